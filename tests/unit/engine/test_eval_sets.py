"""Named evaluation sets, evaluations every N steps and limits: exact on any ranks, once each over a resume."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import SLOW_TENSORFLOW, config, fitted, make_model, samples

from hvdtrain.checkpoint import CheckpointStore
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.commands import train
from hvdtrain.config import CheckpointConfig, Config, DataConfig, DataParallelConfig, EarlyStopConfig, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Record
from hvdtrain.core.records import numbers
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks import preempt
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.trainer import Trainer

TRAIN, TEST = samples(20), samples(5, 1)
SETS = {"wiki": samples(9, 2), "tiny": (TRAIN, samples(1, 3))}
BASE = config(global_batch=8, epochs=2, eval_every=1, eval_steps=2)
DUE = [2, 3, 4, 6]
"""Steps after which `BASE` evaluates: three steps an epoch."""


class Seen(Callback):
    """Keeps the metrics of each evaluation by step, and each step that is evaluated again."""

    where = "all"

    def __init__(self, ask_at: int = 0) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.again: list[int] = []
        self._ask_at = ask_at

    def step_end(self, run: Any) -> None:
        if run.state.cursor.step == self._ask_at and run.control.rank == 0:
            run.tell_all(preempt.TOPIC, "a test")

    def eval_end(self, run: Any) -> None:
        step = run.state.cursor.step
        self.again += [step] if step in self.metrics else []
        self.metrics[step] = dict(run.state.metrics)


class Rows:
    """A stream of the training samples."""

    def chunks(self, epoch: int) -> Any:
        x, y = TRAIN
        for at in range(0, len(x), 7):
            yield x[at:at + 7], y[at:at + 7]


def seen(settings: Config, size: int = 1, model: Any = None, sets: Any = None, data: Any = (TRAIN, TEST),
         ask_at: int = 0) -> list[tuple[Any, Seen]]:
    """Return run and evaluations of each rank after a fit."""
    def work(control: Any, wire: Any) -> tuple[Any, Seen]:
        watch = Seen(ask_at)
        run = assemble(settings, model() if model else make_model("numpy"), data, control, wire,
                       more=lambda run: [watch], eval_sets=SETS if sets is None else sets)
        return fitted(run), watch

    return LockstepWorld(size).run(work, timeout_s=30.0)


def near(got: dict[int, dict[str, float]], want: dict[int, dict[str, float]]) -> bool:
    assert got.keys() == want.keys()
    return all(got[step] == pytest.approx(want[step], rel=1e-5) and list(got[step]) == list(want[step]) for step in got)


@pytest.mark.parametrize("size, shares, most", [(2, [3, 1], 0), (4, [1, 2, 4, 0], 0), (3, [], 3)])
def test_each_set_is_exact_on_any_ranks(size, shares, most):
    alone = seen(replace(BASE, eval_max_samples=most))[0][1]
    ranks = seen(replace(BASE, eval_max_samples=most, shares=shares), size)
    assert list(alone.metrics) == DUE and not alone.again
    assert list(alone.metrics[2]) == ["loss", "accuracy", "wiki/loss", "wiki/accuracy", "tiny/loss", "tiny/accuracy"]
    assert all(watch.metrics == ranks[0][1].metrics for _, watch in ranks) and near(ranks[0][1].metrics, alone.metrics)


def test_a_limit_is_the_first_samples_of_each_set():
    run, limited = seen(replace(BASE, eval_max_samples=3, max_steps=2))[0]
    cut = {"": TEST, "wiki": SETS["wiki"], "tiny": SETS["tiny"][1]}
    want = {}
    for name, (x, y) in cut.items():
        want |= {loop.metric_name(name, metric): value for metric, value in seen(
            replace(BASE, max_steps=2), sets={}, data=(TRAIN, (x[:3], y[:3])))[0][1].metrics[2].items()}
    assert limited.metrics[2] == pytest.approx(want)
    assert any("evaluation set wiki: all of it, 9 samples, of which the first 3" in note for note in run.notes)
    assert any("evaluation set tiny: its test split, 1 sample" in note for note in run.notes)


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"data_parallel": DataParallelConfig("zero")},
                                     {"pipeline": PipelineConfig(2)},
                                     {"pipeline": PipelineConfig(2), "data_parallel": DataParallelConfig("zero", 1)}])
def test_with_accumulation_zero_and_pipelines(changes):
    from test_pipeline_state import model

    want = seen(BASE, model=model)[0][1].metrics
    assert all(near(watch.metrics, want) for _, watch in seen(replace(BASE, **changes), 4, model))


def test_when_a_run_evaluates():
    assert list(seen(BASE)[0][1].metrics) == DUE
    assert list(seen(replace(BASE, eval_every=0))[0][1].metrics) == [2, 4, 6]
    run, watch = seen(replace(BASE, data=DataConfig(prefetch=2, workers=0)), data=(Rows(), Rows()))[0]
    assert list(watch.metrics) == DUE and not watch.again, "a stream, whose last step is known when it is over"
    assert list(seen(replace(BASE, eval_steps=0))[0][1].metrics) == [3, 6]
    stopped = seen(replace(BASE, eval_steps=2, max_steps=4))[0][1]
    assert list(stopped.metrics) == [2, 3, 4] and not stopped.again


@pytest.mark.parametrize("stream", [False, True])
def test_a_resume_neither_repeats_nor_misses_an_evaluation(tmp_path, stream):
    data = (Rows(), Rows()) if stream else (TRAIN, TEST)
    settings = replace(BASE, eval_steps=3 if stream else 2, checkpoint=CheckpointConfig(every_steps=1, keep=9),
                       early_stop=EarlyStopConfig("wiki/loss", "max", patience=9, restore=False))
    whole, want = seen(replace(settings, out=str(tmp_path / "whole")), data=data)[0]
    waited = {type(one).__name__: one for one in whole.callbacks}["EarlyStop"].waited
    for step in (2, 3, 5):
        at = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        for size in (1, 3) if step == 3 else (1,):
            run, watch = seen(replace(settings, out=str(tmp_path / f"{step}-{size}"), resume=str(at)), size,
                              data=data)[0]
            done = step if stream or step != 3 else step - 1  # an epoch's end evaluates after the step's checkpoint
            assert near(watch.metrics, {n: m for n, m in want.metrics.items() if n > done}) and not watch.again
            assert {type(one).__name__: one for one in run.callbacks}["EarlyStop"].waited == waited


@pytest.mark.parametrize("ask_at", [1, 3, 5])
def test_a_requeue_leaves_its_evaluation_to_the_run_that_resumes(tmp_path, ask_at):
    """The vote of the step after the request ends the run: at step 2 and 4 within an epoch, at 6 at its end."""
    want = seen(BASE)[0][1].metrics
    settings = replace(BASE, out=str(tmp_path))
    (run, first), _ = seen(settings, 2, ask_at=ask_at)
    assert run.state.requeue and ask_at + 1 not in first.metrics
    (_, then), _ = seen(replace(settings, resume="auto"), 2)
    assert not first.metrics.keys() & then.metrics.keys() and near({**first.metrics, **then.metrics}, want)


def test_early_stop_and_keep_best_follow_a_named_set(tmp_path):
    settings = replace(BASE, out=str(tmp_path), epochs=9, lr=1e-9, early_stop=EarlyStopConfig(
        "wiki/accuracy", patience=2), checkpoint=CheckpointConfig(keep_best="tiny/loss", keep=1))
    run, watch = seen(settings, 2)[0]
    assert list(watch.metrics) == [2, 3, 4] and run.state.cursor.step == 4, "stops at its evaluation, within the epoch"
    assert run.state.findings.best["wiki/accuracy"][0].step == 2 and run.state.findings.weights_at == 2
    assert set(run.state.findings.best) == {"tiny/loss", "wiki/accuracy"}
    learns = replace(settings, out=str(tmp_path / "b"), lr=0.1, early_stop=EarlyStopConfig(), epochs=2,
                     checkpoint=CheckpointConfig(keep_best="wiki/loss", keep_best_mode="max", keep=9))
    run, watch = seen(learns)[0]
    loss = {step: metrics["wiki/loss"] for step, metrics in watch.metrics.items()}
    better = [step for step in loss if all(loss[step] > loss[other] for other in loss if other < step)]
    assert {2, *better} <= {one.step for one in CheckpointStore(tmp_path / "b" / "checkpoints", 1).list()}


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
@pytest.mark.parametrize("changes, meant", [
    ({"early_stop": EarlyStopConfig("wiki/los")}, "early_stop.metric 'wiki/los' is not evaluated.*'wiki/loss'"),
    ({"checkpoint": CheckpointConfig(keep_best="acuracy")}, "checkpoint.keep_best 'acuracy' is not .*'accuracy'")])
def test_an_unknown_metric_is_refused_before_the_first_step(tmp_path, framework, changes, meant):
    run = assemble(replace(BASE, out=str(tmp_path / "run"), **changes), make_model(framework), (TRAIN, TEST),
                   eval_sets=SETS)
    with pytest.raises(UserError, match=meant):
        loop.fit(run)
    assert run.state.cursor.step == 0 and not (tmp_path / "run").exists()


def test_a_set_by_name_and_what_is_refused(tmp_path):
    (x, y), (xt, yt) = samples(6, 4), samples(4, 5)
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=xt, y_test=yt)
    config = train.parse(["--eval.a.name", str(tmp_path / "a.npz"), "--eval.ring.name", "synthetic",
                          "--eval.ring.args.shape", "[12]", "--eval_steps", "5"])
    assert config is not None and config.eval["ring"] == {"name": "synthetic", "args": {"shape": [12]}}
    settings = replace(BASE, eval={"a": str(tmp_path / "a.npz")}, eval_steps=0, epochs=1)
    run, watch = seen(settings, sets={})[0]
    alone = seen(replace(settings, eval={}), sets={}, data=(TRAIN, (xt, yt)))[0][1]
    assert watch.metrics[3]["a/loss"] == alone.metrics[3]["loss"]
    assert "evaluation set a: its test split, 4 samples" in run.notes
    for given, meant in (({"a/b": "digits"}, "a set named 'a/b'"), ({"a": 3}, "eval.a is 3"),
                         ({"a": {"nmae": "digits"}}, "'nmae'.*did you mean 'name'"),
                         ({"a": {"args": {}}}, "eval.a.name is")):
        with pytest.raises(UserError, match=meant):
            replace(BASE, eval=given).check()
    with pytest.raises(UserError, match="evaluation set a: .*no argument 'rots'.*eval.a.args"):
        seen(replace(BASE, eval={"a": {"name": "digits", "args": {"rots": 1}}}), sets={})
    with pytest.raises(UserError, match="evaluation set wiki is given to fit and by the key eval"):
        seen(replace(BASE, eval={"wiki": "digits"}))


def test_each_set_is_compared_over_ranks_and_tried():
    def differ(control: Any, wire: Any) -> None:
        with pytest.raises(UserError, match="evaluation set wiki: "):
            assemble(BASE, make_model("numpy"), (TRAIN, TEST), control, wire,
                     eval_sets={"wiki": samples(9, control.rank)})

    LockstepWorld(2).run(differ, timeout_s=30.0)
    odd = np.ones((4, 7), np.float32), TEST[1][:4]
    with pytest.raises(UserError, match="evaluation set odd: "):
        assemble(BASE, make_model("torch"), (TRAIN, TEST), eval_sets={"odd": odd})


def test_training_data_is_not_read_during_an_evaluation():
    evaluates, together = threading.Event(), []

    class Read:
        """Reads samples; of training data slowly enough to notice an evaluation meanwhile."""

        def __init__(self, data: Any, own: bool) -> None:
            self.data, self.own = data, own

        def __len__(self) -> int:
            return len(self.data[0])

        def fetch(self, indices_n: np.ndarray) -> Any:
            if self.own and threading.current_thread().name == "hvdtrain-fetch":
                together.append(evaluates.wait(0.1))
            elif not self.own:
                evaluates.set()
                threading.Event().wait(0.02)
                evaluates.clear()
            return tuple(array[indices_n] for array in self.data)

    settings = replace(BASE, epochs=1, global_batch=2, max_steps=2, data=DataConfig(prefetch=4, workers=0))
    seen(settings, data=(Read(TRAIN, True), Read(TEST, False)), sets={})
    assert len(together) > 2 and not any(together)


def test_reports_name_the_sets(tmp_path):
    result = Trainer(replace(BASE, out=str(tmp_path))).fit(make_model("torch"), (TRAIN, TEST), eval=SETS)
    assert {"loss", "wiki/loss", "tiny/accuracy"} <= set(result.metrics) and len(result.history["val_wiki/loss"]) == 2
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    evals = [row for row in log if row["event"] == "eval"]
    assert [row["step"] for row in evals] == DUE and all("tiny/loss" in row["metrics"] for row in evals)
    assert "wiki/loss" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "completed.json").read_text())["metrics"] == pytest.approx(result.metrics)
    assert numbers(Record("eval", 3, 0.0, {"metrics": {"ranks/loss": 1.5}})) == {"test/ranks/loss": 1.5}
    with pytest.raises(UserError, match="eval as a tuple"):
        Trainer(BASE).fit(make_model("numpy"), TRAIN, eval=TEST)
