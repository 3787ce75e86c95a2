"""The ssh command of a launch: the user's words, or one that fails instead of asking.

Owns the default and the refusal of words that a launcher would take apart. Runs nothing. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from hvdtrain.cluster.launchers.spec import LaunchSpec
from hvdtrain.core.errors import UserError

DEFAULT_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30")
"""Host keys are checked as ever. BatchMode: a password prompt among launchers' output is a hang that nobody sees."""

_HYDRA = ("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC")

AGENT_VARIABLES: dict[str, tuple[str, ...]] = {
    "openmpi4": ("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_rsh_agent", "OMPI_MCA_pls_rsh_agent"),
    "openmpi5": ("PRTE_MCA_plm_ssh_agent",),
    "mpich": _HYDRA,
    "intelmpi": (*_HYDRA, "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
}
"""By launcher: where one of these is set, the user has chosen already, and the default stays out of the way."""

UNREAD = ("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent")
"""Names of an agent that Open MPI 5 does not read (5.0.11 was seen not to): launch reads them for it."""


def parse_ssh(text: str) -> tuple[str, ...]:
    """Split ``--ssh`` into words as a shell would, without a shell."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--ssh {text!r} has {str(error).lower()}", "a command such as: ssh -p 2222",
                        "close the quotes") from None
    if not words or words[0].startswith("-"):
        raise UserError(f"--ssh {text!r} names no program", "a command such as: ssh -p 2222",
                        "begin with the program's name")
    return words


def chosen(launcher: str, env: Mapping[str, str]) -> bool:
    """Whether a variable that this launcher reads names the way to other hosts."""
    return any(name in env for name in AGENT_VARIABLES.get(launcher, ()))


def unread(launcher: str, env: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """(name, words) of the agent that ``env`` names where the launcher does not look; ("", ()) without one."""
    if launcher != "openmpi5" or chosen(launcher, env):
        return "", ()
    name = next((name for name in UNREAD if env.get(name, "").strip()), "")
    return name, tuple(env.get(name, "").split())


def agent_words(spec: LaunchSpec, splits: str) -> tuple[str, ...]:
    """The words of the ssh command, () for the launcher's own choice; refused if one has a character of ``splits``."""
    words = spec.ssh or (DEFAULT_SSH if spec.over_ssh else ())
    for word in words:
        if not word or any(c in splits or not c.isprintable() for c in word):
            raise UserError(f"the ssh command has the word {word!r}, which {spec.tool.launcher} would take apart",
                            "words without blanks, quotes, backslashes" + (" and colons" if ":" in splits else ""),
                            "put the option into ~/.ssh/config, or name a script of yours that calls ssh")
    return words
