"""The doctor under a real launcher: ranks gather; a job that does not come together is told, bounded, status 1.

The frameworks are placeholders that load at once, so that the runs take seconds.
"""

import json
import os
import sys
import time

import pytest
from runner import ROOT, mpirun

TORCH = """
__version__ = "9.9"
class version:
    cuda = hip = None
class cuda:
    device_count = staticmethod(lambda: 0)
"""


@pytest.fixture
def env(tmp_path):
    """Return an environment where torch is a fake that works, tensorflow one that does not, and Horovod lacks parts."""
    packages = {"torch": TORCH, "tensorflow": "raise ImportError('no such file: libtf.so')", "horovod": ""}
    for name, text in packages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])}


def test_ranks_of_a_host_are_one_row(env):
    job = mpirun(2, ["-m", "hvdtrain", "doctor", "--json", "--cluster"], timeout_s=100, env=env)
    assert (job.returncode, job.orphans) == (1, []), job.text
    told = json.loads(next(line for line in job.stdout.splitlines() if line.startswith("{")))
    (host,) = told["hosts"]
    assert (host["ranks"], host["slots"], host["clock"], host["links"]) == ([0, 1], 2, None, None)
    assert host["launcher"]["size"] == host["launcher"]["world"] == 2
    assert host["mpi"]["library"].startswith(("Open MPI", "MPICH", "Intel")) and "error" not in host["mpi"]
    assert host["torch"]["version"] == "9.9" and "error" not in host["torch"]
    stops = [p["got"] for p in told["problems"] if p["severity"] == "stops" and "PMI" not in p["got"]]
    assert host["cluster"]["ports"] == [] and host["cluster"]["limits"]["open files"]
    assert stops == ["tensorflow does not work: importing tensorflow: ImportError: no such file: libtf.so"]


def test_one_broken_rank_does_not_silence_rank_0(env, tmp_path):
    """As on a host whose mpi4py does not load: the launcher ends the job when a rank leaves, so that one must not."""
    broken = tmp_path / "broken"
    (broken / "mpi4py").mkdir(parents=True)
    (broken / "mpi4py" / "__init__.py").write_text("raise ImportError('no such file: libmpi.so')")
    words = ["-m", "hvdtrain", "doctor", "--timeout", "6"]
    second = [":", "-np", "1", "-x", f"PYTHONPATH={broken}:{env['PYTHONPATH']}", sys.executable, *words]
    job = mpirun(1, [*words, *second], timeout_s=90, env=env)
    assert "did not connect within 6 s" in job.stdout, job.text
    assert "hvdtrain: rank 1 on host" in job.text and "no such file: libmpi.so" in job.text
    assert job.returncode not in (0, None) and job.orphans == [], job.text


def test_a_rank_that_never_starts_mpi_is_told_in_time(env):
    started = time.monotonic()
    words = ["-m", "hvdtrain", "doctor", "--timeout", "4", ":", "-np", "1", "sleep", "90"]
    job = mpirun(1, words, timeout_s=80, env=env)
    assert "did not connect within 4 s" in job.stdout, job.text
    assert job.returncode not in (0, None) and job.orphans == [], job.text
    assert time.monotonic() - started < 60
