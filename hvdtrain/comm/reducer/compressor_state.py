"""What a compressor remembers of each bucket from step to step, in cells that a graph reads and writes too.

Owns their values, the way back where a step is left out, and what of them a checkpoint keeps.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from hvdtrain.core.protocols import Array, Compressor, Ops
from hvdtrain.core.protocols.types import Bucket

OTHER = "compressor state starts anew: compression, buckets or parameters are others than in the checkpoint"


class CompressorState:
    """The arrays of ``compressor`` for each of ``buckets``; ``ops``: of each bucket, on its device.

    ``steps``: how many the compressor has begun. ``undoable``: whether a step may be discarded, for which the arrays
    before it are kept.
    """

    undoable = True

    def __init__(self, compressor: Compressor, buckets: Sequence[Bucket], ops: Sequence[Ops]) -> None:
        self._compressor, self._buckets, self.ops = compressor, list(buckets), list(ops)
        self.cells = [{key: ops.cell(x) for key, x in state.items()} for ops, state in zip(ops, self._fresh())]
        self._before: list[dict[str, Array]] = []
        self.steps = 0

    def _fresh(self) -> list[dict[str, Array]]:
        """The arrays before the first exchange."""
        return [self._compressor.init(ops, b) if b.n else {} for ops, b in zip(self.ops, self._buckets)]

    def of(self, index: int) -> dict[str, Array]:
        """Read the arrays of a bucket."""
        return {key: cell.read() for key, cell in self.cells[index].items()}

    def all(self) -> list[dict[str, Array]]:
        """Read the arrays of each bucket."""
        return [self.of(i) for i in range(len(self.cells))]

    def write(self, states: Sequence[dict[str, Array]]) -> None:
        """Give every bucket new arrays."""
        for cells, state in zip(self.cells, states):
            for key, cell in cells.items():
                cell.write(state[key])

    def if_finite(self, index: int, total_N: Array, new: dict[str, Array]) -> dict[str, Array]:
        """Return ``new`` arrays of a bucket if its sum is finite, else those that it has."""
        ops, cells = self.ops[index], self.cells[index]
        finite = ops.all_finite(total_N) if cells else None
        return {key: ops.select(finite, new[key], cell.read()) for key, cell in cells.items()}

    def take_over(self, other: CompressorState) -> None:
        """Take the arrays of ``other``, whose buckets are the first of these."""
        self.undoable, self.steps = other.undoable, other.steps
        self.write([*other.all(), *self.all()[len(other.cells):]])

    def begin(self) -> int:
        """Open a step; return the compressor's stage of warm-up in it."""
        stage = self._compressor.stage(self.steps)
        self.steps += 1
        self._before = self.all() if self.undoable else []
        return stage

    def discard(self) -> None:
        """Undo what the step did to the arrays, if they are `undoable`, and to the count of steps."""
        self.write(self._before)
        self.steps -= 1

    def nbytes(self) -> int:
        """Return the bytes of all arrays, twice where those before a step are kept."""
        found = sum(_nbytes(cell.read()) for cells in self.cells for cell in cells.values())
        return found * (2 if self.undoable else 1)

    def saved(self) -> dict[str, np.ndarray]:
        """Return all of it as numpy, with a mark of what it belongs to; {} without any."""
        arrays = {f"compressor.{i}.{key}": np.array(ops.to_host(x))
                  for i, (ops, state) in enumerate(zip(self.ops, self.all())) for key, x in state.items()}
        return {**arrays, "compressor.mark": self._mark(), "compressor.steps": np.array([self.steps])} if arrays else {}

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Undo `saved`; what is of another plan is not taken, all starts anew. Returns why, in words, or ""."""
        if "compressor.mark" not in own:
            self.restart()
            return "compressor state starts anew: the checkpoint has none" if any(self.cells) else ""
        if not np.array_equal(own["compressor.mark"], self._mark()):
            self.restart()
            return OTHER
        self.write([{key: ops.from_host(np.array(own[f"compressor.{i}.{key}"])) for key in cells}
                    for i, (ops, cells) in enumerate(zip(self.ops, self.cells))])
        self._before = []
        self.steps = int(own["compressor.steps"][0])
        return ""

    def restart(self) -> None:
        """Forget all arrays and the count of steps."""
        self.write(self._fresh())
        self._before, self.steps = [], 0

    def _mark(self) -> np.ndarray:
        """int64 (1,): a checksum of the compression and of the buckets it works on."""
        plan = [self._compressor.describe(), *((b.params, b.shapes, b.dtype) for b in self._buckets)]
        return np.array([zlib.crc32(repr(plan).encode())], np.int64)


def _nbytes(array: Array) -> int:
    found = getattr(array, "nbytes", None)  # symbolic tensors lack it
    return int(found) if found is not None else int(np.prod(array.shape)) * int(array.dtype.size)
