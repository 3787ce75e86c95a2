"""Certify that each sample of an epoch was trained on exactly once: counts, and sums of a hash of each sample number.

Pure. The hash of (epoch, number) is a bijection of 64-bit words and sums are modulo 2^64: one lost, one doubled, or one
of each is always detected, other faults up to 2^-64. `hvdtrain.engine.callbacks.ledger` sums while a run trains.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Control
from hvdtrain.data.sources import innermost
from hvdtrain.data.stream import Arrays, fingerprint, on_disk, rows_hashed
from hvdtrain.data.workers.worker import fetch_seeded

WORD = 2**64
LIMB_BITS = 16  # bits of a sum that travel in one float64: sums over 2^37 ranks stay exact whole numbers
LIMBS = 1 + 64 // LIMB_BITS  # numbers that `to_limbs` makes of a `Sums`
CHUNK = 1 << 16  # sample numbers that are hashed at a time, so that an epoch of billions needs no memory
MOST_SEARCHED = 1 << 22
"""Samples of an epoch up to which those that were lost or doubled are looked for by number."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Sums:
    """``count`` samples whose hashes add up to ``total`` modulo 2^64."""

    count: int = 0
    total: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, (self.total + other.total) % WORD)


def hashes(numbers_n: np.ndarray, epoch: int) -> np.ndarray:
    """Hash int64[n] sample numbers of ``epoch`` to uint64[n] by `mixed`, under the epoch's key."""
    key = mixed(np.array([epoch], np.int64).view(np.uint64) + GOLDEN)
    return mixed(np.asarray(numbers_n, np.int64).view(np.uint64) ^ key)


def sums_of(numbers_n: np.ndarray, epoch: int) -> Sums:
    return Sums(len(numbers_n), int(np.add.reduce(hashes(np.ascontiguousarray(numbers_n), epoch), dtype=np.uint64)))


def sums_of_range(start: int, stop: int, epoch: int) -> Sums:
    found = Sums()
    for low in range(start, stop, CHUNK):
        found += sums_of(np.arange(low, min(low + CHUNK, stop), dtype=np.int64), epoch)
    return found


