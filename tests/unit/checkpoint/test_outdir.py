"""The run's directory: a new one each time, never overwritten, whole records."""

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from hvdtrain import Trainer
from hvdtrain.checkpoint import run_directory as outdir
from hvdtrain.cluster.control import SoloControl, agreed
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.commands.train import parse
from hvdtrain.config import Config, DataConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.engine.run import Run
from hvdtrain.engine.run_parts import RunSetup, RunState, Services


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(config=Config(), name="torch_models.cnn:build", control=None, step=0):
    """Return a run of this configuration and model that has nothing but what a directory needs."""
    control = control or SoloControl("here")
    return Run(RunSetup(config, None, None, SimpleNamespace(name=name), None, None, None), Services(control, None),
               RunState(cursor=Cursor(step=step)))


def choose(*args, **kwargs):
    """Return the directory that a run gets, from the current one."""
    path = outdir.ensure_out(make_run(*args, **kwargs))
    assert path.is_absolute()
    return path.relative_to(Path.cwd())


def begun(*args, **kwargs):
    """Return a run that has begun."""
    run = make_run(*args, **kwargs)
    with outdir.starting(run):
        assert not run.begun and run.out.is_dir()
    return run


def files(root=Path()):
    """Every file below the current directory, with its content."""
    return {path: path.read_text() if path.is_file() else None for path in sorted(root.rglob("*"))}


def test_numbers_go_up():
    assert [str(choose()) for _ in range(3)] == [
        "runs/torch_models.cnn-001",
        "runs/torch_models.cnn-002",
        "runs/torch_models.cnn-003",
    ]
    Path("runs/torch_models.cnn-041").mkdir()
    Path("runs/torch_models.cnn-099x").mkdir()
    Path("runs/torch_models.cnn-extra-100").mkdir()
    assert str(choose()) == "runs/torch_models.cnn-042"


@pytest.mark.parametrize(
    "name, stem",
    [
        ("torch_models.cnn:build", "torch_models.cnn"),
        ("/far/away/my net.py:build", "my-net"),
        ("Sequential", "Sequential"),
        ("a/b[c]*?.py:x", "b-c"),
        ("..:x", "run"),
        ("", "run"),
        ("ünï:x", "n"),
    ],
)
def test_the_name_comes_from_the_model(name, stem):
    path = choose(name=name)
    assert path == Path("runs") / f"{stem}-001" and path.is_dir()
    assert choose(name=name).name == f"{stem}-002"


def test_resume_auto_takes_the_newest_of_that_model():
    first = choose()
    second, other = choose(), choose(name="other:build")
    assert choose(Config(resume="auto")) == second
    assert choose(Config(resume="auto"), name="other:build") == other
    assert choose(Config(resume="auto"), name="third:build") == Path("runs/third-001")
    assert choose(Config(resume=str(first))) == Path("runs/torch_models.cnn-003")


def test_a_given_directory_is_made_with_its_parents():
    path = begun(Config(out="deep/er/run")).out
    assert path == Path("deep/er/run").absolute() and (path / "config.yaml").is_file()


def test_the_current_directory_may_hold_a_run():
    run = begun(Config(out="."))
    assert run.out == Path.cwd() and outdir.ensure_out(run) == Path.cwd() and Path("config.yaml").is_file()


@pytest.mark.parametrize("trace", ["log.jsonl", "checkpoints", "completed.json"])
def test_a_directory_that_holds_a_run_is_refused_unless_resumed(trace):
    path = Path("mine")
    path.mkdir()
    (path / "notes.txt").write_text("kept")
    choose(Config(out="mine"))  # another file of the user's does not matter
    (path / trace).mkdir() if trace == "checkpoints" else (path / trace).write_text("old")
    with pytest.raises(UserError, match="mine already holds a run; .*--resume auto"):
        choose(Config(out="mine"))
    before = files()
    assert choose(Config(out="mine", resume="auto")) == path
    assert files() == before
    begun(Config(out="mine", resume="auto"))
    assert (path / trace).exists() == (trace != "completed.json")  # a run under way is not complete
    assert (path / "notes.txt").read_text() == "kept"


