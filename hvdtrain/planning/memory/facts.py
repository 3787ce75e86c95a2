"""What is known of a model and of a rank before it trains: a few numbers, from which `forecast` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.core.protocols import BlockCost, ParamSpec
from hvdtrain.core.protocols.types import Bucket, itemsize
from hvdtrain.planning import shards
from hvdtrain.planning.memory.pass_trace import MemoryLine


@dataclass(frozen=True)
class Slots:
    """What an optimizer keeps of one parameter: bytes for each of its elements, and bytes whatever its size."""

    per_element: float
    fixed: int = 0

    def bytes(self, n: int) -> int:
        """Return the bytes for a slice of ``n`` elements; none for an empty one."""
        return round(self.per_element * n) + self.fixed if n else 0


@dataclass(frozen=True)
class Model:
    """A model with its optimizer, on one rank's device.

    ``specs``: its trainable tensors. ``other_bytes``: frozen parameters and buffers. ``slots``: of each of ``specs``;
    ``common_bytes``: what the optimizer holds once. ``elementwise``: its state can be cut anywhere. ``average_bytes``:
    the moving average of the weights, which no stage of ZeRO divides.
    """

    specs: Sequence[ParamSpec]
    other_bytes: int
    slots: Sequence[Slots]
    common_bytes: int = 0
    elementwise: bool = True
    framework: str = "torch"
    average_bytes: int = 0

    @property
    def param_bytes(self) -> list[int]:
        """Of each trainable tensor."""
        return [spec.n * itemsize(spec.dtype) for spec in self.specs]

    def state_bytes(self, spans: Sequence[tuple[int, int]] | None = None) -> int:
        """Return the bytes of optimizer state for whole tensors, or for one slice [begin, end) of each."""
        lengths = [spec.n for spec in self.specs] if spans is None else [end - begin for begin, end in spans]
        return sum(slot.bytes(n) for slot, n in zip(self.slots, lengths)) + self.common_bytes


@dataclass(frozen=True)
class MeasuredMemory:
    """What a few samples have told of this rank.

    ``line``: bytes of a pass (`hvdtrain.planning.memory.pass_trace`); None: nothing was measured. ``with_gradients``:
    they were counted in it. ``scratch``: bytes beyond the line for each sample, and at least: kernels' own memory.
    ``held_bytes``: what the process holds beside counted tensors: framework, program, data. ``blocks``: what
    recomputing each block saves and costs with ``block_samples``; none of them was recomputed in the line. ``spared``:
    bytes by which recomputing makes a pass less.
    """

    line: MemoryLine | None = None
    with_gradients: bool = False
    scratch: tuple[float, float] = (0.0, 0.0)
    held_bytes: int = 0
    blocks: tuple[BlockCost, ...] = ()
    block_samples: int = 1
    spared: int = 0


@dataclass(frozen=True)
class RankMemory:
    """One rank of ``size``: ``local`` of them share its host. ``free_bytes``: what it may take in all; None: unknown.

    ``micro_batch``: samples of its largest micro-batch. ``micros``: how many a step has.
    ``batch_bytes``: bytes of the samples of a step; ``ahead``: how many steps' samples lie in memory.
    ``saves``: the run writes checkpoints beside training, for which state is copied.
    """

    rank: int = 0
    size: int = 1
    local: int = 1
    free_bytes: int | None = None
    micro_batch: int = 1
    micros: int = 1
    batch_bytes: int = 0
    ahead: int = 1
    saves: bool = False


@dataclass(frozen=True)
class Sharding:
    """How the copies of the model stay one: ``stage`` 0 (every rank holds all), 1 or 2 of ZeRO.

    ``buckets``: none where nothing is sent. ``parts_P``: of the state, by rank, in ZeRO; ``sizes_BP``: elements of each
    bucket by rank where they are cut already. ``wire``: its name.
    ``remembered``: bytes that the compressor keeps; ``compression``: its name.
    """

    stage: int = 0
    buckets: Sequence[Bucket] = ()
    parts_P: Sequence[float] = ()
    wire: str = "null"
    compression: str = "none"
    remembered: int = 0
    sizes_BP: Sequence[Sequence[int]] = ()

    def cut(self) -> Sequence[Sequence[int]]:
        """Return how many elements of each bucket each rank owns in ZeRO."""
        return self.sizes_BP or [shards.sizes(b.n, self.parts_P) for b in self.buckets]


@dataclass(frozen=True)
class MemoryFacts:
    """All of it."""

    model: Model
    rank: RankMemory = field(default_factory=RankMemory)
    way: Sharding = field(default_factory=Sharding)
    measured: MeasuredMemory = field(default_factory=MeasuredMemory)
