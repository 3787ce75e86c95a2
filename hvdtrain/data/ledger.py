"""Whether the samples of an epoch were each trained on exactly once: count them, and add up a hash of each number.

Owns the hash, the sums and the words for what does not agree; pure. `hvdtrain.engine.callbacks.ledger` keeps the sums
while a run trains, brings the ranks' together and carries them in checkpoints.

The hash of (epoch, sample number) is a bijection of 64-bit words, so no two numbers of an epoch share one, and sums are
taken modulo 2^64. One sample lost, one doubled, and one lost beside another doubled are therefore seen with certainty;
what more of them would have to cancel out is as unlikely as 2^-64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.core.errors import count

WORD = 2**64
LIMB_BITS = 16
"""Bits of a sum that travel in one float64: sums over 2^37 ranks stay exact whole numbers."""

LIMBS = 1 + 64 // LIMB_BITS
"""Numbers that `to_limbs` makes of a `Sums`."""

CHUNK = 1 << 16
"""Sample numbers that are hashed at a time, so that an epoch of billions needs no memory."""

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
    """Hash int64[n] sample numbers of ``epoch`` to uint64[n]: the finalizer of SplitMix64 over number xor epoch's key.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    key = mixed(np.array([epoch], np.int64).view(np.uint64) + GOLDEN)
    return mixed(np.asarray(numbers_n, np.int64).view(np.uint64) ^ key)


def sums_of(numbers_n: np.ndarray, epoch: int) -> Sums:
    """Add up int64[n] sample numbers of ``epoch``."""
    return Sums(len(numbers_n), int(np.add.reduce(hashes(np.ascontiguousarray(numbers_n), epoch), dtype=np.uint64)))


def sums_of_range(start: int, stop: int, epoch: int) -> Sums:
    """Add up the sample numbers from ``start`` to before ``stop``."""
    found = Sums()
    for low in range(start, stop, CHUNK):
        found += sums_of(np.arange(low, min(low + CHUNK, stop), dtype=np.int64), epoch)
    return found


def to_limbs(sums: Sums) -> np.ndarray:
    """Take a sum apart into whole numbers, float64[LIMBS], that can be added up over ranks without rounding."""
    mask = (1 << LIMB_BITS) - 1
    return np.array([sums.count, *((sums.total >> at) & mask for at in range(0, 64, LIMB_BITS))], np.float64)


def from_limbs(values_k: np.ndarray) -> Sums:
    """Put together what `to_limbs` of several ranks add up to."""
    count, *limbs = (int(value) for value in values_k)
    return Sums(count, sum(limb << (LIMB_BITS * i) for i, limb in enumerate(limbs)) % WORD)


class Book:
    """One rank's sums over the epoch under way; numbers are kept and hashed a few thousand at a time."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, epoch: int, sums: Sums = Sums()) -> None:
        """Begin ``epoch`` with what was added up before."""
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
        """Return what was added since the start."""
        if self._waiting:
            self._sums += sums_of(np.concatenate(self._waiting), self.epoch)
            self._waiting, self._held = [], 0
        return self._sums


def unlike(got: Sums, want: Sums, epoch: int, numbers_n: np.ndarray | None) -> str:
    """Say in words what of an epoch was lost or doubled; "" where ``got`` is ``want``.

    ``numbers_n``: the sample numbers that ``want`` is made of, int64[n], among which the lost and the doubled one are
    looked for; None where there are too many.
    """
    if got == want:
        return ""
    missing, diff = want.count - got.count, (want.total - got.total) % WORD
    lost, doubled = (None, None) if numbers_n is None else _culprits(missing, diff, epoch, numbers_n)
    if lost is not None and doubled is not None:
        return f"sample {lost} was lost and sample {doubled} came twice"
    if lost is not None:
        return f"1 of {want.count} samples was lost: sample {lost}"
    if doubled is not None:
        return f"{count(want.count, 'sample')} and 1 of them twice: sample {doubled}"
    if missing > 0:
        return f"{missing} of {want.count} samples were lost, or more and others came twice"
    if missing < 0:
        return f"{-missing} more than the {count(want.count, 'sample')} there are, so that some came twice"
    return f"{count(want.count, 'sample')}, but not each once: as many were lost as came twice"


def _culprits(missing: int, diff: int, epoch: int, numbers_n: np.ndarray) -> tuple[int | None, int | None]:
    """The number of the one sample that was lost and of the one that came twice, each None if that is not what was."""
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
    """Scramble uint64 words one by one, a bijection: the finalizer of SplitMix64."""
    words_n = (words_n ^ (words_n >> np.uint64(30))) * _M1
    words_n = (words_n ^ (words_n >> np.uint64(27))) * _M2
    return words_n ^ (words_n >> np.uint64(31))
