"""The scripts of docs/migrate: before and after, run as their pages say, on two ranks where there are ranks."""

from __future__ import annotations

import difflib
import re
import shutil
import sys
from pathlib import Path

import pytest
from runner import ROOT, mpirun, run

DOCS = ROOT / "docs" / "migrate"
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
    found = re.findall(r"^(?:accuracy|\W*test accuracy)\W+([01]\.\d+)", job.stdout, re.M)
    assert found, job.text
    return float(found[-1])


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
    job = mpirun(2, [script("horovod_keras/before.py")], 100)
    assert job.returncode != 0 and "has no attribute 'get_value'" in job.text, job.text


def test_the_tf_distribute_script_as_it_was_trains_on_one_worker():
    assert accuracy(run([sys.executable, script("tf_distribute/before.py")], 100)) >= LEAST


@pytest.mark.parametrize("name", ["horovod_tape", "tf_distribute", "ddp", "accelerate", "data_parallel"])
def test_a_script_that_moved_trains_on_two_ranks(name):
    assert accuracy(mpirun(2, [script(f"{name}/after.py")], 100)) >= LEAST


def test_the_ddp_script_as_it_was():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert accuracy(run([*torchrun, script("ddp/before.py")], 100), gloo=True) >= LEAST


def test_the_accelerate_script_as_it_was():
    pytest.importorskip("accelerate", reason="accelerate is not installed (requirements/bench.txt)")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines",
              "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    assert accuracy(run([*launch, script("accelerate/before.py")], 100), gloo=True) >= LEAST


def test_the_data_parallel_script_as_it_was():
    assert accuracy(run([sys.executable, script("data_parallel/before.py")], 60)) >= LEAST
