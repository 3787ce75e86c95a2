"""Whole training jobs as a user starts them: the recipe, a file of one's own, and mistakes (scripts: test_readme)."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import pytest
from runner import mpirun, run

WORK = Path(__file__).with_name("workloads.py")
TRAIN = ["-m", "hvdtrain", "train", "--progress", "off", "--checkpoint.at_end", "false"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def need(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


def completed(job, out):
    """Return the completion record of a job that ended well."""
    assert job.returncode == 0, job.text
    assert not job.orphans
    return json.loads((out / "completed.json").read_text())


def test_the_built_in_recipe_learns_digits(tmp_path):
    """No arguments: the CNN on scikit-learn's digits, in one process."""
    need("torch")
    out = tmp_path / "run"
    job = run([sys.executable, "-m", "hvdtrain"], 120, {"HVDTRAIN_OUT": str(out)})
    record = completed(job, out)
    assert record["metrics"]["accuracy"] >= 0.97
    assert record["ranks"] == 1 and record["framework"] == "torch"
    for row in ("framework", "ranks", "transport", "global batch", "steps", "speed", "train loss", "test accuracy",
                "time a step"):
        assert re.search(rf"^\W*{row}\b", job.stdout, re.MULTILINE), f"the summary lacks {row}:\n{job.stdout}"
    for phase in ("data", "compute", "wait", "update"):
        assert f"{phase} " in job.stdout
    assert (out / "model" / "model.safetensors").stat().st_size > 1000 and (out / "model" / "model.pt").exists()
    assert any((out / "checkpoints").iterdir())


OWN = """
import torch
from sizes import WIDTH


class Net(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.inner = torch.nn.Linear(64, WIDTH, bias=bias)
        self.outer = torch.nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x.flatten(1))))


def make(bias=True):
    return Net(bias)


def task(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))


def metrics(model, batch):
    return {"right": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""


def test_a_users_own_file_with_its_task_and_metrics(tmp_path):
    need("torch")
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "sizes.py").write_text("WIDTH = 7\n")
    out = tmp_path / "run"
    job = mpirun(2, [*TRAIN, "--model", f"{tmp_path / 'mine.py'}:make", "--model_args.bias", "false",
                     "--data.name", "synthetic", "--data.args.samples", "50", "--global_batch", "9", "--epochs", "3",
                     "--out", str(out)], 90)
    record = completed(job, out)
    assert record["steps"] == 18 and set(record["metrics"]) == {"loss", "right"}
    from safetensors.numpy import load_file

    shapes = {name: array.shape for name, array in load_file(str(out / "model" / "model.safetensors")).items()}
    assert shapes == {"inner.weight": (7, 64), "outer.weight": (10, 7), "outer.bias": (10,)}


MISTAKES = {
    "unknown model": (["--model", "torch_models.cnn:bild"], "'build'"),
    "unknown module": (["--model", "no_such_module:build"], "no_such_module"),
    "unknown option": (["--global_bach", "8"], "global_batch"),
    "unreadable file": (["--data.name", "{npz}"], "cannot be read"),
    "shares": (["--shares", "[1, 2, 3]"], "shares has 3 entries for 2 ranks"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_message_and_status_2(what, tmp_path):
    need("torch")
    npz = tmp_path / "data.npz"
    npz.write_bytes(b"this is no archive")
    arguments, text = MISTAKES[what]
    job = mpirun(2, [*TRAIN, "--out", str(tmp_path / "run"), *[a.format(npz=npz) for a in arguments]], 60)
    assert job.returncode == 2, job
    assert "Traceback" not in job.text and not job.orphans
    assert job.stderr.count("hvdtrain: ") == 1 and text in job.stderr, job.stderr
    assert not (tmp_path / "run" / "completed.json").exists()


def test_a_mistake_in_a_library_script_is_one_message_and_status_2(tmp_path):
    (tmp_path / "script.py").write_text("from hvdtrain import Config, Trainer\nTrainer(Config(epochs=-3)).fit()\n")
    job = mpirun(2, [str(tmp_path / "script.py")], 60)
    assert job.returncode == 2 and "Traceback" not in job.text and not job.orphans, job
    assert job.stderr.count("hvdtrain: ") == 1 and "epochs is -3" in job.stderr, job.stderr


def test_an_exception_in_a_users_model_on_one_rank(tmp_path):
    need("torch")
    marker = tmp_path / "raised-at"
    job = mpirun(2, [*TRAIN, "--model", f"{WORK}:torch_breaks", "--model_args.rank", "1",
                     "--model_args.marker", str(marker), "--data.name", f"{WORK}:data",
                     "--global_batch", "8", "--out", str(tmp_path / "run")], 60)
    took_s = time.time() - float(marker.read_text())
    assert job.returncode not in (0, None), job
    assert took_s < 15.0, f"the job ended {took_s:.1f} s after the exception"
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert re.findall(r"rank (\d+) on host \S+ failed and ends the job", job.stderr) == ["1"]
    assert job.stderr.count("RuntimeError: the third forward is broken") == 1
    assert not job.orphans and not (tmp_path / "run" / "completed.json").exists()


@pytest.mark.parametrize("norm, status, said", [("group", 0, r"\n +2 +equal .* same (bits|results)\n"),
                                                ("batch", 1, r"(?s)note: not independent.*BatchNorm.*beyond 1e-05\n")],
                         ids=["group", "batch"])
def test_verify_tells_whether_a_model_follows_law_2(norm, status, said):
    """BatchNorm over a rank's own samples is the named exception: the command must see it."""
    need("torch")
    job = run([sys.executable, "-m", "hvdtrain", "verify", "--np", "1,2", "--no-uneven", "--steps", "6",
               "--model", "torch_models.cnn:build", "--model_args.norm", norm, "--model_args.channels", "[8, 8]",
               "--data.name", "synthetic", "--data.args.samples", "40", "--global_batch", "13"], 120)
    assert job.returncode == status, job
    assert re.search(said, job.stdout), job.text
    assert not job.orphans


@pytest.mark.parametrize("ranks, model, limit", [(2, "torch_models.cnn:build", "2"), (1, "tf_models.cnn:build", "1")])
def test_a_time_limit_shorter_than_the_start_is_refused(tmp_path, ranks, model, limit):
    """Of 2 s two ranks keep 2.3 free for MPI's end, on any machine; importing TensorFlow takes over 1 s."""
    words = ["-m", "hvdtrain", "train", "--model", model, "--time_limit", limit, "--out", str(tmp_path / "out")]
    job = mpirun(ranks, words) if ranks > 1 else run([sys.executable, *words])
    assert job.returncode == 2 and not (tmp_path / "out").exists(), job.text
    assert job.text.count(f"a time limit of {limit} s, of which the start took") == 1, job.text
    assert "Traceback" not in job.text
