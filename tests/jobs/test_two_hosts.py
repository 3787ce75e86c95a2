"""mpi_scripts/two_hosts.sh: its hosts are different hosts to MPI, their links have the rate, and nothing outlives it.

Owns no timing: whether the rate is reached is for the bench. That hvdtrain trains across its hosts is in test_recipes.
Skips with the script's own words where it cannot run.
"""

import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from runner import JOB_ID, ROOT, end, processes, run

TWO_HOSTS = str(ROOT / "mpi_scripts" / "two_hosts.sh")
CANNOT = 77

SENT_BYTES = 4 << 20
RANK = f"""
import json, os, socket
import numpy as np
from mpi4py import MPI
from hvdtrain.comm import transport_sweep as shown
from hvdtrain.cluster import links

def sent():
    line = next(line for line in open("/proc/net/dev") if "eth0:" in line)
    return int(line.split(":")[1].split()[8])

world = MPI.COMM_WORLD
x, before = np.ones({SENT_BYTES}, np.uint8), sent()
world.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
here = world.Split_type(MPI.COMM_TYPE_SHARED)
name = socket.gethostname()
me = [MPI.Get_processor_name(), name, socket.gethostbyname(name), here.size, sent() - before,
      os.stat(os.environ["TMPDIR"]).st_dev]
everyone = world.gather(me)
if world.rank == 0:
    print(json.dumps(everyone))
names = [rank[1] for rank in world.bcast(everyone)]
hosts = sorted(set(names))
found = links.measure(world, [[r for r, at in enumerate(names) if at == name] for name in hosts], 0.6)
if world.rank == 0:
    print(json.dumps([link.hosts for link in found]))
    print(*shown.words(found, hosts), sep="\\n")

from hvdtrain import backends
from hvdtrain.cluster import boot
from hvdtrain.core.launcher import launch_facts
from hvdtrain.cluster.topology import survey
from hvdtrain.comm.wires import Wires
from hvdtrain.config import Config
from hvdtrain.planning import transport_choice; from hvdtrain.comm import transport_sweep

numpy, control = backends.load("numpy"), boot.start_control(launch_facts(os.environ), 60)
wires = Wires(Config(), "numpy", numpy, control, survey(control), control.gather(numpy.device_facts()))
first = wires.first([]).name
found = transport_sweep.measure({{name: wires.get(name)[0] for name in wires.names}}, numpy.Ops(), control, 1e6, 0.5)
assert all(other == found for other in control.gather(found))
if world.rank == 0:
    print(json.dumps([first, wires.names, transport_choice.decide(transport_choice.estimate(found, 1e6, 1.0)).name]))
"""

ON_EVERY_HOST = """
import os, shlex, subprocess, sys
words = shlex.split(os.environ["TWO_HOSTS_MPIRUN_ARGS"])
agent = words[words.index("plm_rsh_agent") + 1]
hosts = sys.argv[2:] or [entry.split(":")[0] for entry in os.environ["TWO_HOSTS_LIST"].split(",")]
found = {subprocess.run([agent, host, sys.argv[1]]).returncode for host in hosts}
sys.exit(found.pop() if len(found) == 1 else f"the hosts differ: {found}")
"""


