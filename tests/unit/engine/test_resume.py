"""``resume`` before the first step: what is read, what is refused, and that a directory stays as it is until then."""

from dataclasses import replace

import first_checkpoint
import pytest
from small_runs import CLASSES, FEATURES, FRAMEWORKS, config, fitted, make_model, samples, solo, weights

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import CheckpointConfig, DataConfig, EarlyStopConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.trainer import Trainer

DATA = samples(40)


def settings(out, **changes):
    """Two epochs of five steps, and a checkpoint at the end."""
    return config(**{"out": str(out), "epochs": 2, "global_batch": 8, "checkpoint": CheckpointConfig(), **changes})


def tree(root):
    """Every file below ``root``: its bytes and when it was changed."""
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """``finished(framework)``: the directory of a run that is complete, made once; tests leave it as it is."""
    made = {}

    def get(framework):
        if framework not in made:
            made[framework] = tmp_path_factory.mktemp("finished") / framework
            Trainer(settings(made[framework])).fit(make_model(framework), DATA)
            assert (made[framework] / "completed.json").exists()
        return made[framework]

    return get


class Refuses(Callback):
    """Refuses the run at its start."""

    def fit_start(self, run):
        raise UserError("this run is refused", "another", "do something else")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("what", ["another model", "a metric without data to measure", "a callback"])
def test_a_refused_resume_changes_nothing(finished, framework, what):
    out = finished(framework)
    before, more = tree(out), {}
    again, model = settings(out, resume="auto", epochs=3, lr=5.0), make_model(framework)
    if what == "another model":
        model = other_model(framework)
    elif what == "a callback":
        more = {"callbacks": [Refuses()]}
    else:
        again = replace(again, early_stop=EarlyStopConfig("accuracy"))
    with pytest.raises(UserError):
        Trainer(again).fit(model, DATA, **more)
    assert tree(out) == before


def other_model(framework):
    """Return a model that the checkpoints do not fit."""
    if framework == "torch":
        import torch

        return torch.nn.Linear(12, 5)
    import keras

    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_finished_run_with_nothing_left_says_so_and_stays(finished, framework, capsys):
    out = finished(framework)
    before = tree(out)
    result = Trainer(settings(out, resume="auto", lr=5.0)).fit(make_model(framework), (DATA, DATA))
    assert tree(out) == before
    assert result.steps == 10 and result.out == out and set(result.metrics) == {"loss", "accuracy"}
    assert f"nothing is left to train: {out} holds a complete run" in capsys.readouterr().out


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_evaluating_a_finished_run_leaves_it_as_it_is(finished, framework):
    out = finished(framework)
    before = tree(out)
    trainer = Trainer(settings(out, resume="auto"))
    trainer.evaluate(model=make_model(framework), data=(DATA, DATA))
    assert tree(out) == before and trainer.run.state.cursor.step == 10


def test_a_finished_run_goes_on_with_more_epochs(tmp_path):
    Trainer(settings(tmp_path / "run")).fit(make_model("numpy"), DATA)
    result = Trainer(settings(tmp_path / "run", resume="auto", epochs=3)).fit(make_model("numpy"), DATA)
    assert result.steps == 15 and '"steps": 15' in (tmp_path / "run/completed.json").read_text()


def test_a_run_that_was_killed_after_its_last_step_is_completed(tmp_path):
    Trainer(settings(tmp_path / "run")).fit(make_model("numpy"), DATA)
    (tmp_path / "run/completed.json").unlink()
    result = Trainer(settings(tmp_path / "run", resume="auto")).fit(make_model("numpy"), DATA)
    assert result.steps == 10 and (tmp_path / "run/completed.json").exists()


def test_a_finished_run_without_checkpoint_is_not_trained_over(tmp_path):
    quiet = settings(tmp_path / "run", checkpoint=CheckpointConfig(at_end=False))
    Trainer(quiet).fit(make_model("numpy"), DATA)
    before = tree(tmp_path)
    with pytest.raises(UserError, match="complete and has no checkpoint to resume from.*[Ll]eave out --resume"):
        Trainer(replace(quiet, resume="auto")).fit(make_model("numpy"), DATA)
    assert tree(tmp_path) == before


def test_a_new_run_that_is_refused_leaves_no_directory(tmp_path):
    with pytest.raises(UserError, match="refused"):
        Trainer(settings(tmp_path / "a" / "b")).fit(make_model("numpy"), DATA, callbacks=[Refuses()])
    assert list(tmp_path.iterdir()) == []


def test_a_saved_state_has_its_configuration_beside_it_and_stays(tmp_path):
    trainer = Trainer(settings(tmp_path / "run", early_stop=EarlyStopConfig("accuracy")))
    trainer._assembled(make_model("numpy"), DATA)
    trainer.save()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoints", "config.yaml"]
    with pytest.raises(UserError, match="there is no evaluation data"):
        trainer.fit()
    assert trainer.save() == tmp_path / "run" / "checkpoints"


