"""Predictions against the formula, the decision with its margin and ties, the check afterwards, bucket sizes."""

import pytest

from hvdtrain.comm.compressors import choices, create, names
from hvdtrain.config import Config
from hvdtrain.planning.compressor_choice import (
    BUCKET_TIE,
    TIE,
    Baseline,
    CompressorChoice,
    CompressorCost,
    CompressorPrediction,
    best_wires,
    codec_of,
    decide,
    pick_bucket,
    predict,
    table,
    verdict,
)
from hvdtrain.planning.linear import Link, Traffic

LINKS = {"allreduce float32": Link(0.0, 1e-8), "allgather": Link(0.0, 2e-8)}
NONE = CompressorCost("none", 0.0, (Traffic("allreduce float32", False, 1, 10_000_000),), 10_000_000, "exact")  # 100 ms
TWO_SHOT = CompressorCost("int8", 0.005, (Traffic("allreduce float32", False, 1, 1_000_000),           # 10 ms
                                Traffic("allgather", True, 1, 500_000)), 1_500_000,          # 10 ms
                "lossy: 8 bits")


def row(name, step_s):
    return CompressorPrediction(name, 1, 0.0, 0.0, step_s, "", f"lossy: what {name} loses")


@pytest.mark.parametrize("overlaps, in_graph, wait_s, shown", [
    (True, False, 0.1, 1.0), (True, False, 0.05, 0.5), (True, False, 0.0, 0.0), (True, False, 0.3, 1.0),
    (True, True, 0.05, 0.5), (True, True, 0.3, 1.0),
    (False, False, 0.1, 1.0), (False, False, 0.05, 0.5), (False, False, 0.3, 3.0)])
def test_the_formula(overlaps, in_graph, wait_s, shown):
    none, two_shot = predict([NONE, TWO_SHOT], LINKS, Baseline(0.4, wait_s), overlaps, in_graph)
    assert none.step_s == pytest.approx(0.4) and none.wire_s == pytest.approx(0.1)
    later = 1.0 if overlaps and not in_graph else shown
    assert two_shot.step_s == pytest.approx(0.4 - shown * 0.1 + 0.005 + shown * 0.01 + later * 0.01)
    assert (two_shot.wire_s, two_shot.codec_s, two_shot.wire_bytes) == (pytest.approx(0.02), 0.005, 1_500_000)


def test_a_compressor_in_a_simulated_step_takes_its_seconds():
    """Over a link that is slower in a step than by single calls, with buckets of its own."""
    sums = Link(1e-3, 2e-8)
    found = codec_of(TWO_SHOT, NONE, LINKS, sums, (2_000_000,) * 5, (5_000_000,) * 2)
    whole_s = 2 * 1e-3 + 10_000_000 * 2e-8
    assert 5 * 1e-3 + found.ratio * 10_000_000 * 2e-8 == pytest.approx(0.1 * whole_s)  # 10 of 100 ms
    assert (found.codec_s, found.later_s, found.bucket_bytes) == (0.005, pytest.approx(0.01), (2_000_000,) * 5)
    free = {kind: Link(0.0, 0.0) for kind in LINKS}
    assert codec_of(TWO_SHOT, NONE, free, Link(0.0, 0.0), (1,), (1,)).ratio == 0.15


def test_a_wire_that_costs_nothing_gives_nothing_to_save():
    free = {kind: Link(0.0, 0.0) for kind in LINKS}
    rows = predict([NONE, TWO_SHOT], free, Baseline(0.1, 0.02), True)
    assert [r.step_s for r in rows] == [pytest.approx(0.1), pytest.approx(0.105)]
    assert decide(rows, 0.0).name == "none"


@pytest.mark.parametrize("margin, name", [(0.05, "fp16"), (0.1, "none"), (0.11, "none"), (0.0, "fp16")])
def test_the_best_must_save_more_than_the_margin(margin, name):
    got = decide([row("none", 1.0), row("fp16", 0.9), row("int8", 1.5)], margin)
    assert got.name == name and got.step_s == (0.9 if name == "fp16" else 1.0)
    assert "fp16 is predicted to take 900 ms a step against 1000 ms uncompressed" in got.reason
    assert got.reason.startswith("none: ") == (name == "none")
    assert ("gradients are no longer exact (lossy: what fp16 loses)" in got.reason) == (name == "fp16")


def test_what_saves_nothing_is_not_taken_with_any_margin():
    got = decide([row("none", 1.0), row("fp16", 1.0), row("topk", 1.2)], 0.0)
    assert got.name == "none" and "saves nothing" in got.reason


def test_ties_go_to_the_gentlest():
    rows = [row("none", 1.0), row("fp16", 0.55), row("int8", 0.5 * (1 + TIE) - 1e-6), row("powersgd", 0.5)]
    assert decide(rows, 0.05).name == "int8"
    rows[2] = row("int8", 0.5 * (1 + TIE) + 1e-6)
    assert decide(rows, 0.05).name == "powersgd"


