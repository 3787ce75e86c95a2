"""What Open MPI 4.1 and 5 have in common on mpirun's command line. The files of the two hold what differs."""

from __future__ import annotations

from hvdtrain.errors import UserError
from hvdtrain.launch.spec import LaunchSpec
from hvdtrain.launch.ssh import agent_words

SPLITS = " \t\n:\"'\\"
"""Characters at which Open MPI takes a launch agent apart (a colon separates alternatives)."""


def command(spec: LaunchSpec, objects: dict[str, str], agent_name: list[str],
            interface_names: list[list[str]]) -> tuple[list[str], dict[str, str]]:
    """(argv, environment to set). ``objects``: see `binding`. The names: options before ssh words and the interface.

    Errors: `UserError` for root unasked, and for ssh words that mpirun would take apart.
    """
    # Without --stdin none a rank 0 that reads its input to the end waits for ever (Open MPI 5).
    words = [spec.tool.path, *root(spec), *placement(spec), *binding(spec, objects), "--stdin", "none"]
    if found := agent(spec):
        words += [*agent_name, found]
    for name in interface_names if spec.interface else ():
        words += [*name, spec.interface]
    return [*words, *environment(spec), *spec.mpi_args, *spec.program], dict(spec.env_values)


def placement(spec: LaunchSpec) -> list[str]:
    """How many ranks, and where; both lines are mpirun's ``-H name:slots``."""
    words = ["-np", str(spec.ranks)] if spec.ranks else []
    return [*words, "-H", ",".join(map(str, spec.hosts))] if spec.hosts else words


def binding(spec: LaunchSpec, words: dict[str, str]) -> list[str]:
    """Always said: without it two ranks get one core each, and a rank's threads share it.

    ``words`` name the parts of a host as this version does. Ranks fill a host before the next one (by slot), in every
    binding; the hosts go in the order of ``-H``, but for 4.1, which takes this host first wherever it stands.
    """
    by = f"slot:PE={spec.cores_per_rank}" if spec.bind == "core" else "slot"
    return ["--map-by", by, "--bind-to", words[spec.bind], *(["--oversubscribe"] if spec.oversubscribe else [])]


def environment(spec: LaunchSpec) -> list[str]:
    """``-x NAME`` for each name. Values stay in mpirun's own environment: any character survives, none is in ``ps``."""
    return [word for name in spec.env_names for word in ("-x", name)]


def root(spec: LaunchSpec) -> list[str]:
    """The root override, where the user gave it; `UserError` for root without it."""
    if not spec.as_root or spec.root_in_environment:
        return []
    if not spec.root_allowed:
        raise UserError("this is root, and Open MPI refuses to run as root",
                        "an ordinary user, or --allow-run-as-root, or the variables OMPI_ALLOW_RUN_AS_ROOT=1 and "
                        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                        "in a container say --allow-run-as-root; elsewhere change the user: a mistake of root's costs "
                        "the machine")
    return ["--allow-run-as-root"]


def agent(spec: LaunchSpec) -> str:
    """The ssh command as the one value that Open MPI wants; "" for its own choice."""
    return " ".join(agent_words(spec, SPLITS))
