"""The meter's arithmetic, its causes, and the sentence for each of them."""

import math
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.engine.callbacks.meter import EARLY_S, Meter, _row
from hvdtrain.planning.batch.meter import CAUSES, AverageStep, faster_data, read, slow_rank

TWO = ["rank 0 on host a", "rank 1 on host b"]


def lost(**percent):
    return pytest.approx({**dict.fromkeys(CAUSES, 0.0), **percent})


def test_equal_shares_on_unlike_ranks():
    rows = [AverageStep(32, 0.0, 0.1, 0.14, 0.0), AverageStep(32, 0.0, 0.24, 0.0, 0.0)]
    got = read(rows, 0.24, TWO, "off", "none")
    assert got.percent == pytest.approx(100 * (64 / 0.24) / (32 / 0.1 + 32 / 0.24))  # 58.8 %
    assert got.lost == lost(slowest=100 * 0.14 / 0.48) and got.rows == tuple(rows) and got.step_s == 0.24
    assert got.sentence == "rank 1 on host b is 2.4 times as slow as the others: --balance auto would gain about 70 %"


@pytest.mark.parametrize("slow, step_s, words", [
    (AverageStep(32, 0.0, 0.25, 0.0, 0.0), 0.25, "rank 1 on host b is 2.5x slower; balance: auto would gain about 75 "),
    (AverageStep(32, 0.0, 0.14, 0.0, 0.0), 0.14, ""),    # not by much
    (AverageStep(32, 0.15, 0.1, 0.0, 0.0), 0.25, ""),    # waits for its input
    (AverageStep(1, 0.0, 0.25, 0.0, 0.0), 0.25, ""),     # has no sample to give away
    (AverageStep(32, 0.0, 0.25, 4.0, 0.0), 4.25, "")])   # the transport takes most of the time
def test_a_rank_that_is_far_slower_is_named(slow, step_s, words):
    row = AverageStep(32, 0.0, 0.1, step_s - 0.1, 0.0)
    got = slow_rank(read([row, slow], step_s, TWO, "off", "none"), TWO)
    assert got.startswith(words) if words else got == ""


def test_a_slow_rank_is_named_once_and_only_early(capsys):
    rows = [AverageStep(32, 0.0, 0.1, 0.14, 0.0), AverageStep(32, 0.0, 0.24, 0.0, 0.0)]
    reading = read(rows, 0.24, TWO, "off", "none")
    run = SimpleNamespace(mesh=SimpleNamespace(copies=((0,), (1,))), control=SimpleNamespace(size=2),
                          topology=SimpleNamespace(host_of=lambda rank: SimpleNamespace(node="ab"[rank])))
    meter = Meter(5)
    meter._advises = True
    meter._advise(run, reading)
    assert not meter._advises and capsys.readouterr().out.startswith("rank 1 on b is 2.4x slower; balance: auto would")
    even = read([AverageStep(32, 0.0, 0.1, 0.0, 0.0)] * 2, 0.1, TWO, "off", "none")
    meter._begin_s = time.perf_counter()
    meter._advise(run, even)
    assert meter._advises
    meter._begin_s -= EARLY_S
    meter._advise(run, even)
    assert not meter._advises and not capsys.readouterr().out
    meter._mark = lambda run: None
    for config, advises in ((Config(), True), (Config(exchange=ExchangeConfig(adasum=True)), False)):
        meter.fit_start(SimpleNamespace(config=config))
        assert meter._advises is advises, "adasum takes no balance"


def test_the_predicted_win_keeps_the_wire():
    rows = [AverageStep(32, 0.0, 0.1, 0.2, 0.0), AverageStep(32, 0.0, 0.24, 0.06, 0.0)]
    assert read(rows, 0.3, TWO, "off", "none").sentence.endswith("would gain about 49 %")  # 0.3 / (0.24 / 1.7 + 0.06)


def test_ideal_balance_has_nothing_to_do():
    got = read([AverageStep(32, 0.0, 0.1, 0.002, 0.001), AverageStep(13, 0.0, 0.1, 0.002, 0.001)], 0.103, TWO, "auto",
               "none")
    assert got.percent == pytest.approx(100 * 0.101 / 0.103)
    assert got.sentence == "nothing to do: scaling efficiency is 98 %"


def test_stage_that_waits_for_the_input_of_the_one_before_counts_it_once():
    first, second = AverageStep(8, 0.4, 0.3, 0.4, 0.1), AverageStep(8, 0.1, 0.3, 0.7, 0.1)  # of a step of 1.2
    assert _row([first, second], [0.2, 0.5]) == AverageStep(8, 0.4, pytest.approx(0.5), pytest.approx(0.2), 0.1)


