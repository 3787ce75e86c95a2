"""Collectives over host memory for a GPU's tensors: order, memory, errors, and the cases that all collectives pass.

There is no GPU here: `HostLane` takes the same steps within host memory. What only a GPU can show (streams, pinned
memory) is not in these tests.
"""

import gc
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from collectives_cases import CASES, name_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from host_lane import HostLane  # noqa: E402

from hvdtrain.backends.torch import Ops, stage  # noqa: E402
from hvdtrain.backends.torch.collectives import StagedCollectives  # noqa: E402
from hvdtrain.backends.torch.pinned import CudaLane, DirectLane, Memory  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.comm.compressors import create  # noqa: E402
from hvdtrain.comm.reducer.reducer import Reducer  # noqa: E402
from hvdtrain.config import Config  # noqa: E402
from hvdtrain.core.buckets import plan_buckets  # noqa: E402
from hvdtrain.core.errors import PeerFailed  # noqa: E402
from hvdtrain.core.protocols import ParamSpec  # noqa: E402

LANES = [HostLane, DirectLane]


def wire_over(inner, lane=HostLane):
    return StagedCollectives(inner, timeout_s=20.0, lane=lane())


class Log(NullCollectives):
    """Collectives of CPU tensors in a world of one whose calls are written down; sums are doubled, in new memory.

    ``gates``: events by name that a call's handle waits for, as an asynchronous wire does.
    """

    host = False

    def __init__(self):
        super().__init__()
        self.calls, self.gates, self.failing = [], {}, {}

    def allreduce(self, flat_N, name, op="sum"):
        self.calls.append((name, op, flat_N.data_ptr(), threading.current_thread().name))
        if name in self.failing:
            raise self.failing[name]
        gate = self.gates.get(name)

        class Pending:
            def wait(self):
                assert gate is None or gate.wait(20.0)
                return flat_N * 2

        return Pending()


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_cases_in_a_world_of_one(check, lane):
    check(wire_over(NullCollectives(), lane), torch.from_numpy, lambda t: t.numpy())


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_cases_over_numpy_collectives_of_three_ranks(check, lane):
    LockstepWorld(3).run(lambda control, inner: check(wire_over(inner, lane), torch.from_numpy, lambda t: t.numpy()),
                         timeout_s=20)


def test_ranks_with_and_without_copies_are_in_one_job():
    """As a job of CPUs beside GPUs: the same sequence, whatever a rank's lane."""
    def work(control, inner):
        wire = wire_over(inner, HostLane if control.rank else DirectLane)
        handles = [wire.allreduce(torch.full((3,), float(control.rank + i)), f"mixed.{i}") for i in range(4)]
        return [h.wait().tolist() for h in handles]

    assert LockstepWorld(2).run(work, timeout_s=20) == [[[1.0 + 2 * i] * 3 for i in range(4)]] * 2


def test_it_is_named_after_what_carries_it_and_takes_the_tensors_of_its_backend():
    wire = stage(NullCollectives(), SoloControl())
    assert wire.name == "null over host memory" and (wire.host, wire.in_graph, wire.overlaps) == (False, False, True)
    assert wire.buffer(4, "float32") is None and wire.hierarchical is False


def test_a_tensor_in_host_memory_is_passed_on_itself():
    log = Log()
    x = torch.ones(4)
    StagedCollectives(log).allreduce(x, "a").wait()
    assert log.calls[0][2] == x.data_ptr()


def test_sums_are_written_to_the_argument_with_its_type_and_the_asked_operation():
    log = Log()
    wire = wire_over(log)
    for dtype in (torch.float16, torch.float64, torch.int64):
        x = torch.arange(5).to(dtype)
        got = wire.allreduce(x, f"sum.{dtype}", "adasum").wait()
        assert got.data_ptr() == x.data_ptr() and got.dtype == dtype and x.tolist() == [0, 2, 4, 6, 8]
    assert {op for _, op, *_ in log.calls} == {"adasum"}


def test_what_is_not_contiguous_is_summed_too():
    x_NM = torch.arange(6.0).reshape(2, 3)
    assert wire_over(Log()).allreduce(x_NM.T[0], "a").wait().tolist() == [0.0, 6.0]


