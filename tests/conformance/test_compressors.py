"""Compressors over lockstep ranks in numpy: what they sum, what they owe, and the bytes they say they send."""

import numpy as np
import pytest
from compressor_cases import (
    MAKE,
    SHAPES,
    SIZES,
    buckets,
    check_not_finite_among_many,
    check_not_finite_is_seen,
    check_shards_are_those_of_the_sum,
    check_state_survives,
    check_zeros,
    cuts,
    exact,
    exchanged,
    gradient,
    scattered,
)

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.comm.collectives.base import ReadyHandle
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.compressors.adasum import Adasum
from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.comm.compressors.powersgd import PowerSGD
from hvdtrain.comm.compressors.topk import TopK
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.units import MIB


def exchange(compressor, size, n, dtype, give, steps=1):
    """Every rank's sums of ``steps`` exchanges of one bucket, and the bytes each rank sent."""
    world = LockstepWorld(size)

    def work(control, wire):
        reducer = Reducer(plan_buckets([ParamSpec("p", (n,), dtype)], 1e6 / MIB), compressor, wire, Ops())
        out = []
        for step in range(steps):
            reducer.start(0, give(control.rank, step))
            out.append(np.array(reducer.finish()[0]))
        return out

    return world.run(work), world.sent_bytes


# --- none ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", SIZES)
def test_no_compression_is_the_exact_sum_for_the_bytes_it_names(size, n, dtype):
    def give(rank, step):
        return (np.arange(n) % 50 + rank * (step + 1)).astype(dtype)

    compressor = NoCompression()
    results, sent = exchange(compressor, size, n, dtype, give, steps=3)
    for out in results:
        for step, total in enumerate(out):
            assert total.dtype.name == dtype
            np.testing.assert_array_equal(total, size * (np.arange(n) % 50) + (step + 1) * size * (size - 1) // 2)
    (bucket,) = plan_buckets([ParamSpec("p", (n,), dtype)], 1e6 / MIB)
    assert sent == [3 * compressor.wire_bytes(bucket, size)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_no_compression_gives_every_rank_the_same_bits(size):
    def give(rank, step):
        draw = np.random.default_rng([rank, step])
        return (draw.standard_normal(999) * 10.0 ** draw.integers(-6, 6, 999)).astype(np.float32)

    results, _ = exchange(NoCompression(), size, 999, "float32", give, steps=2)
    for out in results[1:]:
        for a, b in zip(out, results[0]):
            assert a.tobytes() == b.tobytes()


def test_no_compression_passes_infinities_on():
    def give(rank, step):
        return np.array([np.inf if rank else 1.0, np.nan if rank else 1.0, 1.0], np.float32)

    (first, _), _ = exchange(NoCompression(), 2, 3, "float32", give)
    np.testing.assert_array_equal(first[0], np.array([np.inf, np.nan, 2.0], np.float32))


def test_no_compression_keeps_no_state():
    (wide,) = plan_buckets([ParamSpec("p", (10,), "bfloat16")], 1)
    assert NoCompression().init(Ops(), wide) == {} and NoCompression().name == "none"
    assert NoCompression().wire_bytes(wide, 2) == 20 and NoCompression().wire_bytes(wide, 1) == 0


# --- all of them ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", MAKE)
def test_bits_and_bytes(name, shapes, size):
    """Equal bits on all ranks and the bytes that were named, after every step: `exchanged` looks."""
    outcome = exchanged(MAKE[name](), Ops, size, SHAPES[shapes], 6)
    assert np.isfinite(np.stack(outcome.sums[0])).all()
    assert (np.array(outcome.sent) > 0).all() == (size > 1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy speaks of each NaN; the frameworks do not
@pytest.mark.parametrize("name", MAKE)
def test_what_is_not_finite_is_seen(name):
    check_not_finite_is_seen(name, Ops, all_pairs=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_is_seen_among_many():
    check_not_finite_among_many(Ops)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", MAKE)
def test_shards_are_those_of_the_sum(name, shapes, size):
    check_shards_are_those_of_the_sum(name, Ops, size, SHAPES[shapes])


@pytest.mark.parametrize("name, most", [("fp16", (0.6, 0.6)), ("bf16", (0.6, 0.6)), ("int8", (0.6, 0.6)),
                                        ("topk", (0.6, 0.35)), ("topk-momentum", (0.6, 0.35))])
def test_a_rank_that_wants_its_shard_sends_as_much_less(name, most):
    for size, ratio in zip((2, 4), most):
        sent = sum(exchanged(MAKE[name](), Ops, size, SHAPES["model"], 6).sent)
        equal = cuts(buckets(SHAPES["model"])[0].n, size)[0]
        assert sum(scattered(MAKE[name](), Ops, equal, SHAPES["model"], 6).sent) <= ratio * sent


@pytest.mark.parametrize("name", MAKE)
def test_zeros(name):
    check_zeros(name, Ops)


@pytest.mark.parametrize("name", MAKE)
def test_state_survives(name):
    check_state_survives(name, Ops)


# --- linear --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name,part", [("fp16", 2.0 ** -11), ("bf16", 2.0 ** -8)])
def test_halves_round_each_gradient_and_the_sum_once(name, part, size):
    n = 5205
    outcome = exchanged(MAKE[name](), Ops, size, SHAPES["model"], 3)
    for step, total in enumerate(outcome.sums[0]):
        rounded = part * sum(np.abs(gradient(r, step, n)) for r in range(size)) + part * np.abs(total)
        smallest = (size + 1) * 2.0 ** -25 if name == "fp16" else 0
        assert (np.abs(total - exact(size, step, n)) <= 1.01 * rounded + smallest).all()


@pytest.mark.parametrize("size", SIZES)
def test_powersgd_is_exact_where_the_rank_is_enough(size):
    """Gradients of rank 2 (the sum's: 2 P) and tensors that are not matrices: the sum, to float32's rounding.

    The first step starts from a random Q, which loses digits; from then on Q is of the rows that the gradients have.
    """
    shapes = ((60, 50), (9,), (80, 40), (3, 3))

    def give(rank, step, n):
        draw, rows = np.random.default_rng([rank, step]), np.random.default_rng([rank, 99])
        low = [draw.standard_normal((a, 2)) @ rows.standard_normal((2, b)) for a, b in (shapes[0], shapes[2])]
        parts = [low[0], draw.standard_normal(9), low[1], draw.standard_normal((3, 3))]
        return np.concatenate([p.reshape(-1) for p in reversed(parts)]).astype(np.float32)

    outcome = exchanged(PowerSGD(2 * size), Ops, size, shapes, 3, give)
    for step, total in enumerate(outcome.sums[0]):
        want = exact(size, step, len(total), give)
        np.testing.assert_allclose(total, want, atol=(1e-3 if step == 0 else 2e-5) * np.abs(want).max())


@pytest.mark.parametrize("name", ["int8", "topk", "topk-warmup", "powersgd", "powersgd-1"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_sent_is_owed(name, size):
    """Sum sent = sum of gradients - sum of residuals, over any number of steps: nothing is lost or sent twice."""
    shapes, n = SHAPES["model"], 5205
    outcome = exchanged(MAKE[name](), Ops, size, shapes, 6)
    sent = np.sum(np.stack(outcome.sums[0]).astype(np.float64), axis=0)
    given = sum(exact(size, step, n) for step in range(6))
    np.testing.assert_allclose(sent + owed(outcome, shapes), given, atol=2e-5 * np.abs(given).max())


def owed(outcome, shapes):
    """Return the residuals of all ranks, as one flat vector."""
    (bucket,), total_N = buckets(shapes), np.zeros(sum(int(np.prod(s)) for s in shapes))
    for (state,) in outcome.states:
        if "residual" in state:
            total_N += state["residual"]
        for key, residual in state.items():
            if key.startswith("residual."):
                offset = bucket.offsets[int(key.split(".")[1])]
                total_N[offset:offset + residual.size] += residual.reshape(-1)
    return total_N


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_the_mean_of_what_is_sent_converges_to_a_constant_gradient(name):
    """Error feedback: the distance is what is owed over T, so it falls as 1 / T."""
    def give(rank, step, n):
        return gradient(rank, 0, n)

    shapes, n = ((40, 30), (7,)), 1207
    steps = 200
    sums = np.stack(exchanged(MAKE[name](), Ops, 2, shapes, steps, give).sums[0]).astype(np.float64)
    want = exact(2, 0, n, give)
    far = [np.linalg.norm(sums[:t].mean(axis=0) - want) for t in (steps // 4, steps // 2, steps)]
    assert far[2] < 0.65 * far[1] < 0.5 * far[0] and far[2] < 0.1 * np.linalg.norm(want)


def test_powersgd_does_not_depend_on_how_samples_are_cut():
    """Law 1: the same total gradient on 1, 2, 3 ranks, all of it on one of them or spread, gives the same sums."""
    def whole(step, n):
        return gradient(0, 3 * step, n)

    def cut(shares):
        return lambda rank, step, n: (whole(step, n) * np.float32(shares[rank])).astype(np.float32)

    want = exchanged(PowerSGD(2), Ops, 1, SHAPES["model"], 5, cut([1.0])).sums[0]
    for shares in ([0.0, 1.0], [0.75, 0.25], [0.5, 0.25, 0.25]):
        got = exchanged(PowerSGD(2), Ops, len(shares), SHAPES["model"], 5, cut(shares)).sums[0]
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_powersgd_finds_a_direction_that_was_lost():
    """After a step of gradients of rank 1 all but one column of Q are zero; rank 4 must come back from that."""
    shapes, draw = ((60, 50),), np.random.default_rng(0)
    one = np.outer(draw.standard_normal(60), draw.standard_normal(50))
    four = draw.standard_normal((60, 4)) @ draw.standard_normal((4, 50))

    def give(rank, step, n):
        return (one if step == 0 else four).reshape(-1).astype(np.float32)

    sums = exchanged(PowerSGD(4), Ops, 2, shapes, 2, give).sums[0]
    np.testing.assert_allclose(sums[1], 2 * four.reshape(-1), atol=1e-3 * np.abs(four).max())


# --- topk ----------------------------------------------------------------------------------------------------------

def test_momentum_correction_by_hand():
    """n = 2, k = 1, m = 0.5, gradient (1, 0.5): the steps of the paper's algorithm, worked out on paper."""
    outcome = exchanged(TopK(0.5, 0.5), Ops, 1, ((2,),), 3, lambda rank, step, n: np.array([1, 0.5], np.float32))
    np.testing.assert_array_equal(outcome.sums[0], [[1, 0], [0, 1.25], [2.5, 0]])
    np.testing.assert_array_equal(outcome.states[0][0]["residual"], [0, 0.5])
    np.testing.assert_array_equal(outcome.states[0][0]["momentum"], [0, 0.5])


def test_topk_sends_fewer_as_it_warms_up():
    compressor, n = TopK(0.01, 0.0, 8), 10_000
    outcome = exchanged(compressor, Ops, 1, ((n,),), 10, lambda rank, step, n: np.arange(1, n + 1, dtype=np.float32))
    assert [np.count_nonzero(s) for s in outcome.sums[0]] == [2500] * 2 + [625] * 2 + [157] * 2 + [100] * 4


def test_topk_of_everything_is_the_sum():
    outcome = exchanged(TopK(1.0), Ops, 3, SHAPES["three"], 4)
    for step, total in enumerate(outcome.sums[0]):
        np.testing.assert_allclose(total, exact(3, step, 3), rtol=1e-6)


# --- adasum --------------------------------------------------------------------------------------------------------

class Adding:
    """A lockstep wire that offers Adasum of two ranks, by its formula (Maleki et al., MLSys 2021, equation 3)."""

    reductions = frozenset({"adasum"})

    def __init__(self, wire):
        self._wire = wire

    def __getattr__(self, name):
        return getattr(self._wire, name)

    def allreduce(self, flat_N, name, op="sum"):
        assert op == "adasum"
        rows = self._wire.allgather(flat_N, name).wait().astype(np.float64)
        if len(rows) == 1:
            return ReadyHandle(flat_N)
        a, b = rows
        parts = [(1 - a @ b / (2 * x @ x)) * x for x in (a, b) if x.any()]
        total = np.sum(parts, axis=0)
        return ReadyHandle(total.astype(flat_N.dtype))


def adasum(size, give):
    def work(control, wire):
        reducer = Reducer(buckets(((4,),)), Adasum(), Adding(wire), Ops())
        reducer.start(0, np.array(give(control.rank), np.float32))
        return reducer.finish()[0]

    return LockstepWorld(size).run(work)


def test_adasum_is_of_the_ranks_mean_gradients():
    """Equal mean gradients give themselves, orthogonal ones their sum, and nothing is added to one alone."""
    mean = np.array([1.0, -2.0, 3.0, 0.5])
    for total in adasum(2, lambda rank: mean):
        np.testing.assert_allclose(total, mean, rtol=1e-6)
    for total in adasum(2, lambda rank: np.eye(4)[rank]):
        np.testing.assert_allclose(total, [1, 1, 0, 0], rtol=1e-6)
    for total in adasum(2, lambda rank: mean * rank):
        np.testing.assert_allclose(total, mean, rtol=1e-6)
    np.testing.assert_array_equal(adasum(1, lambda rank: mean)[0], mean)


def test_adasum_is_refused_where_it_cannot_be():
    with pytest.raises(UserError, match="adasum over lockstep, which does not offer it"):
        LockstepWorld(2).run(lambda control, wire: Reducer(buckets(((4,),)), Adasum(), wire, Ops()))
    with pytest.raises(UserError, match="adasum with 3 ranks; expected a power of two"):
        adasum(3, lambda rank: np.ones(4))
