"""An exception of the user's, wherever it is raised on one rank, ends all ranks with its traceback once."""

import re

import pytest
from runner import mpirun

TRAINS = """
import sys, threading
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.cluster import boot
from hvdtrain.config import CheckpointConfig

WHERE, RANK, OUT = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def fail(where):
    if where == WHERE and boot.current_control() is not None and boot.current_control().rank == RANK:
        raise ValueError("mine in " + where)

class Data:
    def __init__(self, where, late):
        self.where, self.count, self.late = where, 0, late

    def __len__(self):
        return 48

    def fetch(self, indices_n):
        self.count += 1
        if self.count > self.late:
            fail(self.where)
        return np.zeros((len(indices_n), 12)), np.zeros(len(indices_n), np.int64)

class Mine(Callback):
    where = "all"

    def checkpoint(self, run):
        fail("checkpoint")

    def eval_end(self, run):
        fail("eval_end")

class Bad(Model):
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 4:
            fail("forward")
        return super().forward(*args, **kwargs)

Trainer(Config(epochs=3, global_batch=9, out=OUT, progress="off", checkpoint=CheckpointConfig(every_steps=2))).fit(
    Bad((12, 16, 5)), (Data("loader", 4), Data("evaluation", 1)), callbacks=[Mine()])
"""


def check(job, where, rank):
    """Check that the job ended soon, by this rank's one message."""
    assert job.returncode not in (0, None) and not job.orphans, job
    assert re.findall(r"rank (\d+) on host \S+ failed and ends the job", job.stderr) == [str(rank)], job.stderr
    assert job.stderr.count(f"ValueError: mine in {where}\n") >= 1, job.stderr
    assert "ended without a message" not in job.stderr, job.stderr


@pytest.mark.parametrize("where, rank", [("loader", 1), ("evaluation", 0), ("forward", 2), ("checkpoint", 1),
                                         ("eval_end", 2)])
def test_an_exception_in_a_trainers_run(where, rank, script, tmp_path):
    job = mpirun(3, [script(TRAINS), where, str(rank), str(tmp_path / "run")], timeout_s=40)
    check(job, where, rank)
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert not (tmp_path / "run" / "completed.json").exists()