def test_nothing_to_choose_from():
    got = decide([row("none", 1.0)], 0.05)
    assert got == CompressorChoice("none", 1.0, "none: there is no compressor to compare")


@pytest.mark.parametrize("measured_s, keep, words", [
    (0.5, True, "powersgd stays: it took 500 ms a step, predicted were 480 ms, without compression 1000 ms"),
    (0.61, True, "; 27% longer than predicted, and still shorter than without"),
    (1.0, False, "none from now on: powersgd took 1000 ms a step, predicted were 480 ms, without compression 1000"),
    (3.0, False, "the prediction was wrong")])
def test_the_check_afterwards(measured_s, keep, words):
    got, reason = verdict(CompressorChoice("powersgd", 0.48, ""), Baseline(1.0, 0.6), measured_s)
    assert got is keep and words in reason


def test_the_table_tells_what_is_lossy_and_what_was_left_out():
    rows = predict([NONE, TWO_SHOT], LINKS, Baseline(0.4, 0.1), True)
    lines = table(rows, {"topk": "because"}, "int8", 2).splitlines()
    assert lines[0] == "compression auto: a step on each of 2 ranks, predicted"
    assert lines[3].split() == ["none", "exact", "9.537", "0.00", "100.00", "400.00"]
    assert lines[4].split() == [">", "int8", "lossy:", "8", "bits", "1.431", "5.00", "20.00", "325.00"]
    assert lines[5].split() == ["topk", "not", "considered:", "because"] and len(lines) == 6


def test_every_compressor_of_the_house_is_named():
    assert choices() == ("none", "fp16", "bf16", "int8", "topk", "powersgd"), "the gentlest first, as auto tries them"
    assert set(names()) == {*choices(), "adasum"}, "the key exchange.adasum asks for adasum"
    made = [create(name, Config()) for name in choices()]
    assert [one.name for one in made if not one.numerics.startswith("lossy")] == ["none"]
    assert [one.name for one in made if not one.same_bits] == ["powersgd"]
    assert all(0 < one.bytes_share <= 1 for one in made)


def test_the_cheapest_bucket_size_and_its_tail():
    totals_s, tails_s = {1.0: 0.10, 4.0: 0.08, 16.0: 0.07}, {1.0: 0.01, 4.0: 0.02, 16.0: 0.05}
    best, why = pick_bucket(totals_s, tails_s, overlaps=False)
    assert best == 16.0 and why == "1 MiB 100 ms, 4 MiB 80 ms, 16 MiB 70 ms"
    best, why = pick_bucket(totals_s, tails_s, overlaps=True)
    assert best == 4.0 and why.startswith("1 MiB 110 ms, 4 MiB 100 ms, 16 MiB 120 ms (plus the last bucket")


def test_ties_go_to_the_larger_bucket():
    nothing = dict.fromkeys((1.0, 8.0), 0.0)
    assert pick_bucket({1.0: 0.1, 8.0: 0.1 * (1 + BUCKET_TIE) - 1e-6}, nothing, True)[0] == 8.0
    assert pick_bucket({1.0: 0.1, 8.0: 0.1 * (1 + BUCKET_TIE) + 1e-6}, nothing, True)[0] == 1.0


def test_wire_and_compressor_are_chosen_from_one_table():
    """Of a step of 100 ms that waits 80: shared halves sums, and takes longer over what fp16 sends."""
    costs = (CompressorCost("none", 0.0, (Traffic("allreduce float32", False, 1, 8e6),), 8),
             CompressorCost("fp16", 0.01, (Traffic("alltoall", False, 1, 4e6),), 4))
    mpi = {"allreduce float32": Link(0.0, 1e-8), "alltoall": Link(0.0, 1e-8)}
    shared = {"allreduce float32": Link(0.0, 0.5e-8), "alltoall": Link(0.0, 4e-8)}
    base = Baseline(0.1, 0.08)
    rows = predict(costs, mpi, base, True) + predict(costs, shared, base, True, wire="shared", in_use=mpi)
    assert [(r.name, r.wire, round(1e3 * r.step_s)) for r in rows] == [
        ("none", "", 100), ("fp16", "", 70), ("none", "shared", 60), ("fp16", "shared", 190)]
    assert [(r.name, r.wire) for r in best_wires(rows)] == [("none", "shared"), ("fp16", "")]
    decision = decide(rows, 0.05)
    assert decision.reason.endswith("; uncompressed, over shared from now on")
    assert (decision.name, decision.wire) == ("none", "shared"), "sums over shared take less than fp16 over mpi"
    lines = table(rows, {}, "none", 2, "shared").splitlines()
    assert [line[0] for line in lines[3:]] == [" ", " ", ">", " "] and lines[5].endswith("shared")


def test_the_wire_at_hand_stays_where_another_saves_little():
    rows = [CompressorPrediction("none", 8, 0.0, 0.08, 0.100),
            CompressorPrediction("none", 8, 0.0, 0.077, 0.097, "shared")]
    assert [r.wire for r in best_wires(rows)] == [""]
