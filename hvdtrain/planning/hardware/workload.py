"""The work of a plan: a model's gradients, operations and memory, measured on a few samples or assumed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.units import Footprint
from hvdtrain.planning.memory import options
from hvdtrain.planning.memory.forecast import (
    MeasuredMemory,
    MemoryFacts,
    MemoryLine,
    Model,
    RankMemory,
    Sharding,
    Slots,
    forecast,
)

STATE_BYTES = {"adam": 8.0, "momentum": 4.0, "sgd": 0.0}
"""Optimizer state per parameter: fp32 moments."""

MOST_LAYERS, MOST_PARAMETERS = 10_000, 1e15
"""Bounds of an assumed model: each layer is planned for."""

ASSUMED = ("parameters", "flops_per_sample", "activation_bytes_per_sample", "checkpointed_bytes_per_sample", "layers",
           "optimizer", "sample_bytes")
"""Keys of ``model`` in a file of assumptions."""


@dataclass(frozen=True)
class Workload:
    """Work of a training step per sample. ``facts``: of one rank with the whole model; ``buckets``: of its gradients.

    ``flops``: of a sample's forward and backward; 0: unknown, because of ``why``. ``checkpointed_bytes``: activations
    of a sample with activation checkpointing of all layers, where assumed. ``assumed``: not of a built model.
    """

    name: str
    facts: MemoryFacts
    buckets: tuple[Bucket, ...]
    flops: float
    why: str = ""
    sample_bytes: float = 0.0
    checkpointed_bytes: float = 0.0
    assumed: bool = False

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes that ranks exchange in a step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def update_bytes(self) -> int:
        """Return the bytes that an optimizer's update reads and writes at least."""
        parameters = sum(self.facts.model.param_bytes)
        return 3 * parameters + 2 * self.facts.model.state_bytes()

    @property
    def boundary_bytes(self) -> float:
        """Return the most bytes of a sample that a block passes on to the next: what it keeps for backward."""
        line = self.facts.measured.line
        return float(line.slope_E.max(initial=0.0)) / self.blocks if line is not None else 0.0

    @property
    def blocks(self) -> int:
        """Return the number of blocks of the model, which a pipeline may divide; 1 where it has none."""
        return len({spec.block for spec in self.facts.model.specs})

    @property
    def norm_bytes(self) -> tuple[int, ...]:
        """Return the float64 bytes of each sum of sync_batchnorm: three a channel in forward, two in backward."""
        return tuple(8 * times * n for n in self.facts.model.norm_channels for times in (3, 2))

    def recomputing(self) -> tuple[Callable[[MemoryFacts], MemoryFacts], float] | None:
        """Return (change of a rank's facts, fraction of forward computed again) of checkpointing all blocks, or None.
        """
        if self.checkpointed_bytes:
            slope_E = np.array([self.checkpointed_bytes])
            return (lambda facts: replace(facts, measured=replace(facts.measured, line=replace(
                facts.measured.line or MemoryLine(np.zeros(1), slope_E, ()), slope_E=slope_E)))), 1.0
        if not any(cost.saved_bytes > 0 for cost in self.facts.measured.blocks):
            return None
        return lambda facts: options.spared(facts, options.choice(facts, 0)), 1.0

    def on_rank(self, rank: RankMemory, way: Sharding) -> MemoryFacts:
        """Return the facts of a rank of the plan, which has ``way`` of exchanging gradients."""
        return replace(self.facts, rank=replace(rank, ahead=self.facts.rank.ahead, saves=self.facts.rank.saves),
                       way=way)

    def memory(self, rank: RankMemory, way: Sharding) -> Footprint:
        """Return the bytes of a rank of the plan at the step's peak."""
        return forecast(self.on_rank(rank, way))


def batches_of(samples: int, global_batch: int, epoch_samples: int = 0) -> dict[int, int]:
    """Return the number of steps by samples of a step: the last batch of each epoch is smaller.

    >>> batches_of(100, 16, 40), batches_of(100, 16)
    ({16: 5, 8: 2, 4: 1}, {16: 6, 4: 1})
    """
    epochs, rest = divmod(samples, epoch_samples) if epoch_samples else (0, samples)
    found: dict[int, int] = {}
    for n, times in ((epoch_samples, epochs), (rest, 1)):
        whole, last = divmod(n, global_batch)
        for size, steps in ((global_batch, whole * times), (last, times)):
            if size and steps:
                found[size] = found.get(size, 0) + steps
    return found


def assumed(name: str, given: Mapping[str, Any], bucket_mb: float = 16.0) -> Workload:
    """Return the workload that ``model`` in a file of assumptions describes: equal layers, fp32 parameters.

    ``bucket_mb``: of the exchange.
    """
    for key in given:
        if key not in ASSUMED:
            raise UserError(f"model of the assumptions has the key {key!r}", nearest(str(key), ASSUMED),
                            "correct or remove the key")
    layers = int(_number(given, "layers", 32, 1, MOST_LAYERS))
    n = int(_number(given, "parameters", None, 1, MOST_PARAMETERS))
    flops = _number(given, "flops_per_sample")
    activations = _number(given, "activation_bytes_per_sample")
    optimizer = given.get("optimizer", "adam")
    if not isinstance(optimizer, str) or optimizer not in STATE_BYTES:
        raise UserError(f"optimizer of the assumed model is {optimizer!r}", nearest(str(optimizer), STATE_BYTES),
                        "correct it")
    sizes = [n // layers + (i < n % layers) for i in range(layers)]
    specs = [ParamSpec(f"layer{i}", (size,), "float32", block=i) for i, size in enumerate(sizes)]
    model = Model(specs, 0, [Slots(STATE_BYTES[optimizer])] * layers)
    line = MemoryLine(np.zeros(1), np.array([activations]), tuple((1, i) for i in range(layers)))
    facts = MemoryFacts(model, RankMemory(), Sharding(), MeasuredMemory(line))
    return Workload(name, facts, tuple(plan_buckets(specs, bucket_mb)), flops,
                    sample_bytes=_number(given, "sample_bytes", 0.0),
                    checkpointed_bytes=_number(given, "checkpointed_bytes_per_sample", 0.0), assumed=True)


def _number(given: Mapping[str, Any], key: str, default: float | None = None, least: float = 1e-9,
            most: float = 1e24) -> float:
    value = given.get(key, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (least <= value <= most or value == default):
        return float(value)
    raise UserError(f"{key} of the assumed model is {value!r}", f"a number from {least:g} to {most:g}",
                    f"correct {key} under model:")
