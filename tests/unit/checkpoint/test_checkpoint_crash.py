"""A save that fails or dies at any system call leaves the old checkpoint or the new one, never a mix.

``Faults`` stands between the code and the operating system: it counts every call that changes the disk and
makes the n-th go wrong. The tests try all n, in three ways: an error once (the code must clean up), death
(nothing runs after it), and death with power loss (what was not fsynced by then is torn in half or gone).
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.checkpoint import CheckpointStore, Snapshot, read_snapshot, write_snapshot
from hvdtrain.checkpoint.sharded import answer, order, publish
from hvdtrain.core.protocols.run import Shard

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True, scope="module")
def fsync_costs_nothing():
    """Thousands of real fsyncs would wait for a slow disk; the processes that get killed do them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


ERRORS = itertools.cycle([errno.EIO, errno.ENOSPC, errno.EACCES])


class Died(BaseException):
    """The process is gone: every later call raises it too, so no clean-up code can help."""


class Faults:
    """Counts the calls that change the disk and spoils the ``nth`` (from 1; 0 spoils none)."""

    CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str, nth: int) -> None:
        self.way, self.nth, self.count, self.dead = way, nth, 0, False
        self.trace: list[tuple[str, str]] = []
        self.unsynced: set[str] = set()
        self.patch = monkeypatch

    def __enter__(self) -> Faults:
        for name in self.CALLS:
            self.patch.setattr(os, name, self._wrap(name, getattr(os, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self.patch.undo()
        if self.dead and self.way == "power":
            self._lose_power()

    def _wrap(self, name: str, real):
        def call(*args, **kwargs):
            self.count += 1
            self.dead = self.dead or (self.way != "error" and self.count == self.nth)
            if self.dead or self.count == self.nth:
                self._spoil(name, real, args)
            where = self._where(name, args, kwargs)
            result = real(*args, **kwargs)
            self._note(name, where, args)
            return result

        return call

    def _spoil(self, name: str, real, args) -> None:
        if self.count == self.nth and name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        if name == "close":
            real(*args)  # a descriptor is freed whatever close says
        if self.dead:
            raise Died
        number = next(ERRORS)
        raise OSError(number, os.strerror(number))

    @staticmethod
    def _where(name: str, args, kwargs) -> str:
        if name in ("write", "fsync", "close"):
            return os.readlink(f"/proc/self/fd/{args[0]}")
        if kwargs.get("dir_fd") is not None:
            return os.path.join(os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"), str(args[0]))
        return str(args[0])

    def _note(self, name: str, where: str, args) -> None:
        self.trace.append((name, where if name != "rename" else f"{where} -> {args[1]}"))
        if name == "open" and args[1] & os.O_CREAT:
            self.unsynced |= {where, os.path.dirname(where)}
        elif name == "write":
            self.unsynced.add(where)
        elif name == "fsync":
            self.unsynced.discard(where)
        elif name == "rename":
            moved = {path for path in self.unsynced if path.startswith(where)}
            self.unsynced = (self.unsynced - moved) | {str(args[1]) + path[len(where) :] for path in moved}

    def _lose_power(self) -> None:
        for path in map(Path, self.unsynced):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
            elif path.is_dir() and "manifest.json" in os.listdir(path):
                (path / "manifest.json").unlink()  # a name that its directory never made durable


def make(seed: int) -> Snapshot:
    """Return a small run's state that shares no array and no fact with another seed's."""
    rng = np.random.default_rng(seed)
    tensors = {
        "model": {"w": rng.normal(size=(4, 3)), "b": rng.normal(size=3).astype(np.float16)},
        "rank-0000": {"rng": rng.integers(0, 256, 16, np.uint8)},
    }
    return Snapshot(tensors, {"seed": seed})


def bits(snapshot: Snapshot) -> tuple:
    arrays = [
        (group, name, a.dtype.str, a.shape, a.tobytes())
        for group, named in sorted(snapshot.tensors.items())
        for name, a in sorted(named.items())
    ]
    return arrays, dict(snapshot.meta)


def hidden(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".")]


def visible(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


OLD, NEW, NEXT = bits(make(1)), bits(make(2)), bits(make(3))
SCENES = {"next step": 2, "same step": 1}  # the step of the new checkpoint; the old one is step 1


def prepared(root: Path) -> CheckpointStore:
    store = CheckpointStore(root, keep=1)
    store.save(make(1), 1)
    return store


def call_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> int:
    store = prepared(tmp_path / "count")
    with Faults(monkeypatch, "error", 0) as faults:
        store.save(make(2), step)
    assert faults.count > 20
    return faults.count


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("way", ["error", "death", "power"])
def test_old_or_new_whatever_call_goes_wrong(tmp_path, monkeypatch, way, scene):
    step, outcomes = SCENES[scene], set()
    for nth in range(1, call_count(tmp_path, monkeypatch, step) + 1):
        root = tmp_path / str(nth)
        store, said = prepared(root), []
        try:
            with Faults(monkeypatch, way, nth) as faults:
                store.save(make(2), step)
            raised = None
        except (OSError, Died) as error:
            raised = error
        path, found = CheckpointStore(root, keep=1).latest_whole(said.append)
        outcome = bits(found)
        assert outcome in (OLD, NEW), f"call {nth}: a mix, after {faults.trace[-3:]}"
        assert said == [], f"call {nth}: a broken checkpoint is in sight"
        assert raised is not None or outcome == NEW, f"call {nth}: the save said it was done and was not"
        if way == "error" and raised is not None:
            assert not [name for name in hidden(root) if "-tmp-" in name], f"call {nth}: left {hidden(root)}"
            renamed = [text.split(" -> ")[0] for name, text in faults.trace if name == "rename"]
            published = any("-tmp-" in source for source in renamed)
            assert outcome == (NEW if published else OLD)
            assert path.name == f"step-{step if published else 1:08d}", f"call {nth}: not under its own name"
        outcomes.add("old" if outcome == OLD else "new")
        # The next run continues from there: what is left over goes, and what is needed stays.
        store = CheckpointStore(root, keep=1)
        store.save(make(3), 3)
        assert bits(store.latest_whole(said.append)[1]) == NEXT
        assert (visible(root), hidden(root), said) == (["step-00000003"], [], [])
    assert outcomes == {"old", "new"}


def test_a_crash_after_a_crash_after_a_crash(tmp_path, monkeypatch):
    """Each save of step 1 dies one call later than the one before, over what all the others left behind."""
    count = call_count(tmp_path, monkeypatch, 1)
    root = tmp_path / "run"
    prepared(root)
    whole = {OLD[1]["seed"]: OLD}
    for nth in range(1, 2 * count):
        whole[nth + 9] = bits(make(nth + 9))
        with pytest.raises(Died) if nth < 20 else _may_die(), Faults(monkeypatch, "power", nth):
            CheckpointStore(root, keep=1).save(make(nth + 9), 1)
        found = bits(CheckpointStore(root, keep=1).latest_whole(lambda text: None)[1])
        assert found == whole[found[1]["seed"]]
    assert found == whole[nth + 9], "the last save met no fault"


class _may_die:
    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        return kind is Died


def test_the_order_of_durability(tmp_path, monkeypatch):
    with Faults(monkeypatch, "error", 0) as faults:
        write_snapshot(tmp_path / "step-00000001", make(1))
    done = [(name, Path(text.split(" -> ")[0]).name) for name, text in faults.trace]
    rename = next(place for place, (name, _) in enumerate(done) if name == "rename")
    temp = done[rename][1]
    for file in ("model.safetensors", "rank-0000.safetensors", "manifest.json"):
        last_write = max(place for place, step in enumerate(done) if step == ("write", file))
        assert last_write < done.index(("fsync", file)) < done.index(("fsync", temp)) < rename
    assert done.index(("fsync", "rank-0000.safetensors")) < done.index(("open", "manifest.json"))
    assert done.index(("fsync", tmp_path.name)) > rename


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


KILLED_AT_EVERY_CALL = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[3])
import numpy as np
from test_checkpoint_crash import CRASH_CALLS, make, prepared, save_sharded
from hvdtrain.checkpoint.savers import BackgroundSaver
base, (step, beside), layout = sys.argv[1], map(int, sys.argv[2].split(",")), sys.argv[4]

def dies_at(nth):
    count, lock = 0, threading.Lock()
    def wrap(real):
        def call(*args, **kwargs):
            nonlocal count
            with lock:
                count += 1
                if count == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)
            return real(*args, **kwargs)
        return call
    for name in CRASH_CALLS:
        setattr(os, name, wrap(os.fstat if name == "fsync" else getattr(os, name)))

def child(root, nth):
    store = prepared(root)
    dies_at(nth)
    if layout == "sharded":
        work = lambda: save_sharded(store, make(2), step)
    else:
        work = lambda: store.save(make(2), step)
    if not beside:
        work()
        return
    saver = BackgroundSaver()
    saver.save(step, work)
    while not saver.wait(0):
        np.ones((30, 30)) @ np.ones((30, 30))
    outcome, = saver.settled()
    if outcome.error:
        raise RuntimeError(outcome.error)

from pathlib import Path
os.fsync = os.fstat
nth, status = 0, -1
while status != 0:
    nth += 1
    pid = os.fork()
    if pid == 0:
        try:
            child(Path(base) / str(nth), nth)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status not in (0, signal.SIGKILL):
        sys.exit(f"call {nth}: {status}")
print(nth)
"""

CRASH_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "close")


def save_sharded(store: CheckpointStore, snapshot: Snapshot, step: int) -> None:
    """Write a snapshot as two ranks do where each writes its own shards: halves of every tensor."""
    note, size = order(store, step, 0), 2
    answers = []
    for rank in range(size):
        shards = [Shard(group, name, a.shape, low, a.reshape(-1)[low:high])
                  for group, arrays in snapshot.tensors.items() for name, a in arrays.items()
                  for low, high in [(a.size * rank // size, a.size * (rank + 1) // size)]]
        answers.append(answer(note, rank, shards, "", ()))
    publish(store, note, answers, snapshot.meta, lambda text: None)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gathered", "sharded"])
@pytest.mark.parametrize("beside", [0, 1], ids=["the run waits", "in a thread beside the run"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_process_killed_before_any_call_leaves_old_or_new(tmp_path, scene, beside, layout):
    """SIGKILL before the nth call that changes the disk, for all n; the n that is beyond the last one ends well."""
    done = run(KILLED_AT_EVERY_CALL, str(tmp_path), f"{SCENES[scene]},{beside}", str(Path(__file__).parent), layout)
    assert done.returncode == 0, done.stderr
    calls, seen = int(done.stdout), set()
    assert calls > 25
    for nth in range(1, calls + 1):
        root, said = tmp_path / str(nth), []
        store = CheckpointStore(root, keep=1)
        outcome = bits(store.latest_whole(said.append)[1])
        assert outcome == NEW if nth == calls else outcome in (OLD, NEW), f"call {nth}: a mix"
        seen.add("old" if outcome == OLD else "new")
        store.save(make(3), 3)
        assert (visible(root), hidden(root), said) == (["step-00000003"], [], []), f"call {nth}"
    assert seen == {"old", "new"}


def test_a_disk_that_fills_up_keeps_the_previous_one(tmp_path, monkeypatch):
    """The disk takes 1000 bytes, part of one write, and then no more: the shape of a real full disk."""
    store = prepared(tmp_path / "root")
    real, room = os.write, 1000

    def write(descriptor: int, data) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(descriptor, bytes(data)[:room])
        room -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError) as caught:
        store.save(Snapshot({"model": {"w": np.ones(4096)}}), 2)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(store.root) == ["step-00000001"]
    assert bits(store.latest_whole(pytest.fail)[1]) == OLD


LIMITED = """
import errno, resource, sys
import numpy as np
from hvdtrain.checkpoint import CheckpointStore, Snapshot
store = CheckpointStore(sys.argv[1], keep=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    store.save(Snapshot({"model": {"w": np.ones(1 << 18)}}), 2)
except OSError as error:
    sys.exit(0 if error.errno == errno.EFBIG else 1)
sys.exit(2)
"""


def test_a_limit_of_the_kernel_is_an_oserror_and_leaves_nothing(tmp_path):
    """The kernel itself cuts the write at 1 MiB (a short write, then EFBIG), as a quota does."""
    store = prepared(tmp_path / "root")
    done = run(LIMITED, str(store.root))
    assert done.returncode == 0, done.stderr
    assert os.listdir(store.root) == ["step-00000001"]
    assert bits(read_snapshot(store.path_of(1))) == OLD


def test_an_interrupt_from_the_keyboard_leaves_nothing(tmp_path, monkeypatch):
    store = prepared(tmp_path / "root")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(make(2), 2)
    assert os.listdir(store.root) == ["step-00000001"]
