"""Keras models split over logical CPU devices, which have to be made before TensorFlow starts: two children.

`device_split_cases` is one process with two devices, `device_split_hybrid` two ranks with two devices each.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from runner import mpirun, run

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def tensorflow():
    if importlib.util.find_spec("tensorflow") is None:  # this process itself needs none
        pytest.skip("TensorFlow is not installed")


def test_one_process_with_two_devices(tmp_path):
    job = run([sys.executable, str(HERE / "device_split_cases.py"), str(tmp_path)], timeout_s=280)
    assert job.returncode == 0, job.text
    files = (HERE / name for name in ("device_split_cases.py", "device_split_refusals.py"))
    cases = [case for file in files for case in re.findall(r"^def (case_\w+)", file.read_text(), re.MULTILINE)]
    assert re.findall(r"^passed (case_\w+)", job.stdout, re.MULTILINE) == cases


def test_two_ranks_with_two_devices_each(tmp_path):
    job = mpirun(2, [str(HERE / "device_split_hybrid.py"), str(tmp_path)], timeout_s=280)
    assert (job.returncode, job.orphans) == (0, []), job.text
    told = re.findall(r"equal over (\w+) with (\w+)", job.stdout)
    assert [compression for _, compression in told] == ["none", "int8", "bf16"] and told[2][0] == "mpi", job.text
