"""A store keeps the last few checkpoints, finds the newest whole one, and touches nothing but its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hvdtrain.checkpoint import CheckpointError, CheckpointStore, Snapshot, StoredCheckpoint, write_snapshot
from hvdtrain.core.errors import UserError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def fsync_costs_nothing():
    """Hundreds of real fsyncs would wait for the disk of whoever runs the tests; other tests do them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


def make(seed: int) -> Snapshot:
    return Snapshot({"model": {"w": np.full(5, seed, np.int64)}}, {"seed": seed})


def seed_of(snapshot: Snapshot) -> int:
    seed = snapshot.meta["seed"]
    assert snapshot.tensors["model"]["w"].tolist() == [seed] * 5
    return seed


def flip(path: Path) -> None:
    """Change one byte and keep the size: only a hash can tell."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def steps(store: CheckpointStore) -> list[int]:
    return [stored.step for stored in store.list()]


def newest(store: CheckpointStore, said: list[str] | None = None) -> int | None:
    log = (lambda text: pytest.fail(f"said {text!r}")) if said is None else said.append
    found = store.latest_whole(log)
    return None if found is None else seed_of(found[1])


def test_a_store_that_is_not_there_or_empty_has_nothing(store):
    assert (store.list(), newest(store)) == ([], None)
    store.root.mkdir()
    assert (store.list(), newest(store)) == ([], None)


def test_the_last_keep_are_kept(store):
    for step in (5, 10, 15, 20, 25):
        assert store.save(make(step), step) == store.root / f"step-{step:08d}"
    assert store.list() == [StoredCheckpoint(step, store.root / f"step-{step:08d}") for step in (15, 20, 25)]
    assert newest(store) == 25
    assert sorted(os.listdir(store.root)) == ["step-00000015", "step-00000020", "step-00000025"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None, "3"])
def test_keep_is_a_whole_number_from_one(tmp_path, keep):
    with pytest.raises(UserError, match="expected a whole number of at least 1"):
        CheckpointStore(tmp_path, keep)


def test_order_is_by_the_steps_in_manifests_not_by_time_or_name(store):
    odd = [7, 1, 99_999_999, 1_234_567_890, 100_000_000, 0]
    for step in odd:
        write_snapshot(store.path_of(step), make(step), step=step)
    for age, path in enumerate(sorted(store.root.iterdir())):
        os.utime(path, (age, age))
    assert steps(store) == sorted(odd)
    assert newest(store) == 1_234_567_890
    # A copy under a later name is still the step it was saved at.
    shutil.copytree(store.path_of(7), store.root / "step-9999999999")
    assert steps(store) == sorted([*odd, 7])
    assert newest(store) == 1_234_567_890


def test_damaged_and_foreign_ones_are_skipped_each_with_its_reason(store):
    store.keep = 10
    for step in (1, 2, 3, 4, 5):
        store.save(make(step), step)
    os.truncate(store.path_of(5) / "model.safetensors", 20)
    (store.path_of(4) / "manifest.json").write_text('{"format": "hvdtrain-checkpoint", "version": 3}')
    flip(store.path_of(3) / "model.safetensors")
    (store.root / "step-00000006").mkdir()
    (store.root / "step-00000006" / "model.bin").write_bytes(b"x")
    (store.root / "step-00000007").mkdir()
    (store.root / "step-00000008").write_text("text")
    (store.root / "step-00000009").symlink_to(store.path_of(1))
    (store.root / "notes.txt").write_text("not ours")
    (store.root / "final").mkdir()
    said: list[str] = []
    path, snapshot = store.latest_whole(said.append)
    assert (path, seed_of(snapshot)) == (store.path_of(2), 2)
    expected = [
        ("step-00000009", "is a symbolic link"),
        ("step-00000008", "is a file"),
        ("step-00000007", "is empty"),
        ("step-00000006", "holds no manifest.json"),
        ("step-00000005", "model.safetensors is truncated: 20 bytes"),
        ("step-00000004", "has format version 3"),
        ("step-00000003", "was changed: it hashes to"),
    ]
    assert len(said) == len(expected)
    for text, (name, reason) in zip(said, expected):
        assert text.startswith(f"checkpoint {name} is not used: ") and reason in text


def test_nothing_whole_is_none_and_said(store):
    store.save(make(1), 1)
    flip(store.path_of(1) / "model.safetensors")
    said: list[str] = []
    assert newest(store, said) is None
    assert len(said) == 1


def test_looking_changes_nothing(store):
    store.save(make(1), 1)
    (store.root / f".hvdtrain-tmp-{socket.gethostname()}-999999999-00000000").mkdir()
    before = sorted(os.listdir(store.root))
    assert (newest(store), steps(store)) == (1, [1])
    assert sorted(os.listdir(store.root)) == before


def test_the_only_good_one_is_never_pruned(store):
    """A later step is there but cut short: with keep 1 the step just saved stays all the same."""
    store.keep = 1
    store.save(make(110), 110)
    store.save(make(120), 120)
    os.truncate(store.path_of(120) / "model.safetensors", 5)
    said: list[str] = []
    store.save(make(110), 110, said.append)
    assert newest(store, said) == 110
    store.save(make(120), 120)
    assert (newest(store), steps(store)) == (120, [120])


@pytest.mark.parametrize("how", ["no manifest", "cut short"])
def test_damaged_ones_do_not_count_towards_keep_and_are_not_removed(store, how):
    store.keep = 2
    for step in (1, 2):
        store.save(make(step), step)
    if how == "no manifest":
        (store.path_of(2) / "manifest.json").unlink()
    else:
        os.truncate(store.path_of(2) / "model.safetensors", 3)
    store.save(make(3), 3)
    assert sorted(os.listdir(store.root)) == ["step-00000001", "step-00000002", "step-00000003"]
    store.save(make(4), 4)
    assert sorted(os.listdir(store.root)) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_failed_save_prunes_nothing(store, monkeypatch):
    store.keep = 1
    store.save(make(1), 1)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(make(2), 2)
    assert os.listdir(store.root) == ["step-00000001"]
    assert newest(store) == 1


def test_later_steps_of_an_earlier_run_stay_and_are_mentioned_once(store):
    store.keep = 1
    store.save(make(150), 150)
    said: list[str] = []
    for step in (60, 70):
        store.save(make(step), step, said.append)
    assert steps(store) == [70, 150]
    assert len(said) == 1 and "a checkpoint of step 150, later than step 60" in said[0]


def test_trouble_with_pruning_is_said_and_the_save_counts(store, monkeypatch):
    store.keep = 1
    store.save(make(1), 1)

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hvdtrain.checkpoint.files.discard", denied)
    said: list[str] = []
    assert store.save(make(2), 2, said.append) == store.path_of(2)
    assert newest(store) == 2
    assert len(said) == 1 and "older ones could not be removed" in said[0] and "Permission denied" in said[0]


def test_the_same_step_again_replaces(store):
    store.save(make(1), 5)
    store.save(make(2), 5)
    assert (newest(store), steps(store), os.listdir(store.root)) == (2, [5], ["step-00000005"])


def test_one_left_aside_is_found_and_gets_its_name_back(store):
    """The crash fell between the two renames of a replaced step: the step's own name is missing."""
    store.save(make(1), 1)
    store.save(make(5), 5)
    aside = store.root / f".hvdtrain-aside-{_here()}-{_dead_pid()}-0123abcd-step-00000005"
    store.path_of(5).rename(aside)
    found = store.latest_whole(pytest.fail)
    assert (found[0], seed_of(found[1])) == (aside, 5)
    assert steps(store) == [1]
    store.save(make(6), 6)
    assert steps(store) == [1, 5, 6]
    assert [name for name in os.listdir(store.root) if name.startswith(".")] == []


