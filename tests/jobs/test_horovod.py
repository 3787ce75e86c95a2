"""Horovod's collectives, of each framework in processes of its own, pass the cases that all collectives must pass.

And what a framework and MPI do to each other in one process.
"""

import sys
from pathlib import Path

import pytest
from runner import mpirun, run

from hvdtrain.cluster.horovod import horovod_reason

CASES = Path(__file__).resolve().parents[1] / "conformance"

SCRIPT = """
import importlib, os, sys
sys.path.insert(0, {cases!r})
from collectives_cases import CASES
from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.core.launcher import launch_facts
from hvdtrain.config import ExchangeConfig

def main():
    control = boot.start_control(launch_facts(os.environ), 60)
    hvd = horovod.start_horovod("{framework}", ExchangeConfig(fusion_threshold_mb=4, cycle_time_ms=0.5), control)
    other = {{"torch": "tensorflow", "tensorflow": "torch"}}["{framework}"]
    assert other not in sys.modules, "one process, one framework"
    if "{framework}" == "torch":
        import torch
        make, host = (lambda x: torch.from_numpy(x.copy())), (lambda x: x.numpy())
    else:
        import tensorflow as tf
        make, host = tf.constant, (lambda x: x.numpy())
    wire = importlib.import_module("hvdtrain.backends.{framework}.collectives").HorovodCollectives(hvd)
    for check in CASES:
        control.barrier(check.__name__)
        check(wire, make, host)
    if control.rank == 0:
        print(len(CASES), "cases passed")
    return 0

sys.exit(run_guarded(main, launch_facts(os.environ)))
"""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_horovod(script, framework, ranks):
    reason = horovod_reason(framework)
    if reason:
        pytest.skip(reason)
    job = mpirun(ranks, [script(SCRIPT.format(cases=str(CASES), framework=framework))], timeout_s=100)
    assert (job.returncode, job.orphans) == (0, []), job.text
    assert "cases passed" in job.stdout


def test_mpi_ends_in_order_beside_tensorflow(script):
    """Open MPI and TensorFlow each bring an hwloc; this job used to end with signal 11 in MPI_Finalize."""
    pytest.importorskip("tensorflow")
    text = ("import os\nfrom hvdtrain.cluster import boot\nfrom hvdtrain.core.launcher import launch_facts\n"
            "boot.start_control(launch_facts(os.environ), 60).barrier('a')\nimport tensorflow\n")
    job = mpirun(2, [script(text)], timeout_s=100)
    assert (job.returncode, job.orphans) == (0, []), job.text


def test_one_process_can_have_mpi_s_collectives(script):
    job = run([sys.executable, script("import os, numpy\nfrom hvdtrain.cluster import boot\n"
                                      "from hvdtrain.comm.collectives.mpi import MpiCollectives\n"
                                      "wire = MpiCollectives(boot.mpi_comm())\n"
                                      "assert wire.allreduce(numpy.ones(3), 'a').wait().tolist() == [1, 1, 1]\n")])
    assert (job.returncode, job.orphans) == (0, []), job.text
