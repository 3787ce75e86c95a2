"""`checkpoints`: what it says of whole, damaged, hidden and foreign ones, what it removes, the weights it takes out."""

import fcntl
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import config, make_model, samples

from hvdtrain import Trainer
from hvdtrain.checkpoint import CheckpointError, CheckpointStore, Snapshot, weights
from hvdtrain.checkpoint.tensors import Spec
from hvdtrain.commands import checkpoints
from hvdtrain.config import CheckpointConfig
from hvdtrain.core.errors import UserError


def snapshot(step):
    tensors = {"model": {"w": np.full((3, 2), step, np.float32)}, "optimizer": {}, "rank-0000": {"rng": np.arange(4)}}
    return Snapshot(tensors, {"framework": "torch", "world_size": 2, "layout": "gathered"})


@pytest.fixture
def run(tmp_path):
    """Return a run with checkpoints of steps 2, 4 and 6."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 9)
    for step in (2, 4, 6):
        store.save(snapshot(step), step)
    return tmp_path / "run"


def at(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path):
    """Change one bit in the middle of a file, its size as before."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def call(capsys, *argv):
    """(exit status, lines on stdout)."""
    status = checkpoints.main([str(a) for a in argv])
    return status, [line for line in capsys.readouterr().out.splitlines() if line]


def steps(run):
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*"))


def test_a_list_of_whole_ones(run, capsys):
    status, lines = call(capsys, run)
    assert status == 0 and len(lines) == 6
    assert [line.split()[0] for line in lines[3:]] == ["6", "4", "2"], "the newest first"
    assert all("gathered" in line and line.endswith(checkpoints.LISTED) for line in lines[3:])
    status, lines = call(capsys, run, "--verify")
    assert status == 0 and all(line.endswith("  complete and verified") for line in lines[3:])
    assert call(capsys, run / "checkpoints") == call(capsys, run), "its checkpoints directory means the same"


def test_a_changed_bit_is_found_by_verify_alone_and_is_status_1(run, capsys):
    flip(at(run, 6) / "model.safetensors")
    assert call(capsys, run)[0] == 0
    status, lines = call(capsys, run, "--verify")
    assert status == 1
    assert "incomplete: model.safetensors was changed" in lines[3] and lines[4].endswith("  complete and verified")


@pytest.mark.parametrize(("harm", "said"), [
    (lambda path: (path / "model.safetensors").unlink(), "incomplete: it lacks model.safetensors"),
    (lambda path: (path / "manifest.json").write_bytes(b"{}"), "incomplete: manifest.json has"),
    (lambda path: os.truncate(path / "rank-0000.safetensors", 9), "incomplete: rank-0000.safetensors is truncated"),
    (lambda path: (path / "notes.txt").write_text("mine"), "incomplete: it also holds 'notes.txt'"),
    (lambda path: (shutil.rmtree(path), path.symlink_to("/tmp")), "incomplete: it is a symbolic link"),
])
def test_what_is_wrong_is_said_without_reading_tensors(run, capsys, harm, said):
    harm(at(run, 4))
    status, lines = call(capsys, run)
    assert status == 0 and said in lines[4], lines
    assert call(capsys, run, "--verify")[0] == 1


def test_hidden_and_foreign_things_have_a_line_of_their_own(run, capsys):
    root, host = run / "checkpoints", os.uname().nodename
    own = subprocess.Popen(["sleep", "30"])
    try:
        (root / f".hvdtrain-tmp-{host}-{own.pid}-0123abcd").mkdir()
        (root / f".hvdtrain-tmp-{host}-0-0123abce").mkdir()
        at(run, 4).rename(root / f".hvdtrain-aside-{host}-0-0123abcf-step-00000004")
        (root / "notes.txt").write_text("mine")
        text = "\n".join(call(capsys, run, "--verify")[1])
    finally:
        own.kill()
        own.wait()
    assert f"being written by process {own.pid} on host {host}" in text
    assert "left over from an interrupted save" in text
    assert "moved aside by an interrupted save, and used if nothing newer exists: complete" in text
    assert "notes.txt" in text and "not written by hvdtrain" in text


def test_what_goes_away_meanwhile_is_passed_over(run, capsys, monkeypatch):
    real = checkpoints.check_listing

    def vanishing(path, manifest):
        if path == at(run, 4):
            shutil.rmtree(path)
        real(path, manifest)

    monkeypatch.setattr(checkpoints, "check_listing", vanishing)
    status, lines = call(capsys, run, "--verify")
    assert status == 0 and [line.split()[0] for line in lines[3:]] == ["6", "2"]


def test_prune_keeps_the_newest_that_are_whole_to_the_last_byte(run, capsys):
    flip(at(run, 6) / "model.safetensors")
    status, lines = call(capsys, run, "--prune", "1")
    assert status == 0 and steps(run) == [4, 6], "6 is no good one and is not ours to throw away; 2 is older than 4"
    assert lines == [f"removed {at(run, 2)}", "kept step-00000004, verified as complete"]
    assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]


def test_prune_never_removes_the_last_good_one(run, capsys):
    for step in (4, 6):
        (at(run, step) / "model.safetensors").unlink()
    _, lines = call(capsys, run, "--prune", "1")
    assert steps(run) == [2, 4, 6] and "step-00000006, step-00000004" in lines[-1]
    (at(run, 2) / "model.safetensors").unlink()
    assert call(capsys, run, "--prune", "1")[1] == ["nothing is removed: no checkpoint here is complete"]
    assert steps(run) == [2, 4, 6]


