"""Compare across ranks rows of a source that is fetched by number: before the first step and in each epoch.

`hvdtrain.data.batches` compares streams; `hvdtrain.engine.callbacks.ledger` certifies epochs.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.data.sources import innermost
from hvdtrain.data.stream import Arrays, fingerprint, on_disk, rows_hashed
from hvdtrain.data.workers.worker import fetch_seeded

COMPARED = 8
"""Rows compared before the first step, besides those that are read then anyway, and again in each epoch."""

UNLIKE = "the ranks read different samples at the same place"
_WARNING = (f"{UNLIKE}: seed what shuffles or splits the data alike, unless the dataset draws random numbers when it "
            "is read")


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
                            "seed what shuffles or splits it; the sampler does the cut")
        self.unlike = UNLIKE
        if control.rank == 0:
            warnings.warn(_WARNING, stacklevel=4)
