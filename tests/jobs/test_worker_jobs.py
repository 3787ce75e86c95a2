"""Jobs whose ranks have worker processes: a sample that cannot be read, and a rank that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner import mpirun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {fixtures!r})
from files_of_samples import Files
from small_runs import make_model
from hvdtrain import Config, Trainer
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.config import DataConfig


class Killed(Callback):
    where = "all"

    def step_end(self, run):
        pids = [worker.pid for worker in run.feed.data.pool.workers]
        assert len(pids) == 2 and all(os.path.exists(f"/proc/{{pid}}") for pid in pids)
        if {kill} and run.control.rank == 1 and run.state.cursor.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    config = Config(epochs=2, global_batch=16, progress="off", out={out!r}, data=DataConfig(workers=2), seed=1)
    Trainer(config).fit(make_model("numpy"), Files(80, {bad}), callbacks=[Killed()])
"""


def job(tmp_path, bad=(), kill=False):
    script = tmp_path / "train.py"
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    script.write_text(SCRIPT.format(fixtures=fixtures, out=str(tmp_path / "run"), bad=bad, kill=kill))
    return mpirun(2, [str(script)], 90)


def test_a_sample_that_cannot_be_read_ends_all_ranks(tmp_path):
    ended = job(tmp_path, bad=(33,))
    assert ended.returncode == 2, ended.text
    assert ended.text.count("sample 33 cannot be read: train/33.png: broken") == 1, ended.text
    assert not ended.orphans


def test_workers_end_with_a_rank_that_is_killed(tmp_path):
    ended = job(tmp_path, kill=True)
    assert ended.returncode not in (0, None), ended.text
    assert not ended.orphans