def test_one_left_aside_helps_where_its_successor_is_damaged(store):
    store.save(make(1), 5)
    aside = store.root / f".hvdtrain-aside-{_here()}-{_dead_pid()}-0123abcd-step-00000005"
    shutil.copytree(store.path_of(5), aside)
    store.save(make(2), 6)
    assert not aside.exists()
    shutil.copytree(store.path_of(5), aside)
    flip(store.path_of(5) / "model.safetensors")
    flip(store.path_of(6) / "model.safetensors")
    said: list[str] = []
    assert newest(store, said) == 1
    assert [text.split()[1] for text in said] == ["step-00000006", "step-00000005"]


def test_only_rubbish_of_dead_writers_goes(store):
    store.save(make(1), 1)
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        day_s = 24 * 3600
        kept = [
            f".hvdtrain-tmp-{_here()}-{alive.pid}-0123abcd",
            ".hvdtrain-tmp-another.host-5-0123abcd",
            ".hvdtrain-tmp-odd",
            ".hvdtrain-tmp-h-1-0123abcd-step-00000001",
            ".hvdtrain-aside-h-1-0123abcd",
            ".tmp-other-program",
            "tmp",
        ]
        gone = [
            f".hvdtrain-tmp-{_here()}-{_dead_pid()}-0123abcd",
            f".hvdtrain-tmp-{_here()}-{os.getpid()}-0123abcd",
            f".hvdtrain-tmp-{_here()}-9999999999-0123abcd",
            ".hvdtrain-tmp-another.host-5-89abcdef",
        ]
        for name in kept + gone:
            (store.root / name).mkdir()
            (store.root / name / "model.safetensors").write_bytes(b"half")
        old = (store.root / gone[-1]).stat().st_mtime - 2 * day_s
        os.utime(store.root / gone[-1], (old, old))
        precious = store.root.parent / "precious"
        precious.mkdir()
        links = [f".hvdtrain-tmp-{_here()}-{_dead_pid()}-11111111"]
        links += [f".hvdtrain-aside-{_here()}-{_dead_pid()}-11111111-step-00000077"]
        for name in links:
            (store.root / name).symlink_to(precious)
        store.save(make(2), 2)
        left = [*kept, *links, "step-00000001", "step-00000002"]
        assert sorted(os.listdir(store.root)) == sorted(left)
        assert precious.is_dir()
    finally:
        alive.communicate(b"\n", timeout=20)


