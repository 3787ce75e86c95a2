"""Compressors, transforms, callbacks, schedules, metrics, trackers and strategies from files outside the package."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, config, fitted, lockstep, make_model, samples, solo, weights

from hvdtrain.backends import pairs
from hvdtrain.checkpoint.adapters import state_key_of
from hvdtrain.config import (
    DataConfig,
    EarlyStopConfig,
    ScheduleConfig,
    run_length,
)
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable
from hvdtrain.engine.callbacks import order
from hvdtrain.engine.saving import callback_states
from hvdtrain.reports.progress import silence

MINE = '''
import json
from pathlib import Path

from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.parallel.data_parallel.alone import Alone
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.comm.compressors.base import Uncompressed
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.data.weighting import loss_scale
from hvdtrain.core.protocols import AllReduce


class Late(Uncompressed):
    """Sends half of what is there and keeps the rest for later."""

    name = "late"

    def init(self, ops, bucket):
        return {"rest": ops.zeros(bucket.n, bucket.dtype)}

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        half_N = (flat_N + state["rest"]) * 0.5
        total_N = yield AllReduce(half_N)
        return total_N, {"rest": flat_N + state["rest"] - half_N}


def late(exchange):
    return Late()


class Doubled:
    """Computes with inputs that are twice as large."""

    collective = False

    def install(self, model, blocks):
        if "forward" not in vars(model):
            plain = model.forward
            model.forward = lambda x: plain(2.0 * x)

    def remove(self, model):
        vars(model).pop("forward", None)

    def describe(self):
        return {"inputs": "doubled"}

    def caveats(self):
        return ["inputs are doubled"]


class Count(Callback):
    where = "root"

    def __init__(self):
        self.steps = 0

    def step_end(self, run):
        self.steps += 1

    def fit_end(self, run):
        (Path(run.out) / "count.json").write_text(json.dumps(self.steps))


class LocalSgd(Alone):
    """Updates by each rank's own gradient; every so many steps parameters become their mean over ranks."""

    caveats = ("ranks train apart between two meetings",)

    def __init__(self, setup, every):
        super().__init__(setup.parts.optimizer, setup.ops)
        self.params, self.wire, self.every = setup.parts.params, Transport(setup.collectives, setup.ops), every
        self.plan = plan_buckets(self.params.specs, 16.0, setup.group.name("mean"))

    def scale(self, batch):
        return loss_scale(batch.own_weight)

    def meets(self, step):
        return (step + 1) % self.every == 0

    def update(self, step, grads, unused=()):
        done = super().update(step, grads, unused)
        if self.meets(step):
            for bucket in self.plan:
                own_N = self.params.flat(bucket) / self.wire.size
                self.params.write(bucket, self.wire.allreduce(own_N, f"{bucket.group}.b{bucket.index}"))
        return done


def local_sgd(setup):
    return LocalSgd(setup, 1)


def seldom(setup):
    return LocalSgd(setup, 3)