@pytest.mark.parametrize("lane", LANES)
def test_calls_go_out_in_the_order_of_issue_while_earlier_ones_are_open(lane):
    log = Log()
    log.gates = {"b0": threading.Event()}
    wire = wire_over(log, lane)
    handles = [wire.allreduce(torch.ones(2), f"b{i}") for i in range(20)]
    deadline = time.monotonic() + 20
    while len(log.calls) < 20 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [name for name, *_ in log.calls] == [f"b{i}" for i in range(20)]  # all sent, none received
    assert len({thread for *_, thread in log.calls}) == 1 and threading.current_thread().name != log.calls[0][3]
    log.gates["b0"].set()
    assert all(h.wait().tolist() == [2.0, 2.0] for h in reversed(handles))
    assert handles[0].wait() is handles[0].wait()


def test_memory_is_used_again_by_the_next_step_but_not_while_in_flight():
    log = Log()
    log.gates = {"b": threading.Event()}
    wire = wire_over(log)
    first = wire.allreduce(torch.full((4,), 1.0), "b")
    second = wire.allreduce(torch.full((4,), 10.0), "b")  # the same name before the first has come back
    log.gates["b"].set()
    assert first.wait().tolist() == [2.0] * 4 and second.wait().tolist() == [20.0] * 4
    first_two = {at for _, _, at, _ in log.calls}
    assert len(first_two) == 2
    for step in range(3):
        wire.allreduce(torch.ones(4), "b").wait()
    assert {at for _, _, at, _ in log.calls} == first_two


def test_memory_is_lent_by_name_type_and_size():
    made = []
    memory = Memory(lambda n, dtype: made.append((n, dtype)) or torch.empty(n, dtype=dtype))
    key = ("a", torch.float32, 4)
    lent, free = memory.lend(key)
    assert free is None and lent.shape == (4,)
    memory.take_back(key, lent, "event")
    for other in (("b", torch.float32, 4), ("a", torch.float16, 4), ("a", torch.float32, 5)):
        assert memory.lend(other)[0] is not lent
    assert memory.lend(key) == (lent, "event") and memory.lend(key)[0] is not lent
    assert made == [(4, torch.float32), (4, torch.float32), (4, torch.float16), (5, torch.float32), (4, torch.float32)]


def test_memory_of_a_broadcast_is_not_kept():
    lane = HostLane()
    wire = StagedCollectives(NullCollectives(), lane=lane)
    wire.broadcast(torch.ones(1000), "initial.w").wait()
    assert not lane.memory._idle
    wire.allgather(torch.ones(10), "g").wait()
    assert len(lane.memory._idle) == 1


def test_an_error_of_the_wire_reaches_the_handle_and_nothing_is_sent_after_it():
    log = Log()
    log.failing = {"b1": PeerFailed("rank 1 is gone")}
    wire = wire_over(log)
    handles = [wire.allreduce(torch.ones(2), f"b{i}") for i in range(4)]
    assert handles[0].wait().tolist() == [2.0, 2.0]
    for handle in handles[1:]:
        with pytest.raises(PeerFailed, match="rank 1 is gone"):
            handle.wait()
    assert [name for name, *_ in log.calls] == ["b0", "b1"]
    with pytest.raises(PeerFailed):
        wire.allreduce(torch.ones(2), "later").wait()


def test_an_error_while_waiting_reaches_the_handle():
    class Broken(NullCollectives):
        def allgather(self, x_K, name):
            class Pending:
                def wait(self):
                    raise PeerFailed("connection reset")
            return Pending()

    with pytest.raises(PeerFailed, match="connection reset"):
        wire_over(Broken()).allgather(torch.ones(2), "g").wait()


def test_ranks_that_disagree_are_told_so():
    def work(control, inner):
        wire_over(inner).allreduce(torch.ones(2 + control.rank), "a").wait()

    with pytest.raises((RuntimeError, PeerFailed), match="ranks disagree"):
        LockstepWorld(2).run(work, timeout_s=20)


