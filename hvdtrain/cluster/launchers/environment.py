"""Which environment variables a launch hands to its ranks: an explicit list, and what ``--env`` adds.

Owns the list and the reading of ``--env``. Reads no environment itself: it is given one. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hvdtrain.core.errors import UserError

PASSED = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "PYTHONHASHSEED",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS",
    "HVDTRAIN_*", "HVDLAUNCH_*", "HOROVOD_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "MPICH_*", "I_MPI_*",
)
"""Names that every rank gets where they are set; ``*`` ends a prefix.

Not among them, because each host has its own: CUDA_VISIBLE_DEVICES, HOME, TMPDIR. Open MPI's mpirun passes OMPI_* by
itself.
"""

_OF_ANOTHER_JOB = re.compile(
    r"HOROVOD_(RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|HOSTNAME|CONTROLLER|CPU_OPERATIONS|GLOO_\w+|ELASTIC\w*|\w*SECRET\w*)"
    r"|I_MPI_HYDRA_\w+")
"""What horovodrun or a launcher set for the processes of its own job."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def valid_name(name: str) -> bool:
    """Whether every shell and launcher takes ``name`` for a variable's."""
    return _NAME.fullmatch(name) is not None


def laid_over(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """``env`` without what is in ``own``, and then ``own``, in its order: `hvdtrain.cluster.launchers.mpich.LAST` must
    be last."""
    return {**{name: value for name, value in env.items() if name not in own}, **own}


def passed(env: Mapping[str, str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """The names in ``env`` that are on the list, or in ``more`` (of the same form), sorted."""
    rules = (*PASSED, *more)
    exact = {rule for rule in rules if not rule.endswith("*")}
    prefixes = tuple(rule[:-1] for rule in rules if rule.endswith("*"))
    return tuple(sorted(name for name in env if (name in exact or name.startswith(prefixes))
                        and valid_name(name) and not _OF_ANOTHER_JOB.fullmatch(name)))


def parse_env(words: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read the ``--env`` words: (names to pass, values to set). NAME alone must be set in ``env``."""
    names, values = [], {}
    for word in words:
        name, equals, value = word.partition("=")
        if not valid_name(name):
            raise UserError(f"--env {word!r} does not begin with a variable's name",
                            "NAME or NAME=VALUE, with letters, digits and _ in NAME", "correct --env")
        if equals and ("\0" in value or "\n" in value):
            raise UserError(f"the value of --env {name} has a line break", "one line",
                            "write the value to a file and pass the file's name")
        if equals:
            values[name] = value
        elif name not in env:
            raise UserError(f"--env {name} names a variable that is not set here", "one that is",
                            f"say --env {name}=VALUE, or export it first")
        names.append(name)
    return tuple(names), values
