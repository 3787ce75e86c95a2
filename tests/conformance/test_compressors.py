"""Compressors over lockstep ranks: the sum, the same bits everywhere, and the bytes they say they send."""

import numpy as np
import pytest

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.collectives.lockstep import LockstepWorld
from hvdtrain.exchange.buckets import MIB, plan_buckets
from hvdtrain.exchange.compressors.none import NoCompression
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.protocols import ParamSpec


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


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_compression_is_the_exact_sum_for_the_bytes_it_names(size, n, dtype):
    def give(rank, step):
        return (np.arange(n) % 50 + rank * (step + 1)).astype(dtype)

    compressor = NoCompression(dtype)
    results, sent = exchange(compressor, size, n, dtype, give, steps=3)
    for out in results:
        for step, total in enumerate(out):
            assert total.dtype.name == dtype
            np.testing.assert_array_equal(total, size * (np.arange(n) % 50) + (step + 1) * size * (size - 1) // 2)
    assert sent == [3 * compressor.wire_bytes(n, size)] * size


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
    assert NoCompression().init(Ops(), 5) == {} and NoCompression().name == "none"
    assert NoCompression("bfloat16").wire_bytes(10, 2) == 20 and NoCompression().wire_bytes(10, 1) == 0