@pytest.fixture(scope="module")
def possible():
    """Skip where the script says that it cannot run."""
    tried = subprocess.run([TWO_HOSTS, "1gbit", "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode == CANNOT:
        pytest.skip(tried.stderr.strip())
    assert tried.returncode == 0, tried.stderr


def two_hosts(rate, *command, **env):
    """Run a command under the script, in 100 s: the machine may be busy."""
    return run([TWO_HOSTS, rate, *command], 100.0, {"HOSTS": "2", "SLOTS": "1", **env})


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize(("hosts", "slots"), [(2, 1), (3, 2)])
def test_mpi_sees_different_hosts(script, hosts, slots):
    job = two_hosts("none", "mpirun", "-np", str(hosts * slots), "python", script(RANK), HOSTS=str(hosts),
                    SLOTS=str(slots))
    assert job.returncode == 0, job.text
    ranks, pairs = map(json.loads, job.stdout.splitlines()[:2])
    assert pairs == sorted([a, b] for b in range(hosts) for a in range(b)), "of every pair a link"
    assert "pair of hosts: host" in job.stdout and " Gbit/s in each direction with both in use, latency " in job.stdout
    assert [rank[:3] for rank in ranks] == [[f"host{h}", f"host{h}", f"10.77.0.{h + 1}"]
                                            for h in range(hosts) for _ in range(slots)]
    assert [rank[3] for rank in ranks] == [slots] * len(ranks)
    assert len({rank[5] for rank in ranks}) == hosts, "every host has a TMPDIR of its own"
    first, names, chosen = json.loads(job.stdout.splitlines()[-1])
    assert (first, names) == (("mpi", ["mpi"]) if slots == 1 else ("shared", ["shared", "mpi"])) and chosen in names
    # What the hosts tell each other goes through the cable: half of it or more, however the sum is organised.
    assert max(rank[4] for rank in ranks) >= SENT_BYTES // 2
    assert not job.orphans


@pytest.mark.usefixtures("possible")
def test_the_limit_is_on_every_host(script):
    job = two_hosts("100mbit", "python", script(ON_EVERY_HOST), "tc qdisc show dev eth0", HOSTS="3")
    assert job.returncode == 0, job.text
    assert job.stdout.count("qdisc tbf") == job.stdout.count("rate 100Mbit") == 3, job.stdout


@pytest.mark.usefixtures("possible")
def test_rate_none_limits_nothing(script):
    job = two_hosts("none", "python", script(ON_EVERY_HOST), "tc qdisc show dev eth0")
    assert job.returncode == 0 and "tbf" not in job.stdout, job.text


@pytest.mark.usefixtures("possible")
def test_the_agent_knows_only_its_hosts(script):
    names = ["host2", "10.77.0.3", "10.77.0.0", "../hosts/host1", "host1;id", "localhost", ""]
    job = two_hosts("none", "python", script(ON_EVERY_HOST), "echo reached", *names)
    assert job.returncode == 255
    assert "reached" not in job.stdout and "uid=" not in job.stdout
    assert job.stderr.splitlines() == [f"two_hosts: there is no host '{name}'" for name in names]


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("status", [0, 3, 77])
def test_the_status_of_the_command_is_passed_on_and_its_background_process_ends(status):
    job = two_hosts("1gbit", "bash", "-c", f"setsid sleep 60 >/dev/null 2>&1 & exit {status}")
    assert job.returncode == status
    assert not job.text.strip()
    assert not job.orphans


def networks(pids):
    """Return the network namespaces of processes, as the kernel names them."""
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


def machine():
    """Return what the script must not change: interfaces, named networks, mounts, host name, files in /dev/shm."""
    named = Path("/run/netns")
    mounts = [line.split(" - ")[0].split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return (sorted(os.listdir("/sys/class/net")), sorted(os.listdir(named)) if named.exists() else [], sorted(mounts),
            os.uname().nodename, Path("/etc/hosts").read_text(), Path("/dev/shm/two_hosts").exists())


def until(true, timeout_s=20.0):
    """Wait for it; whether it came."""
    ends_at = time.monotonic() + timeout_s
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.05)
    return bool(true())


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("hosts", ["2", "3"])
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_nothing_outlives_the_script(tmp_path, hosts, sent, status):
    job_id, before = uuid.uuid4().hex, machine()
    rank = f"touch {tmp_path}/up.$OMPI_COMM_WORLD_RANK; trap '' TERM; while true; do sleep 1; done"
    env = os.environ | {JOB_ID: job_id, "HOSTS": hosts, "SLOTS": "1"}
    child = subprocess.Popen([TWO_HOSTS, "1gbit", "mpirun", "-np", hosts, "sh", "-c", rank], env=env,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: len(list(tmp_path.glob("up.*"))) == int(hosts))
        made = networks(processes(job_id)) - networks([os.getpid()])
        assert len(made) == (2 if hosts == "2" else 4), "the hosts', and the switch's where there are more than two"
        child.send_signal(sent)
        assert child.wait(timeout=20) == status
        assert until(lambda: not processes(job_id), 5.0), processes(job_id)
        # A process that is ending has lost its environment a moment before its network.
        assert until(lambda: not made & networks(entry.name for entry in Path("/proc").iterdir()
                                                 if entry.name.isdigit()), 5.0)
        assert machine() == before
    finally:
        child.kill()
        child.wait()
        end(job_id)


@pytest.mark.parametrize("words", [["fast", "true"], ["0mbit", "true"], ["1gbit; id", "true"], ["1gbit"], []])
def test_a_wrong_call_is_refused_in_one_line(words):
    job = run([TWO_HOSTS, *words])
    assert job.returncode == 2
    assert not job.stdout
    assert job.stderr.count("\n") == 1 and job.stderr.startswith("two_hosts: got ") and "expected" in job.stderr


@pytest.mark.parametrize("env", [{"HOSTS": "1"}, {"HOSTS": "2;id"}, {"SLOTS": "0"}, {"SLOTS": "a[$(id)]"}])
def test_wrong_numbers_are_refused_in_one_line(env):
    job = two_hosts("none", "true", **env)
    assert job.returncode == 2
    assert not job.stdout and job.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="root is asked for first, and this is not root")
def test_it_says_which_program_is_missing(tmp_path):
    for tool in ("bash", "env", "unshare", "nsenter", "setpriv", "mount", "ip", "install"):
        os.symlink(shutil.which(tool), tmp_path / tool)
    job = two_hosts("none", "true", PATH=str(tmp_path))
    assert job.returncode == CANNOT
    assert job.stderr == "two_hosts: skipped: needs the program tc\n"


def test_it_says_that_it_needs_root():
    nobody = {"user": 65534} if os.geteuid() == 0 else {}
    with open(TWO_HOSTS) as text:  # read here: nobody may not see this folder
        done = subprocess.run(["bash", "-s", "none", "true"], stdin=text, cwd="/", capture_output=True, text=True,
                              timeout=30, **nobody)
    assert done.returncode == CANNOT
    assert done.stderr == "two_hosts: skipped: needs root\n"
