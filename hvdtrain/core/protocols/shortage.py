"""One time that a rank ran out of memory, what it does next, and the words for that; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Word

REPEAT = "out of memory"
"""What a rank tells the others under that ran out and wants the step repeated (`hvdtrain.engine.run.Word`)."""

ALONE = "out of memory, mended alone"
"""... and that needs nobody for it: in evaluation, and in a step in which the copies do not meet."""

MOST_WORDS = 300
"""Characters of an error's words that are kept."""


class Shortage(NamedTuple):
    """A micro-batch of ``size`` samples did not fit in ``phase`` ("training", "evaluation") of step ``step``.

    ``then``: samples that are tried next, the same number after a clean-up; -1: no smaller number is left. ``why``: the
    error's words.
    """

    step: int
    phase: str
    size: int
    then: int
    why: str

    def spelled(self) -> str:
        """Return it as text for the other ranks."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Shortage:
        """Undo `spelled`."""
        return cls(*json.loads(text))

    def words(self) -> str:
        """Return it as the end of a sentence that begins with the rank."""
        held = f"with micro-batches of {self.size}" if self.size else "without a sample"
        goes_on = f"it goes on with {self.then}"
        if self.then == self.size:
            goes_on = "cleaned up, it tries that size again"
        elif self.then < 0:
            goes_on = "it has no smaller size to try"
        return f"ran out of memory in {self.phase} {held}; {goes_on}"


class Ceiling:
    """The largest micro-batch that a rank tries: ``limit`` samples, 0: any. ``lowered``: a shortage has set it.

    The first time at a size the same is tried again, since fragments of memory may have been in the way; then half of
    it. It never rises within a run.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.lowered = False
        self._tried = -1

    def lower(self, size: int) -> int:
        """Return the samples to try after ``size`` did not fit; -1 where no smaller number is left."""
        if size != self._tried:
            self._tried = size
            return size
        if size <= 1:
            return -1
        self.limit, self.lowered = -(-size // 2), True
        return self.limit

    def follow(self, size: int, then: int) -> None:
        """Do as another rank of the same copy did when ``size`` did not fit."""
        self._tried = size
        if 0 <= then < size:
            self.limit, self.lowered = then, True


class Lost(MemoryError):
    """A step of a pipeline cannot be finished, for which memory lacked on a rank of the copy: on this one, if ``own``.

    ``why``: the error's words. Without ``fits`` no smaller size would do.
    """

    def __init__(self, why: str, fits: bool = True, own: bool = True) -> None:
        super().__init__(why)
        self.why, self.fits, self.own = why, fits, own


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, Lost):
        return error.why
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:MOST_WORDS] if lines else type(error).__name__


def among(words: Iterable[Word], *topics: str) -> Iterator[tuple[int, Shortage]]:
    """Yield (rank, shortage) of those ``words`` that tell one under ``topics``."""
    for word in words:
        if word.topic in topics:
            yield word.rank, Shortage.read(word.text)
