"""The plans of the compressors: names, settings, which tensors, how many elements, how many bytes; rows of the wire."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.compressors import base as twoshot
from hvdtrain.comm.compressors import bf16, create, fp16, int8, names
from hvdtrain.comm.compressors.base import SAMPLE, Stateless, sample
from hvdtrain.comm.compressors.powersgd import MatrixShape, PowerSGD, matrices, split, start
from hvdtrain.comm.compressors.topk import TopK
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec

MLP = [shape for i, o in ((784, 2048), (2048, 2048), (2048, 1792), (1792, 10)) for shape in ((o, i), (o,))]
NORM = [(256,), (256,)]
BLOCK = [*NORM, (768, 256), (768,), (256, 256), (256,), *NORM, (1024, 256), (1024,), (256, 1024), (256,)]
GPT = [(96, 256), (64, 256), *4 * BLOCK, *NORM, (96, 256)]


def plan(shapes, bucket_mb=16, dtype="float32"):
    return plan_buckets([ParamSpec(f"p{i}", tuple(s), dtype) for i, s in enumerate(shapes)], bucket_mb)


# --- names and settings --------------------------------------------------------------------------------------------

def test_the_configuration_makes_them():
    config = Config(exchange=ExchangeConfig(powersgd_rank=2, topk_ratio=0.05, topk_momentum=0.9, topk_warmup_steps=100))
    said = {name: create(name, config).describe() for name in names()}
    assert said == {"none": "none", "fp16": "fp16", "bf16": "bf16", "int8": "int8", "powersgd": "powersgd rank 2",
                    "topk": "topk 5 %, momentum 0.9, warm-up 100 steps", "adasum": "adasum"}
    assert create("topk", Config()).describe() == "topk 1 %"
    for name in names():
        made = create(name, config)
        assert made.name == name and isinstance(made.reductions, frozenset)


def test_every_choice_of_the_configuration_is_there():
    for name in ("auto", *set(names()) - {"adasum"}):
        Config(compression=name).check()
    for name in ("adasum", "topkk"):
        with pytest.raises(UserError, match=f"compression is '{name}'"):
            Config(compression=name).check()


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk", "powersgd", "adasum"])
def test_other_types_are_refused_in_words(name):
    with pytest.raises(UserError, match=f"compression {name} with parameters of type float16; expected gradients of "):
        Reducer(plan([(4,)], dtype="float16"), create(name, Config()), NullCollectives(0, 2), Ops())


# --- bytes ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("shapes", [MLP, GPT], ids=["mlp", "gpt"])
@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_ten_times_fewer_bytes(name, shapes, size):
    buckets = plan(shapes)
    none, made = create("none", Config()), create(name, Config())
    full, less = (sum(c.wire_bytes(b, size) for b in buckets) for c in (none, made))
    assert full >= 10 * less > 0


def test_the_models_are_of_the_size_that_is_meant():
    assert 9.3e6 < sum(b.n for b in plan(MLP)) < 9.7e6 and 3e6 < sum(b.n for b in plan(GPT)) < 3.5e6


@pytest.mark.parametrize("name,part", [("fp16", 2), ("bf16", 2), ("int8", 4)])
def test_halves_and_bytes(name, part):
    none, made = create("none", Config()), create(name, Config())
    for bucket in plan(MLP):
        if bucket.n > 1e5:
            assert none.wire_bytes(bucket, 4) / made.wire_bytes(bucket, 4) == pytest.approx(part, rel=0.01)


def test_one_rank_sends_nothing():
    for name in names():
        assert create(name, Config()).wire_bytes(plan([(50, 40), (3,)])[0], 1) == 0


# --- powersgd ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape,want", [
    ((2048, 784), (2048, 784)),
    ((64, 32, 3, 3), (64, 288)),      # PyTorch: out, in, kh, kw
    ((3, 3, 32, 64), (288, 64)),      # Keras: kh, kw, in, out
    ((128, 3, 7, 7), (128, 147)),
    ((7, 7, 3, 128), (147, 128)),
    ((5, 1), (5, 1)),
])
def test_split(shape, want):
    assert split(shape) == want


def test_which_tensors_are_matrices():
    found = matrices([(256,), (1024, 256), (256, 96), (10, 9), (3, 3, 16, 32), (1, 4096), (), (16, 16)], 4)
    assert found == [MatrixShape(1, 1024, 256, 4), MatrixShape(2, 256, 96, 4), MatrixShape(4, 144, 32, 4)]
    assert matrices([(16, 16)], 4) == [] and matrices([(16, 17)], 4) == [MatrixShape(0, 16, 17, 4)]  # n m > 8 (n + m)
    assert [x.r for x in matrices([(400, 300)], 1000)] == []


def test_the_start_is_the_same_everywhere_and_differs_by_tensor():
    np.testing.assert_array_equal(start(0, 1, 4, 50), start(0, 1, 4, 50))
    assert abs(float(start(0, 1, 4, 5000).mean())) < 0.05 and abs(float(start(0, 1, 4, 5000).std()) - 1) < 0.05
    assert not np.array_equal(start(0, 1, 4, 50), start(0, 2, 4, 50))
    assert not np.array_equal(start(0, 1, 4, 50), start(1, 1, 4, 50))


def test_only_compressed_tensors_have_state():
    (bucket,) = plan([(50, 40), (40,), (6, 5)])
    state = PowerSGD(2).init(Ops(), bucket)
    assert {key: value.shape for key, value in state.items()} == {"q.2": (2, 40), "residual.2": (50, 40)}
    assert PowerSGD(2).init(Ops(), plan([(40,), (6, 5)])[0]) == {}


# --- topk ----------------------------------------------------------------------------------------------------------

def test_stages_of_the_warm_up():
    plain, warm, fine, coarse = TopK(0.01), TopK(0.01, 0.0, 100), TopK(0.001, 0.0, 100), TopK(0.3, 0.0, 100)
    assert plain.ratios == (0.01,) and {plain.stage(s) for s in range(200)} == {0}
    assert warm.ratios == (0.25, 0.0625, 0.015625, 0.01)
    assert [warm.stage(s) for s in (0, 24, 25, 50, 74, 75, 99, 100, 10**6)] == [0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert fine.ratios == (0.25, 0.0625, 0.015625, 0.00390625, 0.001)
    assert [fine.stage(s) for s in (0, 25, 50, 75, 99, 100)] == [0, 1, 2, 3, 3, 4]
    assert coarse.ratios == (0.3,) and {coarse.stage(s) for s in range(200)} == {0}
    assert [TopK(0.001, 0.0, 2).stage(s) for s in range(4)] == [0, 2, 4, 4]


@given(st.integers(1, 10**8), st.floats(1e-6, 1.0))
def test_at_least_one_entry_and_never_more_than_there_are(n, ratio):
    assert 1 <= TopK(ratio).k(n) <= n
    assert TopK(ratio).k(n) >= ratio * n * (1 - 1e-9)


def test_bytes_of_a_stage():
    (bucket,), compressor = plan([(1000,)]), TopK(0.01, 0.0, 100)
    assert [compressor.wire_bytes(bucket, 3, s) for s in (0, 1, 3, None)] == [16 * 250, 16 * 63, 16 * 10, 16 * 10]


@given(st.integers(1, 10**9), st.floats(0, 1))
def test_the_sample_for_the_largest(n, part):
    k = int(part * n)
    stride, place = sample(n, k)
    taken = len(range(0, n, stride))
    assert (stride, place) == (1, 0) or n >= 4 * SAMPLE and k / stride < place <= 0.75 * taken + 1
    assert all(stride == 1 or stride % prime for prime in (2, 3, 5, 7))


# --- rows on the wire ----------------------------------------------------------------------------------------------

FLOATS = st.floats(-2.0 ** 99, 2.0 ** 99, width=32)
VECTORS = st.lists(FLOATS, min_size=1, max_size=40).map(lambda x: np.array(x, np.float32))


@given(VECTORS, st.integers(1, 9))
def test_rows_hold_everything_in_order(flat_N, size):
    for k in (twoshot.part_length(len(flat_N), size), int8.int8_length(len(flat_N), size)):
        rows_PK = twoshot.as_rows(Ops(), flat_N, len(flat_N), size, k)
        assert rows_PK.shape == (size, k)
        np.testing.assert_array_equal(rows_PK.reshape(-1)[:len(flat_N)], flat_N)
        assert not rows_PK.reshape(-1)[len(flat_N):].any()


@given(st.integers(1, 10**8), st.integers(1, 64))
def test_int8_parts_are_blocks_of_one_length(n, size):
    k = int8.int8_length(n, size)
    count = int8.blocks(k)
    assert size * k >= n and k % count == 0 and (k // count) % int8.LANE == 0 and k // count <= int8.BLOCK
    assert k - twoshot.part_length(n, size) < count * int8.LANE


@given(VECTORS)
def test_halves_round_to_the_nearest(x):
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).astype(np.float32)
    got = fp16.Fp16().decode(Ops(), fp16.Fp16().encode(Ops(), x[None]))
    np.testing.assert_array_equal(got, want)
    got = bf16.Bf16().decode(Ops(), bf16.Bf16().encode(Ops(), x[None]))
    assert (np.abs(got - x) <= np.abs(x) * 2.0 ** -8 + 1e-38).all()


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 5000), st.integers(0, 99), st.sampled_from([1e-20, 1.0, 1e30]))
def test_int8_is_within_half_a_unit_and_says_what_is_lost(rows, n, seed, scale):
    k = int8.int8_length(n, 1)
    x_RK = (np.random.default_rng(seed).standard_normal((rows, k)) * scale).astype(np.float32)
    x_RK[0, :k // 2] = 0
    codec, ops = int8.Int8(), Ops()
    wire, lost_RK = codec.encode(ops, x_RK, rows, k)
    back_RK = codec.decode(ops, np.concatenate(wire, axis=1), rows, k)
    absmax_B1 = np.abs(x_RK.reshape(rows * int8.blocks(k), -1)).max(axis=1, keepdims=True)
    off_B = np.abs(back_RK - x_RK).reshape(len(absmax_B1), -1)
    assert (off_B <= absmax_B1 * (1 / 254 + 1e-5)).all()
    np.testing.assert_allclose(lost_RK, x_RK - back_RK, atol=1e-6 * scale)


OWN = '''
from dataclasses import dataclass
from hvdtrain.comm.compressors.fp16 import Fp16
from hvdtrain.comm.compressors.none import NoCompression

class Half(Fp16):
    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        return (yield from super().exchange(ops, flat_N, state, bucket, size, stage))

class Renamed(Fp16):
    name = "renamed"

class Scaled(NoCompression):
    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        return (yield from super().exchange(ops, flat_N, state, bucket, size, stage))

@dataclass(frozen=True)
class Frozen:
    name: str = "frozen"
    dtypes: None = None

def half(exchange): return Half()
def renamed(exchange): return Renamed()
def scaled(exchange): return Scaled()
def frozen(exchange): return Frozen()
'''


def test_a_subclass_with_an_exchange_of_its_own_inherits_no_scatter(tmp_path):
    """Under ZeRO the inherited one would sum without it."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    made = {name: create(f"{path}:{name}", Config()) for name in ("half", "renamed", "scaled", "frozen")}
    assert {name: one.scatter.__func__ is Stateless.scatter for name, one in made.items()} == {
        "half": True, "renamed": False, "scaled": True, "frozen": True}
    assert not made["scaled"].in_place and not made["scaled"].same_bits and made["renamed"].same_bits
    assert made["frozen"].reductions == frozenset() and not made["frozen"].in_place
