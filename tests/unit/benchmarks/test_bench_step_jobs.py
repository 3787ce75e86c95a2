"""bench step's jobs: asked, suspended, resumed and ended, whatever the job does. The jobs are small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from benchmarks import jobs
from benchmarks.jobs import Job, JobFailed
from benchmarks.worker import MARK
from hvdtrain.commands.build_horovod.child_log import logged
from hvdtrain.core.processes import orderly_signals, processes

pytestmark = pytest.mark.timeout(60)

TALK = f"""
import json, os, sys
def say(**message):
    print("noise" + {MARK!r} + json.dumps(message), flush=True)
"""
ECHO = TALK + """
say(event="ready", pid=os.getpid())
for line in sys.stdin:
    if line.split() == ["quit"]:
        break
    say(event="done", line=line.strip())
"""
STRAY = """
import subprocess
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


@pytest.fixture
def start():
    started = []

    def run(program):
        job = Job("probe", [sys.executable, "-c", program], dict(os.environ))
        started.append(job)
        return job

    yield run
    for job in started:
        job.end()


def states(job):
    return {psutil.Process(pid).status() for pid in processes(job._child.mark)}


def eventually(true, within_s=10.0):
    ends_at = time.monotonic() + within_s
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.02)
    return true()


def test_a_job_answers_and_ends_in_order(start):
    job = start(ECHO)
    job.wait("ready", 20)
    assert job.ask("go 3", "done", 20)["line"] == "go 3"
    job.quit()
    began = time.monotonic()
    job.end(20)
    assert job._child.process.returncode == 0 and time.monotonic() - began < 10
    assert not processes(job._child.mark)
    job.end()


def test_a_suspended_job_stands_still_with_all_its_processes(start):
    job = start(TALK + STRAY + ECHO)
    job.wait("ready", 20)
    assert eventually(lambda: len(processes(job._child.mark)) == 2), "also the one that left its session"
    job.suspend()
    assert eventually(lambda: states(job) == {psutil.STATUS_STOPPED})
    with pytest.raises(JobFailed, match="did not answer within"):
        job.ask("go 1", "done", 0.5)
    job.resume()
    assert job.wait("done", 20)["line"] == "go 1"
    job.suspend()
    job.end()
    assert not processes(job._child.mark), "nothing is left of a job that was suspended"


def test_a_job_that_dies_is_told_with_its_last_lines(start):
    job = start("print('first')\nraise SystemExit('the reason')")
    with pytest.raises(JobFailed) as caught:
        job.wait("ready", 20)
    assert "exit status 1" in str(caught.value) and caught.value.lines == ["first", "the reason"]
    job.quit()
    with pytest.raises(JobFailed):
        job._send("go 1")


@pytest.mark.slow
def test_a_job_that_will_not_end_is_made_to(start, monkeypatch):
    monkeypatch.setattr(jobs, "TERMINATE_S", 0.3)
    job = start("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TALK + STRAY
                + "say(event='ready')\nimport time\ntime.sleep(600)")
    job.wait("ready", 20)
    job.quit()
    job.end(0.3)
    assert not processes(job._child.mark) and job._child.process.returncode == -signal.SIGKILL


def test_another_message_or_half_a_one_is_no_answer(start):
    job = start(TALK + "say(event='else')\nprint(" + repr(MARK + '{"event": "rea') + ")\nsay(event='ready')")
    with pytest.raises(JobFailed, match="said 'else'"):
        job.wait("ready", 20)
    assert job.wait("ready", 20) == {"event": "ready"}


def test_a_job_ends_with_whoever_started_it_even_when_that_is_killed():
    program = (f"import os, sys; from benchmarks.jobs import Job\n"
               f"job = Job('probe', [sys.executable, '-c', {ECHO!r}], dict(os.environ))\n"
               f"print(job.wait('ready', 20)['pid'], flush=True)\nos.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert eventually(lambda: not psutil.pid_exists(int(done.stdout)))


@pytest.mark.slow
def test_a_logged_child_is_ended_on_a_signal_with_what_has_left_its_session(tmp_path):
    """As of mpirun, whose ranks are in groups of their own; this is what `benchmarks accuracy` and `verify` rely on."""
    pids, program = tmp_path / "pids", "import os, sys, time\n" + STRAY + """
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {stray.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
    threading.Thread(target=lambda: eventually(pids.exists) and os.kill(os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as left, orderly_signals():
        logged("the child", [sys.executable, "-c", program, str(pids)], tmp_path / "log", dict(os.environ), 40)
    assert left.value.code == 143
    assert eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split()), 5)


def test_a_signal_becomes_an_orderly_exit():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, orderly_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert left.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
