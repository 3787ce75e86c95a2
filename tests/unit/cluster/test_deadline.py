"""The bound on calls that cannot be interrupted."""

import os
import subprocess
import sys
import threading
import time

import pytest

from hvdtrain.cluster import deadline as module
from hvdtrain.cluster.deadline import deadline
from hvdtrain.core import ROOT


def child(code):
    """Run code in an interpreter of its own."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", "import time, sys\nfrom hvdtrain.cluster.deadline import *\n" + code],
                          capture_output=True, text=True, timeout=30, env=os.environ | {"PYTHONPATH": str(ROOT.parent)})
    return done, time.monotonic() - started


def test_a_body_in_time_passes():
    for _ in range(3):
        with deadline(30, "quick"):
            pass
    assert not module._watchdog.open


def test_an_exception_closes_the_deadline():
    with pytest.raises(ValueError), deadline(30, "raising"):
        raise ValueError
    assert not module._watchdog.open


def test_one_thread_however_many_deadlines():
    for _ in range(100):
        with deadline(30, "outer"), deadline(20, "inner"):
            pass
    assert [t.name for t in threading.enumerate()].count("hvdtrain-deadline") == 1


def test_expiry_says_what_and_where_and_ends_the_process():
    done, seconds = child("set_owner('rank 1 on host a', None)\nprint('before')\n"
                          "with deadline(0.3, 'allreduce grad.7'):\n    time.sleep(20)")
    assert done.returncode == module.EXIT_DEADLINE == 70 and seconds < 10
    assert done.stdout == "before\n"
    assert done.stderr.startswith("hvdtrain: rank 1 on host a: allreduce grad.7 did not end within 0.3 s.")
    assert done.stderr.count("did not end") == 1 and '"<string>", line' in done.stderr


@pytest.mark.slow
def test_a_body_that_keeps_pythons_lock_ends_too():
    """As MPI_Init does while another rank is missing: no thread of Python can watch it."""
    done, seconds = child("import ctypes\nwith locked_deadline(0.2, 'MPI_Init'):\n"
                          "    ctypes.PyDLL(None).sleep(25)")  # PyDLL: the lock is kept
    assert done.returncode == 1 and "Timeout" in done.stderr and '"<string>", line' in done.stderr and seconds < 15
    done, _ = child("with locked_deadline(0.2, 'quick'):\n    pass\ntime.sleep(1.6)")
    assert done.returncode == 0 and not done.stderr


def test_expiry_of_a_later_deadline_that_ends_first():
    done, seconds = child("with deadline(25, 'long'):\n    with deadline(0.3, 'short'):\n        time.sleep(20)")
    assert done.returncode == 70 and "short did not end" in done.stderr and seconds < 10


def test_expiry_after_the_thread_slept_through_closed_ones():
    done, _ = child("for _ in range(5):\n    with deadline(0.05, 'past'): pass\n    time.sleep(0.08)\n"
                    "with deadline(0.2, 'real'): time.sleep(20)")
    assert done.returncode == 70 and "real did not end" in done.stderr and "past" not in done.stderr


def test_expiry_calls_the_jobs_abort_and_does_not_trust_it():
    done, _ = child("set_owner('rank 0', lambda code: print('abort', code, file=sys.stderr, flush=True))\n"
                    "with deadline(0.2, 'x'): time.sleep(20)")
    assert done.returncode == 70 and "abort 70" in done.stderr
    done, seconds = child("import hvdtrain.cluster.deadline as d\nd.ABORT_GRACE_S = 0.5\n"
                          "set_owner('rank 0', lambda code: time.sleep(60))\nwith deadline(0.2, 'x'): time.sleep(20)")
    assert done.returncode == 70 and seconds < 10


def test_a_forked_child_has_a_watchdog_of_its_own():
    done, _ = child("import os\nwith deadline(20, 'parent'):\n    pid = os.fork()\n    if pid == 0:\n"
                    "        with deadline(0.2, 'child'): time.sleep(10)\n"
                    "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))")
    assert done.stdout == "70\n" and "child did not end" in done.stderr