def test_the_configuration_is_kept_as_a_recipe():
    config = Config(
        lr=1e-5,
        model_args={"width": 3, "text": "1e-3", "when": "2020-01-01"},
        data=DataConfig(args={"seed": None}),
        shares=[2.0, 1.0],
    )
    path = begun(config).out
    assert parse(["--config", str(path / "config.yaml")], {}) == config
    assert stat.S_IMODE(os.stat(path / "config.yaml").st_mode) == 0o644


def test_objects_of_a_library_user_are_kept_as_text():
    assert "<object object" in (begun(Config(model_args={"a": object()})).out / "config.yaml").read_text()


def test_a_place_that_cannot_be_written_is_the_users_mistake():
    Path("file").write_text("")
    for out in ("file", "file/below", "x" * 300):
        with pytest.raises(
            UserError, match="the run's directory cannot be made.*choose another --out|Choose another --out"
        ):
            choose(Config(out=out))


def test_all_ranks_get_the_one_that_rank_0_made():
    def work(control, wire):
        return choose(control=control)

    assert LockstepWorld(3).run(work) == [Path("runs/torch_models.cnn-001")] * 3
    assert [p.name for p in Path("runs").iterdir()] == ["torch_models.cnn-001"]


def test_a_refusal_reaches_all_ranks():
    Path("file").write_text("")

    def work(control, wire):
        with pytest.raises(UserError, match="rank 0 on host lockstep: the run's directory cannot be made"):
            choose(Config(out="file"), control=control)
        return True

    assert LockstepWorld(2).run(work) == [True, True]


@pytest.mark.parametrize("out", ["", "a/b"])
def test_a_run_that_is_refused_gives_back_what_it_made(out):
    run = make_run(Config(out=out))
    with pytest.raises(UserError, match="no such thing"), outdir.starting(run):
        assert run.out.is_dir()
        raise UserError("no such thing")
    assert files() == {} and run.out == Path() and not run.begun
    assert begun(Config(out=out)).out.is_dir(), "the same directory serves the next run"


def test_a_refused_run_leaves_what_is_not_its_own():
    Path("mine").mkdir()
    for config in (Config(out="mine"), Config(out="other/run")):
        with pytest.raises(UserError), outdir.starting(make_run(config)):
            Path("other").mkdir(exist_ok=True)
            Path("other/notes.txt").write_text("a neighbour's")
            raise UserError("refused")
    assert sorted(map(str, files())) == ["mine", "other", "other/notes.txt"]


def test_ranks_agree_before_anything_changes(tmp_path):
    Path("mine").mkdir()
    Path("mine/completed.json").write_text("{}")
    Path("mine/config.yaml").write_text("lr: 1\n")
    before = files()

    def work(control, wire):
        run = make_run(Config(out="mine", resume="auto"), control=control)

        def fails():
            if control.rank == 1:
                raise UserError("refused by one")

        with pytest.raises(UserError, match="rank 1 on host lockstep: refused by one"), outdir.starting(run):
            agreed(control, fails, "the test")
        return run.begun

    assert LockstepWorld(2).run(work) == [False, False] and files() == before


def test_a_finished_run_with_nothing_left_to_train_stays_as_it_is(capsys):
    first = begun(Config(out="mine", epochs=2))
    outdir.write_completed(first.out, {"steps": 3})
    outdir.release(first)
    before = files()

    def work(control, wire):
        run = make_run(Config(out="mine", epochs=2, lr=7.0, resume="auto"), control=control)
        run.state.cursor = Cursor(epoch=2, step=3)
        with outdir.starting(run):
            pass
        return run.begun

    assert LockstepWorld(2).run(work) == [False, False] and files() == before
    assert capsys.readouterr().out.count("mine holds a complete run") == 1
    cut = make_run(Config(out="mine", epochs=3, resume="auto"))
    cut.state.stop, cut.state.requeue = "requeue: SIGTERM (rank 0)", True
    with outdir.starting(cut):
        pass
    assert not cut.begun and files() == before and not cut.notes, "epoch 3 is left to train"
    more = begun(Config(out="mine", epochs=3, resume="auto"))
    assert more.begun and not Path("mine/completed.json").exists()


def test_a_directory_in_which_another_job_trains_is_refused():
    first = begun(Config(out="shared"))
    before = files()
    with pytest.raises(UserError, match="another job is training in .*shared"):
        begun(Config(out="shared", resume="auto", epochs=7))
    assert files() == before
    outdir.release(first)
    assert begun(Config(out="shared", resume="auto")).begun