@pytest.mark.parametrize("row, compression, cause, words", [
    (AverageStep(8, 0.0, 0.05, 0.05, 0.0), "none", "wire",
     "50 % of the ranks' time is gradient exchange: try "
                                                   "--compression auto, a larger global_batch or fewer hosts"),
    (AverageStep(8, 0.0, 0.05, 0.05, 0.0), "int8", "wire", "try a larger global_batch or fewer hosts"),
    (AverageStep(8, 0.04, 0.05, 0.01, 0.0), "none", "input", "40 % of the ranks' time is waiting for "
                                                     "data: raise data.workers, store decoded"),
    (AverageStep(8, 0.0, 0.05, 0.01, 0.04), "none", "update",
     "40 % of the ranks' time is the optimizer's "
                                                      "update: a larger global_batch needs fewer updates")])
def test_what_all_ranks_lose_alike(row, compression, cause, words):
    got = read([row, row], 0.1, TWO, "off", compression)
    assert max(got.lost, key=got.lost.get) == cause and words in got.sentence
    assert sum(got.lost.values()) == pytest.approx(50.0)  # the rest is compute


@pytest.mark.parametrize("stream, workers, cores, words", [
    (True, 0, 8, "num_parallel_calls"), (False, 2, 8, "set data.workers: 7 (now 2)"), (False, 1, 2, "decoded samples")])
def test_waiting_for_data_is_answered_by_what_reads_it(stream, workers, cores, words):
    rows = [AverageStep(8, data_s, 0.05, 0.05 - data_s, 0.0) for data_s in (0.02, 0.05)]
    got = read([*rows, rows[0]], 0.1, ["rank 0", "rank 1", "rank 2"], "off", "int8",
               faster=faster_data(stream, workers, cores))
    assert words in got.sentence and "most of it on rank 1: " in got.sentence


@pytest.mark.parametrize("stages_s, words", [
    ((0.06, 0.02), "30 % of the ranks' time is stages waiting for each other: use more pipeline.micro_batches"),
    ((0.02, 0.06), "30 % of the ranks' time is messages between stages: use fewer stages, or a pipeline.cut")])
def test_what_stages_of_one_copy_lose(stages_s, words):
    got = read([AverageStep(32, 0.0, 0.1, 0.0, 0.0)], 0.1, ["copy 0 (ranks 0, 1)"], "off", "none", stages_s=stages_s,
               ranks=2)
    assert got.lost == lost(idle=500 * stages_s[0], channel=500 * stages_s[1]) and words in got.sentence


@pytest.mark.parametrize("rows, balance, words", [
    ([AverageStep(32, 0.0, 0.1, 0.1, 0.0), AverageStep(32, 0.0, 0.2, 0.0, 0.0)], "static",
     "rank 1 on host b is 2.0 times as slow as the others in spite of the plan: --balance auto would gain about 50 %"),
    ([AverageStep(20, 0.0, 0.1, 0.1, 0.0), AverageStep(40, 0.0, 0.2, 0.0, 0.0)], "off",  # unequal shares, equal speeds
     "25 % of the ranks' time is waiting for rank 1 on host b: --balance auto would gain about 33 %"),
    ([AverageStep(32, 0.0, 0.1, 0.1, 0.0), AverageStep(32, 0.1, 0.1, 0.0, 0.0)], "off",
     "waiting for rank 1 on host b, which waits for its data: raise data.workers, store decoded"),
    ([AverageStep(4, 0.0, 0.1, 0.06, 0.0), AverageStep(1, 0.0, 0.16, 0.0, 0.0)], "auto",
     "waiting for rank 1 on host b, which can give up only one sample: use a larger global_batch"),
    ([AverageStep(64, 0.0, 0.1, 0.1, 0.0), AverageStep(64, 0.0, 0.2, 0.0, 0.0)], "auto",
     "waiting for rank 1 on host b, although --balance auto follows its speed: the speed changes too fast"),
    ([AverageStep(0, 0.0, 0.0, 0.1, 0.0), AverageStep(64, 0.0, 0.1, 0.0, 0.0)], "auto",
     "rank 1 on host b computes all samples and the other ranks wait: use a larger global_batch, or fewer ranks"),
    ([AverageStep(64, 0.0, 0.0, 0.2, 0.0), AverageStep(64, 0.0, 0.2, 0.0, 0.0)], "off",  # a clock that showed nothing
     "50 % of the ranks' time is waiting for rank 1 on host b: --balance auto would gain about")])
