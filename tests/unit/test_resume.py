"""``resume`` before the first step: what is read, what is refused, and that a directory stays as it is until then."""

from dataclasses import replace

import pytest
from small_runs import FRAMEWORKS, config, make_model, samples

from hvdtrain.callbacks.base import Callback
from hvdtrain.config import Checkpoint, EarlyStop
from hvdtrain.errors import UserError
from hvdtrain.trainer import Trainer

DATA = samples(40)


def settings(out, **changes):
    """Two epochs of five steps, and a checkpoint at the end."""
    return config(**{"out": str(out), "epochs": 2, "global_batch": 8, "checkpoint": Checkpoint(), **changes})


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
        again = replace(again, early_stop=EarlyStop("accuracy"))
    with pytest.raises(UserError):
        Trainer(again).fit(model, DATA, **more)
    assert tree(out) == before


def other_model(framework):
    """A model that the checkpoints do not fit."""
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
    assert f"nothing is left to train: {out} holds a run that is complete" in capsys.readouterr().out


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
    quiet = settings(tmp_path / "run", checkpoint=Checkpoint(at_end=False))
    Trainer(quiet).fit(make_model("numpy"), DATA)
    before = tree(tmp_path)
    with pytest.raises(UserError, match="complete and has no checkpoint to go on from.*[Ll]eave out --resume"):
        Trainer(replace(quiet, resume="auto")).fit(make_model("numpy"), DATA)
    assert tree(tmp_path) == before


def test_a_new_run_that_is_refused_leaves_no_directory(tmp_path):
    with pytest.raises(UserError, match="refused"):
        Trainer(settings(tmp_path / "a" / "b")).fit(make_model("numpy"), DATA, callbacks=[Refuses()])
    assert list(tmp_path.iterdir()) == []


def test_a_saved_state_has_its_configuration_beside_it(tmp_path):
    trainer = Trainer(settings(tmp_path / "run"))
    trainer.evaluate(model=make_model("numpy"), data=(DATA, DATA))
    trainer.save()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoints", "config.yaml"]
