"""The exchanges in which a rank stood, since they were last taken: bounded in number, the same ones on every rank."""

from __future__ import annotations

from typing import NamedTuple

MOST = 4096
"""Exchanges that are kept. Beyond it those of every second step are, then of every fourth: the ranks' steps are the
same, so without a word they keep the same ones."""


class Blocked(NamedTuple):
    """This rank stood in the exchange ``name`` of ``step`` from ``begin_s`` to ``end_s`` (`time.perf_counter`).

    ``came_s``: when it had handed over its part, which may be earlier where it went on computing meanwhile. Others wait
    for that moment.
    """

    step: int
    name: str
    came_s: float
    begin_s: float
    end_s: float


class Stood:
    """The latest `Blocked` of one rank, in order. ``stride``: those of steps that are multiples of it are kept."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.rows: list[Blocked] = []
        self.stride = 1

    def add(self, row: Blocked) -> None:
        """Keep one, if it is its step's turn."""
        if row.step % self.stride:
            return
        self.rows.append(row)
        while len(self.rows) > self._most and self.stride < 1 << 30:
            self.stride *= 2
            self.rows = [kept for kept in self.rows if kept.step % self.stride == 0]

    def take(self) -> list[Blocked]:
        """Return those kept, and begin anew."""
        rows, self.rows, self.stride = self.rows, [], 1
        return rows