def test_a_root_that_cannot_be_listed_is_an_error_not_an_empty_store(store, monkeypatch):
    store.save(make(1), 1)

    def denied(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        store.latest_whole(pytest.fail)


def test_a_stranger_in_the_place_of_a_step_is_not_replaced(store):
    (store.root / "step-00000001").mkdir(parents=True)
    (store.root / "step-00000001" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"holds 'thesis.tex'; expected a free name"):
        store.save(make(1), 1)
    assert (store.root / "step-00000001" / "thesis.tex").read_text() == "years"


def _here() -> str:
    name = socket.gethostname()
    return "".join(letter if letter.isascii() and letter.isalnum() else "." for letter in name)[:64]


def _dead_pid() -> int:
    """Return a process id that was in use and is no more."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(timeout=20)
    return done.pid


class StoreMachine(RuleBasedStateMachine):
    """Saves, failures, corruption and restarts in any order; the model knows what each step should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "run"
        self.store = CheckpointStore(self.root, keep=2)
        self.good: dict[int, int] = {}  # step -> seed of what was saved there and not damaged since
        self.seed = 0

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(step=st.integers(0, 6))
    def save(self, step: int) -> None:
        self.seed += 1
        self.store.save(make(self.seed), step)
        self.good[step] = self.seed
        on_disk = {int(path.name[5:]) for path in self.root.iterdir()}
        older_good = [s for s in self.good if s < step and s in on_disk]
        assert len(older_good) <= 1, "more than keep are left"
        self.good = {s: seed for s, seed in self.good.items() if s in on_disk}
        assert step in self.good

    @rule(
        step=st.integers(0, 6),
        nth=st.integers(1, 3),
        error=st.sampled_from([OSError(28, "full"), KeyboardInterrupt()]),
    )
    def fail_to_save(self, step: int, nth: int, error: BaseException) -> None:
        """Fail one of the first three fsyncs (two files, their directory), before anything is published."""
        self.seed += 1
        real, count = os.fsync, 0

        def fsync(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == nth:
                raise error
            real(descriptor)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(os, "fsync", fsync)
            self.store.save(make(self.seed), step)

    @precondition(lambda self: self.good)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "lose", "add"]))
    def damage(self, data, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.good)))
        file = self.store.path_of(step) / data.draw(st.sampled_from(["model.safetensors", "manifest.json"]))
        if how == "flip":
            flip(file)
        elif how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "lose":
            file.unlink()
        else:
            (file.parent / "rank-0009.safetensors").write_bytes(b"")
        del self.good[step]

    @rule()
    def restart(self) -> None:
        self.store = CheckpointStore(self.root, keep=2)

    @invariant()
    def the_newest_good_one_is_found(self) -> None:
        found = self.store.latest_whole(lambda text: None)
        if not self.good:
            assert found is None
        else:
            assert seed_of(found[1]) == self.good[max(self.good)]


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestStoreMachine = StoreMachine.TestCase
