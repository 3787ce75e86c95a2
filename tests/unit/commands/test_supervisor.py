"""The runner around `next_launch`, over a small program as launcher: real processes, signals and files, no MPI."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvdtrain.cluster.launchers.spec import HostSlots
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.cluster.machine.usage import oom_kills
from hvdtrain.commands.launch import supervisor as supervising
from hvdtrain.commands.launch.job import SupervisedJob, next_number
from hvdtrain.commands.launch.restart_policy import HostCandidate, cause_of
from hvdtrain.commands.launch.supervisor import LauncherGroup, Supervisor, SupervisorEnvironment
from hvdtrain.config import Config, DataParallelConfig, RebalanceConfig
from hvdtrain.core import ROOT
from hvdtrain.reports import jsonl as history

HERE = HostSlots("localhost", 1)

FAKE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from hvdtrain.cluster.liveness import causes
out, where, number = Path(sys.argv[1]), Path(os.environ["HVDLAUNCH_DIR"]), int(os.environ["HVDLAUNCH_ATTEMPT"])
def complete():
    (out / "completed.json").write_text("{}")
def save(step):
    (out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    causes.progress(step, True)
causes.mark("start"); causes.mark("imported"); causes.mark("loaded"); causes.mark("fit", 0)
"""


@pytest.fixture
def supervisor(tmp_path):
    """Make (supervisor, what it says) for a launcher that runs ``body`` after `FAKE`."""
    def make(body, restarts=3, config=None, **around):
        path = tmp_path / "launcher.py"
        path.write_text(FAKE + textwrap.dedent(body))
        out = tmp_path / "run"
        out.mkdir(exist_ok=True)
        said = []

        def command(hosts, program, told):
            env = {**os.environ, "PYTHONPATH": str(ROOT.parent), **told}
            return [sys.executable, str(path), str(out), *program], env

        environment = SupervisorEnvironment(command, lambda where: [HostCandidate(HERE, here=True)],
                                            lambda hosts: hosts, said.append, **around)
        return Supervisor(SupervisedJob(("words",), out, config, (HERE,)), restarts, environment), said

    return make


def test_it_launches_again_until_the_record_is_there(supervisor, tmp_path):
    pages = []
    one, said = supervisor("""
        save(number * 10)
        causes.mark("step", number * 10)
        if number == 1: os.kill(os.getpid(), signal.SIGKILL)
        if number == 2: causes.leave("exception", "ValueError: bad"); sys.exit(0)
        time.sleep(0.4)
        complete(); sys.exit(9)
    """, page=lambda out: pages.append(len(history.read_attempts(out))))
    assert one.run() == 0, "the record counts, not the launcher's status"
    rows = history.read_attempts(tmp_path / "run")
    assert [(row["cause"], row["step_end"], row["checkpoint"]) for row in rows] == \
        [("lost", 10, 10), ("exception", 20, 20), ("done", 30, 30)]
    assert rows[1]["words"] == "ValueError: bad" and rows[0]["host"] == "localhost" and rows[0]["ranks"] == 1
    assert {"notice", "kill", "start", "import", "load", "first step"} <= set(rows[0]["seconds"])
    assert pages == [1, 2, 3], "the report page is written after each attempt, which is in it"
    text = "\n".join(said)
    assert "recovered in " in text and re.search(r"2 restarts, 0 steps repeated, \d+\.\d s in total", text)
    assert not [line for line in said if "\n" in line]


def test_a_status_of_0_without_the_record_is_no_success(supervisor, tmp_path):
    one, _ = supervisor("sys.exit(0)", restarts=1, config=Config())
    assert one.run() == 1
    assert [row["cause"] for row in history.read_attempts(tmp_path / "run")] == ["lost", "lost"]


def test_an_old_record_is_no_success(supervisor, tmp_path):
    one, _ = supervisor("sys.exit(0)", restarts=0, config=Config())
    (tmp_path / "run" / "completed.json").write_text("{}")
    assert one.run() == 1
    found, _ = supervisor("causes.leave('done', '')", restarts=0, config=Config())
    assert found.run() == 0, "nothing was left to train"
    assert next_number(tmp_path / "run") == 3


def test_an_old_record_is_no_success_of_another_program_that_fails(supervisor, tmp_path):
    one, _ = supervisor("causes.leave('done', ''); sys.exit(3)", restarts=0)  # what Python's end leaves for any status
    (tmp_path / "run" / "completed.json").write_text("{}")
    assert one.run() == 1