def sums_of_ranges(ranges: Sequence[tuple[int, int]], part: int, parts: int, epoch: int) -> Sums:
    """Sum the numbers of ``ranges`` [low, high) that are ``part``'s of ``parts``."""
    found = Sums()
    for low, high in ranges:
        first, last = (low + (high - low) * p // parts for p in (part, part + 1))
        found += sums_of_range(first, last, epoch)
    return found


def to_limbs(sums: Sums) -> np.ndarray:
    """Split sums into whole numbers, float64[LIMBS], that add up over ranks without rounding."""
    mask = (1 << LIMB_BITS) - 1
    return np.array([sums.count, *((sums.total >> at) & mask for at in range(0, 64, LIMB_BITS))], np.float64)


def from_limbs(values_k: np.ndarray) -> Sums:
    """Restore the total of `to_limbs` of several ranks."""
    count, *limbs = (int(value) for value in values_k)
    return Sums(count, sum(limb << (LIMB_BITS * i) for i, limb in enumerate(limbs)) % WORD)


class Book:
    """Sums of one rank over the current epoch; numbers are hashed a few thousand at a time."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, epoch: int, sums: Sums = Sums()) -> None:
        """Begin ``epoch`` with the sums so far."""
        self.epoch, self._sums = epoch, sums
        self._waiting: list[np.ndarray] = []
        self._held = 0

    def add(self, numbers_n: np.ndarray) -> None:
        """Add the samples int64[n] of a finished step."""
        self._waiting.append(numbers_n)
        self._held += len(numbers_n)
        if self._held >= CHUNK or len(self._waiting) >= CHUNK >> 6:
            self.sums()

    def sums(self) -> Sums:
        if self._waiting:
            self._sums += sums_of(np.concatenate(self._waiting), self.epoch)
            self._waiting, self._held = [], 0
        return self._sums


def unlike(got: Sums, want: Sums, epoch: int, numbers_n: np.ndarray | None) -> str:
    """Describe lost or doubled samples, "" for none; ``numbers_n`` (None: too many) are searched for culprits."""
    if got == want:
        return ""
    missing, diff = want.count - got.count, (want.total - got.total) % WORD
    lost, doubled = (None, None) if numbers_n is None else _culprits(missing, diff, epoch, numbers_n)
    if lost is not None and doubled is not None:
        return f"sample {lost} was lost and sample {doubled} was repeated"
    if lost is not None:
        return f"1 of {want.count} samples was lost: sample {lost}"
    if doubled is not None:
        return f"{count(want.count, 'sample')} and 1 of them twice: sample {doubled}"
    if missing > 0:
        return f"{missing} of {want.count} samples were lost, or more, with others repeated"
    if missing < 0:
        return f"{-missing} more than the {count(want.count, 'sample')} of the epoch, so some were repeated"
    return f"{count(want.count, 'sample')}, but as many were lost as were repeated"


def _culprits(missing: int, diff: int, epoch: int, numbers_n: np.ndarray) -> tuple[int | None, int | None]:
    """Return the number of the single lost sample and of the single doubled one, None where not single."""
    hashes_n, wanted = hashes(numbers_n, epoch), np.array([diff], np.uint64)
    if missing in (1, -1):
        (at,) = np.nonzero(hashes_n == (wanted if missing == 1 else np.zeros(1, np.uint64) - wanted))
        found = int(numbers_n[at[0]]) if len(at) else None
        return (found, None) if missing == 1 else (None, found)
    if missing == 0:
        order_n = np.argsort(hashes_n)
        sought_n = hashes_n - wanted  # hash of the lost one less hash of the doubled one is diff
        at_n = np.minimum(np.searchsorted(hashes_n[order_n], sought_n), len(order_n) - 1)
        (at,) = np.nonzero(hashes_n[order_n[at_n]] == sought_n)
        if len(at):
            return int(numbers_n[at[0]]), int(numbers_n[order_n[at_n[at[0]]]])
    return None, None


def mixed(words_n: np.ndarray) -> np.ndarray:
    """Scramble uint64 words: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection."""
    words_n = (words_n ^ (words_n >> np.uint64(30))) * _M1
    words_n = (words_n ^ (words_n >> np.uint64(27))) * _M2
    return words_n ^ (words_n >> np.uint64(31))


COMPARED = 8
"""Rows compared before the first step, besides those that are read then anyway, and again in each epoch."""

UNLIKE = "the ranks read different samples at the same place"
_WARNING = (f"{UNLIKE}: use the same seed on all ranks to shuffle or split the data, unless the dataset draws "
            "random numbers when read")


class Comparison:
    """Compare rows of ``data`` at random numbers drawn alike on all ranks.

    ``unlike``: why samples cannot be verified, the same on all ranks. Rows of a user's dataset are read with seeded
    generators, so that augmentation from the global generators makes no difference.
    """

    def __init__(self, data: Any, samples: int, seed: int) -> None:
        self._data, self._samples, self._seed = data, samples, seed
        self._fixed, self._whole, self._rows = bool(getattr(innermost(data), "fixed", False)), False, 0
        self.unlike = ""

    def begin(self, control: Control, numbers_n: np.ndarray, read: Arrays) -> None:
        """Compare arrays in memory, a subset's indices, the rows ``read`` and `COMPARED` others; collective.

        `UserError` where fixed data differs; where other rows differ, rank 0 warns and ``unlike`` is set.
        """
        if control.size == 1:
            return
        source = innermost(self._data)
        arrays = list(getattr(source, "arrays", ())) if self._fixed else []
        in_memory = [array for array in arrays if not on_disk(array)]
        hashed = min(map(rows_hashed, arrays), default=0) if len(in_memory) == len(arrays) else 0
        self._whole = hashed == self._samples
        self._rows = max(hashed, len(numbers_n))
        rows = control.gather((fingerprint((*in_memory, *getattr(source, "subset_indices", ()))), fingerprint(read)))
        if len({row[0] for row in rows}) > 1 or self._fixed and len(set(rows)) > 1:
            self._refute(control, refused=True)
        if len(set(rows)) > 1:
            self._compare(control, numbers_n, 0)
        others = np.setdiff1d(self._drawn(0), numbers_n)
        self._rows += self._compare(control, others, 0)

    def again(self, control: Control, epoch: int) -> int:
        """Compare rows of ``epoch``; return how many since the last call, 0 if `begin` compared all. Collective."""
        if control.size == 1:
            return 0
        rows = self._rows + self._compare(control, self._drawn(epoch + 1), epoch)
        self._rows = 0
        return 0 if self._whole else rows

    def _drawn(self, turn: int) -> np.ndarray:
        return np.random.default_rng([self._seed, turn]).choice(self._samples, min(COMPARED, self._samples), False)

    def _compare(self, control: Control, numbers_n: np.ndarray, epoch: int) -> int:
        """Return the number of rows that all ranks have read, without those that a rank could not read."""
        if self.unlike:
            return 0
        columns = list(zip(*control.gather(self._checksums(numbers_n, epoch))))
        if any(len({checksum for checksum in column if checksum is not None}) > 1 for column in columns):
            self._refute(control, refused=self._fixed)
        return sum(None not in column for column in columns)

    def _checksums(self, numbers_n: np.ndarray, epoch: int) -> list[int | None]:
        """Read each row by itself: rows may be padded to those of their batch."""
        data, found = self._data, list[int | None]()
        each = [numbers_n[i:i + 1] for i in range(len(numbers_n))]
        fetches = [data.begin(one, epoch) for one in each] if hasattr(data, "begin") else each
        for fetch in fetches:
            found.append(None)
            with contextlib.suppress(Exception):  # of a row that training may never read; else raised again there
                arrays = (fetch_seeded(data, fetch, self._seed, epoch) if fetches is each  # workers seed theirs
                          else data.collect(fetch))
                found[-1] = fingerprint(arrays)
        return found

    def _refute(self, control: Control, refused: bool) -> None:
        if refused:
            raise UserError("ranks hold different samples", "the same data in the same order on every rank",
                            "seed the shuffle or split of the data; the sampler divides it")
        self.unlike = UNLIKE
        if control.rank == 0:
            warnings.warn(_WARNING, stacklevel=4)
