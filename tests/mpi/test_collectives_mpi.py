"""Plain MPI's collectives, and Horovod's in PyTorch, pass the cases that all must; MPI's refuse ranks that disagree.

Horovod's in TensorFlow: test_tensorflow_horovod.
"""

import numpy as np
import pytest
from collectives_cases import CASES, as_is, name_of

from hvdtrain.cluster import horovod
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.config import ExchangeConfig

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module")
def wire(comm):
    """Yield collectives with a bound shorter than the test's."""
    return MpiCollectives(comm, timeout_s=60)


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_mpi(wire, check):
    check(wire, as_is, as_is)


@pytest.fixture(scope="module")
def torch_wire(control):
    """Return Horovod's collectives of PyTorch tensors."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    reason = horovod.horovod_reason("torch")
    if reason:
        pytest.skip(reason)
    from hvdtrain.backends.torch.collectives import collectives

    return collectives("horovod", control, ExchangeConfig(),
                       lambda name, exchange: horovod.start_horovod(name, exchange, control))


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_horovod_in_torch(torch_wire, check):
    import torch

    check(torch_wire, lambda x: torch.from_numpy(x.copy()), lambda x: x.numpy())


def test_horovod_starts_again_where_a_script_has_shut_it_down(torch_wire, control):
    def started():
        return horovod.start_horovod("torch", ExchangeConfig(), control)

    started().shutdown()
    assert started().is_initialized() and started().size() == control.size


@pytest.mark.world_size(3)
@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_in_small_chunks(comm, check):
    """As vectors whose counts pass MPI's 31 bits would go."""
    check(MpiCollectives(comm, timeout_s=60, chunk=23), as_is, as_is) if "bits" not in check.__name__ else check(
        MpiCollectives(comm, timeout_s=60, chunk=10_007), as_is, as_is)


def test_float16_is_summed_in_float32(wire):
    x = np.array([2048.0, 1.0], np.float16) if wire.rank == 0 else np.array([1.0, 1.0], np.float16)
    got = wire.allreduce(x, "half").wait()
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.array([2048.0 + wire.size - 1, wire.size]).astype(np.float16))


def test_nothing_to_send(wire):
    none = np.zeros(0, np.float32)
    assert wire.allreduce(none, "none").wait().shape == (0,)
    assert wire.allgather(none, "none").wait().shape == (wire.size, 0)
    assert wire.alltoall(np.zeros((wire.size, 0), np.float32), "none").wait().shape == (wire.size, 0)
    assert wire.reducescatter(none, "none").wait().shape == (0,)
    assert wire.broadcast(none, "none").wait().shape == (0,)
    assert wire.reducescatterv(none, [0] * wire.size, "none").wait().shape == (0,)
    assert wire.allgatherv(none, [0] * wire.size, "none").wait().shape == (0,)


def test_read_only_and_strided_arguments_are_left_alone(wire):
    base = np.arange(10, dtype=np.float32)
    fixed = base[:5].copy()
    fixed.flags.writeable = False
    np.testing.assert_array_equal(wire.allreduce(fixed, "fixed").wait(), wire.size * base[:5])
    np.testing.assert_array_equal(wire.allreduce(base[::2], "strided").wait(), wire.size * np.arange(0, 10, 2))
    np.testing.assert_array_equal(wire.allgather(base[::2], "strided").wait()[-1], np.arange(0, 10, 2))
    np.testing.assert_array_equal(base, np.arange(10))


def test_allreduce_is_in_place_where_it_can_be(wire):
    x = np.ones(4, np.float32)
    assert wire.allreduce(x, "in place").wait() is x


def test_waiting_twice_gives_the_same(wire):
    handle = wire.allreduce(np.ones(3, np.float32), "twice")
    assert handle.wait() is handle.wait()


def test_parts_that_ranks_cut_unlike_are_refused(wire):
    P, odd = wire.size, wire.rank == wire.size - 1
    sizes = [1] * P if not odd else [2, 0, *[1] * (P - 2)]
    for handle in (wire.reducescatterv(np.zeros(P, np.float32), sizes, "grad.0"),
                   wire.allgatherv(np.zeros(sizes[wire.rank], np.float32), sizes, "grad.0")):
        with pytest.raises(RuntimeError, match=rf"rank 0 entered .*'grad.0'.*; rank {P - 1} entered .*\(2, 0"):
            handle.wait()


@pytest.mark.parametrize("what", ["name", "shape", "dtype", "kind", "root"])
def test_ranks_that_disagree_all_hear_of_it(wire, what):
    odd = wire.rank == wire.size - 1
    x = np.zeros(4 if what == "shape" and odd else 3, np.float64 if what == "dtype" and odd else np.float32)
    name = "other" if what == "name" and odd else "grad.0"
    if what == "kind" and odd:
        handle = wire.allgather(x, name)
    elif what == "root":
        handle = wire.broadcast(x, name, root=int(odd))
    else:
        handle = wire.allreduce(x, name)
    with pytest.raises(RuntimeError, match=rf"rank 0 entered .*'grad.0'.*; rank {wire.size - 1} entered "):
        handle.wait()
    assert wire.allreduce(np.ones(2, np.float32), "after").wait().tolist() == [wire.size, wire.size]


@pytest.mark.parametrize("dtype, told", [("float32", True), ("float64", True), ("float16", False), ("int32", False)])
def test_squares_are_told_of_floats_alone(comm, wire, dtype, told):
    """A rank that takes 0 for squares nobody took would not see a NaN."""
    wire.looked()
    wire.allreduce(np.full(1000, 2, dtype), "squares").wait()
    n, squares = np.sum(comm.allgather(wire.looked()), axis=0)
    assert (n, squares) == ((1000 * wire.size, 1000 * (2 * wire.size) ** 2) if told else (0, 0))
