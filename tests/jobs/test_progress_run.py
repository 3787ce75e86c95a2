"""Output of whole jobs: on a terminal, in a file, and when a run fails."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from runner import _env, _flags, _path, run
from screen import Screen, on_terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = """
import os, sys, time
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.config import CheckpointConfig
from hvdtrain.reports.progress import silence

silence.SILENT_S, silence.LOOK_S = 0.3, 0.05  # over 3 s would be a long test
FAILS = len(sys.argv) > 2

class Data:
    count = 0
    def __len__(self):
        return 400
    def fetch(self, indices_n):
        if len(indices_n) > 1:  # single rows are read for a comparison of ranks
            Data.count += 1
        if Data.count == 10 and len(indices_n) > 1:
            if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
                print("a word of the user's own")
            time.sleep(1.3)
            if FAILS:
                raise RuntimeError("no more data")
        time.sleep(0.03)
        return np.zeros((len(indices_n), 12)), np.zeros(len(indices_n), np.int64)

Trainer(Config(global_batch=8, epochs=1, max_steps=25, eval_every=0, out=sys.argv[1],
               checkpoint=CheckpointConfig(at_end=False))).fit(Model((12, 16, 5)), Data())
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path), str(tmp_path / "run")]


def mpirun(command):
    launcher = shutil.which("mpirun", path=_path())
    return [launcher, *_flags(launcher), "-np", "2", *command]


def environment():
    return {name: value for name, value in _env("progress", {"TERM": "xterm"}).items() if name != "CI"}


def test_a_terminal_has_one_line_that_moves(job):
    """Over the whole width, with what the run waits for; nothing of it is left at the end."""
    status, written = on_terminal(job, 90, environment(), 60)
    assert status == 0, written
    steps = [int(n) for n in re.findall(r"(\d+)/25\b", written)]
    assert len(steps) > 3 and steps == sorted(steps)
    assert "samples/s" in written and "eta" in written
    assert re.search(r"waiting for the (first|next) batch  0:01", written), written
    screen = Screen(90)
    screen.feed(written)
    shown = "\n".join(screen.lines)
    assert "━" not in shown and not re.search(r"batch +0:", shown), shown
    assert shown.count("a word of the user's own") == 1 and re.search(r"[|│] steps +[|│] 25 in", shown), shown


def test_mpirun_into_a_file_has_plain_lines(job):
    found = run(mpirun(job), 60, environment())
    assert found.returncode == 0, found.text
    assert "\x1b" not in found.text and "\r" not in found.text and "━" not in found.text
    said = re.findall(r"^waiting for the \w+ batch: (1 s so far|took \d\.\d s)$", found.stdout, re.MULTILINE)
    assert [words.split()[0] for words in said] == ["1", "took"], found.stdout
    assert re.search(r"^step 1/25  epoch 1/1  loss", found.stdout, re.MULTILINE)


def test_nothing_comes_after_the_words_of_a_run_that_fails(job):
    status, written = on_terminal([*job, "fails"], 90, environment(), 60)
    assert status == 1 and re.search(r"waiting for the (first|next) batch  0:01", written), written
    screen = Screen(90)
    screen.feed(written)
    rows = [row.rstrip() for row in screen.lines if row.strip()]
    assert rows[-1] == "RuntimeError: no more data", rows
    assert not any("━" in row or "waiting" in row for row in rows), rows
