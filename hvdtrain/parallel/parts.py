"""The parts of a model on one rank that a run drives; each backend's ``make_parts`` makes them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    Writable,
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
    batch as a named loss that ignores labels or weighs classes. ``measured``: metrics of an evaluation, once a few
    samples have been tried; [] where they are not known.
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
    measured: list[str] = field(default_factory=list)
    _installed: list[Transform] = field(default_factory=list)

    def measure_names(self) -> None:
        """Take the totals of samples that were tried, which are forgotten, and keep the names of their metrics."""
        totals = self.evaluator.totals()
        of_one_rank = {name: each if isinstance(each, np.ndarray) else [each] for name, each in totals.items()}
        with contextlib.suppress(Exception), warnings.catch_warnings():  # a metric may not be defined for few samples
            warnings.simplefilter("ignore")
            self.measured = list(self.evaluator.results(of_one_rank)) if totals else self.measured

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

    @contextlib.contextmanager
    def draws_kept(self) -> Iterator[None]:
        """Give the random generators back as they were before the body: datasets and models draw numbers in it."""
        kept = self.state.rank_state()
        try:
            yield
        finally:
            self.state.load_rank(kept)

    def describe(self) -> dict[str, str]:
        words = {**self.optimizer.describe(), **self.stage.describe()}
        for transform in self.transforms:
            words |= transform.describe()
        return words

    def caveats(self) -> list[str]:
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


class GroupBuffers:
    """Implements `Buffers` of a partitioned model by those of each `ReplicaGroup` of this rank."""

    groups: Sequence[Buffers]

    def keep(self) -> None:
        for group in self.groups:
            group.keep()

    def discard(self) -> None:
        for group in self.groups:
            group.discard()

    def share(self) -> None:
        for group in self.groups:
            group.share()

    def sync(self) -> list[str]:
        return [name for group in self.groups for name in group.sync()]

    def writable(self) -> dict[str, Writable]:
        return {name: one for group in self.groups for name, one in group.writable().items()}

    def statistics(self) -> list[str]:
        return [name for group in self.groups for name in group.statistics()]

    def noticed(self) -> list[str]:
        return [name for group in self.groups for name in group.noticed()]

    def track(self, names: Iterable[str]) -> None:
        names = list(names)
        for group in self.groups:
            group.track(names)

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        for group in self.groups:
            group.combine(reductions, samples, force)
