"""Replicated data parallelism: every rank holds the whole model; gradients are summed in each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from hvdtrain.comm.compressors import create
from hvdtrain.comm.reducer.reducer import Reducer, sum_squares
from hvdtrain.core.protocols import Array, Collectives, Compressor, Control, DataParallel, Optimizer, ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.data_parallel import DataParallelSetup
from hvdtrain.parallel.data_parallel.alone import Alone
from hvdtrain.parallel.data_parallel.attach import buckets_of, check, compression_of
from hvdtrain.parallel.data_parallel.reducing import Reducing, Whole


def make(setup: DataParallelSetup) -> DataParallel:
    """Plan buckets and compressor by the configuration; collective. compression auto begins with none
    (`Replicate.use`).

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
    made.plan = lambda wire, name: buckets_of(replace(setup, collectives=wire, config=replace(
        config, compression=name) if name else config))
    return made


class Replicate(Reducing):
    """`hvdtrain.core.protocols.DataParallel` that sums every bucket by ``reducer`` in every step.

    ``clip_norm``: global norm to clip to, 0: none. ``look``: the update reports the norm. ``decides``: control plane of
    all ranks of a partitioned model.
    """

    copies_equal = retains = True
    waited_s = 0.0
    plan: Callable[[Collectives, str], list[Bucket]] | None = None
    """Gives the buckets of a transport and a compressor, "" for the run's; None where it was made without a run."""
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
        return self.reducer.collectives.overlaps and not self.in_graph

    @property
    def can_change_transport(self) -> bool:
        return self.plan is not None

    def use(self, compressor: Compressor) -> None:
        """Exchange by another compressor, with fresh state, from the next step on; called by all ranks."""
        old = self.reducer
        self._take(Reducer(old.buckets, compressor, old.collectives, old.ops, old.ops_of_place, old.among))

    def use_wire(self, wire: Collectives) -> str:
        """Exchange over another transport from the next step on; called by all ranks between steps.

        Its buckets get names of their own, so that the stage, which is to be connected again, asks for their memory.
        The compressor keeps its state if buckets are the same; returns a message if not.
        """
        assert self.plan is not None
        old, saved = self.reducer, self.reducer.state.saved()
        buckets = [replace(bucket, group=f"{bucket.group}.{wire.name}") for bucket in self.plan(wire, "")]
        self._take(Reducer(buckets, old.compressor, wire, old.ops, old.ops_of_place))
        return self.reducer.state.restore(saved) if saved else ""

    def buckets_with(self, name: str) -> list[Bucket]:
        """Return the buckets that a run with the compressor ``name`` has; collective."""
        return self.buckets if self.plan is None else self.plan(self.reducer.collectives, name)

    def extend(self, specs: Sequence[ParamSpec], first: int) -> None:
        self._take(self._extended(specs, first))

    def _take(self, reducer: Reducer) -> None:
        reducer.state.undoable = self.reducer.state.undoable
        self.reducer, self.buckets, self.in_graph = reducer, reducer.buckets, reducer.collectives.in_graph

    def begin(self, step: int) -> None:
        self.reducer.begin()
        self._sums = self._squares = None

    def buffer(self, bucket: Bucket) -> Array:
        return self.reducer.buffer(bucket)

    def put(self, index: int, x: Array) -> None:
        self.reducer.start(index, x)

    def collect(self) -> list[Array]:
        if self._sums is None:
            self._sums = self.reducer.finish()
        sums, self._sums = self._sums, None
        return sums

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        ops = self.reducer.ops
        parts = self.reducer.own_parts(sums) if self.looks else []
        return ops.reshape(sum_squares(ops, parts), (1,)), sums

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        self._sums, self._squares = list(sums), float(numbers[0])

    def squares(self, grads: Sequence[Array]) -> float:
        """Return the squares of this rank's share; 0 if the device decides by itself, which no shard of a model may."""
        if self._squares is None:
            if not self.looks or self.optimizer.looks and self._whole is None:
                return 0.0
            self._squares = self.reducer.squares(grads)
        return self._squares

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update from the sums, which have the same bits on every rank: all ranks decide alike without an agreement."""
        if self._whole is not None:
            return self._whole.step(self.optimizer, grads, self.buckets, self.squares(grads), unused)
        return self.optimizer.step(grads, self.buckets, self.clip_norm, self.look_first, unused=unused)
