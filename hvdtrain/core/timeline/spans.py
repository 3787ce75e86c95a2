"""Spans of a trace, the exchanges in which a rank waited, and the attribution of that waiting to other ranks.

Owns the bounded records and the arithmetic; gathering them is the callers'.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

MARKS = 5
"""At the start and at the end each: the narrowest of them count."""


class Profiler(Protocol):
    """Takes the framework's own events on a rank. ``within_s``: their error on its clock, once stopped."""

    within_s: float

    def start(self) -> None:
        """Begin. Raises whatever the framework's does, for instance where another profiler is running."""

    def stop(self) -> list[Span]:
        """End, and return what was found, in seconds of `time.perf_counter`."""


class Marks:
    """Events of the profiler's own, each made between two readings of the rank's clock."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._read: list[tuple[float, float]] = []

    def put(self) -> None:
        """Make some."""
        for _ in range(MARKS):
            before_s = time.perf_counter()
            with self._make():
                pass
            self._read.append((before_s, time.perf_counter()))

    def shift(self, seen_s: Sequence[float]) -> tuple[float, float]:
        """Return what is to be added to the profiler's seconds, and how far that may be off.

        ``seen_s``: when the profiler says that the marks began. Errors: RuntimeError where it has not seen them all, or
        where they contradict each other by more than a millisecond.
        """
        if len(seen_s) != len(self._read) or not seen_s:
            raise RuntimeError(f"the profiler has {len(seen_s)} of {len(self._read)} marks")
        pairs = list(zip(self._read, sorted(seen_s)))
        least_s = max(before - seen for (before, _), seen in pairs)
        most_s = min(after - seen for (_, after), seen in pairs)
        if least_s - most_s > 1e-3:
            raise RuntimeError(f"the profiler's clock has changed by {least_s - most_s:.6f} s")
        return (least_s + most_s) / 2, abs(most_s - least_s) / 2


KERNEL = "kernel"
"""Cause of spans that a device worked in, from a profiler."""


class Span(NamedTuple):
    """A piece of work ``name`` of a ``lane`` (a thread, a transport), in seconds of the rank's `time.perf_counter`.

    ``cause``: of the rank's time (`hvdtrain.core.timeline.CAUSES`), or where it comes from; "": of what is around it.
    """

    name: str
    lane: str
    begin_s: float
    end_s: float
    cause: str = ""
    args: dict[str, Any] = {}


class SpanRecorder:
    """Implements `hvdtrain.core.timeline.Taker`: keeps the first ``most`` spans, counts others in ``dropped``."""

    def __init__(self, most: int) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self._most = most

    def take(self, name: str, lane: str, begin_s: float, end_s: float, args: dict[str, Any], cause: str = "") -> None:
        """Keep what ``lane`` did. Called from any thread: to append to a list is one operation."""
        if len(self.spans) < self._most:
            self.spans.append(Span(name, lane, begin_s, end_s, cause, args))
        else:
            self.dropped += 1


def longest(spans: list[Span], most: int) -> tuple[list[Span], int]:
    """Return the ``most`` longest of ``spans``, in their order, and how many are left out. Pure."""
    if len(spans) <= most:
        return spans, 0
    kept = sorted(range(len(spans)), key=lambda i: spans[i].begin_s - spans[i].end_s)[:most]
    return [spans[i] for i in sorted(kept)], len(spans) - most


MOST, MOST_OF_ALL, LEAST = 2048, 1 << 15, 256
"""Exchanges that a rank keeps, all ranks keep together, and a rank keeps however many ranks there are."""


class Blocked(NamedTuple):
    """This rank stood in the exchange ``name`` of ``step`` from ``begin_s`` to ``end_s`` (`time.perf_counter`).

    ``came_s``: when it had handed over its part, for which others wait; earlier where it went on computing.
    """

    step: int
    name: str
    came_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Packed:
    """Many `Blocked`, small to send: ``names``, ``keys_N2`` (step, which name), ``times_N3`` (came, begin, end)."""

    names: tuple[str, ...]
    keys_N2: np.ndarray
    times_N3: np.ndarray


def packed(rows: list[Blocked]) -> Packed:
    """Pack ``rows``; ranks with the same exchanges have equal names and keys."""
    names = {name: i for i, name in enumerate(dict.fromkeys(row.name for row in rows))}
    keys_N2 = np.array([(row.step, names[row.name]) for row in rows], np.int64).reshape(-1, 2)
    return Packed(tuple(names), keys_N2, np.array([row[2:] for row in rows], np.float64).reshape(-1, 3))


class BlockedSpans:
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
        """Return those kept, and begin again."""
        rows, self.rows, self.stride = self.rows, [], 1
        return rows


@dataclass(frozen=True)
class Waits:
    """Seconds: ``wait_PP[r, k]`` that rank r waited for rank k, ``wire_P[r]`` of r in exchanges that all had come to,
    ``own_P[r]`` in which r's own device had not handed over yet."""

    wait_PP: np.ndarray
    wire_P: np.ndarray
    own_P: np.ndarray


