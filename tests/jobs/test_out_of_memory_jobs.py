"""Jobs of which a rank runs out of memory: they continue, or end on all ranks with one message and status 2."""

import json

import pytest
from runner import mpirun

TRAINS = """
import sys
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model, Params
from hvdtrain.commands.train import parse
from hvdtrain.cluster import boot
import numpy as np

WHERE, OUT = sys.argv[1:]

class Short(Model):
    calls = 0

    def gradient(self, *args, **kwargs):
        Short.calls += 1
        due = Short.calls >= 5 if WHERE == "always" else Short.calls == 5 and WHERE == "once"
        if due and boot.current_control().rank == 1:
            raise MemoryError("in forward")
        return super().gradient(*args, **kwargs)

def update(*args, **more):
    if WHERE == "update" and boot.current_control().rank == 1:
        raise MemoryError("in the update")
    return own(*args, **more)

made = Params.optimizer
def short_of_memory(self, *args):
    global own
    found = made(self, *args)
    own = found.step
    found.step = update
    return found
Params.optimizer = short_of_memory

x = np.random.default_rng(0).standard_normal((48, 12))
config = parse(["--progress", "off", "--epochs", "2", "--global_batch", "12", "--out", OUT])
Trainer(config).fit(Short((12, 16, 5)), (x, np.arange(48) % 5))
"""


def test_a_job_goes_on(script, tmp_path):
    job = mpirun(2, [script(TRAINS), "once", str(tmp_path / "run")], timeout_s=40)
    assert job.returncode == 0 and not job.orphans, job
    found = json.loads((tmp_path / "run" / "completed.json").read_text())["out_of_memory"]
    assert [(each["rank"], each["size"], each["then"]) for each in found["each"]] == [(1, 6, 6)]


@pytest.mark.parametrize("where, says", [
    ("always", "rank 1 is out of memory in training with a micro-batch of 1 (MemoryError: in forward)"),
    ("update", "out of memory in the update, which cannot be repeated (MemoryError: in the update)")])
def test_a_job_ends_with_one_message(where, says, script, tmp_path):
    job = mpirun(2, [script(TRAINS), where, str(tmp_path / "run")], timeout_s=40)
    assert job.returncode == 2 and not job.orphans, job
    assert job.stderr.count("hvdtrain: ") == 1 and says in job.stderr and "Traceback" not in job.stderr, job.stderr
