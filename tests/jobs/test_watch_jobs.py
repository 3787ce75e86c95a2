"""Jobs whose rank, launcher or host dies: an end within the bound, one message, and no process left."""

import json
import re

import pytest
from runner import mpirun
from test_two_hosts import possible, two_hosts  # noqa: F401  (a fixture)

from hvdtrain.cluster.liveness.watch.system import stat

TRAIN = """
import json, os, signal, sys, time
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.engine.callbacks.base import Callback

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

HOST = """
import json, os, socket, sys, time
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.cluster.liveness import pulse, watch
from hvdtrain.cluster.liveness.watch import meet

rank, folder, bound_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])

class Control:
    size, local_rank, node = 2, 0, socket.gethostname()

    def gather(self, row):
        with open(f"{folder}/row{rank}.new", "w") as file:
            json.dump([x.hex() if isinstance(x, bytes) else x for x in row], file)
        os.rename(f"{folder}/row{rank}.new", f"{folder}/row{rank}")
        while not all(os.path.exists(f"{folder}/row{r}") for r in range(2)):
            time.sleep(0.02)
        rows = [json.load(open(f"{folder}/row{r}")) for r in range(2)]
        return [(*row[:3], bytes.fromhex(row[3])) for row in rows]

Control.rank = rank
watch.start(LaunchFacts("gloo", rank, 2, 0, 1, "horovodrun --gloo"), bound_s)
meet(Control())
pulse.at("data", 7)
while True:
    time.sleep(0.1)
"""

CUT = """
import json, os, shlex, subprocess, sys, time

script, folder = sys.argv[1:]
words = shlex.split(os.environ["TWO_HOSTS_MPIRUN_ARGS"])
agent = words[words.index("plm_rsh_agent") + 1]
os.environ |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": folder, "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}

def link(word):
    subprocess.run(["ip", "link", "set", "eth0", word], check=True)

hosts = [subprocess.Popen([agent, f"host{r}", shlex.join(["exec", sys.executable, script, str(r), folder, "3"])],
                          stderr=subprocess.PIPE, text=True) for r in range(2)]
time.sleep(3)
link("down")
time.sleep(1.5)
link("up")
time.sleep(4)
survived = [host.poll() is None for host in hosts]
link("down")
said, began = [], time.monotonic()
for host in hosts:
    try:
        said.append(host.communicate(timeout=15)[1])
    except subprocess.TimeoutExpired:
        host.kill()
        said.append("it went on; " + host.communicate()[1])
print(json.dumps([survived, said, time.monotonic() - began, [host.returncode for host in hosts]]))
"""


@pytest.mark.usefixtures("possible")
def test_hosts_that_are_cut_off_name_each_other_and_a_short_outage_survives(script, tmp_path):
    host = tmp_path / "host.py"
    host.write_text(HOST)
    job = two_hosts("none", "python", script(CUT), str(host), str(tmp_path))
    assert job.returncode == 0, job.text
    survived, said, seconds, status = json.loads(job.stdout.splitlines()[-1])
    assert survived == [True, True], "1.5 s without a link ended them"
    for r in range(2):
        assert re.fullmatch(rf"hvdtrain: host host{1 - r}: unreachable from host host{r} for 3 s \(heartbeat_timeout_s "
                            r"3\). The job is stopped.\n", said[r]), said
    assert status == [-9, -9] and 1 < seconds < 12 and not job.orphans


def alive(pid):
    """Return whether there is such a process, and not only its number, which waits for its parent."""
    found = stat(pid)
    return found is not None and found.state != "Z"


def test_a_job_whose_launcher_is_killed_leaves_nothing(script, tmp_path):
    text = TRAIN.format(at_step_3="os.kill(os.getppid(), signal.SIGKILL)", bound_s=30.0)
    job = mpirun(2, [script(text), str(tmp_path)], settle_s=5.0)
    assert job.returncode == -9 and not job.orphans, job
    own = [json.loads((tmp_path / f"rank{r}").read_text())[0] for r in range(2)]
    assert len(own) == 2 and not any(alive(pid) for pid in own)
    assert "Traceback" not in job.text
