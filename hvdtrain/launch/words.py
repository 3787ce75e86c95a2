"""``--mpi-args``: more words for the launcher, as the user writes them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hvdtrain.errors import UserError


def parse_mpi_args(texts: Sequence[str]) -> tuple[str, ...]:
    """Split the options' texts into words as a shell would, without a shell; several add up.

    `UserError` where the launcher would take the first word, or what follows a lone colon, for the program.
    """
    try:
        words = tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise UserError(f"--mpi-args has {str(error).lower()}", "words as in a shell", "close the quotes") from None
    if words and not words[0].startswith("-"):
        raise UserError(f"--mpi-args begins with {words[0]!r}, which the launcher would take for the program",
                        "an option first, such as --mpi-args='--mca pml ucx'", "correct --mpi-args")
    if ":" in words or "--" in words:
        raise UserError("--mpi-args has a lone colon or --, after which the launcher looks for a program", "options",
                        "correct --mpi-args")
    return words
