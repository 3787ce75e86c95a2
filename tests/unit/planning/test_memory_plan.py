"""The arithmetic of the memory plan: states by the formula, a pass by its trace, options in their order, words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.config import Config, DataParallelConfig
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import BlockCost, ParamSpec
from hvdtrain.core.units import Footprint
from hvdtrain.engine.average import average_bytes
from hvdtrain.engine.memory_plan import MemoryPlan
from hvdtrain.parallel.data_parallel.attach import least_stage
from hvdtrain.planning.memory import options
from hvdtrain.planning.memory.forecast import (
    MeasuredMemory,
    MemoryFacts,
    MemoryTrace,
    Model,
    RankMemory,
    Sharding,
    Slots,
    first_copies,
    forecast,
    line,
)
from hvdtrain.planning.memory.options import Option

SPECS = [ParamSpec(f"layer{i}", (512, 512), "float32") for i in range(8)]
N = sum(spec.n for spec in SPECS)
ADAM = Model(SPECS, 0, [Slots(8.0)] * len(SPECS))


def facts(stage=0, size=4, rank=0, parts=None, **more):
    way = Sharding(stage, plan_buckets(SPECS, 2.0), parts or [1.0] * size, "mpi") if size > 1 else Sharding()
    return MemoryFacts(ADAM, RankMemory(rank, size, size, 10**9, micro_batch=32), way, **more)


@pytest.mark.parametrize("size", (2, 4, 8))
def test_states_of_adam_follow_the_formula(size):
    for stage, formula in ((0, 16), (1, 8 + 8 / size), (2, 4 + 12 / size)):
        held = [forecast(facts(stage, size, rank)).states for rank in range(size)]
        assert all(one == pytest.approx(formula * N, rel=0.02) for one in held)
        if stage == 2:
            assert sum(held) == (4 * size + 12) * N


def test_an_average_of_the_weights_is_whole_on_every_rank():
    kept = replace(ADAM, average_bytes=average_bytes([*SPECS, ParamSpec("half", (10,), "bfloat16")]))
    for stage in (0, 1, 2):
        plain = facts(stage)
        with_average = replace(plain, model=kept)
        assert forecast(with_average).total == forecast(plain).total + 4 * N + 40


def test_parts_by_room_give_a_rank_what_it_has_room_for():
    held = [forecast(facts(2, 2, rank, [3.0, 1.0])).state for rank in range(2)]
    assert held[0] == pytest.approx(3 * held[1], rel=0.02) and sum(held) == 8 * N


def test_a_rank_alone_has_no_buckets():
    alone = forecast(facts(size=1))
    assert alone.buckets == 0 and alone.states == 16 * N


def test_accumulated_gradients_stay_whole_in_stage_2():
    whole = facts(2)
    assert forecast(whole).gradients == N
    assert forecast(replace(whole, rank=replace(whole.rank, micros=2))).gradients == 4 * N


def test_a_slice_that_is_empty_has_no_state():
    assert Slots(8.0, 4).bytes(0) == 0 and Slots(8.0, 4).bytes(3) == 28


def test_two_small_passes_tell_each_moment_of_a_large_one():
    made = ((2, 1), (3, 0))
    small, large = (MemoryTrace(n, np.array([10 * n, 30 * n + 5, 8 * n]), made) for n in (2, 4))
    through = line(small, large)
    assert through.live_E(100).tolist() == [1000, 3005, 800] and through.peak(100) == 3005
    other = line(small, MemoryTrace(4, np.array([1, 2, 3, 200]), made))  # took other operations: by the peaks alone
    assert other.peak(4) == 200 and other.peak(2) == 65
    assert line(large, large).peak(8) == 250


def test_gradients_wait_until_their_bucket_is_full():
    made = ((1, 2), (2, 1), (3, 0))
    assert first_copies(made, 5, [4, 2, 1], []).tolist() == [0, 1, 3, 7, 7]
    assert first_copies(made, 5, [4, 2, 1], [[2, 1], [0]]).tolist() == [0, 1, 3, 4, 4]
    assert first_copies(made, 5, [4, 2, 1], [[2, 1, 0]]).tolist() == [0, 1, 3, 7, 7]  # the last one waits for the end


def test_a_pass_counts_what_waits_beside_what_is_alive():
    trace = MemoryTrace(32, np.array([100, 50, 20]), tuple((i % 3, i) for i in range(8)))
    measured = MeasuredMemory(line(trace, trace))
    alone, several = (forecast(facts(size=size, measured=measured)) for size in (1, 4))
    assert alone.gradients == 4 * N and alone.activations <= 100
    assert several.activations > 100


def test_options_are_told_best_first():
    now = facts()
    buckets = plan_buckets(SPECS, 2.0)
    found = list(options.changes(now, Config(), buckets, [1.0] * 4))
    assert [c.name for c in found] == ["zero stage 1", "zero stage 2", "accumulation", "bf16"]
    needs = tuple(forecast(facts(rank=rank)) for rank in range(4))
    made = [Option(c.name, c.line, c.cost, tuple(forecast(c.apply(facts(rank=r))) for r in range(4))) for c in found]
    assert [o.name for o in options.ranked(made, needs, [None] * 4)] == ["zero stage 2", "zero stage 1"]
    room = made[0].needs_P[0].total
    stage_1 = replace(made[0], needs_P=(replace(made[0].needs_P[0], workspace=10**9),) * 4)
    assert [o.name for o in options.ranked([stage_1, made[1]], (Footprint(workspace=10**10),) * 4, [room] * 4)] == [
        "zero stage 2", "zero stage 1"]


def test_what_cannot_be_is_not_offered():
    def names(which, config=None, **more):
        return [c.name for c in options.changes(which, config or Config(), plan_buckets(SPECS, 2.0), [1.0] * 4, **more)]

    whole_tensors = replace(facts(), model=replace(ADAM, elementwise=False))
    assert "zero stage 2" not in names(whole_tensors)
    assert names(facts(size=1)) == ["accumulation", "bf16"]
    assert "zero stage 1" not in names(facts(1)) and "zero stage 2" in names(facts(1))
    keras = replace(facts(), model=replace(ADAM, framework="tensorflow"))
    for refused in (names(facts(), Config(compression="auto")), names(keras, Config(model_parallel=2)),
                    names(replace(facts(), way=replace(facts().way, wire="null")))):
        assert not any("zero" in name for name in refused)
    assert "zero stage 2" in names(facts(), Config(model_parallel=2)) and "zero stage 2" in names(keras)
    one_sample = replace(facts(), rank=RankMemory(0, 4, 4, None, micro_batch=1))
    assert "accumulation" not in names(one_sample)
    assert "bf16" not in names(facts(), Config(precision="bf16"))
    assert "split" not in names(facts(), has_blocks=True)
    assert "split" in names(facts(), has_blocks=True, device="cuda")


def test_a_line_names_the_stage_where_a_bare_name_would_leave_another():
    def lines(stage, way):
        config = Config(data_parallel=DataParallelConfig("zero" if way else "replicate", stage))
        return {c.name: c.line for c in options.changes(facts(way), config, plan_buckets(SPECS, 2.0), [1.0] * 4)}

    assert lines(2, 0)["zero stage 2"] == "--data_parallel zero"
    for stage, way in ((1, 1), ("auto", 1), ("auto", 0)):
        assert lines(stage, way)["zero stage 2"] == "--data_parallel.name zero --data_parallel.stage 2"


def test_a_plan_near_the_limit_says_what_to_type():
    need = Footprint(parameters=4 * 10**9, state=8 * 10**9)
    half = Option("zero stage 2", "--data_parallel zero", "gathers 4 GB of parameters a step",
                  (Footprint(4 * 10**9),) * 2)
    plan = MemoryPlan((need, need), (13 * 10**9, 20 * 10**9), (half,))
    assert plan.sentence() == ("memory: rank 0 will hold about 11.2 GiB of the 12.1 GiB available; zero stage 2 "
                               "would take 3.73 GiB (gathers 4 GB of parameters a step): add --data_parallel zero")
    assert MemoryPlan((need,), (16 * 10**9,)).sentence() == "" and MemoryPlan((need,), (None,)).sentence() == ""
    assert [row[-1] for row in MemoryPlan((need, need), (10**9, None)).rows()] == ["no", "unknown"]
    assert plan.to_dict()["options"][0]["saves"] == 8 * 10**9


def test_no_room_at_all_is_not_an_unknown_one():
    need = Footprint(parameters=100)
    assert MemoryPlan((need, need), (0, None)).tightest() == 0 and MemoryPlan((need,), (0,)).sentence()
    assert least_stage([[9, 6, 4]], [0])[0] == 2 and least_stage([[9, 6, 4]], [None])[0] == 0


def test_recomputing_is_offered_with_its_bytes_and_its_time():
    trace = MemoryTrace(32, np.array([0, 600 * 10**6, 0]), ())
    blocks = tuple(BlockCost(f"b{i}", 40 * 10**6, 2e-3) for i in range(3))  # of 8 samples
    measured = MeasuredMemory(line(trace, trace), True, blocks=blocks, block_samples=8)
    whole = facts(size=1, measured=measured)
    need = forecast(whole).total
    for free, names in ((need, ["remat auto", "remat"]), (need - 10**6, ["remat auto"])):
        one = replace(whole, rank=replace(whole.rank, free_bytes=free))
        found = {c.name: c for c in options.changes(one, Config(), (), [1.0]) if "remat" in c.name}
        assert list(found) == names
        saved = need - forecast(found["remat auto"].apply(one)).total
        assert saved == pytest.approx(0 if free == need else 1.17 * 160e6)
    assert found["remat auto"].cost == "computes 1 of 3 blocks again: 8 ms a micro-batch"
    most = [c for c in options.changes(whole, Config(), (), [1.0]) if c.name == "remat"][0]
    assert most.line == "--remat b0,b1" and need - forecast(most.apply(whole)).total == pytest.approx(1.17 * 320e6)
    assert not any("remat" in c.name for c in options.changes(whole, Config(remat="every:2"), (), [1.0]))
