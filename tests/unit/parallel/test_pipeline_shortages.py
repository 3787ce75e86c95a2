"""A stage that runs out of memory in the midst of its order: all ranks finish the step, and its copy cuts alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, lockstep, samples

from hvdtrain.config import Config, PipelineConfig
from hvdtrain.core.errors import UserError

DATA = samples(48), samples(21, 1)
SETTINGS = replace(config(), max_steps=3, global_batch=24, lr=0.05)


def model(rank: int) -> Any:
    from hvdtrain.backends.numpy.model import Model

    return Model((FEATURES, 10, 9, 8, CLASSES), 3)


def short(rank: int, method: str, at: set[int]) -> Any:
    """Work of a rank: train, where calls number ``at`` of ``method`` of that rank's stage find no memory."""
    def work(run: Any) -> Any:
        stage, calls = run.parts.stage, count()
        stage.sizes = {}

        def watched(name: str) -> Any:
            own = getattr(stage, name)

            def call(chunk: int, micro: int, came: Any, batch: Any, *more: Any) -> Any:
                stage.sizes.setdefault(run.state.cursor.step, []).append(len(batch[0]))
                return own(chunk, micro, came, batch, *more)

            return call

        stage.forward, stage.loss = watched("forward"), watched("loss")
        if run.control.rank == rank:
            failing = getattr(stage, method)

            def fails(*args: Any) -> Any:
                if next(calls) in at:
                    raise MemoryError("no room (of a test)")
                return failing(*args)

            setattr(stage, method, fails)
        return fitted(run)

    return work


def held(runs: list[Any]) -> list[Any]:
    """All weights, by name."""
    both = {name: array for run in runs for name, array in run.parts.state.state()[0]["model"].items()}
    return [both[name] for name in sorted(both)]


def trained(settings: Config, size: int, *shortage: Any) -> list[Any]:
    return lockstep(size, settings, model, DATA, short(*shortage))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "order", "rank", "method", "at"), [
    (3, "1f1b", 0, "forward", 4), (3, "1f1b", 0, "backward", 11), (3, "gpipe", 1, "backward", 0),
    (3, "1f1b", 2, "loss", 7), (2, "interleaved", 1, "forward", 3), (3, "1f1b", 1, "hand_over", 1)])
def test_a_step_is_repeated_at_its_size_first_and_then_in_halves(size, order, rank, method, at):
    settings = replace(SETTINGS, pipeline=PipelineConfig(size, order, micro_batches=6))
    fine, once, twice = (trained(settings, size, rank, method, set(range(at, at + n))) for n in range(3))
    assert all((a == b).all() for a, b in zip(held(once), held(fine)))
    assert apart(held(twice), held(fine)) < 1e-6
    assert [s["rank"] for s in twice[0].shortages] == [rank, rank]
    assert all(run.shortages == twice[0].shortages for run in twice)
    assert {size for run in fine for size in run.parts.stage.sizes[2]} == {4}
    assert {size for run in twice for size in run.parts.stage.sizes[2]} == {2}
    assert {run.recovery.limit for run in twice} == {2}


def test_the_other_copies_keep_their_micro_batches():
    settings = replace(SETTINGS, pipeline=PipelineConfig(2, micro_batches=3))
    fine, twice = (trained(settings, 4, 3, "loss", set(range(2, 2 + n))) for n in (0, 2))
    assert apart(held(twice), held(fine)) < 1e-6
    assert [run.recovery.limit for run in twice] == [0, 0, 2, 2]
    assert [set(run.parts.stage.sizes[2]) for run in twice] == [{4}, {4}, {2}, {2}]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_evaluation_is_repeated_with_smaller_batches_on_the_whole_copy(rank):
    settings = replace(SETTINGS, pipeline=PipelineConfig(3), eval_every=1)
    fine, twice = (trained(settings, 3, rank, "evaluate", set(range(1, 1 + n))) for n in (0, 2))
    assert all(run.state.metrics == pytest.approx(fine[0].state.metrics) for run in twice)
    assert [s["phase"] for s in twice[1].shortages] == ["evaluation"] * len(twice[1].shortages) != []
    assert len({run.recovery.evaluation.limit for run in twice}) == 1


def test_without_a_smaller_size_all_end_in_words():
    settings = replace(SETTINGS, pipeline=PipelineConfig(2, micro_batches=24))
    with pytest.raises(UserError, match="out of memory"):
        trained(settings, 2, 0, "backward", set(range(99)))


def test_where_memory_is_to_end_the_run_it_does():
    settings = replace(SETTINGS, pipeline=PipelineConfig(2, micro_batches=3), on_oom="stop")
    with pytest.raises(UserError, match="out of memory in training with micro-batches of 8 .*no room.*on_oom is stop"):
        trained(settings, 2, 1, "backward", {1})
