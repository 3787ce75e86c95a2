"""Replicas of a model that is partitioned over ranks stay equal: the numpy backend on ranks that are threads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, lockstep, samples

from hvdtrain.backends import numpy as numpy_backend
from hvdtrain.comm import wires as wire
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named, PipelineConfig
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout
from hvdtrain.core.mesh import Layout, Mesh
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.weight_checks import Diverged
from hvdtrain.parallel.pipeline.partition import even_layout
from hvdtrain.parallel.precision import LossScale

SIZES = (FEATURES, 16, 14, 12, 10, CLASSES)
MOMENTUM = config(max_steps=20, global_batch=24, lr=0.05, optimizer=Named("SGD", {"momentum": 0.9}))
SMALL = ExchangeConfig(bucket_mb=0.001)
"""Several buckets in each group."""


def model(rank: int = 0, dtype: str = "float64") -> Any:
    from hvdtrain.backends.numpy.model import Model

    return Model(SIZES, 3, dtype)


def trained(size: int, settings: Any = MOMENTUM, dtype: str = "float64", data: Any = None,
            work: Any = fitted) -> list[Any]:
    return lockstep(size, settings, lambda rank: model(rank, dtype), data or samples(100), work)


def whole(runs: list[Any]) -> list[np.ndarray]:
    """Return the weights of all blocks, which every rank that holds one has alike."""
    held: dict[str, np.ndarray] = {}
    for run in runs:
        for name, array in run.parts.state.state()[0]["model"].items():
            assert (held.setdefault(name, array) == array).all(), name
    return [held[name] for name in sorted(held)]


@pytest.fixture(autouse=True)
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """About as many blocks on each rank, in the order of the ranks: then copies of unlike depth share blocks."""
    monkeypatch.setattr(numpy_backend, "agree", lambda measured, config, control, mesh, *_: even_layout(
        config, mesh, [block.name for block in measured.blocks]))


@pytest.fixture(scope="module")
def alone() -> Any:
    """Train in one process: (weights, loss, norm) by clip_norm."""
    found = {}
    for clip in (0.0, 0.05):
        (run,) = trained(1, replace(MOMENTUM, clip_norm=clip))
        found[clip] = whole([run]), run.state.loss, run.state.grad_norm
    return found


ZERO1, ZERO2 = DataParallelConfig("zero", 1), DataParallelConfig("zero", 2)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline, shares, more", [
    (PipelineConfig(2), [1], {"clip_norm": 0.05}),
    (PipelineConfig(2), [1, 1], {"clip_norm": 0.05, "data_parallel": ZERO1}),
    (PipelineConfig(3), [3, 1], {"exchange": SMALL}),
    (PipelineConfig(2), [3, 0, 2], {"clip_norm": 0.05, "exchange": SMALL, "data_parallel": ZERO2}),
    (PipelineConfig(depths=[1, 2]), [1, 1], {}),
    (PipelineConfig(depths=[1, 2]), [1, 1],
     {"clip_norm": 0.05, "data_parallel": DataParallelConfig("zero", 2, [0, 1, 1])}),
    (PipelineConfig(depths=[2, 1]), [1, 3], {"clip_norm": 0.05, "exchange": SMALL}),
    (PipelineConfig(depths=[2, 3]), [3, 1], {"exchange": SMALL, "data_parallel": ZERO1}),
    (PipelineConfig(depths=[2, 3]), [1, 2], {"clip_norm": 0.05, "exchange": SMALL}),
    (PipelineConfig(depths=[1, 1, 2]), [2, 1, 1], {"clip_norm": 0.05, "exchange": SMALL}),
], ids=map(str, range(10)))
def test_copies_stay_the_model_of_one_process(alone: Any, pipeline: PipelineConfig, shares: list[int],
                                              more: Any) -> None:
    size = sum(pipeline.depths) or pipeline.stages * len(shares)
    runs = trained(size, replace(MOMENTUM, pipeline=pipeline, shares=shares, **more))
    weights, loss, norm = alone[more.get("clip_norm", 0.0)]
    assert norm > 0.05 and apart(whole(runs), weights) < 1e-9
    for run in runs:
        assert run.state.loss == pytest.approx(loss, rel=1e-9) and run.state.grad_norm == pytest.approx(norm, rel=1e-9)
        assert run.dp.compression == "none"


def test_each_rank_keeps_the_state_of_its_part_alone() -> None:
    shards = [3, 1, 1, 1, 2]
    runs = trained(5, replace(MOMENTUM, max_steps=2, pipeline=PipelineConfig(depths=[2, 3]),
                              data_parallel=DataParallelConfig("zero", 1, shards)))
    held = [sum(array.size for _, _, array in run.parts.optimizer.slots()) for run in runs]
    assert sum(held) == sum(array.size for array in whole(runs)) and all(held)


# --- who exchanges what --------------------------------------------------------------------------------------------

def layouts(depths: list[int], starts: Any) -> list[Layout]:
    return [Layout(Mesh.of(depths, rank), tuple("abcdef"), starts) for rank in range(sum(depths))]


def test_a_bucket_belongs_to_one_group_and_groups_have_one_order() -> None:
    runs = trained(5, replace(MOMENTUM, max_steps=1, pipeline=PipelineConfig(depths=[2, 3]), exchange=SMALL))
    for run in runs:
        block_of = [spec.block for spec in run.parts.params.specs]
        for bucket in run.dp.buckets:
            (replicas,) = [r for r in run.parts.replicas if r.group.name("grad") == bucket.group]
            assert {block_of[i] for i in bucket.params} <= set(replicas.blocks)
        assert [b.index for b in run.dp.buckets] == list(range(len(run.dp.buckets)))
    names = [[b.name for b in run.dp.buckets] for run in runs]
    for mine in names:
        for other in names:
            assert [n for n in mine if n in other] == [n for n in other if n in mine]


def test_groups_are_ordered_alike_on_every_rank() -> None:
    found = layouts([2, 3, 1], ((0, 3), (0, 2, 4), (0,)))
    assert len({tuple(layout.groups()) for layout in found}) == 1
    order = list(found[0].groups())
    assert order == [(1, 4, 5), (1, 3, 5), (0, 3, 5), (0, 2, 5)]
    for rank, layout in enumerate(found):
        assert [group.ranks for group, _ in layout.replicas()] == [ranks for ranks in order if rank in ranks]
    assert sorted(b for blocks in found[0].groups().values() for b in blocks) == list(range(6))


def test_a_rank_that_enters_other_buckets_first_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_on_rank_1(run: Any) -> Any:
        if run.control.rank == 1:
            run.dp.reducer.wires[0], run.dp.reducer.wires[-1] = run.dp.reducer.wires[-1], run.dp.reducer.wires[0]
        return fitted(run)

    with pytest.raises((RuntimeError, WaitTimeout, PeerFailed), match=r"g1,[34]\.grad\.b0\.r0"):
        trained(5, replace(MOMENTUM, pipeline=PipelineConfig(depths=[2, 3])), work=reversed_on_rank_1)


# --- one model on all ranks -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("rank, name, who", [(3, "w3", "rank 3 of ranks 1, 3"), (0, "b0", "rank 2 of ranks 0, 2"),
                                             (4, "w4", "rank 4 of ranks 1, 4")])
def test_a_weight_that_one_copy_writes_is_named_with_the_ranks_that_hold_it(rank: int, name: str, who: str) -> None:
    def writing(run: Any) -> Any:
        if run.control.rank == rank:
            step = run.parts.optimizer.step

            def stepped(*args: Any) -> Any:
                found = step(*args)
                run.parts.model.params[name][...] += 1e-3
                return found

            run.parts.optimizer.step = stepped
        return fitted(run)

    with pytest.raises(Diverged, match=f"after update 2 .*{name!r} differs on {who} by"):
        trained(5, replace(MOMENTUM, pipeline=PipelineConfig(depths=[2, 3]), check_every=5), work=writing)


def test_ranks_with_unlike_blocks_are_told_apart_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(rank: int) -> Any:
        made = model(rank)
        if rank == 3:
            made.params = {n: p.astype("float32") if n == "b2" else p for n, p in made.params.items()}
        return made

    with pytest.raises(UserError, match=r"rank 3 has parameter b2 float32\[12\] where rank 0 has parameter b2 f.*64"):
        lockstep(5, replace(MOMENTUM, pipeline=PipelineConfig(depths=[2, 3])), build, samples(100), fitted)


# --- what is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, more", [
    ("compression auto", {"compression": "auto"}),
    ("bucket_mb sweep", {"exchange": ExchangeConfig(bucket_mb="sweep")}),
    ("exchange.adasum", {"exchange": ExchangeConfig(adasum=True)}),
    ("exchange.autotune", {"exchange": ExchangeConfig(autotune=True)}),
    ("collectives horovod", {"collectives": "horovod"}),
    ("audit 5", {"audit": 5}),
    ("stage auto", {"data_parallel": DataParallelConfig("zero", "auto")}),
])
def test_what_needs_a_whole_gradient_is_refused(words: str, more: Any) -> None:
    with pytest.raises(UserError, match=words):
        replace(MOMENTUM, pipeline=PipelineConfig(2), **more).check()


def test_a_group_without_an_owner_is_refused() -> None:
    with pytest.raises(UserError, match="no shard to any of the ranks 1, 3"):
        trained(4, replace(MOMENTUM, pipeline=PipelineConfig(2),
                           data_parallel=DataParallelConfig("zero", 1, [1, 0, 1, 0])))


def test_an_optimizer_that_needs_all_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.backends.numpy.model import Sgd

    monkeypatch.setattr(Sgd, "needs_all", "global_clipnorm 1 of SGD")
    with pytest.raises(UserError, match="global_clipnorm 1 of SGD with a pipeline.*clip_norm"):
        trained(2, replace(MOMENTUM, pipeline=PipelineConfig(2)))
    trained(2, replace(MOMENTUM, max_steps=1))


# --- what is not finite --------------------------------------------------------------------------------------------

def breaking(rank: int, at: int, what: str) -> Any:
    """Work in which a number becomes NaN or infinite on ``rank`` in the step after ``at``, in ``what``."""
    def work(run: Any) -> Any:
        stage = run.parts.stage
        real = {name: getattr(stage, name) for name in ("forward", "backward", "loss")}

        def broken(kind: str) -> Any:
            def call(*args: Any) -> Any:
                gave = real[kind](*args)
                if run.state.cursor.step == at and run.control.rank == rank:
                    if kind == what == "forward":
                        gave.arrays[0][...] = np.nan
                    elif kind == what == "backward" and gave is not None:
                        gave.arrays[0][...] = np.inf
                    elif kind == "backward" and what in stage._grads:
                        stage._grads[what][...] = np.nan
                    elif kind == what == "loss":
                        return np.nan, gave[1]
                return gave
            return call

        for name in real:
            setattr(stage, name, broken(name))
        return fitted(run)

    return work


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("rank, what, named", [
    (0, "forward", (0, "w0")), (0, "w1", (0, "w1")), (3, "loss", (3, "blocks layer3 to layer4")),
    (3, "backward", (3, "")), (3, "b4", (3, "b4"))])
def test_the_rank_is_named_where_a_number_first_was_not_finite(rank: int, what: str, named: tuple[int, str]) -> None:
    """On one stage of one copy: every rank leaves the step out."""
    settings = replace(MOMENTUM, pipeline=PipelineConfig(2), nan_guard="skip", max_steps=5)
    runs = trained(4, settings, work=breaking(rank, 3, what))
    whole(runs)
    for run in runs:
        assert list(run.state.outcome.bad_where) == [named[0]] and named[1] in run.state.outcome.bad_where[named[0]]
        assert [n for n in run.notes if "update skipped" in n and f"on rank {named[0]}," in n]
    (alone,) = trained(1, replace(settings, pipeline=PipelineConfig(), max_steps=4))
    assert all(run.state.loss != alone.state.loss for run in runs)


def test_a_nan_sample_is_named_with_the_stage_that_reads_it() -> None:
    x, y = samples(100)
    x[30] = np.nan
    settings = replace(MOMENTUM, pipeline=PipelineConfig(depths=[2, 3]), max_steps=6)
    with pytest.raises(UserError, match="is not finite at step . on rank [02]; .*: the gradient of w0"):
        trained(5, settings, data=(x, y))


def test_a_step_that_is_left_out_leaves_no_trace_in_a_compressor() -> None:
    settings = replace(MOMENTUM, pipeline=PipelineConfig(depths=[1, 2]), nan_guard="skip", compression="int8",
                       max_steps=6)
    broken = trained(3, settings, "float32", work=breaking(1, 3, "forward"))
    for run in broken:
        assert len(run.state.outcome.bad_where) == 1 and run.dp.reducer.state.steps == 5
    whole(broken)


def test_an_overflow_on_one_stage_halves_the_scale_of_all() -> None:
    """The loss that shows it is on a rank that computes in float32."""
    def work(rank: int) -> Any:
        broken = breaking(rank, 2, "loss")

        def scaled(run: Any) -> Any:
            run.parts.scale = LossScale(8.0, [0])
            return broken(run)

        return scaled

    settings = replace(MOMENTUM, pipeline=PipelineConfig(2), nan_guard="skip", max_steps=4)
    runs = trained(4, settings, work=work(1))
    assert [(run.parts.scale.value, run.state.outcome.bad_where) for run in runs] == [(4.0, {})] * 4
    runs = trained(4, settings, work=work(3))
    assert [(run.parts.scale.value, list(run.state.outcome.bad_where)) for run in runs] == [(8.0, [3])] * 4


# --- compression -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def unsplit() -> Any:
    """Two whole models with a bucket for each tensor: weights by compression."""
    def train(name: str) -> list[np.ndarray]:
        return whole(trained(2, replace(MOMENTUM, compression=name, accumulate=8, exchange=TENSORS), "float32"))

    return train


TENSORS = ExchangeConfig(bucket_mb=1e-5, topk_ratio=0.2, powersgd_rank=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_two_copies_compress_as_two_whole_models_do(unsplit: Any, name: str) -> None:
    """Processors differ in rounding sums of float32: an entry may be sent as the next number."""
    want, exact = unsplit(name), unsplit("none")
    settings = replace(MOMENTUM, compression=name, exchange=TENSORS)
    runs = trained(3, replace(settings, pipeline=PipelineConfig(depths=[1, 2], micro_batches=8)), "float32")
    assert all(run.dp.compression == name for run in runs) and apart(want, exact) > 1e-4
    # PowerSGD draws its start by a bucket's number in its group, and there are two groups here.
    assert apart(whole(runs), want) < (0.4 if name != "powersgd" else 1) * apart(want, exact)


def test_ranks_of_a_group_draw_alike() -> None:
    settings = replace(MOMENTUM, compression="powersgd", exchange=TENSORS, max_steps=1,
                       pipeline=PipelineConfig(depths=[1, 2]))
    drawn: dict[str, Any] = {}
    for run in trained(3, settings, "float32"):
        run.dp.restart()
        for bucket, state in zip(run.dp.buckets, run.dp.reducer.state.all()):
            for key, array in state.items():
                assert (drawn.setdefault(f"{bucket.name} {key}", array) == array).all()
    assert len(drawn) == 2 * (len(SIZES) - 1), "a factor and a residual for each matrix"


def test_what_a_compressor_remembers_is_kept_for_each_group() -> None:
    settings = replace(MOMENTUM, pipeline=PipelineConfig(depths=[1, 2]), compression="topk", exchange=SMALL,
                       max_steps=4)
    for run in trained(3, settings, "float32"):
        own = run.dp.saved()
        before = [{k: np.array(x) for k, x in state.items()} for state in run.dp.reducer.state.all()]
        run.dp.restart()
        assert run.dp.restore(own) == "" and len(before) == len(run.dp.buckets)
        for a, b in zip(before, run.dp.reducer.state.all()):
            assert a and all((a[key] == b[key]).all() for key in a)


# --- wires -----------------------------------------------------------------------------------------------------------

def test_without_an_exchange_each_copy_trains_by_itself() -> None:
    settings = replace(MOMENTUM, pipeline=PipelineConfig(depths=[1, 2]), max_steps=3, collectives="null")
    build = [model(rank) for rank in range(3)]
    runs = LockstepWorld(3).run(lambda control, wire: fitted(assemble(
        settings, build[control.rank], samples(100), control, NullCollectives(control.rank, 3))), timeout_s=30.0)
    first, second = ({n: a for run in copy for n, a in run.parts.state.state()[0]["model"].items()}
                     for copy in (runs[:1], runs[1:]))
    assert sorted(first) == sorted(second) and all((first[name] != second[name]).any() for name in first)


def test_auto_takes_another_wire_than_horovod_where_a_model_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod would be taken over several hosts, and sums over all ranks of a job."""
    monkeypatch.setattr(wire.boot, "has_mpi", lambda: True)
    monkeypatch.setattr(wire.Wires, "_horovod", lambda *_: pytest.fail("Horovod was asked for"))
    monkeypatch.setattr(wire.Wires, "_mpi", lambda self, notes: NullCollectives(0, 4))
    notes: list[str] = []
    control, device = SimpleNamespace(rank=0, size=4, agree=bool), SimpleNamespace(kind="cpu")
    backend, two = SimpleNamespace(in_host_memory=lambda: True), SimpleNamespace(hosts=(0, 1))
    opened = wire.open_wire(replace(MOMENTUM, pipeline=PipelineConfig(2)), "torch", backend, control, two, [device] * 4,
                            notes)
    assert opened.size == 4 and "Horovod sums over all ranks" in notes[0]
