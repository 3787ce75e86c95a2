"""Reports that a rank leaves for a supervisor: written once, whole, and without ever raising."""

import json
import subprocess
import sys

import pytest

from hvdtrain.cluster import exit as exits
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.liveness import causes as marks
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout
from hvdtrain.core.launcher import SOLO


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an attempt's folder, with this process as rank 1 of a job that starts from nothing."""
    for name, value in (("_step", -1), ("_descriptor", -1), ("_left", set()), ("_marked", set())):
        monkeypatch.setattr(causes, name, value)
    monkeypatch.setenv(causes.DIRECTORY, str(tmp_path / "attempts" / "001"))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    return tmp_path / "attempts" / "001"


def test_the_first_cause_of_a_rank_stays(folder):
    causes.progress(7, root=False)
    assert causes.leave("exception", "ValueError: bad")
    assert not causes.leave("lost", "gone") and not causes.leave("hang", "late", rank=1)
    assert causes.leave("lost", "gone", rank=0, step=3, host="b")
    first, second = causes.read(folder)
    assert (first["rank"], first["kind"], first["host"], first["step"]) == (0, "lost", "b", 3)
    assert (second["rank"], second["kind"], second["text"], second["step"]) == (1, "exception", "ValueError: bad", 7)
    assert sorted(path.name for path in folder.iterdir()) == ["cause-0000.json", "cause-0001.json"]


def test_another_process_does_not_replace_a_cause(folder, monkeypatch):
    assert causes.leave("user", "mistake")
    monkeypatch.setattr(causes, "_left", set())
    assert not causes.leave("lost", "gone", rank=1)
    assert [row["kind"] for row in causes.read(folder)] == ["user"]


def test_without_a_supervisor_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(causes.DIRECTORY, raising=False)
    monkeypatch.chdir(tmp_path)
    assert not causes.leave("user", "x")
    causes.mark("start")
    causes.progress(3, root=True)
    assert not causes.requeue_asked() and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, folder, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(causes.DIRECTORY, str(tmp_path / "file" / "001"))
    assert not causes.leave("exception", "x")
    causes.mark("start")
    causes.progress(1, root=True)
    assert causes.read(tmp_path / "file" / "001") == [] and not causes.requeue_asked()


class ResourceExhaustedError(Exception):
    """TensorFlow's, by name."""


@pytest.mark.parametrize("error, kind", [
    (UserError("a", "b", "c"), "user"), (UserError("a").of_kind("non_finite"), "non_finite"),
    (MemoryError(), "oom"), (ResourceExhaustedError("x"), "oom"),
    (RuntimeError("CUDA error: out of memory"), "oom"), (RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                                                         "oom"),
    (RuntimeError("the size of tensor a"), "exception"), (ValueError("out of memory"), "exception"),
    (KeyboardInterrupt(), "interrupted"), (WaitTimeout("barrier"), "hang")])
def test_the_kind_of_an_exception(error, kind):
    assert causes.kind_of(error) == kind


def test_torn_and_foreign_records_are_left_out(folder):
    folder.mkdir(parents=True)
    (folder / "cause-0000.json").write_text('{"kind": "user", "te')
    (folder / "cause-0001.json").write_text('[1]\n')
    (folder / "cause-0002.json").write_text(json.dumps({"kind": "surprise", "text": "", "rank": 2, "host": "",
                                                        "step": 1, "time": 1.0}))
    (folder / "step").write_text("x")
    assert causes.read(folder) == [] and causes.read_progress(folder) == (-1, 0.0)


def test_progress_is_read_back(folder):
    folder.mkdir(parents=True)
    for step in (9, 10, 11):
        causes.progress(step, root=True)
    assert causes.read_progress(folder)[0] == 11


def test_the_parts_of_a_start(folder):
    folder.mkdir(parents=True)
    for name in ("start", "imported", "loaded", "loaded", "step"):
        causes.mark(name)
    found = causes.read_marks(folder)
    assert [row["name"] for row in found] == ["start", "imported", "loaded", "step"]
    rows = [{"name": name, "time": 100.0 + at, "rank": rank} for name, at, rank in
            (("start", 0.5, 0), ("imported", 3.5, 0), ("imported", 1.0, 1), ("loaded", 5.0, 0), ("step", 5.25, 0))]
    parts = marks.start_parts(100.0, rows)
    assert parts == {"start": 0.5, "import": 3.0, "load": 1.5, "first step": 0.25}
    assert marks.start_parts(100.0, rows[:1]) == {"start": 0.5}
    assert marks.in_words({"notice": 1.0, **parts}) == \
        "6.2 s: notice 1.0, start 0.5, import 3.0, load 1.5, first step 0.2"


def stop(error):
    """Return a main that ends with ``error``, an exception or a status."""
    def main():
        if isinstance(error, BaseException):
            raise error
        return error

    return main


@pytest.mark.parametrize("error, kind, status", [
    (0, "done", 0), (None, "done", 0), (75, "requeue", 75), (3, "exception", 3), (SystemExit(0), "done", 0),
    (SystemExit(75), "requeue", 75), (SystemExit(4), "exception", 4), (UserError("no", "yes", "mend it"), "user", 2),
    (ValueError("bad"), "exception", 1), (PeerFailed("another rank went away"), "echo", 1), (MemoryError(), "oom", 1)])
def test_every_end_of_a_command_leaves_its_cause(folder, error, kind, status, capfd):
    assert exits.run_guarded(stop(error), SOLO) == status
    row, = causes.read(folder)
    assert row["kind"] == kind, capfd.readouterr()


def test_an_agreed_mistake_keeps_its_kind():
    def work(control, wire):
        def write():
            if control.rank == 1:
                raise UserError("disk full", "room", "free some").of_kind("disk")

        with pytest.raises(UserError, match="rank 1") as caught:
            agreed(control, write, "the save")
        return causes.kind_of(caught.value)

    assert LockstepWorld(2).run(work, timeout_s=20.0) == ["disk", "disk"]


FORKS = """
import atexit, os, sys
from hvdtrain.cluster.liveness import causes, pulse

pulse.page()
atexit.register(pulse.leaving)
causes.leave_done_at_exit()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(pulse._own.own.pace().leaving, causes.leave("exception", "ValueError: bad"))
"""


def test_a_forked_childs_end_is_not_the_ranks(folder):
    child = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=30)
    assert child.stdout == "False True\n", child.stderr
    assert [row["kind"] for row in causes.read(folder)] == ["exception"]


SAVED = """
import os, signal, sys
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.core.launcher import SOLO

status = run_guarded(lambda: 75, SOLO)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(status)
"""


def test_a_launcher_that_ends_who_is_saved_does_not_change_the_status():
    assert subprocess.run([sys.executable, "-c", SAVED], timeout=30).returncode == 75
