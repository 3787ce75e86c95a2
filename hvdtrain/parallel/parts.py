"""A model on one rank, taken apart into what a run drives: `ModelParts`, which each backend's ``make_parts`` makes."""

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
    """The parts. ``precision``: what every rank computes in; ``scale``: the loss scale.

    ``transforms``: in the order in which they are installed (`hvdtrain.backends.TRANSFORMS`). ``ops_of_place``:
    of a model that is split, the array operations of each device. ``remat``: the one of ``transforms`` that recomputes
    blocks, None for a model without any. ``compile``: the one that computes in other ways, where the configuration asks
    for it. ``layout``, ``replicas``: of a model that is cut over ranks, who has which block, and this rank's blocks by
    who else has them; ``stage`` is an `hvdtrain.core.protocols.PipelineStage` then. ``facts``: finds what callbacks
    change of the model; None where nobody looks. ``batch_weight``: weighs a numpy batch as a loss by name does that
    ignores labels or weighs classes; None for other losses and a model file's task.
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
        """Take the model for a run, the first transform first; without ``collective`` for this rank alone."""
        for transform in self.transforms:
            if collective or not transform.collective:
                transform.install(self.model, self.blocks)
                if transform not in self._installed:
                    self._installed.append(transform)

    def remove(self) -> None:
        """Give the model back as its user made it, from the last transform that was installed to the first.

        All are removed, whichever raises; then the first error is raised.
        """
        with contextlib.ExitStack() as stack:
            for transform in self._installed:
                stack.callback(transform.remove, self.model)
        self._installed = []

    def describe(self) -> dict[str, str]:
        """Return the model's training in words, for the summary."""
        words = {**self.optimizer.describe(), **self.stage.describe()}
        for transform in self.transforms:
            words |= transform.describe()
        return words

    def caveats(self) -> list[str]:
        """Return what in this model depends on how a batch is cut, in words (law 2)."""
        return [*self.stage.caveats(), *(caveat for transform in self.transforms for caveat in transform.caveats())]


@dataclass(frozen=True)
class ReplicaGroup:
    """``group``: one rank of each copy of the model; ``blocks``: the numbers of the blocks that just these ranks have.

    ``wire``: between the group's ranks alone.
    """

    group: Group
    blocks: tuple[int, ...]
    wire: Collectives

    def params(self, specs: Sequence[ParamSpec]) -> list[int]:
        """The indices of those of this rank's ``specs`` that these ranks hold."""
        return [i for i, spec in enumerate(specs) if spec.block in self.blocks]


def replicas_of(layout: Layout, wire: Collectives) -> list[ReplicaGroup]:
    """Return those of this rank, the model's last blocks first; collective over all ranks of the job.

    A rank may be in several groups, where copies are of unlike depth. All ranks make the wires of their groups in one
    order, by the last block of each, so that none waits for one that waits for it.
    """
    return [ReplicaGroup(group, blocks, wire.among(group)) for group, blocks in layout.replicas()]
