"""`bench compressors`: its split of the time, its errors in closed form, its command over numpy."""

import json
import re
import time

import numpy as np
import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.comm.compressors import create, names
from hvdtrain.comm.compressors.base import Stateless
from hvdtrain.commands.bench import compressors as bench
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import AllGather, AllReduce, AllToAll

SUMMING = [name for name in names() if not create(name, Config()).reductions]
SHAPES = ((12, 10), (12,), (6, 5, 2), (7,))


class TwoShot(Stateless):
    """All-to-all of pieces, each rank sums its own, all-gather of the sums."""

    name = "two-shot"

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        pad = -bucket.n % size
        pieces_PK = yield AllToAll(ops.reshape(ops.pack([flat_N, ops.zeros(pad, "float32")]), (size, -1)))
        sums_PK = yield AllGather(pieces_PK.sum(0))
        return ops.reshape(sums_PK, (-1,))[:bucket.n], state

    def wire_bytes(self, bucket, size, stage=None):
        return 2 * (size - 1) * -(-bucket.n // size) * 4


class Half(Stateless):
    """Sends half of what is due and keeps the rest for the next step."""

    name = "half"

    def init(self, ops, bucket):
        return {"left": ops.zeros(bucket.n, "float32")}

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        due_N = flat_N + state["left"]
        total_N = yield AllReduce(due_N / 2)
        return total_N, {"left": due_N / 2}

    def wire_bytes(self, bucket, size, stage=None):
        return bucket.nbytes // 4


class Scribbler(Stateless):
    """Writes into whatever it is given and answered."""

    name = "scribbler"

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        total_N = yield AllReduce(flat_N.copy())
        flat_N[:] = 7
        result_N = total_N.copy()
        total_N[:] = 7
        return result_N, state

    def wire_bytes(self, bucket, size, stage=None):
        return bucket.nbytes


def small(ranks=2, bucket_mb=16.0):
    return bench.subject("small", SHAPES, bucket_mb, ranks, 0)


# --- the subject ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("model, n, tensors", [("mlp", 9_458_186, 8), ("resnet", 269_722, 59), ("gpt", 3_225_088, 53)])
def test_models_have_the_parameters_that_are_told(model, n, tensors):
    text, shapes = bench.WORKLOADS[model]
    assert sum(int(np.prod(s)) for s in shapes) == n and len(shapes) == tensors
    told = re.search(r"([\d.]+)M parameters", text)
    assert float(told[1]) == pytest.approx(n / 1e6, abs=0.01)


def test_shapes_in_their_order():
    assert bench.mlp_shapes(3, [4, 5], 2) == [(4, 3), (4,), (5, 4), (5,), (2, 5), (2,)]
    assert bench.gpt_shapes(9, 7, 2, 1) == [(9, 2), (7, 2), (2,), (2,), (6, 2), (6,), (2, 2), (2,), (2,), (2,), (8, 2),
                                            (8,), (2, 8), (2,), (2,), (2,), (9, 2)]


def test_shapes_are_those_of_the_model_that_is_trained():
    torch_models = pytest.importorskip("torch_models.resnet", reason="PyTorch is not installed")
    assert [tuple(p.shape) for p in torch_models.build().parameters()] == bench.WORKLOADS["resnet"][1]
    assert bench.resnet_shapes(1, 2, 1, 4)[:6] == [(2, 1, 3, 3), (2,), (2,), (2, 2, 3, 3), (2,), (2,)]


def test_gradients_are_the_seeds_and_the_ranks_own():
    a, b = bench.gradient((8, 6), 0, 1, 0), bench.gradient((8, 6), 0, 1, 1)
    assert a.shape == (8, 6) and a.dtype == np.float32 and np.isfinite(a).all()
    assert np.array_equal(a, bench.gradient((8, 6), 0, 1, 0))
    for other in (b, bench.gradient((8, 6), 1, 1, 0), bench.gradient((8, 6), 0, 2, 0)):
        assert not np.array_equal(a, other)
    assert np.linalg.matrix_rank(bench.gradient((200, 150), 0, 0, 0)) == bench.SAMPLES


def test_ranks_see_related_gradients():
    a, b = (bench.gradient((50, 40), 0, 0, rank).ravel() for rank in range(2))
    assert 0.05 < np.corrcoef(a, b)[0, 1] < 0.9


def test_a_subject_has_a_row_for_each_rank_in_each_bucket():
    found = small(3, bucket_mb=4e-4)
    assert found.params == 12 * 10 + 12 + 60 + 7 and found.ranks == 3 and len(found.buckets) > 1
    assert [rows_PN.shape for rows_PN in found.gradients] == [(3, b.n) for b in found.buckets]
    last = found.buckets[0]  # the last parameter first
    assert np.array_equal(found.gradients[0][1, :7], bench.gradient((7,), 0, len(SHAPES) - 1, 1))
    assert last.params[0] == len(SHAPES) - 1


# --- times ---------------------------------------------------------------------------------------------------------

def make(name):
    own = {"two-shot": TwoShot, "half": Half}
    return own[name]() if name in own else create(name, Config())


@pytest.mark.parametrize("name", [*SUMMING, "two-shot", "half"])
def test_one_rank_alone_is_timed_with_the_shapes_of_many(name):
    assert min(min(seconds) for seconds in bench._seconds(make(name), Ops(), small(3, 4e-4), None, 2)) > 0


# --- errors --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("steps", [1, 2, 10])
def test_errors_of_half_in_closed_form(steps):
    """A step sends half of what is due: 1/2 is missing from the first sum, (1 - 2^-n) / n from the mean of n."""
    first, mean = bench.errors(Half(), Ops(), small(2, 4e-4), steps)
    assert first == pytest.approx(0.5, rel=1e-5) and mean == pytest.approx((1 - 2.0**-steps) / steps, rel=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [*SUMMING, "two-shot"])
def test_errors_are_those_of_ranks_that_train(name, ranks):
    found = bench.errors(make(name), Ops(), small(ranks), 3)
    assert all(0 <= error < 1 for error in found) and found[1] <= found[0] + 1e-6


def test_ranks_that_ask_for_different_collectives_are_our_bug():
    class Lopsided(Stateless):
        def exchange(self, ops, flat_N, state, bucket, size, stage=0):
            if flat_N[0] > 0:
                yield AllReduce(flat_N)
            return flat_N, state

    what = small()
    what.gradients[0][:, 0] = 1, -1
    with pytest.raises(RuntimeError, match="has finished"):
        bench.errors(Lopsided(), Ops(), what, 1)


def test_a_sum_has_no_error_but_rounding():
    assert max(bench.errors(create("none", Config()), Ops(), small(3), 2)) < 1e-6
    assert max(bench.errors(Scribbler(), Ops(), small(3), 2)) < 1e-6


def test_errors_are_of_all_buckets_together():
    one, many = (bench.errors(create("none", Config()), Ops(), small(2, mb), 1)[0] for mb in (16.0, 4e-4))
    assert one == pytest.approx(many, rel=1e-6)


# --- the command ---------------------------------------------------------------------------------------------------

def test_a_record(monkeypatch):
    monkeypatch.setattr(bench, "create", lambda name, config: Half() if name == "half" else create(name, config))
    row = bench.measure("half", Config(), small(2), Ops(), None, 3, 2)
    plain = create("none", Config()).wire_bytes(small(2).buckets[0], 2)
    assert row["bytes_sent"] == plain // 4 and row["ratio"] == pytest.approx(4.0, rel=0.05)
    assert row["error_first"] == pytest.approx(0.5, rel=1e-5) and row["error_mean"] == pytest.approx(0.375, rel=1e-5)
    assert 0 < row["min_ms"] <= row["time_ms"] <= row["max_ms"]
    assert row["encode_ms"] > 0 and row["decode_ms"] > 0
    assert bench.cells(row)[4:] == [str(plain // 4), f"{row['ratio']:.1f}x", "5.00e-01", "3.75e-01"]


def test_a_graph_is_made_once_and_timed_whole():
    made = []

    def graph(function):
        made.append(function)
        return function

    row = bench.measure("none", Config(), small(2), Ops(), graph, 3, 1)
    assert len(made) == 1 and row["in_graph"] and row["time_ms"] > 0
    assert row["encode_ms"] is row["decode_ms"] is None and bench.cells(row)[2:4] == ["-", "-"]


def test_a_compressor_that_wants_more_than_sums_is_refused(monkeypatch):
    class Odd(Half):
        reductions = frozenset({"adasum"})

    monkeypatch.setattr(bench, "create", lambda name, config: Odd())
    with pytest.raises(UserError, match="needs from the transport adasum"):
        bench.measure("odd", Config(), small(2), Ops(), None, 1, 1)


def test_bench_over_numpy(tmp_path, capsys):
    path = tmp_path / "c.jsonl"
    status = bench.main(["--framework", "numpy", "--shapes", "12x10,12", "--repeats", "2", "--steps", "2",
                         "--ranks", "3", "--jsonl", str(path), "--seed", "5"])
    assert status == 0
    out = capsys.readouterr().out
    assert "shapes: 132 parameters in 1 bucket of 16 MiB; numpy" in out and "3 ranks" in out and "mean of 2" in out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["compressor"] for r in records] == SUMMING
    for r in records:
        assert r["bench"] == "compressors" and r["simulated_ranks"] == 3 and r["seed"] == 5 and r["bytes_sent"] > 0
        assert r["versions"]["numpy"] == np.__version__ and r["params"] == 132


def test_settings_reach_the_compressors():
    args = bench.parse(["--powersgd_rank", "2", "--topk_ratio", "0.5", "--bucket_mb", "3"])
    exchange = bench._config(args).exchange
    assert (exchange.powersgd_rank, exchange.topk_ratio, exchange.bucket_mb) == (2, 0.5, 3.0)


@pytest.mark.parametrize("argv, text", [
    (["--compressors", "zip"], "--compressors is 'zip'"), (["--workload", "bert"], "--workload is 'bert'"),
    (["--shapes", "3*4"], "--shapes is"), (["--ranks", "1"], "--ranks is '1'"),
    (["--topk_ratio", "2"], "--topk_ratio is"),
    (["--framework", "mxnet"], "--framework is 'mxnet'"), (["--rank", "2"], "did you mean '--ranks'"),
    (["--topk-ratio", "0.5"], "did you mean '--topk_ratio'")])
def test_a_mistake_is_said_in_words(argv, text):
    with pytest.raises(UserError, match=text):
        bench.parse(argv)


def test_a_split_of_the_time_is_by_the_last_request():
    class Timed(Stateless):
        name = "timed"

        def exchange(self, ops, flat_N, state, bucket, size, stage=0):
            time.sleep(0.02)
            total_N = yield AllReduce(flat_N)
            time.sleep(0.03)
            total_N = yield AllReduce(total_N)
            time.sleep(0.01)
            return total_N, state

    what = small(2)
    encode_s, decode_s = bench._seconds(Timed(), Ops(), what, None, 1)[0]
    assert encode_s >= 0.05 and decode_s >= 0.01


def test_records_that_cannot_be_written_are_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(UserError, match="cannot be written"):
        bench.main(["--framework", "numpy", "--shapes", "3x4", "--jsonl", "/"])


def test_a_launcher_of_several_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="was started on 2 ranks"):
        bench.main(["--framework", "numpy"])
    monkeypatch.undo()
