"""Metrics with states: over any number of ranks and any shares, the result is that of one object fed all samples."""

from dataclasses import replace

import numpy as np
import pytest
from small_runs import CLASSES, config, fitted, lockstep, make_model, samples, solo

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import EarlyStopConfig, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.metric_entries import loaded
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble
from hvdtrain.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
classification = torchmetrics.classification

SHARES = [(1, []), (2, [3, 1]), (2, [0, 1]), (3, [1, 1, 1]), (3, [5, 0, 2])]
DATA = samples(24), samples(45, 1)
BASE = config(global_batch=8, micro_batch=3, epochs=1)


class OfProbability(torchmetrics.Metric):
    """A number of one class's probabilities, with a state of each reduction; depends on the order of the samples."""

    def __init__(self, reduction="cat"):
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=reduction)
        self.add_state("largest", torch.tensor(-9.0), dist_reduce_fx="max")
        self.add_state("seen", torch.tensor(5, dtype=torch.int32), dist_reduce_fx="sum")
        self.add_state("joined", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="cat")
        self.add_state("setting", torch.tensor(1.0), dist_reduce_fx="mean")  # as data_range of PeakSignalNoiseRatio

    def update(self, outputs, targets):
        self.rows.append(outputs[:, 0])
        self.largest = torch.maximum(self.largest, outputs[:, 0].max())
        self.seen += len(targets)
        self.joined = torch.cat([self.joined, outputs[:, 1].double()])

    def compute(self):
        rows = torch.cat(self.rows)
        assert self.seen.dtype == torch.int32 and self.joined.dtype == torch.float64
        return {"order": (rows * torch.arange(len(rows))).sum() * self.setting,
                "joined": (self.joined * torch.arange(len(rows))).sum(),
                "largest": self.largest, "seen": self.seen, "left_out": rows}


class Learned(torchmetrics.Metric):
    """A metric that learns from samples what it computes."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.classes, self.seen = outputs.shape[1], self.seen + len(targets)

    def compute(self):
        return self.seen * self.classes


class Lacking:
    """A metric whose package is not installed."""

    def __init__(self, k):
        raise ModuleNotFoundError("it needs pycocotools")


class Averaged(torchmetrics.Metric):
    """A mean over ranks, which is right for equal shares alone."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, outputs, targets):
        self.mean += outputs.mean() * len(targets)

    def compute(self):
        return self.mean


def collection():
    return torchmetrics.MetricCollection({
        "f1": classification.MulticlassF1Score(CLASSES, average="macro"),
        "auroc": classification.MulticlassAUROC(CLASSES),
        "ap": classification.MulticlassAveragePrecision(CLASSES, thresholds=20),
        "each": torchmetrics.ClasswiseWrapper(classification.MulticlassAccuracy(CLASSES, average=None), prefix="of_"),
        "twice": classification.MulticlassRecall(CLASSES) * 2})


def measured(size, shares, metrics, **more):
    settings = replace(BASE, metrics=metrics, shares=shares, **more)
    found = lockstep(size, settings, lambda rank: make_model("torch"), DATA,
                     lambda run: loop.measure(run, run.eval_feed))
    assert all(one == found[0] for one in found)
    return found[0]


