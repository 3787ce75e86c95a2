"""The run's directory: a new one each time, never overwritten, whole records."""

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain import outdir
from hvdtrain.cli.train import parse
from hvdtrain.cluster.control import SoloControl
from hvdtrain.collectives.lockstep import LockstepWorld
from hvdtrain.config import Config, Data
from hvdtrain.errors import UserError


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def choose(config=Config(), name="torch_models.cnn:build", control=None):
    """The directory that a run of this configuration and model gets."""
    run = SimpleNamespace(
        config=config, spec=SimpleNamespace(name=name), control=control or SoloControl("here"), out=Path()
    )
    return outdir.ensure_out(run)


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
    path = choose(Config(out="deep/er/run"))
    assert path == Path("deep/er/run") and (path / "config.yaml").is_file()


@pytest.mark.parametrize("trace", ["log.jsonl", "checkpoints", "completed.json"])
def test_a_directory_that_holds_a_run_is_refused_unless_resumed(trace):
    path = Path("mine")
    path.mkdir()
    (path / "notes.txt").write_text("kept")
    choose(Config(out="mine"))  # another file of the user's does not matter
    (path / trace).mkdir() if trace == "checkpoints" else (path / trace).write_text("old")
    with pytest.raises(UserError, match="mine holds a run already; .*--resume auto"):
        choose(Config(out="mine"))
    assert choose(Config(out="mine", resume="auto")) == path
    assert (path / trace).exists() == (trace != "completed.json")  # a run under way is not complete
    assert (path / "notes.txt").read_text() == "kept"


def test_the_configuration_is_kept_as_a_recipe():
    config = Config(
        lr=1e-5,
        model_args={"width": 3, "text": "1e-3", "when": "2020-01-01"},
        data=Data(args={"seed": None}),
        shares=[2.0, 1.0],
    )
    path = choose(config)
    assert parse(["--config", str(path / "config.yaml")], {}) == config
    assert stat.S_IMODE(os.stat(path / "config.yaml").st_mode) == 0o644


def test_objects_of_a_library_user_are_kept_as_text():
    assert "<object object" in (choose(Config(model_args={"a": object()})) / "config.yaml").read_text()


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


def test_a_run_keeps_its_directory():
    run = SimpleNamespace(config=Config(), spec=SimpleNamespace(name="m:f"), control=SoloControl("here"), out=Path())
    assert outdir.ensure_out(run) == outdir.ensure_out(run) == run.out == Path("runs/m-001")


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
    path = choose()
    outdir.write_completed(path, {"steps": 3, "where": Path("x")})
    assert json.loads((path / "completed.json").read_text()) == {"steps": 3, "where": "x"}
    outdir.write_completed(path, {"steps": 4})
    assert json.loads((path / "completed.json").read_text()) == {"steps": 4}
    assert sorted(p.name for p in path.iterdir()) == ["completed.json", "config.yaml"]


def test_a_record_that_cannot_be_written_leaves_the_old_one_and_no_litter(monkeypatch):
    path = choose()
    outdir.write_completed(path, {"steps": 3})

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outdir.os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        outdir.write_completed(path, {"steps": 4})
    assert json.loads((path / "completed.json").read_text()) == {"steps": 3}
    assert sorted(p.name for p in path.iterdir()) == ["completed.json", "config.yaml"]
