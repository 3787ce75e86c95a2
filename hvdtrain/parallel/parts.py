"""The parts of a model on one rank that a run drives; each backend's ``make_parts`` makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.core.mesh import Group, Layout
from hvdtrain.core.protocols import (
    Buffers,
    Collectives,
    Compile,
    Evaluator,
    ModelFacts,
    ModelState,
    Ops,
    Optimizer,
    Params,
    ParamSpec,
    Remat,
    Stage,
    Transform,
)
from hvdtrain.data.weighting import LabelWeight
from hvdtrain.parallel.precision import LossScale, Precision


@dataclass
class ModelParts:
    """Stage, parameters, optimizer and state of a model. ``precision``: compute type of every rank; ``scale``: the loss
    scale.

    ``transforms``: in the order of installation (`hvdtrain.backends.in_order`). ``ops_of_place``: array
    operations of each device of a split model. ``remat``, ``compile``: those of ``transforms`` that recompute blocks
    and compile. ``layout``, ``replicas``: of a model partitioned over ranks, whose ``stage`` is an
    `hvdtrain.core.protocols.PipelineStage`. ``facts``: finds changes by callbacks. ``batch_weight``: weighs a numpy
    batch as a named loss that ignores labels or weighs classes.
    """

    model: Any
    blocks: Sequence[Any]
    stage: Stage
    params: Params
    optimizer: Optimizer
    buffers: Buffers
    evaluator: Evaluator
    state: ModelState
    transforms: list[Transform]
    precision: Precision
    scale: LossScale
    ops_of_place: Sequence[Ops] = ()
    remat: Remat | None = None
    compile: Compile | None = None
    layout: Layout | None = None
    replicas: Sequence[ReplicaGroup] = ()
    facts: ModelFacts | None = None
    batch_weight: LabelWeight | None = None
    _installed: list[Transform] = field(default_factory=list)

    def install(self, collective: bool = True) -> None:
        """Install the transforms, the first one first; without ``collective`` for this rank alone."""
        for transform in self.transforms:
            if collective or not transform.collective:
                transform.install(self.model, self.blocks)
                if transform not in self._installed:
                    self._installed.append(transform)

    def remove(self) -> None:
        """Remove all transforms, the last one first, whichever raises; then raise the first error."""
        with contextlib.ExitStack() as stack:
            for transform in self._installed:
                stack.callback(transform.remove, self.model)
        self._installed = []

    def describe(self) -> dict[str, str]:
        """Return the rows of the summary."""
        words = {**self.optimizer.describe(), **self.stage.describe()}
        for transform in self.transforms:
            words |= transform.describe()
        return words

    def caveats(self) -> list[str]:
        """Return what depends on how a batch is divided (law 2)."""
        return [*self.stage.caveats(), *(caveat for transform in self.transforms for caveat in transform.caveats())]


@dataclass(frozen=True)
class ReplicaGroup:
    """Ranks with the same blocks, one of each replica (``group``), the ``blocks``' numbers, and their
    transport.
    """

    group: Group
    blocks: tuple[int, ...]
    wire: Collectives

    def params(self, specs: Sequence[ParamSpec]) -> list[int]:
        """Return the indices of the ``specs`` that these ranks hold."""
        return [i for i, spec in enumerate(specs) if spec.block in self.blocks]


def replicas_of(layout: Layout, wire: Collectives) -> list[ReplicaGroup]:
    """Return the groups of this rank, the model's last blocks first; collective over all ranks of the job.

    A rank is in several groups if copies differ in depth. All ranks make the transports in one order, by the last block
    of each group, so that none waits for another in a circle.
    """
    return [ReplicaGroup(group, blocks, wire.among(group)) for group, blocks in layout.replicas()]
