"""What ends a job whose rank, launcher or host is gone: within the bound, with one message, and with nothing left."""

import json
import os
import re

import pytest
from runner import mpirun
from test_two_hosts import TWO_HOSTS, possible, two_hosts  # noqa: F401  (a fixture)

TRAIN = """
import json, os, signal, sys, time
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.callbacks.base import Callback

class Slow(Callback):
    where = "all"

    def step_end(self, run):
        step = run.state.cursor.step
        if run.control.rank == 0 and step == 3:
            {at_step_3}
        with open(f"{{sys.argv[1]}}/rank{{run.control.rank}}", "w") as file:
            json.dump([os.getpid(), step], file)
        time.sleep(0.1)

x, y = np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32), np.arange(64) % 5
Trainer(Config(epochs=100, global_batch=8, progress="off", out=f"{{sys.argv[1]}}/run", heartbeat_timeout_s={bound_s})
        ).fit(Model((12, 16, 5)), (x, y), callbacks=[Slow()])
"""

CUT = """
import json, os, shlex, subprocess, sys, time

def rank(r):
    try:
        return json.load(open(f"{folder}/rank{r}"))
    except (OSError, ValueError):
        return [0, -1]

def wait(true, seconds):
    ends_at = time.monotonic() + seconds
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.05)
    return true()

def link(word):
    subprocess.run(["ip", "link", "set", "eth0", word], check=True)

script, folder = sys.argv[1:]
words = ["-H", os.environ["TWO_HOSTS_LIST"], *shlex.split(os.environ["TWO_HOSTS_MPIRUN_ARGS"])]
job = subprocess.Popen(["mpirun", *words, "-np", "2", sys.executable, script, folder], text=True,
                       stderr=subprocess.PIPE)
assert wait(lambda: rank(1)[1] >= 3, 60)
link("down")
time.sleep(2)
link("up")
at = rank(1)[1]
survived = wait(lambda: rank(1)[1] >= at + 5, 20)
pids = [rank(r)[0] for r in range(2)]
link("down")
began = time.monotonic()
ended = wait(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 20)
seconds = time.monotonic() - began
try:
    text = job.communicate(timeout=10)[1]
except subprocess.TimeoutExpired:
    job.kill()
    text = "mpirun went on\\n" + job.communicate()[1]
print(json.dumps([survived, ended, seconds, job.returncode, text]))
"""


@pytest.mark.usefixtures("possible")
def test_a_host_that_is_cut_off_is_named_and_a_short_outage_survives(script, tmp_path):
    train = tmp_path / "train.py"
    train.write_text(TRAIN.format(at_step_3="pass", bound_s=5.0))
    job = two_hosts("none", "python", script(CUT), str(train), str(tmp_path))
    assert job.returncode == 0, job.text
    survived, ended, seconds, status, text = json.loads(job.stdout.splitlines()[-1])
    assert survived, "training did not go on after 2 s without a link"
    assert ended and 4 < seconds < 15, (seconds, text)
    assert re.search(r"hvdtrain: host host1: unreachable from host host0 for 5 s", text), text
    assert status not in (0, None) and text.count("hvdtrain: ") == 1, text


def test_a_job_whose_launcher_is_killed_leaves_nothing(script, tmp_path):
    text = TRAIN.format(at_step_3="os.kill(os.getppid(), signal.SIGKILL)", bound_s=30.0)
    job = mpirun(2, [script(text), str(tmp_path)], settle_s=5.0)
    assert job.returncode == -9 and not job.orphans, job
    own = [json.loads((tmp_path / f"rank{r}").read_text())[0] for r in range(2)]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in own)
    assert "Traceback" not in job.text