def alone(*metrics):
    """Return the results of objects fed all samples at once."""
    x, y = (torch.from_numpy(array) for array in DATA[1])
    with torch.no_grad():
        outputs = make_model("torch")(x)
        for metric in metrics:
            metric.update(outputs, y)
    return [metric.compute() for metric in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("size, shares", SHARES)
def test_results_are_those_of_one_object_fed_all_samples(size, shares):
    many, own = alone(collection(), OfProbability())
    found = measured(size, shares, ["accuracy", collection(), OfProbability()])
    want = {**many, **{name: value for name, value in own.items() if name != "left_out"}}
    assert found.keys() == {"loss", "accuracy", *want}
    for name, value in want.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("size, shares", SHARES)
def test_states_without_a_reduction_are_stacked_as_the_metric_asks(size, shares, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import torchmetrics\n\n\nclass First(torchmetrics.PearsonCorrCoef):\n"
        "    def update(self, outputs, targets):\n        super().update(outputs[:, 0], targets.float())\n\n\n"
        "def make(k=1):\n    return First()\n")
    monkeypatch.chdir(tmp_path)
    found = measured(size, shares, [f"{tmp_path}/own.py:make", "torchmetrics.classification.MulticlassF1Score("
                                    f"num_classes={CLASSES}, average='micro')"])
    x, y = (torch.from_numpy(array) for array in DATA[1])
    want = torchmetrics.functional.pearson_corrcoef(make_model("torch")(x).detach()[:, 0], y.float())
    micro, = alone(classification.MulticlassF1Score(CLASSES, average="micro"))
    assert found["make"] == pytest.approx(float(want), rel=1e-4) and found["MulticlassF1Score"] == float(micro)


def test_what_cannot_be_exact_is_refused():
    assert np.isfinite(measured(3, [1, 1, 1], [Averaged()], global_batch=9)["Averaged"])  # 45 samples: 15 each
    for reduction in ("mean", lambda stacked: stacked[0]):
        with pytest.raises(UserError, match="state mean is combined over ranks by .* measured 34, 11 samples"):
            measured(2, [3, 1], [Averaged(reduction)])
    with pytest.raises(UserError, match="keeps more than the states of its metrics"):
        measured(1, [], [torchmetrics.MinMaxMetric(classification.MulticlassAccuracy(CLASSES))])
    with pytest.raises(UserError, match=r"returns a Tensor of shape \[5\].*ClasswiseWrapper"):
        measured(1, [], [classification.MulticlassAccuracy(CLASSES, average=None)])
    with pytest.raises(UserError, match="two metrics are named MulticlassAccuracy"):
        measured(1, [], [classification.MulticlassAccuracy(CLASSES), classification.MulticlassAccuracy(CLASSES)])
    with pytest.raises(UserError, match="cannot be made: .*num_classes"):
        measured(1, [], ["torchmetrics.classification.MulticlassF1Score"])
    with pytest.raises(UserError, match="metric Lacking.k=1. cannot be made: .*needs pycocotools.*Install it"):
        loaded("Lacking(k=1)", lambda name: Lacking)
    with pytest.raises(UserError, match=r"metric MeanSquaredError refused its inputs, float32\[., 5\], int64\[.\]: "):
        measured(2, [], ["torchmetrics.MeanSquaredError"])
    with pytest.raises(UserError, match="an object that a script gave"):
        measured(1, [], ["<MulticlassF1Score>"])


def test_a_batch_that_fails_leaves_no_state_behind():
    run = solo(replace(BASE, metrics=[OfProbability(), classification.MulticlassF1Score(CLASSES)]), make_model("torch"),
               DATA)
    evaluator, (x, y) = run.parts.evaluator, DATA[1]
    evaluator.add((x[:20], y[:20]))
    before = {name: value for name, value in evaluator.totals().items()}
    evaluator.add((x[:20], y[:20]))
    with pytest.raises(UserError):
        evaluator.add((x[20:], y[20:] + CLASSES))
    after = evaluator.totals()
    assert [str(one) for one in after.values()] == [str(one) for one in before.values()]


def test_a_score_steers_only_where_its_direction_is_known():
    stop = replace(BASE, eval_every=1, epochs=2)
    metrics = [collection(), OfProbability()]
    run = solo(replace(stop, metrics=metrics, early_stop=EarlyStopConfig("order", "max", restore=False)),
               make_model("torch"), DATA)
    fitted(run)
    run = solo(replace(stop, metrics=metrics, early_stop=EarlyStopConfig("order", restore=False)), make_model("torch"),
               DATA)
    with pytest.raises(UserError, match="whether larger values of order are better is not known"):
        fitted(run)


OF_A_FILE = """
import torch
import torchmetrics

SCORES = torchmetrics.MetricCollection({"f1": torchmetrics.classification.MulticlassF1Score(5, average="macro"),
                                        "auroc": torchmetrics.classification.MulticlassAUROC(5)})


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))


def task(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def metrics(model, batch):
    outputs = model(batch[0])
    return {"right": ((outputs.argmax(1) == batch[1]).sum(), len(batch[1])), "scores": (SCORES, outputs, batch[1])}
"""


@pytest.mark.parametrize("more", [{}, {"shares": [0, 1]}, {"pipeline": PipelineConfig(2)}, {"data_parallel": "zero"}])
def test_a_model_file_gives_objects_what_they_measure(more, tmp_path):
    (tmp_path / "scored.py").write_text(OF_A_FILE)
    settings = replace(BASE, model=f"{tmp_path / 'scored.py'}:build", **more)
    one, = lockstep(1, replace(settings, shares=[], pipeline=PipelineConfig()), lambda rank: None, DATA,
                    lambda run: loop.measure(run, run.eval_feed))
    found = lockstep(2, settings, lambda rank: None, DATA, lambda run: loop.measure(run, run.eval_feed))
    assert one.keys() == {"loss", "right", "f1", "auroc"}
    assert found[0] == found[1] == pytest.approx(one, rel=1e-5)


def test_the_last_stage_of_a_pipeline_computes():
    assert measured(2, [], [Learned()], pipeline=PipelineConfig(2))["Learned"] == 45 * CLASSES


def test_an_unknown_direction_is_refused_on_every_rank_of_a_pipeline(tmp_path):
    """The last stage alone knows the objects of a model file."""
    (tmp_path / "scored.py").write_text(OF_A_FILE)
    settings = replace(BASE, model=f"{tmp_path / 'scored.py'}:build", pipeline=PipelineConfig(2), eval_every=1,
                       early_stop=EarlyStopConfig("f1", restore=False))

    def work(run):
        with pytest.raises(UserError, match="whether larger values of f1 are better is not known"):
            fitted(run)

    lockstep(2, settings, lambda rank: None, DATA, work)


def test_a_failed_evaluation_adds_nothing_to_the_next():
    trainer, (x, y) = Trainer(replace(BASE, metrics=[OfProbability()])), DATA[1]
    good = DATA[0], (x[:8], y[:8])
    want = trainer.evaluate(model=make_model("torch"), data=good)
    with pytest.raises(UserError, match="targets run from"):
        trainer.evaluate(data=(DATA[0], (x, np.where(np.arange(len(y)) == 20, 99, y))))
    assert trainer.evaluate(data=good) == want


KERAS_ENTRIES = ["accuracy", "AUC(curve='PR', name='area')", "R2Score", "TopKCategoricalAccuracy(k=2)", "{home}:f1"]


@pytest.mark.slow
@pytest.mark.parametrize("size, shares", SHARES)
def test_keras_objects_are_those_of_one_fed_all_samples(size, shares, tmp_path):
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    (tmp_path / "own.py").write_text(
        "import keras\n\n\ndef f1():\n    return keras.metrics.F1Score('macro', name='f1')\n")
    entries = [entry.format(home=tmp_path / "own.py") for entry in KERAS_ENTRIES]
    settings = replace(BASE, metrics=entries, shares=shares, loss="CategoricalCrossentropy")
    data = tuple((x, np.eye(CLASSES, dtype=np.float32)[y]) for x, y in DATA)
    found = lockstep(size, settings, lambda rank: make_model("tensorflow"), data,
                     lambda run: loop.measure(run, run.eval_feed))
    assert all(one == found[0] for one in found)
    outputs = make_model("tensorflow")(data[1][0])
    for name, metric in {"area": keras.metrics.AUC(curve="PR"), "R2Score": keras.metrics.R2Score(),
                         "TopKCategoricalAccuracy": keras.metrics.TopKCategoricalAccuracy(2),
                         "f1": keras.metrics.F1Score("macro")}.items():
        metric.update_state(data[1][1], outputs)
        assert found[0][name] == pytest.approx(float(metric.result()), rel=1e-5), name


@pytest.mark.parametrize("size, shares", [(1, []), (3, [5, 0, 2])])
def test_each_evaluation_set_has_states_of_its_own(size, shares):
    sets = {"wiki": samples(9, 2), "tiny": samples(2, 3)}
    settings = replace(BASE, metrics=[OfProbability()], shares=shares)
    models = [make_model("torch") for _ in range(size)]

    def work(control, wire):
        run = assemble(settings, models[control.rank], DATA, control, wire, eval_sets=sets)
        assert "order" in run.parts.measured
        return loop.measure_all(run)

    ranks = LockstepWorld(size).run(work, timeout_s=30.0)
    assert all(one == ranks[0] for one in ranks)
    for name, data in {"": DATA[1], **sets}.items():
        want = solo(replace(settings, shares=[], metrics=[OfProbability()]), make_model("torch"), (DATA[0], data))
        for metric, value in loop.measure(want, want.eval_feed).items():
            assert ranks[0][loop.metric_name(name, metric)] == pytest.approx(value, rel=1e-5, nan_ok=True), metric