def test_a_run_keeps_its_directory():
    run = make_run(name="m:f")
    assert outdir.ensure_out(run) == outdir.ensure_out(run) == run.out == Path("runs/m-001").absolute()


@pytest.mark.parametrize("out", ["", "mine"])
def test_user_code_that_changes_the_directory_does_not_divide_a_run(tmp_path, out):
    """Also the default directory, data, model and callbacks that are given by relative paths, and a later resume."""
    (tmp_path / "away").mkdir()
    (tmp_path / "parts.py").write_text(
        "import os\nfrom hvdtrain.backends.numpy.model import Model\n"
        "from hvdtrain.engine.callbacks.base import Callback\n"
        "class Moves(Callback):\n"
        "    def step_end(self, run): os.chdir(%r)\n"
        "def build():\n    os.chdir(%r)\n    return Model((4, 3), 0)\n" % ((str(tmp_path / "away"),) * 2))
    np.savez("some.npz", x=np.ones((8, 4), np.float32), y=np.zeros(8, np.int64))
    config = Config(model="parts.py:build", callbacks=["parts.py:Moves"], out=out,
                    data=DataConfig("some.npz", prefetch=0),
                    epochs=1, global_batch=4, optimizer=Named("SGD"), metrics=[], progress="off", resume="auto")
    for epochs in (1, 2):
        trainer = Trainer(config, epochs=epochs)
        found = trainer.fit().out
        os.chdir(tmp_path)
        assert found == tmp_path / (out or "runs/parts-001") and list((tmp_path / "away").iterdir()) == []
        assert {p.name for p in found.iterdir()} >= {"checkpoints", "completed.json", "log.jsonl", "model"}
    assert [note for note in trainer.run.notes if note.startswith("resumed at step 2")]


def test_two_jobs_at_once_get_different_directories(monkeypatch):
    """Another job makes the directory between the look and the making."""
    usual, raced = Path.mkdir, []

    def mkdir(self, *args, **kwargs):
        if self.name == "m-001" and not raced:
            raced.append(self)
            usual(self, parents=True)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert choose(name="m:f") == Path("runs/m-002") and raced


def test_the_completion_record_is_whole():
    path = begun().out
    outdir.write_completed(path, {"steps": 3, "where": Path("x")})
    assert json.loads((path / "completed.json").read_text()) == {"steps": 3, "where": "x"}
    outdir.write_completed(path, {"steps": 4})
    assert json.loads((path / "completed.json").read_text()) == {"steps": 4}
    assert sorted(p.name for p in path.iterdir()) == ["completed.json", "config.yaml"]


def test_a_record_that_cannot_be_written_leaves_the_old_one_and_no_litter(monkeypatch):
    path = begun().out
    outdir.write_completed(path, {"steps": 3})

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outdir.os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        outdir.write_completed(path, {"steps": 4})
    assert json.loads((path / "completed.json").read_text()) == {"steps": 3}
    assert sorted(p.name for p in path.iterdir()) == ["completed.json", "config.yaml"]


@pytest.mark.parametrize("number, kind", [(errno.ENOSPC, "disk"), (errno.EDQUOT, "disk"), (errno.EACCES, "user")])
def test_a_full_disk_is_no_mistake_that_ends_a_supervision(tmp_path, monkeypatch, number, kind):
    def full(*args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UserError, match="cannot be made") as caught:
        outdir.choose(Config(out=str(tmp_path / "new")), "cnn")
    assert caught.value.kind == kind


def test_a_run_directory_opens_what_a_run_leaves(tmp_path):
    empty = outdir.RunDirectory(tmp_path)
    assert empty.completed is None and empty.config == {}
    (tmp_path / "completed.json").write_text("{torn")
    assert empty.completed == {}
    (tmp_path / "completed.json").write_text('{"steps": 2}')
    (tmp_path / "config.yaml").write_text("lr: 0.5\n")
    assert empty.completed == {"steps": 2} and empty.config == {"lr": 0.5}
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model" / "model.safetensors")
    assert empty.model()["w"].tolist() == [1, 1, 1] and empty.roots == (tmp_path, tmp_path / "checkpoints")