def test_why_the_slowest_is_waited_for(rows, balance, words):
    assert words in read(rows, 0.2, TWO, balance, "none").sentence


@pytest.mark.parametrize("idle, words", [
    (1, "c would only be a straggler and got no samples"), (2, "2 ranks would be stragglers")])
def test_ranks_without_samples(idle, words):
    rows = [AverageStep(32, 0.0, 0.1, 0.001, 0.0),
            AverageStep(33, 0.0, 0.101, 0.0, 0.0)] + [AverageStep(0, 0.0, 0.0, 0.101, 0.0)] * idle
    labels = ["a", "b", "c", "d"][:2 + idle]
    got = read(rows, 0.101, labels, "auto", "none")
    assert words in got.sentence and got.percent == pytest.approx(99.5, abs=0.5)
    with_solo = read(rows, 0.101, labels, "auto", "none", solo_P=[320, 330] + [20] * idle)
    assert with_solo.percent == pytest.approx(100 * (65 / 0.101) / (650 + 20 * idle))


def test_one_rank_waits_for_nobody():
    got = read([AverageStep(32, 0.0, 0.1, 0.0, 0.002)], 0.102, ["rank 0 on host a"], "off", "none")
    assert got.percent == pytest.approx(100.0) and got.sentence.startswith("nothing to do: scaling efficiency is 100 %")


@pytest.mark.parametrize("rows, step_s", [([], 0.0), ([], 1.0), ([AverageStep(0, 0, 0, 0, 0)] * 2, 0.0),
                                          ([AverageStep(0, 0, 0, 0.1, 0)] * 2, 0.1),
                                          ([AverageStep(8, 0, 0.1, 0, 0)] * 2, 0.0)])
def test_a_window_without_steps(rows, step_s):
    got = read(rows, step_s, TWO[:len(rows)], "off", "none")
    assert got.percent == 0.0 and got.sentence == "nothing to do: no step was measured"


SECONDS = st.one_of(st.just(0.0), st.floats(0, 10), st.just(1e-300))


@example([AverageStep(0, 0.0, 0.0, 0.0, 2.0)], 5.857e-307, "off", "none")
@example([AverageStep(0, 0, 0, 0, 0), AverageStep(1, 0, 0, 0, 2.0)], 5.857e-307, "off", "none")
@given(st.lists(st.builds(AverageStep, st.integers(0, 99), SECONDS, SECONDS, SECONDS, SECONDS), max_size=5), SECONDS,
       st.sampled_from(["off", "static", "auto"]), st.sampled_from(["none", "int8"]))
def test_whatever_was_measured_numbers_are_finite_and_there_is_one_sentence(rows, step_s, balance, compression):
    got = read(rows, step_s, [f"rank {r} on host h" for r in range(len(rows))], balance, compression)
    assert math.isfinite(got.percent) and got.percent >= 0 and tuple(got.lost) == CAUSES
    assert all(math.isfinite(p) and p >= 0 for p in got.lost.values())
    assert got.sentence and "\n" not in got.sentence and not got.sentence.endswith(".")


def test_the_awaited_rank_may_have_nothing_to_give():
    labels = ["rank 0 on a", "rank 1 on b"]
    idle = read([AverageStep(64, 0, 0.1, 0.2, 0), AverageStep(0, 0, 0.3, 0, 0)], 0.3, labels, "auto", "none", [640, 0])
    assert "got no samples" in idle.sentence
    for balance in ("off", "static", "auto"):
        single = read([AverageStep(1, 0, 0.01, 0.01, 0), AverageStep(1, 0, 0.02, 0, 0)], 0.02, labels, balance, "none")
        assert "only one sample" in single.sentence


def test_advice_knows_the_hosts_and_the_cores():
    rows = [AverageStep(8, 0, 0.05, 0.05, 0)] * 2
    one = read(rows, 0.1, ["rank 0 on a", "rank 1 on a"], "off", "none", hosts=1)
    assert "larger global_batch" in one.sentence and "hosts" not in one.sentence and "auto" not in one.sentence
    full = read(rows, 0.1, ["rank 0 on a", "rank 1 on a"], "off", "none", hosts=1, crowded="2 ranks share 1 core on a")
    assert "2 ranks share 1 core on a" in full.sentence and "fewer ranks" in full.sentence
