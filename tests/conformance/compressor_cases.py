"""Cases that every compressor must pass with every backend's ops; the tests are in test_compressors*.py.

Owns no framework: gradients go in by ``ops.from_host`` and sums come out by ``ops.to_host``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.backends.numpy.ops import Ops as NumpyOps
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.compressors.bf16 import Bf16
from hvdtrain.comm.compressors.fp16 import Fp16
from hvdtrain.comm.compressors.int8 import Int8
from hvdtrain.comm.compressors.powersgd import PowerSGD
from hvdtrain.comm.compressors.topk import TopK
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Shards

MAKE = {
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "topk": lambda: TopK(0.05),
    "topk-momentum": lambda: TopK(0.05, 0.9),
    "topk-warmup": lambda: TopK(0.01, 0.0, 4),
    "powersgd": PowerSGD,
    "powersgd-1": lambda: PowerSGD(1),
}
"""A compressor of each kind, small enough for small tensors."""
SHAPES = {
    "model": ((64, 33), (7,), (3, 3, 16, 20), (10, 20), (5,), (1,)),  # dense and Keras convolution; 5205: odd
    "blocks": ((2500,), (33, 40)),                                     # several int8 blocks a rank
    "one": ((1,),),                                                    # less than one element a rank
    "three": ((3,),),
}
SIZES = (1, 2, 3, 4)


@dataclass
class Outcome:
    """``sums[rank][step]``: one flat vector each; ``states[rank]``: by bucket; ``sent``: bytes by rank."""

    sums: list[list[np.ndarray]]
    states: list[list[dict[str, np.ndarray]]]
    sent: list[int]


def buckets(shapes):
    """All tensors in one bucket of float32."""
    return plan_buckets([ParamSpec(f"p{i}", tuple(s), "float32") for i, s in enumerate(shapes)], 16)


def gradient(rank, step, n):
    """Of very different magnitudes; every third step a rank has nothing."""
    if (rank + step) % 3 == 2:
        return np.zeros(n, np.float32)
    draw = np.random.default_rng([rank, step, n])
    return (draw.standard_normal(n) * 10.0 ** draw.uniform(-4, 0, n)).astype(np.float32)


def exchanged(compressor, make_ops, size, shapes, steps, give=gradient) -> Outcome:
    """Run ``steps`` exchanges over ``size`` lockstep ranks; check what must hold for every compressor."""
    world, plan = LockstepWorld(size), buckets(shapes)
    n = plan[0].n

    def work(control: Any, wire: Any):
        ops = make_ops()
        reducer, sums = Reducer(plan, compressor, wire, ops), []
        for step in range(steps):
            before, own = world.sent_bytes[control.rank], ops.from_host(give(control.rank, step, n))
            kept = [{k: np.array(ops.to_host(v)) for k, v in s.items()} for s in reducer.state.all()]
            old = reducer.state.all()[0]
            reducer.begin()
            reducer.start(0, own)
            total_N = ops.to_host(reducer.finish()[0])
            assert total_N.shape == (n,) and total_N.dtype == np.float32
            sent = world.sent_bytes[control.rank] - before
            assert sent == compressor.wire_bytes(plan[0], size, reducer.stage), "bytes are not those named"
            for key, value in old.items():
                np.testing.assert_array_equal(ops.to_host(value), kept[0][key], err_msg="a state was written to")
            sums.append(np.array(total_N))
        return sums, [{k: np.array(ops.to_host(v)) for k, v in s.items()} for s in reducer.state.all()]

    results = world.run(work)
    for sums, _ in results[1:]:
        for step, (a, b) in enumerate(zip(sums, results[0][0])):
            assert np.isnan(a).any() or a.tobytes() == b.tobytes(), f"ranks have other bits after step {step}"
    return Outcome([r[0] for r in results], [r[1] for r in results], world.sent_bytes)


def cuts(n, size):
    """Shards of n elements over ranks: about equal, unequal, and all of it one rank's."""
    unequal = [n * part // 10 for part in ([10], [7, 3], [6, 0, 4], [1, 5, 0, 4])[size - 1]]
    equal = [n * (r + 1) // size - n * r // size for r in range(size)]
    return [equal, [n - sum(unequal[1:]), *unequal[1:]], [0] * (size - 1) + [n]]


def scattered(compressor, make_ops, sizes, shapes, steps, give=gradient, graph=lambda ops, wire, step: (wire, step)):
    """Return the `Outcome` of `exchanged` where each rank wants its shard alone; ``sums`` of shards.

    ``graph``: gives the transport of the compressor, and the step as it is run.
    """
    world, plan = LockstepWorld(len(sizes)), buckets(shapes)

    def work(control: Any, wire: Any):
        ops, sums = make_ops(), []

        def step(flat_N):
            reducer.start(0, flat_N)
            shard_K = reducer.take(0)
            reducer.close()
            return shard_K

        wire, step = graph(ops, wire, step)
        reducer = Reducer(plan, compressor, wire, ops)
        reducer.shards = [Shards(tuple(sizes), control.rank)]
        for t in range(steps):
            reducer.begin()
            sums.append(np.array(ops.to_host(step(ops.from_host(give(control.rank, t, plan[0].n))))))
        return sums, [{k: np.array(ops.to_host(v)) for k, v in s.items()} for s in reducer.state.all()]

    results = world.run(work)
    return Outcome([r[0] for r in results], [r[1] for r in results], world.sent_bytes)


def check_shards_are_those_of_the_sum(name, make_ops, size, shapes, **graph):
    """Shards, equal or not, have the bits of the exchange's sums and leave those of its states, over several steps."""
    want = exchanged(MAKE[name](), make_ops, size, shapes, 4)
    for sizes in cuts(buckets(shapes)[0].n, size):
        got = scattered(MAKE[name](), make_ops, sizes, shapes, 4, **graph)
        for step, total in enumerate(want.sums[0]):
            assert np.concatenate([sums[step] for sums in got.sums]).tobytes() == total.tobytes(), (sizes, step)
        for mine, theirs in zip(got.states, want.states):
            for key in theirs[0]:
                np.testing.assert_array_equal(mine[0][key], theirs[0][key])


def exact(size, step, n, give=gradient):
    """Return the sum over ranks in float64."""
    return sum(give(r, step, n).astype(np.float64) for r in range(size))


def check_like_numpy(name, make_ops, size, shapes):
    """Compare sums and states with the numpy reference over several steps, to 1e-5 of the largest."""
    got = exchanged(MAKE[name](), make_ops, size, shapes, 6)
    want = exchanged(MAKE[name](), NumpyOps, size, shapes, 6)
    for a, b in zip(got.sums[0], want.sums[0]):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
    for mine, theirs in zip(got.states, want.states):
        for key in theirs[0]:
            assert np.abs(mine[0][key] - theirs[0][key]).max() <= 1e-4 * (np.abs(theirs[0][key]).max() + 1e-30), key


def check_not_finite_is_seen(name, make_ops, all_pairs=False):
    """NaN or infinity in any kind of tensor of one rank: no rank may read a finite vector, nor all a finite shard.

    ``all_pairs`` of value and place: with the numpy reference. A framework, held against it, has each place once.
    """
    shapes, size = SHAPES["model"], 3
    n = buckets(shapes)[0].n
    values, places = (np.nan, np.inf, -np.inf), (0, 1, 7, 300, n // 2, n - 40, n - 1)
    for bad, where in itertools.product(values, places) if all_pairs else zip(itertools.cycle(values), places):
        def give(rank, step, n):
            own = gradient(rank, 0, n)
            if rank == 1 and step == 1:
                own[where] = bad
            return own

        outcome = exchanged(MAKE[name](), make_ops, size, shapes, 2, give)
        for first, second in outcome.sums:
            assert np.isfinite(first).all() and not np.isfinite(second).all(), (bad, where)
        shards = scattered(MAKE[name](), make_ops, cuts(n, size)[1], shapes, 2, give).sums
        first, second = (np.concatenate(of_ranks) for of_ranks in zip(*shards))
        assert np.isfinite(first).all() and not np.isfinite(second).all(), (bad, where)


def check_not_finite_among_many(make_ops):
    """So many that only candidates are looked at, which NaN never is: it reaches all ranks even so."""
    for bad in (np.nan, np.inf):
        def give(rank, step, n):
            own = np.random.default_rng(rank).standard_normal(n).astype(np.float32)
            own[12345] = bad if rank else 1.0
            return own

        for sums in exchanged(TopK(0.01), make_ops, 2, ((200_000,),), 1, give).sums:
            assert not np.isfinite(sums[0]).all()


def check_zeros(name, make_ops):
    """Exchange zeros, then values: no NaN, and no later value is lost."""
    def give(rank, step, n):
        return gradient(rank, 0, n) * (step > 1)

    shapes = SHAPES["model"]
    outcome = exchanged(MAKE[name](), make_ops, 2, shapes, 5, give)
    for sums in outcome.sums:
        assert np.isfinite(np.stack(sums)).all()
        assert not np.stack(sums[:2]).any() and all(total.any() for total in sums[2:])


def check_state_survives(name, make_ops):
    """Through `saved` and `restore`, bit by bit; and `discard` takes a step back."""
    plan = buckets(SHAPES["model"])
    n = plan[0].n

    def work(control, wire):
        ops = make_ops()

        def step(reducer, t):
            reducer.begin()
            reducer.start(0, ops.from_host(gradient(control.rank, t, n)))
            return np.array(ops.to_host(reducer.finish()[0]))

        one = Reducer(plan, MAKE[name](), wire, ops)
        for t in range(3):
            step(one, t)
        before = one.state.saved()
        step(one, 50)  # a step that is left out
        one.state.discard()
        after = one.state.saved()
        other = Reducer(plan, MAKE[name](), wire, ops)
        said = other.state.restore(before)
        pairs = [(step(one, t), step(other, t)) for t in range(3, 6)]
        return before, after, said, pairs

    for before, after, said, pairs in LockstepWorld(2).run(work):
        assert said == "" and before.keys() == after.keys()
        for key in before:
            if key != "compressor.steps":
                np.testing.assert_array_equal(before[key], after[key])
        for a, b in pairs:
            assert a.tobytes() == b.tobytes()
