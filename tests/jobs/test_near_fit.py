"""Keras' ``fit`` over shared memory as whole jobs: TensorFlow with one thread, and a rank that dies in a step."""

import importlib.util
import time
from pathlib import Path

import pytest
from runner import mpirun

from hvdtrain.cluster.horovod import horovod_reason

SCRIPT = str(Path(__file__).parent / "near_cases.py")


@pytest.fixture(autouse=True)
def tensorflow():
    if importlib.util.find_spec("tensorflow") is None or horovod_reason("tensorflow"):
        pytest.skip("needs TensorFlow and Horovod")


def test_one_thread_is_enough():
    job = mpirun(2, [SCRIPT, "20"], timeout_s=120)
    assert (job.returncode, job.orphans) == (0, []), job.text
    assert job.stdout.count("trained 20 steps") == 2


@pytest.mark.parametrize("steps, words", [("0", ""), ("-3", "rank 1 has ended, or has shut down")])
def test_a_rank_that_dies_or_has_fewer_steps_ends_the_job(steps, words):
    began = time.monotonic()
    job = mpirun(2, [SCRIPT, steps], timeout_s=120)
    assert job.returncode != 0 and job.orphans == [] and time.monotonic() - began < 60, job.text
    assert words in job.text
