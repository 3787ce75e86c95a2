"""ZeRO: every rank holds all parameters, and a shard of optimizer state and gradients (Rajbhandari et al. 2020, arXiv
1910.02054).

Stage 1 divides the optimizer's state, stage 2 also the summed gradients. `hvdtrain.planning.shards` sizes the shards.
Bytes a parameter in float32 with Adam over N ranks: 16 in `replicate`, 8 + 8/N in stage 1, 4 + 12/N in stage 2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from itertools import zip_longest

from hvdtrain.cluster.machine import memory
from hvdtrain.comm.compressors import create
from hvdtrain.comm.reducer.reducer import Reducer, sum_squares
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Array, Collectives, Control, DataParallel, Handle, ParamSpec
from hvdtrain.core.protocols.types import Bucket, Shards, itemsize
from hvdtrain.parallel.data_parallel import DataParallelSetup, attach, replicate
from hvdtrain.parallel.data_parallel.attach import buckets_of, check, compression_of
from hvdtrain.parallel.data_parallel.reducing import Reducing
from hvdtrain.planning import shards

LAID_OUT = 2
"""Updates after which all that stays has been made."""

IN_FLIGHT = 2
"""Buckets that are on the transport at once: of updated parameters, and in stage 2 of gradients."""


def make(setup: DataParallelSetup) -> DataParallel:
    """Divide the state by the ranks' free memory, or as ``data_parallel.shards`` says; collective.

    Errors: `UserError` for an optimizer that needs whole tensors, and for what `replicate` refuses.
    """
    config, wire = setup.config, setup.collectives
    stage = config.data_parallel.stage
    if wire.size == 1:
        one = "rank" if setup.parts.layout is None else "replica of the model"
        setup.notes.append(f"data_parallel zero shards nothing: there is one {one}")
        return replicate.make(setup)
    if wire.name == "null":
        raise UserError("data_parallel zero with collectives null, which exchanges nothing", "a transport: "
                        "every rank updates only its shard of the parameters", "set collectives: auto, or "
                                                                               "data_parallel: replicate")
    given = config.data_parallel.shards
    if given and len(given) != setup.control.size:
        raise UserError(f"data_parallel.shards has {count(len(given), 'entry', 'entries')} for "
                        f"{count(setup.control.size, 'rank')}",
                        "one per rank", f"give {setup.control.size} numbers")
    if stage == "auto":
        stage = attach.stage_needed(setup)
        if stage == 0:
            return replicate.make(setup)
    name = compression_of(setup)
    check(setup, name)
    parts_P, why = (given, "as data_parallel.shards says") if given else attach.parts_of(setup)
    buckets = buckets_of(setup)
    sizes_BP = _cut(setup, buckets, parts_P)
    setup.notes.append(_owners(setup, buckets, sizes_BP, why))
    spans = shards.spans(buckets, sizes_BP, setup.control.rank, len(setup.parts.params.specs))
    # A rank of a pipeline sums when its backward is over.
    during = setup.ops.during_backward(wire) if stage == 2 and setup.parts.layout is None else wire
    reducer = Reducer(buckets, create(name, config), during, setup.ops, setup.parts.ops_of_place, setup.wires)
    reducer.state.undoable = (config.nan_guard == "skip" or setup.parts.scale.on or not during.in_graph
                              or config.on_oom == "shrink")
    setup.parts.optimizer = setup.parts.params.sliced(spans)
    setup.parts.state.take(setup.parts.optimizer, spans)
    several = config.accumulate > 1 or config.micro_batch != 0
    if stage == 2 and several:
        setup.notes.append("data_parallel.stage 2: gradients are not sharded, as in stage 1, while a rank "
                           "accumulates them over micro-batches")
    elif stage == 2 and config.sync_batchnorm and not during.in_graph:
        setup.notes.append("data_parallel.stage 2: with sync_batchnorm gradients are not sharded, as in "
                           "stage 1, until backward ends, since its layers wait for other ranks in backward")
    if reducer.compressor.approximates:
        setup.notes.append(f"gradients are approximated by {reducer.compressor.describe()}")
    return Zero(stage, reducer, setup, sizes_BP)


def _cut(setup: DataParallelSetup, buckets: Sequence[Bucket], parts_P: Sequence[float]) -> list[list[int]]:
    """Return the elements of each bucket that each rank of the job owns; 0 on ranks that do not sum the bucket."""
    layout, ranks_of = setup.parts.layout, setup.ranks_of
    for ranks in layout.groups() if layout is not None else ():  # of other ranks too: all refuse alike
        if not any(parts_P[rank] for rank in ranks):
            raise UserError(f"data_parallel.shards {list(parts_P)} give no shard to any of the ranks "
                            f"{', '.join(map(str, ranks))}, the only ranks with some blocks of the model",
                            "a shard for one of them", "correct data_parallel.shards")
    return [shards.sizes(b.n, [part if rank in ranks_of[b.group] else 0.0 for rank, part in enumerate(parts_P)])
            for b in buckets]


def _owners(setup: DataParallelSetup, buckets: Sequence[Bucket], sizes_BP: Sequence[Sequence[int]], why: str) -> str:
    """Return the note about what each rank owns; collective if buckets differ between ranks."""
    itemsizes_B = [itemsize(b.dtype) for b in buckets]
    if setup.parts.layout is None:
        return attach.owners(sizes_BP, itemsizes_B, why)
    own = sum(sizes_P[setup.control.rank] * n for sizes_P, n in zip(sizes_BP, itemsizes_B))
    return attach.owned(setup.control.gather(own), why)


class Zero(Reducing):
    """`hvdtrain.core.protocols.DataParallel` whose ranks own shards of every bucket, ``sizes_BP`` elements of all
    ranks.

    ``reducer``: has the transports of gradients; ``setup``: those of parameters. ``gather_s``: seconds in which the
    latest update gathered the parameters; ``gathered_s``: of all ``gathers`` so far.
    """

    divides_state = copies_equal = True
    look_first = False

    def __init__(self, stage: int, reducer: Reducer, setup: DataParallelSetup,
                 sizes_BP: Sequence[Sequence[int]]) -> None:
        super().__init__(reducer)
        self.stage, self.wire, self.retains = stage, setup.collectives, stage == 1
        self.clip_norm = setup.config.clip_norm
        self.gather_s = self.gathered_s = self.waited_s = 0.0
        self.gathers = 0
        self._control, self._parts, self._setup = setup.control, setup.parts, setup
        self._divide(sizes_BP)
        self._open: dict[int, Handle | None] = {}
        self._waiting: dict[int, Array] = {}
        self._slices: dict[int, Array] = {}
        self._squares: float | None = None
        self._broken = False

    def _divide(self, sizes_BP: Sequence[Sequence[int]]) -> None:
        setup, rank = self._setup, self._control.rank
        self.sizes_BP = [list(sizes_P) for sizes_P in sizes_BP]
        self._wires = [Transport(setup.wires.get(b.group, self.wire), own.ops)
                       for b, own in zip(self.buckets, self.reducer.wires)]
        self._sizes_BG = [[sizes_P[r] for r in setup.ranks_of[b.group]] for b, sizes_P in zip(self.buckets, sizes_BP)]
        first_B = [sum(sizes_P[:rank]) for sizes_P in sizes_BP]
        self._own_B = [(first, first + sizes_P[rank]) for first, sizes_P in zip(first_B, sizes_BP)]
        self._in_place = self.reducer.compressor.in_place
        self.reducer.shards = [] if self._in_place else [
            Shards(tuple(sizes_G), wire.rank) for sizes_G, wire in zip(self._sizes_BG, self._wires)]
        self._inside_B = [shards.in_bucket(b, *own) for b, own in zip(self.buckets, self._own_B)]

    def extend(self, specs: Sequence[ParamSpec], first: int) -> list[shards.Span]:
        """Divide the parameters from ``first`` on in the same proportions."""
        known = len(self.buckets)
        self.reducer = self._extended(specs, first)
        self.buckets = self.reducer.buckets
        parts_P = [float(sum(sizes_P)) for sizes_P in zip(*self.sizes_BP)]
        self._divide([*self.sizes_BP, *(shards.sizes(b.n, parts_P) for b in self.buckets[known:])])
        return shards.spans(self.buckets, self.sizes_BP, self._control.rank, len(specs))[first:]

    def begin(self, step: int) -> None:
        self.reducer.begin()
        self._open, self._waiting, self._slices, self._squares = {}, {}, {}, None
        self.waited_s, self._broken = 0.0, False
        if self.gathers == LAID_OUT:
            memory.end_mapping()

    def buffer(self, bucket: Bucket) -> Array:
        """Return memory (n,) for a bucket's gradient; in stage 2 the transport's bucket in flight, if there is one."""
        if self.retains or not self._in_place or not self.reducer.collectives.host:
            return self.reducer.buffer(bucket)
        ops = self.reducer.wires[bucket.index].ops
        wire = self._wires[bucket.index].collectives
        return ops.buffer(bucket.n, bucket.dtype, wire.flight(bucket.n, bucket.dtype))

    def put(self, index: int, x: Array) -> None:
        """Send a full bucket, after those before it; in stage 2 wait for the sum if the transport blocks."""
        self._waiting[index] = x
        while len(self._slices) + len(self._open) in self._waiting:
            i = len(self._slices) + len(self._open)
            x, began = self._waiting.pop(i), time.perf_counter()
            wire = self.reducer.wires[i].collectives
            if self._in_place:
                self._open[i] = self._scatter(i, x)
            else:
                self.reducer.start(i, x)  # which keeps in mind by itself whether a request was made
                self._open[i] = None
            self._broken = True  # unless this comes through
            if not self.retains and not (self._in_place and wire.in_graph):
                # A graph goes through all requests of a bucket before those of the next one.
                self._arrive(IN_FLIGHT if self._goes_on(wire) else 0)
            self._broken = False
            self.waited_s += 0.0 if self.in_graph else time.perf_counter() - began

    def _scatter(self, i: int, x: Array) -> Handle:
        wire = self.reducer.wires[i]
        sent = wire.outgoing(x)
        self._broken = True
        return wire.collectives.reducescatterv(sent, self._sizes_BG[i], f"{self.buckets[i].name}.part")

    def _goes_on(self, wire: Collectives) -> bool:
        """Return whether the transport makes a bucket's shard in the background."""
        return wire.moves_parts if self._in_place else wire.overlaps and not wire.in_graph

    def owed(self) -> list[int] | None:
        self._waiting.clear()
        done = len(self._slices) + len(self._open)
        return None if self._broken or self.reducer.owed() is None else list(range(done, len(self.buckets)))

    def collect(self) -> list[Array]:
        """Return this rank's shard of each bucket's sum."""
        assert not self._waiting, f"buckets {sorted(self._waiting)} wait for one that was not handed over"
        self._broken = True  # as in `put`
        self._arrive(0)
        self._broken = False
        if not self._in_place and self._squares is None:  # a graph that has run has closed it by itself
            self.reducer.close()
        slices, self._slices = self._slices, {}
        return [slices[b.index] for b in self.buckets]

    def _arrive(self, left: int) -> None:
        """Receive the oldest sums until ``left`` are in flight: a transport holds their buckets meanwhile."""
        for i in sorted(self._open)[:max(0, len(self._open) - left)]:
            handle = self._open.pop(i)
            self._slices[i] = self.reducer.take(i) if handle is None else self.reducer.wires[i].arrived(handle.wait())

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        ops = self.reducer.ops
        return ops.reshape(sum_squares(ops, sums), (1,)), sums

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        self._slices, self._squares = dict(enumerate(sums)), float(numbers[0])

    def squares(self, grads: Sequence[Array]) -> float:
        """Return the squares of this rank's shards, on devices too: an owner must not decide alone."""
        return float(sum_squares(self.reducer.ops, grads)) if self._squares is None else self._squares

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update this rank's slices and gather all parameters; the agreement has found all gradients finite."""
        norm, grads = math.nan, list(grads)
        if self.clip_norm > 0 or self.look_first:
            norm = global_norm([float(sum_squares(self.reducer.ops, [x])) for x in grads], self._control)
            if not math.isfinite(norm):
                return False, norm
            if 0 < self.clip_norm < norm:
                grads = [x * (self.clip_norm / norm) for x in grads]
        slices = {i: x[:0] for b, x in zip(self.buckets, grads) for i in b.params}
        for inside, x in zip(self._inside_B, grads):
            at = 0
            for i, (begin, end) in inside:
                n = end - begin
                slices[i] = x if n == x.shape[0] else x[at:at + n]  # TensorFlow would copy a whole slice too
                at += n
        finite, _ = self._parts.optimizer.step([slices[i] for i in sorted(slices)], [], 0.0, False,
                                               unused=unused)
        assert finite, "an owner left out an update that all ranks have agreed on"
        began = time.perf_counter()
        self._gather()
        self.gather_s = time.perf_counter() - began
        self.gathered_s, self.gathers = self.gathered_s + self.gather_s, self.gathers + 1
        return True, norm

    def _gather(self) -> None:
        """Gather the updated parameters of all ranks, bucket by bucket."""
        params = self._parts.params
        open_: dict[int, Handle] = {}
        ahead = IN_FLIGHT if self.wire.moves_parts else 1
        for i in range(len(self.buckets) + ahead - 1):
            if i < len(self.buckets):
                wire, bucket, sizes_G = self._wires[i], self.buckets[i], self._sizes_BG[i]
                # Held by nobody else: a framework copies a tensor that is written to while it is looked at.
                open_[i] = wire.collectives.allgatherv(wire.outgoing(params.flat(bucket, *self._own_B[i])), sizes_G,
                                                       f"{bucket.name}.params")
            done = i - ahead + 1
            if done >= 0:
                bucket, whole_N = self.buckets[done], open_.pop(done).wait()
                if self.wire.host:  # read where it lies: it is the transport's own until its next call
                    whole_N = self._wires[done].ops.buffer(bucket.n, bucket.dtype, whole_N)
                params.write(bucket, whole_N, self._own_B[done])


def global_norm(squares_B: Sequence[float], control: Control) -> float:
    """Return the norm of the whole gradient from the squares of this rank's shard of each bucket; NaN if one is.
    Collective.

    Added in float64 by bucket, then rank: all ranks find the same number. Numbers of buckets may differ between ranks.
    """
    total = 0.0
    for of_ranks in zip_longest(*control.gather(list(squares_B)), fillvalue=0.0):
        for square in of_ranks:
            total += square
    return math.sqrt(total) if total >= 0 else math.nan