def test_prune_takes_what_was_moved_aside_for_a_whole_successor(run):
    root = run / "checkpoints"
    shutil.copytree(at(run, 6), root / ".hvdtrain-aside-host-0-0123abcf-step-00000006")
    checkpoints.main([str(run), "--prune", "2"])
    assert sorted(p.name for p in root.iterdir()) == ["step-00000004", "step-00000006"]


def test_prune_leaves_a_run_alone_that_is_training(run):
    lock = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as rank 0 of a job holds it
        with pytest.raises(UserError, match="a job is training in"):
            checkpoints.main([str(run), "--prune", "1"])
    finally:
        os.close(lock)
    assert steps(run) == [2, 4, 6]


def test_export_takes_the_newest_whole_one_or_the_one_that_is_named(run, capsys, tmp_path):
    flip(at(run, 6) / "model.safetensors")
    status, lines = call(capsys, run, "--export", tmp_path / "deep" / "weights")
    assert status == 0 and "step-00000006 is not used" in lines[0] and "1 tensor of step-00000004" in lines[1]
    file = tmp_path / "deep" / "weights" / "model.safetensors"
    assert (load_file(str(file))["w"] == 4).all() and [p.name for p in file.parent.iterdir()] == [file.name]
    call(capsys, run, "--export", tmp_path / "w.safetensors", "--step", 2)
    assert (load_file(str(tmp_path / "w.safetensors"))["w"] == 2).all()
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.main([str(run), "--export", str(tmp_path / "w.safetensors")])
    with pytest.raises(CheckpointError, match="was changed"):
        checkpoints.main([str(run), "--export", str(tmp_path / "v"), "--step", "6"])
    with pytest.raises(UserError, match="one of 2, 4, 6"):
        checkpoints.main([str(run), "--export", str(tmp_path / "v"), "--step", "5"])


@pytest.mark.parametrize("argv", [["--prune", "0"], ["--prune", "-3"], ["--verify", "--prune", "1"], ["--step", "2"],
                                  ["--verify", "--export", "x"], ["--average"]])
def test_wrong_options_are_a_mistake(run, argv):
    with pytest.raises(UserError):
        checkpoints.main([str(run), *argv])
    assert steps(run) == [2, 4, 6]


def test_a_directory_without_checkpoints_is_a_mistake(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="holds no checkpoints|there is no directory"):
            checkpoints.main([str(path)])


def test_bfloat16_is_written_as_such(tmp_path):
    bits = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2
    weights.write(Snapshot({"model": {"w#bfloat16": bits}}, {"framework": "torch"}), tmp_path / "a.safetensors")
    weights.write(Snapshot({"model": {"00000/w": bits}}, {"framework": "tensorflow"}), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from safetensors.torch import load_file as load

    found = load(str(tmp_path / "a.safetensors"))["w"]
    assert found.dtype == torch.bfloat16 and found.tolist() == [1.0, -2.0]


def test_a_path_that_comes_twice_is_told_apart_as_the_export_does():
    spec = Spec(np.dtype("float32"), (2,))
    places, _ = weights.named({f"{i:05d}/dense/kernel": spec for i in range(3)}, "tensorflow")
    assert places == {"dense/kernel": "00000/dense/kernel", "dense/kernel#1": "00001/dense/kernel",
                      "dense/kernel#2": "00002/dense/kernel"}


@pytest.mark.parametrize("framework, ema", [("torch", 0.0), ("torch", 0.9), ("tensorflow", 0.9)])
def test_the_file_is_the_one_that_the_end_of_a_training_writes(tmp_path, framework, ema):
    random.seed(3)
    model = make_model(framework)
    Trainer(config(max_steps=2, out=str(tmp_path / "run"), checkpoint=CheckpointConfig(), ema=ema)).fit(model,
                                                                                                        samples(40))
    checkpoints.main([str(tmp_path / "run"), "--export", str(tmp_path), *(["--average"] if ema else [])])
    got = load_file(str(tmp_path / "model.safetensors"))
    want = load_file(str(tmp_path / "run" / "model" / "model.safetensors"))
    assert list(got) == list(want) and all((got[n] == want[n]).all() and got[n].dtype == want[n].dtype for n in want)
    if framework == "torch":
        from safetensors.torch import load_model

        load_model(make_model("torch", seed=5), str(tmp_path / "model.safetensors"))


def test_tied_weights_have_one_average_and_what_is_not_averaged_stays(tmp_path):
    w, other, mean = np.arange(6, dtype=np.uint16), np.arange(1, 7, dtype=np.uint16), np.ones(3, np.float32)
    groups = {"model": {"a#bfloat16": w, "b#bfloat16": w, "c#bfloat16": other, "mean": mean},
              "ema": {"a": np.full(6, 2.0, np.float32)}}
    content = Snapshot(groups, {"framework": "torch"})
    weights.write(content, tmp_path / "a.safetensors", average=True)
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from safetensors.torch import load_file as load

    found = load(str(tmp_path / "a.safetensors"))
    assert found["a"].tolist() == found["b"].tolist() == [2.0] * 6 and found["a"].dtype == torch.float32
    assert found["c"].dtype == torch.bfloat16 and found["c"].view(torch.int16).tolist() == other.tolist()
    assert found["mean"].tolist() == [1.0] * 3
    with pytest.raises(CheckpointError, match="no moving average"):
        weights.write(Snapshot({"model": {"mean": mean}}, {}), tmp_path / "b.safetensors", average=True)


def test_it_imports_no_framework(run):
    code = "import sys; from hvdtrain.commands import main; main(['checkpoints', sys.argv[1], '--verify']); " \
           "sys.exit(len({'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("complete and verified") == 3, done.stderr
