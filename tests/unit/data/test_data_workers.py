"""Samples read by worker processes (`hvdtrain.data.workers`): the same samples in order, and every way to end."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import numpy as np
import pytest

from hvdtrain.config import Config, DataConfig
from hvdtrain.core.errors import ExitCalled, UserError
from hvdtrain.data import prepare as choose
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource, Unreadable
from hvdtrain.data.workers import start
from hvdtrain.data.workers.worker import fetch_seeded


class Slow:
    """``n`` samples, each with its number, an array of its own, and random numbers; some of which do something else."""

    def __init__(self, n: int = 40, at: dict[int, str] | None = None, sleep_s: float = 0.0005) -> None:
        self.n, self.at, self.sleep_s = n, at or {}, sleep_s
        self.table = np.arange(n * 6, dtype=np.float32).reshape(n, 6)

    def __len__(self) -> int:
        return self.n

    def fetch(self, indices_n):
        time.sleep(self.sleep_s * len(indices_n))
        wide = [self._does(i, self.at.get(i, "")) for i in indices_n.tolist()]
        if any(each is not None for each in wide):
            return wide[0], np.asarray(indices_n), np.zeros((1, 2))
        drawn = np.array([[random.random(), np.random.random()] for _ in indices_n])
        return self.table[indices_n], np.asarray(indices_n), drawn

    @staticmethod
    def _does(i: int, what: str) -> np.ndarray | None:
        if what == "unreadable":
            raise Unreadable(i, f"pictures/{i}.png", "truncated")
        if what == "raise":
            raise LookupError(f"no sample {i}")
        if what == "exit":
            sys.exit(3)
        if what == "hang":
            time.sleep(60)
        if what == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "wide":
            return np.zeros((1, 7), np.float32)
        if what == "environment":
            raise RuntimeError(" ".join(sorted(n for n in os.environ if n.startswith(start.JOB)))
                               + f"threads {os.environ['OMP_NUM_THREADS']} mpi {'mpi4py' in sys.modules}")


def pooled(source, workers: int | str = 2, **more):
    (data, _), words = choose.with_workers(Config(data=DataConfig(workers=workers), **more), 5, (source, None), 3)
    return data, words


def gone(pids) -> bool:
    for _ in range(200):
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def own_server(monkeypatch):
    """Give this test a worker server of its own."""
    monkeypatch.setattr(start, "_shared", {"server": None, "users": 0, "pid": 0})


def test_samples_read_in_the_rank_are_drawn_as_in_a_worker():
    class Noisy(Slow):
        def fetch(self, indices_n):
            return (indices_n + np.random.normal() + random.random(),)

    def drawn():
        return random.random(), np.random.random()

    random.seed(1), np.random.seed(1)
    want, numbers = drawn(), np.array([0, 4, 8])
    random.seed(1), np.random.seed(1)
    once = fetch_seeded(Noisy(), numbers, 5, 0)
    assert drawn() == want
    assert np.array_equal(fetch_seeded(Noisy(), numbers, 5, 0), once)
    assert not np.array_equal(fetch_seeded(Noisy(), numbers, 6, 0), once)


@pytest.mark.parametrize("starts", [True, False], ids=["GPUs in use", "GPUs not in use yet"])
def test_samples_read_in_the_rank_leave_the_generators_of_gpus_alone(starts, monkeypatch):
    import torch

    gpus, on_cpu = ["states"], torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: starts)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpus.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(gpus))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: gpus.__setitem__(slice(None), states))
    first, second = (fetch_seeded(Torches(), np.array([0, 4]), 5, 0)[0] for _ in range(2))
    assert gpus == ["states"] and torch.equal(torch.get_rng_state(), on_cpu)
    assert np.array_equal(first, second) and first[0] != first[1]


class Torches:
    def __len__(self):
        return 40

    def fetch(self, indices_n):
        import torch

        return (torch.rand(len(indices_n)).numpy(),)


@pytest.fixture
def one():
    """Return a pool of two workers over 40 samples, ended afterwards; also its processes."""
    data, _ = pooled(Slow())
    pids = [data.pool._server.pid, *(worker.pid for worker in data.pool.workers)]
    yield data, pids
    data.pool.close()
    assert gone(pids), "processes outlive the pool"


def test_workers_give_what_the_rank_would_read_itself(one):
    data, _ = one
    order = np.random.default_rng(0).permutation(40)
    for n in (1, 3, 40):
        got, want = data.fetch_in(order[:n], 2), Slow().fetch(order[:n])
        for mine, its in zip(got[:2], want):
            assert mine.dtype == its.dtype and mine.tobytes() == its.tobytes()
    # What user code draws goes by (seed, epoch, sample), not by who fetches it, nor with which others.
    whole = data.fetch_in(np.arange(40), 2)[2]
    assert np.array_equal(data.fetch_in(order, 2)[2], whole[order])
    assert not np.array_equal(data.fetch_in(order, 3)[2], whole[order])

    def walked(source):
        feed = Feed(source, 7, seed=3)
        return [np.concatenate([m[1] for m in batch.micros]) for batch in feed.epoch(next_to())]

    def next_to():
        from hvdtrain.core.protocols.types import Cursor

        return Cursor()

    for mine, its in zip(walked(data), walked(Slow()), strict=True):
        assert np.array_equal(mine, its)


def test_a_walk_that_stops_leaves_nothing_behind(one):
    data, _ = one
    from hvdtrain.core.protocols.types import Cursor

    feed = Feed(data, 4, seed=1)
    walk = feed.epoch(Cursor())
    next(walk)
    walk.close()
    assert feed.ahead == 4  # two fetched ahead, one held by the thread, one begun
    assert data.fetch(np.array([7]))[1].tolist() == [7]
    assert not data.pool._tasks or data.fetch(np.array([8]))[1].tolist() == [8]


def test_errors_of_a_dataset_come_back_as_they_were():
    at = {3: "raise", 5: "unreadable", 7: "exit", 9: "environment", 11: "wide"}
    data, _ = pooled(Slow(at=at))
    try:
        with pytest.raises(LookupError, match="no sample 3") as raised:
            data.fetch(np.array([1, 3]))
        assert "in _does" in str(raised.value.__cause__)
        with pytest.raises(Unreadable, match="sample 5 cannot be read: pictures/5.png: truncated") as unread:
            data.fetch(np.array([0, 1, 2, 4, 5, 6]))
        assert unread.value.number == 5
        with pytest.raises(ExitCalled, match=r"Slow.fetch \(.*test_data_workers.py, line \d+\) ended the program"):
            data.fetch(np.array([7]))
        with pytest.raises(RuntimeError, match="^threads 1 mpi False$"):  # no variable of a job's
            data.fetch(np.array([9]))
        for n in (2, 9):  # in two tasks, and in one
            with pytest.raises(UserError, match="samples of one batch have the shapes and types float32.6., .*.7.,"):
                data.fetch(np.array([10, 11] + [2] * n))
        assert data.fetch(np.array([2]))[1].tolist() == [2]
    finally:
        data.pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("what, words", [("die", "was ended by SIGSEGV while it fetched sample 3"),
                                         ("hang", "has been fetching sample 3 for 3 s")])
def test_a_worker_that_dies_or_hangs_is_named(what, words):
    data, _ = pooled(Slow(at={3: what}), control_timeout_s=3.0)
    pids = [worker.pid for worker in data.pool.workers]
    with pytest.raises(UserError, match=r"worker \d \(process \d+\) " + words):
        data.fetch(np.array([3]))
    with pytest.raises(UserError, match="worker"):
        data.fetch(np.array([4]))
    data.pool.close()
    assert gone(pids)


@pytest.mark.slow
def test_a_frozen_worker_is_named_even_where_it_cannot_be_told_what_to_read():
    data, _ = pooled(Slow(sleep_s=0.0), 1, control_timeout_s=1.0)
    pid = data.pool.workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=r"worker 0 \(process \d+\) has been fetching samples 0, 0, 0, 0 and"):
        data.fetch(np.zeros(400_000, np.int64))  # more numbers than a socket holds
    data.pool.close()
    assert gone([pid])


def test_a_killed_worker_and_a_killed_server(one):
    data, pids = one
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(UserError, match="was ended by SIGKILL"):
        data.fetch(np.arange(40))
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids)
    another, _ = pooled(Slow())  # while the first is still held
    try:
        data.pool.close()
        assert another.fetch(np.array([1]))[1].tolist() == [1]
    finally:
        another.pool.close()


def test_a_frozen_server_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(start, "STATUS_S", 0.2)
    data, _ = pooled(Slow())
    pids = [data.pool._server.pid, *(worker.pid for worker in data.pool.workers)]
    os.kill(pids[0], signal.SIGSTOP)
    assert data.fetch(np.array([1]))[1].tolist() == [1]
    begin = time.monotonic()
    data.pool.close()
    assert gone(pids) and time.monotonic() - begin < start.END_S


def test_workers_take_no_signal_of_a_job(one):
    data, pids = one
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert data.fetch(np.array([1, 2]))[1].tolist() == [1, 2]


class Some(Slow):
    """Draws random numbers for the samples of ``drawing`` only; takes no time."""

    drawing: frozenset[int] = frozenset()

    def fetch(self, indices_n):
        drawn = [np.random.random() if i in self.drawing else 0.0 for i in indices_n.tolist()]
        return np.asarray(indices_n), np.array(drawn)


def test_auto_takes_workers_for_samples_that_take_long(monkeypatch):
    # A busy machine takes its time over cheap ones too.
    monkeypatch.setattr(choose, "_timed", lambda source, indices_n: source.sleep_s * len(source.fetch(indices_n)[0]))
    data, words = pooled(Slow(sleep_s=0.003), "auto")
    try:
        assert "data.workers: 2 processes read the data of rank 0, which draws random numbers" in words
    finally:
        data.pool.close()
    data, words = pooled(Some(sleep_s=0.003), "auto")
    try:
        assert "data.workers: 2 processes read the data of rank 0, a sample of which takes about 3 ms" in words
    finally:
        data.pool.close()
    for cheap in (ArraySource([np.zeros((4, 2))]), Some(sleep_s=0)):
        assert pooled(cheap, "auto") == (cheap, "")
    assert [choose.spare(cores) for cores in (1, 2, 4, 64)] == [1, 1, 3, 8]


@pytest.mark.parametrize("times_s", [[0.0], [1.0], [1.0, 0.0]], ids=["quick", "slow", "slow at first"])
def test_measured_times_do_not_decide_what_a_dataset_draws(times_s, monkeypatch):
    def timed(source, indices_n):
        source.fetch(indices_n)
        return rest.pop(0) if len(rest) > 1 else rest[0]

    monkeypatch.setattr(choose, "_timed", timed)
    source = Some()
    source.drawing = frozenset(range(1, 39))  # neither the first sample nor the last
    np.random.seed(1)
    rest, want = list(times_s), np.random.get_state()[1:3]
    data, _ = pooled(source, "auto")
    try:
        assert all(map(np.array_equal, np.random.get_state()[1:3], want))
        drawn = data.fetch_in(np.arange(40), 0)[1]
        assert np.array_equal(drawn, fetch_seeded(source, np.arange(40), 5, 0)[1]) and drawn.any()
    finally:
        data.pool.close()


def test_data_that_no_other_process_can_have():
    class Local(Slow):
        pass

    data, words = pooled(Local(), "auto")
    assert isinstance(data, Local) and "data.workers: 0, the rank reads the data itself" in words
    with pytest.raises(UserError, match="cannot be pickled.*set data.workers: 0"):
        pooled(Local(), 2)


def test_no_server_is_left_where_none_was_needed():
    with pytest.raises(KeyError), start.early(True):
        server = start._shared["server"]
        raise KeyError
    assert gone([server.pid]) and start._shared["server"] is None
    env = start.clean({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_FD": "4", "HOME": "/h"})
    assert env == {"HOME": "/h", **start.ALONE}