def test_a_wait_is_bounded(monkeypatch):
    opened = []
    monkeypatch.setattr("hvdtrain.backends.torch.pinned.deadline", lambda *limit: opened.append(limit) or _Nothing())
    StagedCollectives(NullCollectives(), timeout_s=7.0).allreduce(torch.ones(2), "w").wait()
    assert opened == [(7.0, "allreduce 'w' (2,) float32 over host memory")]


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


def test_the_threads_end_with_their_owner():
    def own():
        return {t for t in threading.enumerate() if t.name.startswith("hvdtrain-staged")}

    gc.collect()
    before = own()
    wire = wire_over(NullCollectives())
    wire.allreduce(torch.ones(2), "a").wait()
    mine = own() - before
    assert len(mine) == 2 and all(t.daemon for t in mine)
    del wire
    gc.collect()
    for thread in mine:
        thread.join(10.0)
    assert not any(t.is_alive() for t in mine)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8", "topk", "powersgd"])
def test_every_compressor_gives_the_bits_of_the_direct_wire(compression):
    """Several rounds for each bucket, several steps: pooled memory must not mix them up."""
    params = [ParamSpec("a", (40, 30), "float32"), ParamSpec("b", (17,), "float32"), ParamSpec("c", (9, 50), "float32")]

    def exchange(wire, ops):
        reducer = Reducer(plan_buckets(params, 2e-3), create(compression, Config()), wire, ops)
        sums = []
        for step in range(3):
            reducer.begin()
            for i, bucket in enumerate(reducer.buckets):
                draw = np.random.default_rng([wire.rank, step, i]).standard_normal(bucket.n).astype(np.float32)
                reducer.start(i, torch.from_numpy(draw))
            sums.append([s.clone() for s in reducer.finish()])
        return sums

    def work(control, inner):
        direct = exchange(inner, Ops("cpu"))
        return direct, exchange(wire_over(inner), Ops("cpu"))

    for direct, over_host in LockstepWorld(2).run(work, timeout_s=30):
        for a, b in zip(direct, over_host):
            assert len(a) > 1 and all(torch.equal(x, y) for x, y in zip(a, b))


class FakeCuda:
    """Streams and events that write down what a GPU would be told, in one log; copies take place at once."""

    def __init__(self, monkeypatch):
        self.log, self.on, self.events = [], "compute", 0
        self.streams = iter(["down", "up"])
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream(next(self.streams)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream("compute"))
        monkeypatch.setattr(torch.cuda, "stream", self.within)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: self.log.append(f"{s.name} uses"))
        real = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y, non_blocking: self.log.append(
            f"{self.on} copies" if non_blocking else "blocks") or real(x, y))

    def stream(self, name):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits {other.name}"),
                               wait_event=lambda event: self.log.append(f"{name} waits {event.name}"))

    @contextmanager
    def within(self, stream):
        self.on, before = stream.name, self.on
        yield
        self.on = before

    def event(self, blocking):
        assert blocking
        self.events += 1
        event = SimpleNamespace(name=f"e{self.events}")
        event.record = lambda stream: self.log.append(f"{stream.name} marks {event.name}")
        event.synchronize = lambda: self.log.append(f"host waits {event.name}")
        return event


def test_the_streams_of_a_gpu_are_ordered_and_the_host_waits_for_copies_only_in_its_own_threads(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    lane = CudaLane(torch.device("cpu"))
    lane.memory = Memory(lambda n, dtype: torch.empty(n, dtype=dtype))
    wire = StagedCollectives(Log(), lane=lane)
    x = torch.ones(4)
    assert wire.allreduce(x, "a").wait() is not None and x.tolist() == [2.0] * 4
    assert cuda.log == ["down waits compute", "down copies", "down uses", "down marks e1", "host waits e1",
                        "up copies", "up uses", "up marks e2", "compute waits e2", "compute uses"]
    cuda.log.clear()
    wire.allreduce(x, "a").wait()
    assert cuda.log[:3] == ["down waits compute", "down waits e2", "down copies"]  # the memory is used again
    assert x.tolist() == [4.0] * 4
    cuda.log.clear()
    got = wire.broadcast(x, "w").wait()
    assert got.data_ptr() != x.data_ptr() and got.tolist() == [4.0] * 4 and "blocks" not in cuda.log