def test_the_host_of_the_supervisor_is_not_taken_for_lost(supervisor, tmp_path):
    """Ranks of its host that the launcher kills leave no cause; who was lost waited for them, as for a slow rank."""
    one, _ = supervisor("""
        causes.leave("lost", "rank 2 on host b, ended, in step 9, there waiting in sum since 1 s", rank=2, host="b")
        sys.exit(1)
    """, restarts=0, own_names=("localhost",))
    one.run()
    (row,) = history.read_attempts(tmp_path / "run")
    assert row["rank"] == 2 and row["words"].startswith("rank 2 on host b, ended")


def test_a_program_may_work_on_after_its_fit(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(supervising, "LEAVE_S", 0.1)
    one, _ = supervisor("complete(); time.sleep(1.5); (out / 'scores').touch(); causes.leave('done', '')", restarts=0)
    assert one.run() == 0 and (tmp_path / "run" / "scores").exists()


def test_a_program_without_a_word_of_ours_runs_once(supervisor, tmp_path):
    silent = "for p in where.glob('marks*'): p.unlink()\nsys.exit({})"
    assert supervisor(silent.format(0), own_names=("localhost",))[0].run() == 0
    assert len(history.read_attempts(tmp_path / "run")) == 1
    assert supervisor(silent.format(3), restarts=0, own_names=("localhost",))[0].run() == 1
    assert supervisor(silent.format(0), restarts=0, own_names=("another",))[0].run() == 1, "a lost host, 0 all the same"


def test_other_programs_succeed_by_every_ranks_word(supervisor):
    assert supervisor("causes.leave('done', '')", restarts=0)[0].run() == 0
    assert supervisor("causes.leave('done', ''); sys.exit(3)", restarts=0)[0].run() == 1


@pytest.mark.parametrize("kind, status", [("user", 2), ("requeue", 75)])
def test_what_no_restart_follows(supervisor, tmp_path, kind, status):
    one, _ = supervisor(f"causes.leave({kind!r}, 'words')")
    assert one.run() == status and len(history.read_attempts(tmp_path / "run")) == 1


def test_a_launcher_that_stays_after_a_ranks_last_words_is_ended(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(supervising, "END_S", 0.3)
    one, _ = supervisor("causes.leave('exception', 'ValueError: bad'); time.sleep(60)", restarts=0)
    begin = time.monotonic()
    assert one.run() == 1 and time.monotonic() - begin < 20
    assert history.read_attempts(tmp_path / "run")[0]["cause"] == "exception"


def test_a_launcher_that_stays_after_the_end_is_ended_and_it_is_a_success(supervisor, monkeypatch):
    monkeypatch.setattr(supervising, "LEAVE_S", 0.3)
    assert supervisor("complete(); time.sleep(60)", restarts=0, config=Config())[0].run() == 0


def test_a_job_that_does_not_begin_is_ended(supervisor, tmp_path):
    one, _ = supervisor("for p in where.glob('marks*'): p.unlink()\ntime.sleep(60)", restarts=0, start_s=1.0)
    assert one.run() == 1
    row, = history.read_attempts(tmp_path / "run")
    assert row["cause"] == "hang" and "no rank had begun" in row["words"]


LISTENS = """
    signal.signal(signal.SIGUSR2, lambda *a: (causes.leave('requeue', 'asked'), sys.exit(75)))
    (out / "up").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_its_status(supervisor, tmp_path, number, status):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        one, said = supervisor(LISTENS)
        with ended_by(tmp_path / "run" / "up", number):
            assert one.run() == status
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "run" / "attempts" / "001" / causes.REQUEUE).exists()
    assert "asked to end" in "\n".join(said) and history.read_attempts(tmp_path / "run")[0]["cause"] == "requeue"


def test_a_second_interrupt_does_not_wait_for_the_save(supervisor, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        one, _ = supervisor("""
            signal.signal(signal.SIGUSR2, lambda *a: (out / "again").touch())
            (out / "up").touch()
            time.sleep(60)
        """)
        with ended_by(tmp_path / "run" / "up", signal.SIGINT), ended_by(tmp_path / "run" / "again", signal.SIGINT):
            assert one.run() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert history.read_attempts(tmp_path / "run")[0]["cause"] == "interrupted"


AFTER_FIT = "complete(); (out / 'up').touch(); time.sleep(1.5); (out / 'scores').touch(); causes.leave('done', '')"


def test_a_program_that_works_on_after_its_fit_does_not_die_of_the_wish_to_save(supervisor, tmp_path):
    one, _ = supervisor(AFTER_FIT, forwards=True)
    with ended_by(tmp_path / "run" / "up", signal.SIGTERM):
        assert one.run() == 0 and (tmp_path / "run" / "scores").exists()


def test_a_program_that_is_interrupted_after_its_fit_is_not_complete(supervisor, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        one, _ = supervisor(AFTER_FIT)
        with ended_by(tmp_path / "run" / "up", signal.SIGINT):
            assert one.run() == 130 and not (tmp_path / "run" / "scores").exists()
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_nohup_ignores_stays_ignored(supervisor, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        one, _ = supervisor("(out / 'up').touch(); time.sleep(1); complete()")
        with ended_by(tmp_path / "run" / "up", signal.SIGHUP):
            assert one.run() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_torn_history_swallows_no_record(supervisor, tmp_path):
    one, _ = supervisor("complete()")
    (tmp_path / "run" / history.HISTORY).write_bytes(b'{"attempt": 1}\n\xff{"atte')
    assert one.run() == 0
    assert [row["attempt"] for row in history.read_attempts(tmp_path / "run")] == [1, 1]


def test_an_interrupt_ends_all_at_once(supervisor, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        one, _ = supervisor("(out / 'up').touch(); time.sleep(60)")
        with ended_by(tmp_path / "run" / "up", signal.SIGINT):
            assert one.run() == 130
        assert history.read_attempts(tmp_path / "run")[0]["cause"] == "interrupted"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_it_waits_starts_nothing_more(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.commands.launch.restart_policy.FIRST_WAIT_S", 30.0)
    one, _ = supervisor("(out / 'up').touch() if number == 2 else None; sys.exit(1)", restarts=5, config=Config())
    begin = time.monotonic()
    with ended_by(tmp_path / "run" / "up", signal.SIGTERM):
        assert one.run() == 75
    assert time.monotonic() - begin < 20 and len(history.read_attempts(tmp_path / "run")) == 2


def ended_by(path, number):
    """Context in which this process gets a signal as soon as ``path`` is there."""
    code = (f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.02)\n"
            f"os.kill({os.getpid()}, {number:d})")
    return subprocess.Popen([sys.executable, "-c", code])


def test_children_that_ignore_sigterm_and_left_the_group_are_ended(tmp_path):
    code = ("import os, signal, subprocess, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if len(sys.argv) < 2: subprocess.Popen([sys.executable, __file__, 'child'], start_new_session=True)\n"
            "else: open(os.path.dirname(__file__) + '/up', 'w').close()\n"
            "time.sleep(60)")
    path = tmp_path / "stubborn.py"
    path.write_text(code)
    group = LauncherGroup([sys.executable, str(path)], {**os.environ, causes.JOB: "t" * 8}, "t" * 8)
    ends_at = time.monotonic() + 20
    while not (tmp_path / "up").exists() and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert len(group.processes()) == 2
    group.end_all(grace_s=0.2)
    assert group.processes() == [] and group.process.poll() == -signal.SIGKILL


def test_the_launcher_goes_with_a_supervisor_that_is_killed(tmp_path):
    code = ("import os, sys, time\nfrom hvdtrain.commands.launch.supervisor import LauncherGroup\n"
            "group = LauncherGroup(['sleep', '60'], {**os.environ, 'HVDLAUNCH_JOB': 'u' * 8}, 'u' * 8)\n"
            "print(group.process.pid, flush=True)\ntime.sleep(60)")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(ROOT.parent)})
    pid = int(child.stdout.readline())
    child.kill()
    child.wait()
    ends_at = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}/cmdline") and Path(f"/proc/{pid}/cmdline").read_bytes() and \
            time.monotonic() < ends_at:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}/cmdline") or not Path(f"/proc/{pid}/cmdline").read_bytes()


def left(kind, rank, when):
    """Return a cause as a rank leaves it."""
    return {"kind": kind, "text": f"{kind} of {rank}", "rank": rank, "host": "a", "step": 1, "time": when}


@pytest.mark.parametrize("rows, want", [
    ([left("echo", 0, 1.0), left("exception", 1, 2.0)], ("exception", 1)),
    ([left("exception", 1, 1.0), left("hang", 0, 2.0)], ("exception", 1)),
    ([left("done", 0, 1.0), left("lost", 1, 2.0)], ("lost", 1)),
    ([left("echo", 0, 1.0)], ("lost", -1)), ([], ("lost", -1))])
def test_the_first_cause_counts(rows, want):
    kind, _, rank, _ = cause_of(rows, False, 137, "", 0)
    assert (kind, rank) == want


def test_of_ranks_lost_together_the_one_that_did_not_wait_is_named():
    waited = {**left("lost", 0, 1.0), "text": f"rank 0, ended, {pulse.WAITING} a vote since 0 s"}
    assert cause_of([waited, left("lost", 1, 1.5)], False, 1, "", 0)[2] == 1
    assert cause_of([waited, left("lost", 1, 9.0)], False, 1, "", 0)[2] == 0, "much later: another trouble"
    assert cause_of([waited], False, 1, "", 0)[2] == 0


def test_hosts_of_which_nobody_spoke():
    hosts = (HostSlots("a", 2), HostSlots("b", 1), HostSlots("c", 2))
    assert supervising.silent_hosts(hosts, [left("lost", 1, 1.0), left("lost", 4, 1.0)]) == ["b"]
    assert supervising.silent_hosts(hosts, []) == ["a", "b", "c"]


def test_a_host_that_is_gone_whole_is_named_and_not_the_rank_that_waited_for_it(supervisor, tmp_path):
    one, _ = supervisor(f"causes.leave('lost', 'rank 0, ended, {pulse.WAITING} a vote', rank=0)", restarts=0)
    one.environment.candidates = lambda where: [HostCandidate(HERE, here=True), HostCandidate(HostSlots("far", 1))]
    one.run()
    row, = history.read_attempts(tmp_path / "run")
    assert (row["cause"], row["rank"], row["host"]) == ("lost", -1, "far")


def test_what_the_system_killed_for_memory():
    assert cause_of([left("lost", 1, 1.0)], False, 137, "", 1)[0] == "oom"
    assert cause_of([], False, 137, "", 1)[0] == "oom"
    assert cause_of([left("user", 1, 1.0)], False, 2, "", 1)[0] == "user"


@pytest.mark.parametrize("group, file, text", [
    ("0::/jobs/7", "jobs/7/memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n"),
    ("0::/jobs/7", "memory.events", "oom 3\noom_kill 2\n"),
    (f"0::/{300 * 'x'}", "memory.events", "oom_kill 2\n"),  # a folder that cannot be asked for
    ("5:cpu:/x\n4:memory:/jobs/7", "memory/jobs/7/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n")])
def test_the_systems_count_of_kills_for_memory(tmp_path, group, file, text):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(group + "\n")
    path = tmp_path / "root" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert oom_kills(str(tmp_path / "root"), str(tmp_path)) == 2
    assert oom_kills(str(tmp_path / "elsewhere"), str(tmp_path)) == 0


def test_the_words_of_an_attempt(tmp_path):
    two, one = (HostSlots("a", 1), HostSlots("b", 1)), (HostSlots("b", 1),)
    config = Config(shares=[3, 1], precision="bf16:fp32", resume="elsewhere")
    job = SupervisedJob(("train",), tmp_path, config, two, "elsewhere")
    assert job.attempt(1, two, 0) == ("train", "--out", str(tmp_path))
    again = job.attempt(2, one, 4)
    assert again == ("train", "--out", str(tmp_path), "--resume", "elsewhere", "--micro_batch", "4", "--shares", "[1]",
                     "--precision", "fp32")
    zero = SupervisedJob(("train",), tmp_path, Config(data_parallel=DataParallelConfig("zero", 2, [3, 0])), two)
    assert zero.attempt(2, (HostSlots("a", 2),), 0)[-2:] == ("--data_parallel.shards", "[3, 3]")
    assert zero.attempt(2, one, 0)[-2:] == ("--data_parallel.shards", "[1]"), "somebody has to own the state"
    every = Config(emulate_speed=[1, 0.5], peak_tflops=[300, 2], rebalance=RebalanceConfig(max_micro_batch=[8, 4]))
    assert SupervisedJob(("train",), tmp_path, every, two).attempt(2, one, 0)[5:] == (
        "--rebalance.max_micro_batch", "[4]", "--emulate_speed", "[0.5]", "--peak_tflops", "[2]")
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000009.x").mkdir(parents=True)
    assert job.checkpoint() == 7 and job.attempt(2, two, 0)[-2:] == ("--resume", "auto")
    assert job.micro_batch(2, 0) == 64 and SupervisedJob(("x",), tmp_path, Config()).micro_batch(2, 0) == 32
    assert SupervisedJob(("x",), tmp_path, Config()).micro_batch(2, 8) == 8
