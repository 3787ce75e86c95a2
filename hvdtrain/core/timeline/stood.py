"""The exchanges in which a rank stood, since they were last taken: bounded in number, the same ones on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MOST, MOST_OF_ALL, LEAST = 2048, 1 << 15, 256
"""Exchanges that a rank keeps, all ranks keep together, and a rank keeps however many ranks there are."""


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


@dataclass(frozen=True)
class Packed:
    """Many `Blocked`, small to send: ``names`` in use, ``keys_N2`` (step, which name), ``times_N3`` (came, begin, end).
    """

    names: tuple[str, ...]
    keys_N2: np.ndarray
    times_N3: np.ndarray


def packed(rows: list[Blocked]) -> Packed:
    """Pack ``rows``; ranks with the same exchanges have equal names and keys."""
    names = {name: i for i, name in enumerate(dict.fromkeys(row.name for row in rows))}
    keys_N2 = np.array([(row.step, names[row.name]) for row in rows], np.int64).reshape(-1, 2)
    return Packed(tuple(names), keys_N2, np.array([row[2:] for row in rows], np.float64).reshape(-1, 3))


class Stood:
    """The latest `Blocked` of one rank, in order: at most ``most``.

    Beyond that number those of every second step are kept, then of every fourth, of steps that are multiples of
    ``stride``: the ranks' steps are the same, so without a word they keep the same ones.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.rows: list[Blocked] = []
        self.stride = 1

    def among(self, ranks: int) -> None:
        """Keep so many that those of all ``ranks`` can be sent to each of them."""
        self.most = max(LEAST, min(MOST, MOST_OF_ALL // ranks))

    def add(self, row: Blocked) -> None:
        """Keep one, if it is its step's turn."""
        if row.step % self.stride:
            return
        self.rows.append(row)
        while len(self.rows) > self.most and self.stride < 1 << 30:
            self.stride *= 2
            self.rows = [kept for kept in self.rows if kept.step % self.stride == 0]

    def take(self) -> list[Blocked]:
        """Return those kept, and begin anew."""
        rows, self.rows, self.stride = self.rows, [], 1
        return rows
