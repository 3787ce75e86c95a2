"""Every rank holds the whole model and makes every update: gradients are summed over ranks in each step.

Owns what happens to a step's gradients in order: buckets go on the wire as backward fills them, the sums are looked at,
the optimizer reads them where they arrived. How a bucket is summed is `hvdtrain.comm.reducer.reducer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdtrain.comm.compressors import create
from hvdtrain.comm.reducer.reducer import Reducer, sum_squares
from hvdtrain.core.protocols import Array, Collectives, Compressor, Control, DataParallel, Optimizer, ParamSpec
from hvdtrain.parallel.data_parallel import DataParallelSetup
from hvdtrain.parallel.data_parallel.alone import Alone
from hvdtrain.parallel.data_parallel.attach import buckets_of, check, compression_of
from hvdtrain.parallel.data_parallel.reducing import Reducing, Whole

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Bucket


def make(setup: DataParallelSetup) -> DataParallel:
    """Plan buckets and compressor as the configuration says; collective.

    A rank alone compresses nothing, unless topk stands in for the optimizer's momentum. compression auto begins with
    none: the callback of that name measures and then calls `Replicate.use`.
    Errors: `UserError` for a compression that does not go with the optimizer, the shares or the ranks.
    """
    config, stage, optimizer = setup.config, setup.parts.stage, setup.parts.optimizer
    name = compression_of(setup)
    check(setup, name)
    # A device that decides by itself tells too late for a step that is to be undone as a whole.
    look = stage.asynchronous and config.nan_guard == "skip"
    compressor = create(name, config)
    if setup.collectives.size == 1 and compressor.in_place:
        return Alone(optimizer, setup.ops, config.clip_norm, look, setup.decides)
    reducer = Reducer(buckets_of(setup), compressor, setup.collectives, setup.ops, setup.parts.ops_of_place,
                      setup.wires)
    # In a graph the copy that undoing needs costs a pass over the state; elsewhere the old arrays are merely kept.
    reducer.state.undoable = (config.nan_guard == "skip" or setup.parts.scale.on or not setup.collectives.in_graph
                              or config.on_oom == "shrink")
    if reducer.compressor.approximates:
        setup.notes.append(f"gradients are approximated by {reducer.compressor.describe()}")
    made = Replicate(reducer, optimizer, config.clip_norm, look, setup.decides)
    made.plan = lambda wire: buckets_of(replace(setup, collectives=wire))
    return made


class Replicate(Reducing):
    """`hvdtrain.core.protocols.DataParallel` that sums every bucket by ``reducer`` in every step.

    ``clip_norm``: global norm to clip to, 0: none. ``look``: the update is to tell the norm. ``decides``: the control
    plane of all ranks, where this one has a part of the model alone.
    """

    copies_equal = retains = True
    waited_s = 0.0
    plan: Callable[[Collectives], list[Bucket]] | None = None
    """Gives the buckets of a wire; None where it was made without a run."""
    looks = True
    """False only in the bench that tells what looking at gradients costs."""

    def __init__(self, reducer: Reducer, optimizer: Optimizer, clip_norm: float = 0.0, look: bool = False,
                 decides: Control | None = None) -> None:
        super().__init__(reducer)
        self.optimizer, self.clip_norm, self.look_first = optimizer, clip_norm, look
        self._whole = None if decides is None else Whole(decides, clip_norm)
        self._sums: list[Array] | None = None
        self._squares: float | None = None

    @property
    def overlaps(self) -> bool:
        """Whether a bucket that is put travels while backward goes on, outside of any graph."""
        return self.reducer.collectives.overlaps and not self.in_graph

    @property
    def can_change_transport(self) -> bool:
        """Whether it can plan buckets for another one."""
        return self.plan is not None

    def use(self, compressor: Compressor) -> None:
        """Exchange by another compressor, with fresh state, from the next step on; every rank calls it between steps.

        The stage is to be connected anew.
        """
        old = self.reducer
        self._take(Reducer(old.buckets, compressor, old.collectives, old.ops, old.ops_of_place, old.among))

    def use_wire(self, wire: Collectives) -> str:
        """Exchange over another wire from the next step on; every rank calls it between steps.

        Its buckets are planned for it, under names of their own, so that the stage, which is to be connected anew, asks
        for their memory. The compressor keeps its state where buckets are the same; returns in words where not.
        """
        assert self.plan is not None
        old, saved = self.reducer, self.reducer.state.saved()
        buckets = [replace(bucket, group=f"{bucket.group}.{wire.name}") for bucket in self.plan(wire)]
        self._take(Reducer(buckets, old.compressor, wire, old.ops, old.ops_of_place))
        return self.reducer.state.restore(saved) if saved else ""

    def extend(self, specs: Sequence[ParamSpec], first: int) -> None:
        """Plan buckets for the parameters from ``first`` on."""
        self._take(self._extended(specs, first))

    def _take(self, reducer: Reducer) -> None:
        reducer.state.undoable = self.reducer.state.undoable
        self.reducer, self.buckets, self.in_graph = reducer, reducer.buckets, reducer.collectives.in_graph

    def begin(self, step: int) -> None:
        """Open a step of the reducer."""
        self.reducer.begin()
        self._sums = self._squares = None

    def buffer(self, bucket: Bucket) -> Array:
        """Zeros (n,), in memory of the wire's own where it sums that without a copy."""
        return self.reducer.buffer(bucket)

    def put(self, index: int, x: Array) -> None:
        """Put a full bucket on the wire, after those before it."""
        self.reducer.start(index, x)

    def collect(self) -> list[Array]:
        """The sums by bucket."""
        if self._sums is None:
            self._sums = self.reducer.finish()
        sums, self._sums = self._sums, None
        return sums

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """The squares of this rank's part of ``sums``, float64 (1,), in the graph."""
        ops = self.reducer.ops
        parts = self.reducer.own_parts(sums) if self.looks else []
        return ops.reshape(sum_squares(ops, parts), (1,)), sums

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        """Take a graph's sums and their squares."""
        self._sums, self._squares = list(sums), float(numbers[0])

    def squares(self, grads: Sequence[Array]) -> float:
        """Of this rank's part; 0 where a device looks at them by itself, which it may not with a part of the model."""
        if self._squares is None:
            if not self.looks or self.optimizer.looks and self._whole is None:
                return 0.0
            self._squares = self.reducer.squares(grads)
        return self._squares

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update from the sums, which have the same bits on every rank: so all take one decision without a vote.

        With a part of the model alone the vote has decided, and the norm is that of all parts.
        """
        if self._whole is not None:
            return self._whole.step(self.optimizer, grads, self.buckets, self.squares(grads), unused)
        return self.optimizer.step(grads, self.buckets, self.clip_norm, self.look_first, unused=unused)
