"""``python -m hvdtrain launch`` for real: on this machine under each launcher here, and on two hosts over a strict ssh.

The MPI beside this Python is always tried. TEST_MPIRUNS_OF_HVDTRAIN may name Pythons of other environments, each with
an MPI and mpi4py of its own, divided by colons. (A name in HVDTRAIN_ would be a key of the configuration.)
"""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from runner import run
from strict_ssh import TWO_HOSTS, require_two_hosts, write_ssh

OTHERS = [path for path in os.environ.get("TEST_MPIRUNS_OF_HVDTRAIN", "").split(":") if path]
PYTHONS = [sys.executable, *OTHERS]
HORD = ["", "a b", "$HOME", ";", "*", "'", '"', "\\", "new\nline", "--np", "-x", "--", "é", "`id`", "$(id)", "a:b"]
"""Words that a shell or a careless launcher changes."""

RANK = """
import json, os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
me = [world.rank, world.size, socket.gethostname(), sys.argv[1:], os.environ.get("VALUE"), os.environ.get("HIDDEN"),
      len(os.sched_getaffinity(0)), sys.stdin.read(9) if world.rank == 0 else "", sys.executable]
everyone = world.gather(me)
if world.rank == 0:
    print("RANKS" + json.dumps(everyone), flush=True)
"""
VALUE = "a;b $x 'q' \"r\" \\"
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_ALLOW_RUN_AS_ROOT": "", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": ""}


def launch(python, *words, **env):
    """Run the command under one of the Pythons, as a user does."""
    return run([python, "-m", "hvdtrain", "launch", *words], 100.0, QUIET | env)


def ranks(job):
    """Return what every rank said of itself, in order."""
    assert job.returncode == 0, job.text
    # horovodrun has mpirun tag its output, and a tag may stand at a line's end.
    return json.JSONDecoder().raw_decode(job.stdout.split("RANKS", 1)[1])[0]


def test_other_mpis_are_named():
    if not OTHERS:
        pytest.skip("TEST_MPIRUNS_OF_HVDTRAIN names no Python of another MPI: only the one beside this Python is tried")
    assert all(os.access(path, os.X_OK) for path in OTHERS)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("more", [[], ["--launcher", "horovodrun"]], ids=["mpirun", "horovodrun"])
def test_words_environment_and_input_on_this_host(python, more, script):
    if more and not shutil.which("horovodrun", path=os.path.dirname(python)):
        pytest.skip(f"there is no horovodrun beside {python}")
    told = subprocess.run([shutil.which("mpirun", path=os.path.dirname(python)) or "mpirun", "--version"],
                          capture_output=True, text=True, timeout=30).stdout
    if more and "Open MPI" not in told:
        pytest.skip("horovodrun needs Open MPI")
    job = launch(python, "-np", "3", *AS_ROOT, *more, "--env", f"VALUE={VALUE}", "--", python, script(RANK), *HORD)
    found = ranks(job)
    assert [rank[:2] for rank in found] == [[0, 3], [1, 3], [2, 3]]
    assert all(rank[3:5] == [HORD, VALUE] for rank in found)
    assert found[0][7] == "", "the input is empty, and nobody waits for it"
    assert all(rank[6] == len(os.sched_getaffinity(0)) for rank in found), "not bound"
    assert f"3 ranks on localhost:3, by {more[-1] if more else ''}" in job.stderr
    assert not job.orphans


@pytest.mark.parametrize("python", PYTHONS)
def test_the_exit_status_is_the_ranks(python):
    job = launch(python, "-np", "1", *AS_ROOT, "--", python, "-c", "import sys; sys.exit(7)")
    assert job.returncode == 7 and not job.orphans


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="binding two ranks to a core each needs two cores")
@pytest.mark.parametrize("python", PYTHONS)
def test_a_rank_has_the_core_it_was_given(python, script):
    for bind, cores in (("core", 1), ("none", len(os.sched_getaffinity(0)))):
        job = launch(python, "-np", "2", *AS_ROOT, "--bind", bind, "--", python, script(RANK))
        assert [rank[6] for rank in ranks(job)] == [cores, cores]


def test_a_mistake_is_said_once_with_status_2():
    job = launch(sys.executable, "-H", "a;touch /tmp/x:1", "--", "train")
    assert job.returncode == 2 and not job.stdout
    assert job.stderr.count("\n") == 1 and "a;touch" in job.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="Open MPI minds only root, and this is not root")
def test_root_is_refused_unless_it_is_said():
    job = launch(sys.executable, "-np", "1", "--launcher", "openmpi4", "--dry-run", "--", "true")
    assert job.returncode == 2 and "--allow-run-as-root" in job.stderr


@pytest.mark.parametrize("python", PYTHONS)
def test_unlike_hosts_over_an_ssh_that_brings_no_environment(python, script, tmp_path):
    """host0:1,host1:2; the daemon is found, the words and the named variables arrive, others stay."""
    require_two_hosts()
    ssh = write_ssh(tmp_path)
    job = run([TWO_HOSTS, "none", python, "-m", "hvdtrain", "launch", "-H", "host0:1,host1:2", "--iface", "eth0",
               "--ssh", f"{ssh} -p 2222", "--env", "VALUE", "--", python, script(RANK), *HORD], 100.0,
              QUIET | {"HOSTS": "2", "VALUE": VALUE, "HIDDEN": "1"})
    found = ranks(job)
    assert [rank[2] for rank in found] == ["host0", "host1", "host1"]
    assert all(rank[3:5] == [HORD, VALUE] for rank in found)
    assert [rank[5] for rank in found[1:]] == [None, None]
    (said,) = (tmp_path / "ssh.log").read_text().splitlines()
    assert "-p 2222" in said and " host1 " in said, "the other host only, and only once"
    assert not job.orphans


def test_a_dry_run_is_what_would_be_run(script):
    line = launch(sys.executable, "-np", "2", *AS_ROOT, "--env", f"VALUE={VALUE}", "--dry-run", "--", "python",
                  script(RANK), *HORD)
    assert line.returncode == 0
    assert all(rank[3:5] == [HORD, VALUE] for rank in ranks(run(["bash", "-c", line.stdout], 100.0)))
    assert shlex.split(line.stdout.splitlines()[0]) == ["export", f"VALUE={VALUE}"]
