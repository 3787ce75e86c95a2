"""Partition of a model over ranks: against all partitions, formulae, and made-up hosts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import mixed_host
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config import Config, PipelineConfig
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.units import MIB
from hvdtrain.parallel.pipeline.partition import measured_samples, planned
from hvdtrain.parallel.pipeline.plan import rows, text
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs, evened
from hvdtrain.planning.pipeline.orders import gpipe, interleaved, one_f_one_b, play
from hvdtrain.planning.pipeline.search import Partition, Task, candidates, search


def row(costs: list[float], *, params: list[int] | None = None, activations: list[int] | None = None, capacity: int = 0,
        device: str = "cpu", needs: Needs = Needs(1.0, 0.0)) -> DeviceProfile:  # noqa: B008
    n = len(costs)
    blocks = tuple(Block(f"b{i}", cost, p, a) for i, (cost, p, a) in
                   enumerate(zip(costs, params or [0] * n, activations or [0] * n)))
    return DeviceProfile(blocks, 1, capacity, needs, device)


def config(**changes: object) -> Config:
    return replace(Config(global_batch=64, progress="off"), **changes)  # type: ignore[arg-type]


ORDERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}
costs = st.floats(0.01, 1.0)


# --- a step played through ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@given(p=st.integers(1, 5), m=st.integers(1, 12), forward=costs, backward=costs)
@settings(max_examples=40, deadline=None)
def test_equal_stages_idle_as_the_formula_says(order: str, p: int, m: int, forward: float, backward: float) -> None:
    step = play([ORDERS[order](i, p, 1, m) for i in range(p)], [forward] * p, [backward] * p)
    assert step.step_s == pytest.approx((m + p - 1) * (forward + backward))
    assert step.idle_share == pytest.approx((p - 1) / (m + p - 1))


@given(t=st.lists(costs, min_size=1, max_size=5), m=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_step_lies_between_its_bounds(t: list[float], m: int) -> None:
    forward, backward = [x / 3 for x in t], [2 * x / 3 for x in t]
    slowest = sum(t) + (m - 1) * max(t)
    steps = {name: play([ORDERS[name](i, len(t), 1, m) for i in range(len(t))], forward, backward)
             for name in ("gpipe", "1f1b")}
    assert steps["gpipe"].step_s == pytest.approx(slowest)
    least = max(m * own + sum(t[:i]) for i, own in enumerate(t))
    assert least * (1 - 1e-9) <= steps["1f1b"].step_s <= slowest * (1 + 1e-9)
    assert steps["1f1b"].busy_s == pytest.approx([m * x for x in t])


def test_interleaving_divides_the_idle_share_by_the_chunks() -> None:
    p, m = 4, 8
    one = play([one_f_one_b(i, p, 1, m) for i in range(p)], [1.0] * p, [2.0] * p)
    two = play([interleaved(i, p, 2, m) for i in range(p)], [0.5] * 2 * p, [1.0] * 2 * p)
    ratio = (two.step_s - m * 3.0) / (one.step_s - m * 3.0)
    assert ratio == pytest.approx(0.5, abs=0.01)


def test_travel_is_waited_for_where_nothing_else_is_to_do() -> None:
    step = play([gpipe(i, 2, 1, 1) for i in range(2)], [1.0, 1.0], [2.0, 2.0], [0.5])
    assert step.step_s == pytest.approx(6.0 + 2 * 0.5)


def test_an_order_that_waits_for_itself_is_found() -> None:
    first, second = ([*gpipe(i, 2, 1, 1)] for i in range(2))
    with pytest.raises(AssertionError, match="wait for each other"):
        play([first[::-1], second], [1.0, 1.0], [1.0, 1.0])


# --- the search ----------------------------------------------------------------------------------------------------


def every(task: Task) -> list[Partition]:
    """All choices that fit."""
    places = set(itertools.permutations(task.kind_of))
    cuts = itertools.combinations(range(1, task.n), task.depth * task.chunks - 1)
    found = [Partition(order, (0, *starts)) for starts in cuts for order in places]
    return [choice for choice in found if choice.fits(task)]


tasks = st.tuples(st.integers(1, 3), st.integers(3, 6), st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6),
                  st.randoms(use_true_random=False))


def drawn(p: int, n: int, order: str, m: int, random: object, tight: bool = False) -> Task:
    draw = random.random  # type: ignore[attr-defined]
    params, activations = [int(1 + 9 * draw()) for _ in range(n)], [int(1 + 9 * draw()) for _ in range(n)]
    kinds = []
    for _ in range(p):
        speed = 0.2 + draw()
        kinds.append(row([speed * (0.2 + draw()) for _ in range(n)], params=params, activations=activations,
                         capacity=int((0.6 + draw()) * (2 * sum(params) + p * sum(activations)) / p) if tight else 0))
    return Task(tuple(kinds), tuple(range(p)), order, m)


@given(tasks)
@settings(max_examples=60, deadline=None)
def test_gpipe_search_is_as_good_as_all_cuts_and_orders_tried(drawing: tuple) -> None:  # type: ignore[type-arg]
    task = replace(drawn(*drawing), order="gpipe")
    found = search(task)
    assert found is not None
    best = min(choice.played(task).step_s for choice in every(task))
    assert found[1].step_s == pytest.approx(best)


@given(tasks)
@settings(max_examples=60, deadline=None)
def test_first_candidate_has_the_least_bound_of_all(drawing: tuple) -> None:  # type: ignore[type-arg]
    task = replace(drawn(*drawing), order="1f1b")

    def bound(choice: Partition) -> float:
        ends, before, most = (*choice.starts[1:], task.n), 0.0, 0.0
        for kind, begin, end in zip(choice.places, choice.starts, ends):
            t = sum(b.cost_s for b in task.kinds[kind].blocks[begin:end])
            most, before = max(most, before + task.micros * t), before + t
        return most

    assert bound(next(candidates(task))) == pytest.approx(min(map(bound, every(task))))


@given(tasks)
@settings(max_examples=60, deadline=None)
def test_search_is_near_the_best_of_all_and_never_holds_more_than_fits(drawing: tuple) -> None:  # type: ignore
    task = drawn(*drawing, tight=True)
    all_that_fit, found = every(task), search(task)
    assert (found is None) == (not all_that_fit)
    if found is not None:
        choice, step = found
        assert choice.fits(task)
        best = min(choice.played(task).step_s for choice in all_that_fit)
        assert step.step_s <= 1.1 * best


def test_roomy_device_stands_in_front() -> None:
    """Stage 0 of 1F1B holds most, and equal devices are in their own order."""
    big, small = (row([1.0] * 6, activations=[MIB] * 6, capacity=c * MIB, device=f"{c} MiB") for c in (12, 6))
    plan = planned([small, big, small], config(global_batch=12, pipeline=PipelineConfig(3)), Mesh.of([3], 0))
    assert plan.mesh.copies == ((1, 0, 2),)
    assert plan.starts == ((0, 2, 4),)
    assert all(r["activations_bytes"] <= r["capacity_bytes"] for r in rows(plan))


def test_fast_device_gets_more_blocks() -> None:
    plan = planned([row([2.0] * 9, device="slow"), row([1.0] * 9, device="fast")], config(pipeline=PipelineConfig(2)),
                   Mesh.of([2], 0))
    held = {rank: len(chunk) for rank, chunk in zip(plan.mesh.copies[0], plan.chunks(0))}
    assert held[1] == 2 * held[0] == 6


def test_nine_unlike_devices_are_placed_by_memory_and_speed() -> None:
    devices = [row([1.0 + i / 10] * 20, activations=[MIB] * 20, capacity=(40 + i) * MIB, device=str(i))
               for i in range(13)]
    plan = planned(devices, config(pipeline=PipelineConfig(13)), Mesh.of([13], 0))
    assert plan.mesh.copies[0][0] == 12
    assert len(plan.starts[0]) == 13


def test_interleaved_gives_each_rank_its_chunks() -> None:
    pipeline = PipelineConfig(2, "interleaved", chunks=2)
    plan = planned([row([1.0] * 8)] * 2, config(pipeline=pipeline), Mesh.of([2], 1))
    assert plan.starts == ((0, 2, 4, 6),)
    assert plan.mine == [range(2, 4), range(6, 8)]
    plain = planned([row([1.0] * 8)] * 2, config(pipeline=PipelineConfig(2)), Mesh.of([2], 1))
    assert plan.step_s < plain.step_s


# --- copies --------------------------------------------------------------------------------------------------------


def test_copies_alike_but_for_scatter_share_a_plan() -> None:
    measured = [row([s] * 6) for s in (1.0, 1.02, 0.99, 1.01)]
    plan = planned(measured, config(pipeline=PipelineConfig(2)), Mesh.of([2, 2], 0))
    assert plan.plans[0] == plan.plans[1]
    assert plan.mesh.copies == ((0, 1), (2, 3))


def test_idle_share_of_all_counts_waiting_for_a_slower_copy() -> None:
    measured = [row([1.0] * 4), row([1.0] * 4, device="b"), row([1.0] * 4, device="b")]
    plan = planned(measured, config(pipeline=PipelineConfig(depths=[1, 2])), Mesh.of([1, 2], 0))
    assert plan.idle_share > max(0.0, *(p.step.idle_share for p in plan.plans)) / 2
    assert "all:" in text(plan)


def test_foreseen_of_other_shares_goes_with_the_samples() -> None:
    """A kind keeps count of the samples that it stands for, so that it may be foreseen again and again."""
    plan = planned([row([1.0] * 4)] * 4, config(global_batch=64, pipeline=PipelineConfig(2)), Mesh.of([2, 2], 0))
    more = plan.foreseen([48, 16], [8, 8])
    assert [p.step.step_s for p in more.plans] == pytest.approx([54.0 * 2, 18.0 * 2])
    assert more.foreseen([32, 32], [8, 8]).step_s == pytest.approx(plan.step_s)
    assert more.idle_share > plan.idle_share
    assert plan.foreseen([64, 0], [8, 0]).plans[1].step.step_s == 0.0


def test_rows_are_of_one_kind_only_where_they_are_alike() -> None:
    fast, slow = row([1.0, 2.0]), row([1.5, 3.0])
    kind_of, kinds = evened([fast, slow, row([1.04, 2.0])])
    assert kind_of == [0, 1, 0]
    assert kinds[0].blocks[0].cost_s == pytest.approx(1.01)
    assert evened([fast, replace(fast, capacity_bytes=MIB)])[0] == [0, 1]


def test_a_block_that_was_disturbed_on_one_rank_makes_no_slow_device() -> None:
    kind_of, (kind,) = evened([row([1.0, 2.0, 1.0, 1.0]), row([1.0, 2.0, 9.0, 1.0])])
    assert kind_of == [0, 0] and [block.cost_s for block in kind.blocks] == [1.0, 2.0, 1.0, 1.0]


def test_samples_of_a_micro_batch_follow_the_shares_of_copies() -> None:
    settings_ = config(global_batch=80, shares=[3.0, 1.0], pipeline=PipelineConfig(depths=[1, 2]), accumulate=2)
    assert measured_samples(settings_, Mesh.of([1, 2], 0)) == 30
    assert measured_samples(settings_, Mesh.of([1, 2], 2)) == math.ceil(20 / 8)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pipeline", "said"), [
    (PipelineConfig(5), "4 blocks .*Partition it over 4 ranks"),
    (PipelineConfig(3, "interleaved", chunks=2), "Partition it over 2 ranks"),
    (PipelineConfig(2, "interleaved", chunks=3), "Set fewer pipeline.chunks"),
    (PipelineConfig(2, cut=["b9"]), "b9"), (PipelineConfig(2, cut=["b1", "b2"]), "2 blocks for a replica of 2 stages"),
    (PipelineConfig(3, cut=["b2", "b1"]), "order of the model"), (PipelineConfig(2, cut=["b0"]), "first"),
])
def test_what_cannot_be_cut_is_refused(pipeline: PipelineConfig, said: str) -> None:
    stages = pipeline.stages
    with pytest.raises(UserError, match=said):
        planned([row([1.0] * 4)] * stages, config(pipeline=pipeline), Mesh.of([stages], 0))


def test_unlike_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="rank 1 has blocks that differ"):
        planned([row([1.0] * 4), row([1.0] * 5)], config(pipeline=PipelineConfig(2)), Mesh.of([2], 0))


def test_a_given_cut_is_kept_and_its_ranks_are_ordered() -> None:
    big, small = (row([1.0] * 6, activations=[MIB] * 6, capacity=c * MIB, device=f"{c} MiB") for c in (10, 6))
    plan = planned([small, big], config(pipeline=PipelineConfig(2, cut=["b5"])), Mesh.of([2], 0))
    assert plan.starts == ((0, 5),)
    assert plan.mesh.copies == ((1, 0),)


@pytest.mark.parametrize(("order", "params", "activations", "capacity", "said"), [
    ("gpipe", 0, MIB, 7, "1f1b"), ("1f1b", MIB, 0, 5, "3 stages"), ("1f1b", 0, MIB, 1, "smaller micro_batch"),
])
def test_too_little_memory_says_what_would_help(order: str, params: int, activations: int, capacity: int,
                                                said: str) -> None:
    measured = [row([1.0] * 6, params=[params] * 6, activations=[activations] * 6, capacity=capacity * MIB)] * 2
    with pytest.raises(UserError, match="stage 0 of 2") as caught:
        planned(measured, config(pipeline=PipelineConfig(2, order)), Mesh.of([2], 0))
    assert said in caught.value.do


def test_too_many_parameters_have_no_remedy_but_a_smaller_model() -> None:
    measured = [row([1.0] * 2, params=[MIB] * 2, capacity=MIB)] * 2
    with pytest.raises(UserError) as caught:
        planned(measured, config(pipeline=PipelineConfig(2)), Mesh.of([2], 0))
    assert "smaller model" in caught.value.do


def test_page_tells_the_mixed_host_as_it_is_planned() -> None:
    """docs/explanation/pipeline.md: its tables and its refusal are what these functions give."""
    page = (ROOT.parent / "docs" / "explanation" / "pipeline.md").read_text(encoding="utf-8")
    with pytest.raises(UserError) as caught:
        mixed_host.cut([1] * 6)
    assert str(caught.value) in page
    equal = mixed_host.cut([1, 1, 1, 1, 2])
    made, balanced = mixed_host.balanced(equal)
    for line in text(balanced).splitlines():
        assert f"    {line}\n" in page
    took, idle = text(equal).splitlines()[-1].split(":")[1].strip().split(", ")
    assert f"{took}, {idle}" in page
    assert f"{made.samples_P[4]} samples against {made.samples_P[0]}:" in page
    alone = planned(mixed_host.ranks()[:4], mixed_host.config([1] * 4), Mesh.of([1] * 4, 0))
    assert f"alone would take {1e3 * alone.step_s:.0f} ms" in page
    assert balanced.step_s < alone.step_s < equal.step_s