def split(came_PN: np.ndarray, begin_PN: np.ndarray, end_PN: np.ndarray, within_s: float = 0.0) -> Waits:
    """Split the time of P ranks in N exchanges; one clock, good to ``within_s``; NaN where one took no part."""
    n_ranks = len(came_PN)
    wait_PP, wire_P, own_P = np.zeros((n_ranks, n_ranks)), np.zeros(n_ranks), np.zeros(n_ranks)
    came_PN = np.where(np.isnan(came_PN), -np.inf, came_PN)
    for rank in range(n_ranks):
        begin_N, end_N = begin_PN[rank], end_PN[rank]
        part_N = ~np.isnan(begin_N)
        ready_N = np.clip(came_PN[rank], begin_N, end_N)
        own_P[rank] = float((ready_N - begin_N)[part_N].sum())
        before_PN = np.where(came_PN <= end_N + within_s, came_PN, -np.inf)
        before_PN[rank] = came_PN[rank]
        last_N = before_PN.argmax(axis=0)
        waited_N = np.clip(before_PN.max(axis=0) - ready_N, 0.0, end_N - ready_N)
        waited_N[last_N == rank] = 0.0
        np.add.at(wait_PP[rank], last_N[part_N], waited_N[part_N])
        wire_P[rank] = float((end_N - ready_N - waited_N)[part_N].sum())
    return Waits(wait_PP, wire_P, own_P)


def compare(stood: Sequence[Packed], stood_P: Sequence[float], offsets_P: Sequence[float],
            within_s: float = 0.0) -> Waits:
    """Match the ranks' exchanges by step, name and order, and split all that each rank stood, ``stood_P`` seconds.

    ``stood``: by rank. ``offsets_P``: how far each rank's clock is ahead. Where only some of the exchanges were kept
    they stand for all; if none of a rank's was, its seconds are told as waiting for itself: for whom is not known.
    """
    table_PN3 = _matched(stood) - np.asarray(offsets_P, np.float64)[:, None, None]
    waits = split(table_PN3[..., 0], table_PN3[..., 1], table_PN3[..., 2], within_s)
    kept_P = waits.wait_PP.sum(axis=1) + waits.wire_P + waits.own_P
    for rank, (kept_s, stood_s) in enumerate(zip(kept_P.tolist(), stood_P)):
        if kept_s > 0:
            for seconds in (waits.wait_PP, waits.wire_P, waits.own_P):
                seconds[rank] *= stood_s / kept_s
        else:
            waits.wait_PP[rank, rank] = stood_s
    return waits


def _matched(stood: Sequence[Packed]) -> np.ndarray:
    """came, begin and end by rank and exchange, (P, N, 3); NaN where a rank took no part."""
    first = stood[0]
    if all(own.names == first.names and np.array_equal(own.keys_N2, first.keys_N2) for own in stood):
        return np.stack([own.times_N3 for own in stood])  # law 5: the same exchanges in the same order
    column: dict[tuple[int, str, int], int] = {}
    places_P = []
    for own in stood:
        counts: Counter[tuple[int, str]] = Counter()
        places = []
        for step, name in own.keys_N2.tolist():
            key = (step, own.names[name])
            counts[key] += 1
            places.append(column.setdefault((*key, counts[key]), len(column)))
        places_P.append(places)
    table_PN3 = np.full((len(stood), len(column), 3), np.nan)
    for rows_N3, own, places in zip(table_PN3, stood, places_P):
        rows_N3[places] = own.times_N3
    return table_PN3
