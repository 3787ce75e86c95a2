"""A stage of a pipeline that fails, is killed or stands still ends the job within seconds, and is named."""

from __future__ import annotations

import re

import pytest
from runner import mpirun

TRAIN = """
import os, signal, sys
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.stage import Chunks
from hvdtrain.backends.numpy.model import Model
from hvdtrain.config import CheckpointConfig, PipelineConfig

own, calls = Chunks.backward, []

def backward(self, chunk, micro, came):
    calls.append(micro)
    if len(calls) == 30 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        {fault}
    return own(self, chunk, micro, came)

Chunks.backward = backward
x, y = np.random.default_rng(0).standard_normal((48, 12)).astype(np.float32), np.arange(48) % 5
Trainer(Config(epochs=2000, global_batch=8, pipeline=PipelineConfig(3), progress="off", out=sys.argv[1], eval_every=0,
               heartbeat_timeout_s=2.0, control_timeout_s=20.0, checkpoint=CheckpointConfig(at_end=False))).fit(
    Model((12, 10, 9, 8, 5), 3), (x, y))
"""

WHO = r"rank 1 on host \S+, stage 2 of 3 \(\S+\)"


@pytest.mark.parametrize(("fault", "said"), [
    ("raise ValueError('of a test')", rf"{WHO} failed and ends the job\n(.*\n)*.*ValueError: of a test"),
    ("os.kill(os.getpid(), signal.SIGKILL)", rf"{WHO}, .*its process has ended without a message"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", rf"{WHO}, stopped by a signal, in step \d+, .*frozen for"),
], ids=["raises", "is killed", "stands still"])
def test_a_stage_that(fault, said, script, tmp_path):
    job = mpirun(3, [script(TRAIN.format(fault=fault)), str(tmp_path / "out")], timeout_s=60)
    assert job.returncode not in (0, None), job.text
    assert re.search(said, job.text), job.text
    assert "rank 0 on host" not in job.text.split("Stacks of")[0] and job.seconds < 25, job.text
    assert not job.orphans
