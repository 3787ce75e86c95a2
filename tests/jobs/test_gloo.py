"""Jobs of `horovodrun --gloo`: no MPI anywhere, the control plane over Horovod's object collectives."""

import os
import shutil
import sys

import pytest
from runner import run

from hvdtrain.cluster.horovod import horovod_reason

SCRIPT = """
import os, sys
import numpy as np
from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.core.launcher import launch_facts
from hvdtrain.config import ExchangeConfig
from hvdtrain.core.errors import UserError

facts = launch_facts(os.environ)

def main():
    assert facts.kind == "gloo", facts
    rank = facts.rank
    {early}
    hvd = horovod.start_horovod("{framework}", ExchangeConfig(), facts)
    assert ("torch" in sys.modules) != ("tensorflow" in sys.modules), "one process, one framework"
    control = boot.start_control(facts, 60, hvd)
    for turn in range(2):
        assert control.bcast({{"a": turn}} if rank == 0 else None) == {{"a": turn}}
        assert control.gather("x" * rank) == ["x" * r for r in range(control.size)]
        P = control.size
        assert control.sum(np.array([rank, 1.5])).tolist() == [P * (P - 1) / 2, 1.5 * P]
        assert control.agree(rank == 1) and not control.agree(False)
        control.barrier("turn")
    arrays = [np.full(6, rank, np.float32), np.full(4, rank, np.int64)]
    control.send(arrays, 1, 0)
    assert all((array == 1).all() for array in arrays)
    control.send([arrays[0] * 0 + 7] if rank == 0 else arrays[:1], 0)
    assert rank == 0 or (arrays[0] == 7).all()
    assert "mpi4py" not in sys.modules
    {late}
    control.barrier("end")
    return 0

sys.exit(run_guarded(main, facts))
"""


def horovodrun(script, framework, early="pass", late="pass"):
    """Run the script on two ranks; skips, with the reason, where Horovod is not built for ``framework``."""
    reason = horovod_reason(framework)
    command = shutil.which("horovodrun", path=os.path.dirname(sys.executable))
    if reason or not command:
        pytest.skip(reason or "horovodrun is not beside this interpreter")
    text = SCRIPT.format(framework=framework, early=early, late=late)
    return run([sys.executable, command, "--gloo", "-np", "2", sys.executable, script(text)], timeout_s=100, settle_s=8)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_control_over_horovod(script, framework):
    job = horovodrun(script, framework)
    assert (job.returncode, job.orphans) == (0, []), job.text


def test_a_mistake_is_said_once(script):
    for where in ("early", "late"):
        job = horovodrun(script, "torch", **{where: "raise UserError('lr is -1', 'above 0', 'set lr')"})
        assert job.returncode not in (0, None) and not job.orphans, job
        assert job.text.count("hvdtrain: lr is -1; expected above 0. Set lr.") == 1, job.text
        assert job.text.count("lr is -1") == 1, job.text


def test_a_rank_that_raises_ends_the_job(script):
    job = horovodrun(script, "torch", late="if rank == 1: raise ValueError('bad weights')")
    assert job.returncode not in (0, None) and not job.orphans, job
    assert job.text.count("ValueError: bad weights") == 1, job.text
    assert job.text.count("rank 1 on host ") == 1, job.text
