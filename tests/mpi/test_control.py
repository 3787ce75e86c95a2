"""The control plane over MPI."""

import threading
import time

import numpy as np
import pytest

from hvdtrain.cluster.control import CHUNK, INLINE, MpiControl, agreed
from hvdtrain.cluster.topology import survey
from hvdtrain.core.errors import UserError, WaitTimeout

pytestmark = pytest.mark.mpi(min_size=2)


def test_ranks_are_mpi_s(control, comm):
    assert (control.rank, control.size) == (comm.Get_rank(), comm.Get_size())
    assert 0 <= control.local_rank < control.local_size <= control.size
    places = control.gather((control.node, control.local_rank))
    assert len(set(places)) == control.size


@pytest.mark.parametrize("n", [0, 1, INLINE - 60, INLINE, 3 * INLINE, 1_000_003])
def test_bcast_of_any_size(control, n):
    for turn in range(2):
        sent = {"turn": turn, "data": b"x" * n} if control.rank == 0 else None
        assert control.bcast(sent) == {"turn": turn, "data": b"x" * n}


def test_gather_of_uneven_objects(control):
    for turn in range(2):
        got = control.gather(["x" * (1000 * control.rank), control.rank, turn])
        assert got == [["x" * (1000 * r), r, turn] for r in range(control.size)]
    assert control.gather(None) == [None] * control.size


def test_messages_larger_than_a_chunk(control, monkeypatch):
    assert CHUNK < 2**31
    monkeypatch.setattr("hvdtrain.cluster.control.CHUNK", 1000)
    assert control.bcast(bytes(10_001)) == bytes(10_001)
    assert control.gather(b"y" * (700 + control.rank)) == [b"y" * (700 + r) for r in range(control.size)]


@pytest.mark.parametrize("chunk", [1000, CHUNK])
def test_send_to_one_and_to_all(control, chunk, monkeypatch):
    monkeypatch.setattr("hvdtrain.cluster.control.CHUNK", chunk)
    last = control.size - 1
    for source, target in ((last, 0), (0, last), (last, None), (0, None)):
        sent = [np.arange(3001.0), np.zeros(0, np.float16), np.full(7, source, np.uint8)]
        for array in sent:
            array.flags.writeable = False  # as of a file that was read
        takes = control.rank == source or target in (None, control.rank)
        got = sent if control.rank == source else [np.zeros_like(a) for a in sent] if takes else []
        control.send(got, source, target)
        assert not takes or all((a == b).all() for a, b in zip(got, sent, strict=True))


def test_sum_in_closed_form(control):
    for turn in (1, 2):
        got = control.sum(np.array([control.rank, turn, -1.0]))
        assert got.dtype == np.float64
        assert got.tolist() == [control.size * (control.size - 1) / 2, turn * control.size, -control.size]
    assert control.sum(np.zeros(0)).shape == (0,)


def test_sum_has_the_same_bits_and_is_in_rank_order(control):
    for k in (1, 4, 257):
        draw = [np.random.default_rng([r, k]).standard_normal(k) * 10.0 ** (5 * r) for r in range(control.size)]
        got = control.sum(draw[control.rank])
        want = draw[0].copy()
        for row in draw[1:]:
            want += row
        assert got.tobytes() == want.tobytes()
        assert len(set(control.gather(got.tobytes()))) == 1


def test_agree_is_any(control):
    assert control.agree(control.rank == control.size - 1) is True
    assert control.agree(False) is False
    assert control.agree(True) is True


def test_barrier_holds_until_the_last(control):
    if control.rank == 0:
        time.sleep(0.3)
    entered = time.time()
    control.barrier("late")
    left = time.time()
    assert left >= max(control.gather(entered)) - 0.01


def test_a_wait_that_runs_out_names_itself(comm):
    own = MpiControl(comm.Dup(), timeout_s=5.0)
    if own.rank == 0:
        started = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"rank 0 on host \S+ waited 0.2 s in barrier 'lonely'"):
            own.barrier("lonely", timeout_s=0.2)
        assert time.monotonic() - started >= 0.2
        own._stuck[0].Wait()
    else:
        time.sleep(1.0)
        own.barrier("lonely")


def test_agreed_raises_everywhere(control):
    def check():
        if control.rank == 1:
            raise UserError("cannot read x", "a file", "copy it")
        return control.rank

    with pytest.raises(UserError, match=r"^rank 1 on host \S+: cannot read x; expected a file. Copy it.$"):
        agreed(control, check, "reading x")
    assert agreed(control, lambda: control.rank, "nothing") == control.rank


def test_agreed_without_prefix_where_all_failed_alike(control):
    def check():
        raise UserError("lr is -1", "a number above 0", "set lr")

    with pytest.raises(UserError, match="^lr is -1; expected"):
        agreed(control, check, "config")


def test_survey(control):
    topology = survey(control)
    assert topology.size == control.size
    assert len(topology.host_of(control.rank).ranks) == control.local_size
    assert topology.describe().startswith(f"{len(topology.hosts)} host")


def test_control_works_beside_a_data_thread(control, comm):
    """MPI's THREAD_MULTIPLE: another thread may be in a collective of another communicator."""
    data, total = comm.Dup(), np.zeros(1000)

    def exchange():
        for _ in range(20):
            data.Allreduce(np.ones(1000), total)

    thread = threading.Thread(target=exchange)
    thread.start()
    for _ in range(50):
        assert control.sum(np.ones(1))[0] == control.size
    thread.join(20)
    assert not thread.is_alive() and (total == control.size).all()