# --- checkpoints that are damaged, or of an earlier release --------------------------------------------------------

@pytest.mark.parametrize("by_path", [False, True])
def test_all_checkpoints_damaged_is_an_error_that_names_them(tmp_path, by_path):
    out = tmp_path / "run"
    every = settings(out, checkpoint=CheckpointConfig(every_steps=4))
    Trainer(every).fit(make_model("numpy"), DATA)
    (out / "completed.json").unlink()
    for path in (out / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = tree(out)

    def rank(control, wire):
        with pytest.raises(UserError) as refused:
            assemble(replace(every, resume=str(out) if by_path else "auto"), make_model("numpy"), DATA, control, wire)
        return str(refused.value)

    first, second = LockstepWorld(2).run(rank, timeout_s=30.0)
    assert first == second and "are damaged: step-00000004, step-00000008, step-00000010;" in first
    assert "Leave out --resume to start from scratch" in first and tree(out) == before


def test_no_checkpoint_yet_starts_anew(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert Trainer(settings(tmp_path / "run", resume="auto")).fit(make_model("numpy"), DATA).steps == 10
    assert "no checkpoint yet, starting from scratch" in capsys.readouterr().out


class Counts(Callback):
    """Keeps a number over a resume; ``seen`` is what a checkpoint gave back."""

    where = "all"

    def __init__(self, number):
        self.number, self.seen = number, None

    def state_dict(self):
        return {"number": self.number} if self.number else {}

    def load_state_dict(self, state):
        self.seen = state["number"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_callback_of_a_class_gets_its_own_state_back(tmp_path, framework):
    own = [Counts(3), Counts(0), Counts(5), Counts(7)]
    Trainer(settings(tmp_path)).fit(make_model(framework), DATA, callbacks=own)
    again = [Counts(1) for _ in own]
    Trainer(settings(tmp_path, resume="auto", epochs=3)).fit(make_model(framework), DATA, callbacks=again)
    assert [c.seen for c in again] == [3, None, 5, 7]


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_a_first_checkpoint_is_read(tmp_path, framework):
    momentum = {} if framework == "numpy" else {"momentum": 0.9}
    path = first_checkpoint.write(tmp_path, framework)
    run = solo(settings(tmp_path, resume="auto", optimizer=Named("SGD", momentum),
                        early_stop=EarlyStopConfig("accuracy", mode="max")), make_model(framework), (DATA, DATA))
    assert (run.state.cursor.step, run.state.cursor.epoch) == (5, 1)
    want = [array for _, array in sorted(first_checkpoint.model(framework).items())]
    assert all((a == b).all() for a, b in zip(weights(run), want, strict=True))
    stop = next(c for c in run.callbacks if type(c).__name__ == "EarlyStop")
    assert (stop.best, stop.waited) == (0.425, 3)
    fitted(run)
    assert run.state.cursor.step == 10 and path.is_dir()


def test_the_one_state_of_a_first_checkpoint_goes_to_the_last_of_a_class(tmp_path, capsys):
    first_checkpoint.write(tmp_path, "numpy", {"Counts": {"number": 4}})
    own = [Counts(0), Counts(0)]
    Trainer(settings(tmp_path, resume="auto")).fit(make_model("numpy"), DATA, callbacks=own)
    assert [c.seen for c in own] == [None, 4]
    assert "one state for 2 callbacks Counts: the last one gets it" in capsys.readouterr().out


def masked(framework):
    """Return a model with infinities in what is not trained, as an attention mask has."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES))
        model.register_buffer("mask", torch.full((2, 2), -torch.inf))
        return model
    pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")

    class Masked(keras.layers.Layer):
        def build(self, shape):
            self.mask = self.add_weight(shape=(2, 2), initializer=keras.initializers.Constant(-float("inf")),
                                        trainable=False)

        def call(self, x):
            return x

    return keras.Sequential([keras.Input((FEATURES,)), Masked(), keras.layers.Dense(CLASSES)])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_model_with_an_infinite_mask_is_saved_exported_and_resumed(framework, tmp_path):
    first = Trainer(settings(tmp_path, epochs=1)).fit(masked(framework), DATA)
    assert (tmp_path / "model").is_dir() and first.steps == 5
    assert Trainer(settings(tmp_path, resume="auto")).fit(masked(framework), DATA).steps == 10


def test_settings_that_are_newer_than_a_checkpoint_were_at_their_defaults(tmp_path):
    """Nor is a word said of those that leave the curve alone."""
    first_checkpoint.write(tmp_path, "numpy")
    same = settings(tmp_path, resume="auto", data=DataConfig(), optimizer=Named("SGD", {"momentum": 0.9}), audit=3,
                    check_every=7, time_limit="01:00:00")
    told = [note for note in solo(same, make_model("numpy"), DATA).notes if "changed settings" in note]
    assert told == []
    other = solo(replace(same, eval_every=1, clip_norm=3.0), make_model("numpy"), DATA)
    assert "resumed with changed settings: clip_norm 0.0 -> 3.0" in other.notes