'''


@pytest.fixture
def mine(tmp_path):
    """Return the file of someone else."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def trained(out, arrays=None, built=None, **settings):
    """(weights, notes, words) by rank after six steps of plain SGD on two ranks."""
    def work(run):
        fitted(run)
        if built is not None:
            built.append(run.spec.model)
        return weights(run), list(run.notes), run.parts.describe()

    setting = config(global_batch=8, max_steps=6, out=str(out), **settings)
    return lockstep(2, setting, lambda rank: make_model("numpy"), arrays or samples(24), work)


def same(ranks):
    return all(np.array_equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0]))


def test_a_compressor(mine, tmp_path):
    ranks = trained(tmp_path / "run", compression=f"{mine}:late")
    assert any("gradients are approximated by late" in note for note in ranks[0][1]) and same(ranks)
    assert apart(ranks[0][0], trained(tmp_path / "plain")[0][0]) > 1e-3


def test_a_transform(mine, tmp_path):
    built = []
    ranks = trained(tmp_path / "run", built=built, transforms=[f"{mine}:Doubled"])
    assert ranks[0][2]["inputs"] == "doubled" and any(n.endswith("inputs are doubled") for n in ranks[0][1])
    x, y = samples(24)
    assert apart(ranks[0][0], trained(tmp_path / "plain", (2.0 * x, y))[0][0]) == 0
    assert all("forward" not in vars(model) for model in built), "the model is its user's own again"


def test_a_transform_that_cannot_be_installed_is_not_removed(mine, tmp_path):
    mine.write_text(MINE + """

class Refusing(Doubled):
    def install(self, model, blocks):
        raise UserError("a model that cannot be doubled", "another", "take another")

    def remove(self, model):
        raise AssertionError("it was never there")


def no_way(setup):
    return None
""".replace("class Refusing", "from hvdtrain.core.errors import UserError\n\n\nclass Refusing"))
    built = []
    with pytest.raises(UserError, match="cannot be doubled"):
        trained(tmp_path / "run", built=built, transforms=[f"{mine}:Doubled", f"{mine}:Refusing"])
    with pytest.raises(UserError, match="returned a NoneType"):
        trained(tmp_path / "none", data_parallel=f"{mine}:no_way")
    with pytest.raises(UserError, match="compression auto with data_parallel"):
        trained(tmp_path / "auto", data_parallel=f"{mine}:local_sgd", compression="auto")
    mine.with_name("shards.py").write_text(MINE.replace("caveats = (", "divides_state = True\n    caveats = ("))
    with pytest.raises(UserError, match="shards the state and has no stage and no sizes_BP"):
        trained(tmp_path / "shards", data_parallel=f"{mine.with_name('shards.py')}:local_sgd")


def test_a_callback(mine, tmp_path):
    trained(tmp_path / "run", callbacks=[f"{mine}:Count"])
    assert (tmp_path / "run" / "count.json").read_text() == "6"
    other = mine.with_name("other.py")
    other.write_text('class Other:\n    where = "all"\n\n    def on(self, event, run):\n        pass\n')
    assert state_key_of(order._own_callback(f"{other}:Other")) == "Other", "its state in earlier checkpoints"


TEA = """
from hvdtrain.engine.callbacks.base import Callback


class Tea(Callback):
    where, doing, state_key = "all", "making tea", "tea"
    after, before = ("NanGuard",), ("Recorder", "Checkpoint")

    @classmethod
    def wanted(cls, run):
        return run.config.seed == 7

    @classmethod
    def make(cls, run, earlier):
        made = cls()
        made.found = "NanGuard" in earlier
        return made

    def fit_start(self, run):
        self.cups = 3

    def state_dict(self):
        return {"cups": self.cups}
"""


def test_a_callback_among_the_built_in_ones(mine, tmp_path, monkeypatch):
    mine.write_text(TEA)
    tea = load_callable(f"{mine}:Tea", "callbacks")
    monkeypatch.setattr(order, "REPORTS", (tea, *order.REPORTS))
    runs = lockstep(2, config(global_batch=8, max_steps=1, seed=7, out=str(tmp_path)), lambda rank: make_model("numpy"),
                    samples(24), fitted)
    for run in runs:
        names = [type(callback).__name__ for callback in run.callbacks]
        assert names.index("NanGuard") < names.index("Tea") < names.index("Checkpoint")
        assert run.callbacks[names.index("Tea")].found and ["tea", {"cups": 3}] in callback_states(run)
    assert silence.of("fit_start of Tea", 0, True) == "making tea"
    other = solo(config(global_batch=8, out=str(tmp_path / "other")), make_model("numpy"), samples(24))
    assert not any(isinstance(callback, tea) for callback in other.callbacks)


FALL = {"torch": """
from torch.optim.lr_scheduler import LambdaLR
from hvdtrain.config.run_length import KINDS, ScheduleKind


class Fall(LambdaLR):
    def __init__(self, optimizer, total):
        super().__init__(optimizer, lambda step: max(0.0, 1 - step / total))
""", "tensorflow": """
import keras
from hvdtrain.config.run_length import KINDS, ScheduleKind


class Fall(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, initial_learning_rate, total):
        self.rate, self.total = initial_learning_rate, total

    def __call__(self, step):
        return self.rate * keras.ops.maximum(0.0, 1 - keras.ops.cast(step, "float32") / self.total)

    def get_config(self):
        return {"initial_learning_rate": self.rate, "total": self.total}
"""}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_schedule(framework, mine, tmp_path, monkeypatch):
    """Its length follows from the run, and one that was made for a shorter run is refused at a resume."""
    monkeypatch.setattr(run_length, "KINDS", dict(run_length.KINDS))
    mine.write_text(FALL[framework] + '\n\nKINDS["Fall"] = ScheduleKind(ends=("total",), fills=True)\n')
    asked = ScheduleConfig(f"{mine}:Fall")
    setting = config(global_batch=8, max_steps=3, out=str(tmp_path / "run"), schedule=asked)
    run = solo(setting, make_model(framework), samples(24))
    assert run.parts.optimizer.learning_rate() == pytest.approx(setting.lr)
    assert fitted(run).parts.optimizer.learning_rate() == 0 and "Fall" in run.parts.describe()["schedule"]
    short = replace(asked, args={"total": 3})
    before, now = (run_length.kept(short, steps) for steps in (3, 6))
    with pytest.raises(UserError, match="Fall ends after 3"):
        run_length.check_resumed(before, short, now)


def test_a_metric(mine, tmp_path, monkeypatch):
    """`early_stop` knows whether larger is better, as the metric says; of an unknown one that smaller is."""
    names = ("accuracy", "head_accuracy", "auc_1", "mean_io_u", "inaccuracy")
    assert [pairs.metric_of(name).better for name in names] == ["max"] * 4 + ["min"]
    monkeypatch.setattr(pairs, "METRICS", dict(pairs.METRICS))
    rises = "seen = []\n\n\ndef rises(outputs, targets):\n    seen.append(0)\n    return len(seen), 1\n"
    for facts, epochs in (('METRICS["rises"] = Metric("max")\n', 4), ("", 2)):
        name = mine.with_name(f"mine{epochs}.py")
        name.write_text(f"from hvdtrain.backends.pairs import METRICS, Metric\n\n{rises}\n\n{facts}")
        setting = config(global_batch=24, epochs=4, eval_every=1, out=str(tmp_path / f"{epochs}"),
                         metrics=[f"{name}:rises"], early_stop=EarlyStopConfig(f"{name}:rises", patience=1))
        run = fitted(solo(setting, make_model("torch"), (samples(24), samples(24))))
        assert run.state.cursor.epoch == epochs
        pairs.METRICS.pop("rises", None)


def test_a_tracker(mine, tmp_path):
    """The one that docs/how-to/trackers.md shows."""
    page = (ROOT.parent / "docs" / "how-to" / "trackers.md").read_text()
    mine.write_text(page.partition("```python\n")[2].partition("```")[0])
    trained(tmp_path / "run", trackers=[f"{mine}:Lines"], log_every=3)
    names = [line.split()[:2] for line in (tmp_path / "run" / "lines.txt").read_text().splitlines()]
    assert ["3", "train/loss"] in names and ["6", "train/loss"] in names and ["4", "train/loss"] not in names


def test_a_way_to_keep_copies_alike(mine, tmp_path):
    ranks = trained(tmp_path / "run", data_parallel=f"{mine}:local_sgd")
    assert any(note.endswith("ranks train apart between two meetings") for note in ranks[0][1]) and same(ranks)
    plain = trained(tmp_path / "plain")[0][0]
    assert apart(ranks[0][0], plain) < 1e-12, "with plain SGD a step apart is a step together"
    seldom = trained(tmp_path / "seldom", data_parallel=f"{mine}:seldom")
    assert same(seldom) and apart(seldom[0][0], plain) > 1e-9


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_an_update_of_ones_own_sees_the_gradients(framework, mine, tmp_path):
    """Also of one rank in TensorFlow, whose own update is in the graph of the gradients."""
    mine.write_text(MINE + """

from hvdtrain.parallel.data_parallel.replicate import make


class Still:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def update(self, step, grads, unused=()):
        assert len(grads) == 4
        return True, 0.0


def still(setup):
    return Still(make(setup))
""")
    model = make_model(framework)
    setting = config(global_batch=8, max_steps=2, out=str(tmp_path / "run"), data_parallel=f"{mine}:still")
    run = solo(setting, model, samples(24))
    before = weights(run)
    fitted(run)
    assert all(np.array_equal(a, b) for a, b in zip(weights(run), before))


def test_what_is_not_finite_between_two_meetings_is_told_at_the_next(mine, tmp_path):
    x, y = samples(24)
    x[9] = np.nan
    told = []

    def work(run):
        with contextlib.suppress(UserError):
            fitted(run)
        told.append((run.state.cursor.step, list(run.state.outcome.bad_ranks), run.state.stop))

    setting = config(global_batch=8, max_steps=6, out=str(tmp_path / "run"), data_parallel=f"{mine}:seldom",
                     data=DataConfig(shuffle=False, prefetch=0))
    lockstep(2, setting, lambda rank: make_model("numpy"), (x, y), work)
    short = replace(setting, max_steps=2, out=str(tmp_path / "short"))
    lockstep(2, short, lambda rank: make_model("numpy"), (x, y), work)
    assert told[2:] == [told[2]] * 2 and told[2][1] == [0, 1], "a run that ends before they meet"
    assert told[:2] == [told[0]] * 2 and told[0][0] == 2 and told[0][1] == [0], "that of step 1, at the end of step 2"


def test_a_name_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="data_parallel is 'replicat'; expected .*replicate"):
        trained(tmp_path / "run", data_parallel="replicat")
