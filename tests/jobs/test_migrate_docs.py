"""The scripts of docs/migrate: before and after, run as their pages say, on two ranks where there are ranks."""

from __future__ import annotations

import difflib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from runner import ROOT, mpirun, run

from hvdtrain.commands.migrate.cli import main as migrate

DOCS = ROOT / "docs" / "how-to" / "migrate"
LEAST = 0.9
"""The scripts draw their weights without a seed: most runs reach 0.96, one in hundreds stays below 0.95."""


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    """Run each test in a directory of its own."""
    monkeypatch.chdir(tmp_path)


AT_THE_END = "terminate called without an active exception"
"""How PyTorch 2.13 aborts now and then as a gloo process group ends, after all of a script's own work."""


def accuracy(job, gloo: bool = False) -> float:
    """Return the accuracy that a script printed, or a run's table has; ``gloo``: a script on torch's own transport."""
    assert job.returncode == 0 or gloo and AT_THE_END in job.text, job.text
    found = accuracies(job)
    assert found, job.text
    return min(found)


def accuracies(job) -> list[float]:
    """Return all accuracies that a job printed."""
    return [float(text) for text in re.findall(r"^(?:accuracy|\W*test accuracy)\W+([01]\.\d+)", job.stdout, re.M)]


def script(name: str) -> str:
    return str(DOCS / name)


def test_a_horovod_keras_script_changes_its_import_and_nothing_else():
    before, after = ((DOCS / "horovod_keras" / name).read_text().splitlines() for name in ("before.py", "after.py"))
    code = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and "python" not in line]
    assert [line for line in code if "import" in line and "hvd" in line and "only change" not in line] == [
        "- import horovod.tensorflow.keras as hvd", "+ import hvdtrain.keras as hvd"]
    assert len(code) == 4, code  # beside these the sentence that opens the file


def test_the_horovod_keras_script_trains_under_mpirun():
    assert accuracy(mpirun(2, [script("horovod_keras/after.py")], 100)) >= LEAST


def test_the_script_in_words_of_keras_2_trains_under_horovodrun_once_it_moved():
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if horovodrun is None:
        pytest.skip("horovodrun is not beside this interpreter")
    command = [horovodrun, "-np", "2", "-H", "localhost:2", sys.executable, script("horovod_keras2/after.py")]
    job = run(command, 100)
    assert job.returncode == 0, job.text
    found = re.findall(r"accuracy (0\.\d+)", job.text)
    assert found and float(found[-1]) >= LEAST, job.text


def test_the_horovod_keras_script_as_it_was_fails_on_keras_3():
    job = mpirun(1, [script("horovod_keras/before.py")], 100)  # it fails before anything is sent
    assert job.returncode != 0 and "has no attribute 'get_value'" in job.text, job.text


def test_the_tf_distribute_script_as_it_was_trains_on_one_worker():
    assert accuracy(run([sys.executable, script("tf_distribute/before.py")], 100)) >= LEAST


@pytest.mark.parametrize("name", ["horovod_tape", "tf_distribute"])
def test_a_script_that_moved_trains_on_two_ranks(name):
    assert accuracy(mpirun(2, [script(f"{name}/after.py")], 100)) >= LEAST


IN_A_ROW = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')"


def test_the_scripts_that_moved_to_a_trainer_train_on_two_ranks():
    names = ("ddp", "accelerate", "data_parallel")
    job = mpirun(2, ["-c", IN_A_ROW, *(script(f"{name}/after.py") for name in names)], 100)
    assert accuracy(job) >= LEAST and len(accuracies(job)) == len(names), job.text


def test_the_horovod_and_ddp_loops_train_on_two_ranks_as_in_one_process(tmp_path):
    pytest.importorskip("horovod", reason="Horovod is not built")
    loop = str(tmp_path / "loop.py")
    shutil.copy(script("ddp/before.py"), loop)
    assert migrate([loop, "--write"]) == 0
    job = mpirun(2, ["-c", IN_A_ROW, script("horovod_torch/after.py"), loop], 100)
    assert accuracy(job) >= LEAST and len(accuracies(job)) == 2, job.text
    weights = torch.load("digits.pt")
    assert accuracy(mpirun(1, [script("horovod_torch/after.py")], 100)) >= LEAST
    alone = torch.load("digits.pt")
    for name in weights:
        torch.testing.assert_close(weights[name], alone[name], rtol=0, atol=1e-4)


def test_the_ddp_script_as_it_was():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    assert accuracy(run([*torchrun, script("ddp/before.py")], 100), gloo=True) >= LEAST


def test_the_accelerate_script_as_it_was():
    pytest.importorskip("accelerate", reason="accelerate is not installed (requirements/bench.txt)")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines",
              "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    assert accuracy(run([*launch, script("accelerate/before.py")], 100), gloo=True) >= LEAST


def test_the_data_parallel_script_as_it_was():
    assert accuracy(run([sys.executable, script("data_parallel/before.py")], 60)) >= LEAST
