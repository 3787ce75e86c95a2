"""A rank that stands still ends the job within the bound, wherever the others then wait, and is named."""

import re

import pytest
from runner import mpirun
from workloads import CLASSES, FEATURES

TRAIN = """
import os, signal, sys
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.config import CheckpointConfig

class Freeze(Callback):
    where = "all"

    def {event}(self, run):
        if run.control.rank == 1 and run.state.cursor.step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

{model}
x, y = np.random.default_rng(0).standard_normal((24, {features})).astype(np.float32), np.arange(24) % {classes}
Trainer(Config(epochs=3, global_batch=8, collectives="horovod", progress="off", out=sys.argv[1], control_timeout_s=6.0,
               checkpoint=CheckpointConfig(every_steps=3))).fit(model, ((x, y), (x, y)), callbacks=[Freeze()])
"""

MODELS = {
    "torch": "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear({0}, 16), torch.nn.BatchNorm1d(16), "
             "torch.nn.Linear(16, {1}))",
    "tensorflow": "import keras\nmodel = keras.Sequential([keras.Input(({0},)), keras.layers.Dense(16), "
                  "keras.layers.BatchNormalization(), keras.layers.Dense({1})])",
}

LEAVE = """
import atexit, os, signal, sys
from hvdtrain.cluster import boot
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.core.launcher import launch_facts

facts = launch_facts(os.environ)

def main():
    control = boot.start_control(facts, {timeout_s})
    control.barrier("start")
    if control.rank == 1:
        atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
    return 0

sys.exit(run_guarded(main, facts))
"""


@pytest.mark.parametrize("framework, event, waits", [
    ("torch", "step_end", "an evaluation"),  # after the last step of an epoch the others evaluate
    ("tensorflow", "checkpoint", "a save"),
])
def test_a_rank_that_stands_still_at(framework, event, waits, script, tmp_path):
    pytest.importorskip(framework)
    model = MODELS[framework].format(FEATURES, CLASSES)
    text = TRAIN.format(event=event, model=model, features=FEATURES, classes=CLASSES)
    job = mpirun(2, [script(text), str(tmp_path / "out")], timeout_s=90)
    assert job.returncode not in (0, None), f"{waits} waited without a bound\n{job.text}"
    assert "did not end within 6 s" in job.text or "waited 6 s" in job.text, job.text
    assert re.search(rf"Missing: rank 1 on host \S+, stopped by a signal, in step 3, phase '{event} of Freeze' since",
                     job.text), job.text
    assert not job.orphans


def test_a_rank_that_stands_still_while_leaving(script):
    job = mpirun(2, [script(LEAVE.format(timeout_s=1.0))], timeout_s=40)
    assert job.returncode not in (0, None), job
    assert not job.orphans


FIT = """
import os, signal
import numpy as np
import keras
import hvdtrain.keras as hvd

hvd.init()

class Freeze(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGSTOP)

x, y = np.random.default_rng(hvd.rank()).standard_normal((64, 12)).astype("f"), np.arange(64) % 5
model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5, activation="softmax")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="sparse_categorical_crossentropy")
model.fit(x, y, batch_size=8, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Freeze()])
"""


def test_a_rank_that_stands_still_in_plain_fit(script):
    pytest.importorskip("tensorflow")
    job = mpirun(2, [script(FIT)], timeout_s=90, env={"HVDTRAIN_HEARTBEAT_TIMEOUT_S": "2"})
    assert job.returncode not in (0, None), job
    assert re.search(r"rank 1 on host \S+, stopped by a signal, in step 5, phase 'fit' since \d+ s: frozen for 2 s",
                     job.text), job.text
    assert "Stacks of rank 0" in job.text and not job.orphans, job.text
