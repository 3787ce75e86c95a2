"""Refusals of `hvdtrain.tensorflow` on 2, 3 or 4 ranks, with Horovod's types: roots that differ, sets of other ranks,
models that differ; and that the job goes on afterwards."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

import hvdtrain.keras as hvd_keras  # noqa: E402
import hvdtrain.tensorflow as hvd  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.comm.collectives.mpi import MpiCollectives  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.job import world  # noqa: E402
from hvdtrain.tensorflow.transports import PlainMpi  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)

SETS = {}


@pytest.fixture(scope="module", autouse=True)
def job(control):
    """Return an initialized job with a set of the first two ranks and, where there are more, one of the others."""
    reason = horovod.horovod_reason("tensorflow")
    if reason:
        pytest.skip(reason)
    hvd.shutdown()
    SETS.update(two=hvd.ProcessSet([0, 1] if control.size > 2 else [0]),
                rest=hvd.ProcessSet(list(range(2 if control.size > 2 else 1, control.size))))
    hvd.init(process_sets=list(SETS.values()))
    yield
    np.testing.assert_array_equal(hvd.allgather(tf.constant([hvd.rank()])), range(hvd.size()))


@pytest.fixture(params=["horovod", "plain MPI"])
def carried(request, comm, monkeypatch):
    """Return the job's wire, and the one of jobs without Horovod."""
    if request.param == "plain MPI":
        mpi = PlainMpi(MpiCollectives(comm, timeout_s=30), list(range(hvd.size())))
        monkeypatch.setattr(world(), "wires", {0: mpi})
    return request.param


def variable():
    return keras.Variable(np.full(3, hvd.rank(), "float32"))


ROOTED = {
    "broadcast": lambda root: hvd.broadcast(tf.constant([1.0]), root),
    "of keras": lambda root: hvd_keras.broadcast([1.0], root),
    "broadcast_": lambda root: hvd.broadcast_([variable().value], root),
    "broadcast_variables": lambda root: hvd.broadcast_variables([variable()], root),
    "broadcast_object": lambda root: hvd.broadcast_object({"a": 1}, root),
    "variables in a function": lambda root: in_function(variable(), root),
}


def in_function(variable, root):
    tf.function(lambda: hvd.broadcast_variables([variable], root))()


@pytest.mark.parametrize("name", ROOTED)
def test_other_roots_are_an_error_on_every_rank(carried, name):
    with pytest.raises(UserError, match=r"root_rank 0 on ranks? 0(, 2)?, 1 on ranks? 1(, 3)?; expected one") as found:
        ROOTED[name](hvd.rank() % 2)
    assert isinstance(found.value, tf.errors.FailedPreconditionError)
    assert not np.any(hvd.broadcast_object(hvd.rank(), 0))  # the next call of the same name


def test_other_roots_in_a_function_are_an_error_on_every_rank(carried):
    step = tf.function(lambda x, y: hvd.broadcast(x, hvd.rank() % 2) + hvd.broadcast(y, 0))
    with pytest.raises(tf.errors.OpError, match=r"(?s)ranks \[0, 1.*\[0 1") as found:
        step(tf.ones(2), tf.ones(2))
    assert "same root_rank on every rank" in found.value.message
    same = tf.function(lambda x: hvd.broadcast(x, hvd.size() - 1))
    np.testing.assert_array_equal(same(tf.fill([2], hvd.rank())), [hvd.size() - 1] * 2)


@pytest.mark.parametrize("root", [{0: 99}, {1: 99}, {0: 99, 1: 99, 2: 99, 3: 99}], ids=str)
def test_a_root_that_is_no_rank_is_an_error_on_every_rank(root):
    with pytest.raises(UserError, match="root_rank 99 (among|on)|, 99 on rank"):
        hvd.broadcast(tf.constant([1.0]), root.get(hvd.rank(), 0))


def test_roots_within_a_set_are_compared_within_it():
    if hvd.size() < 3:
        pytest.skip("needs a set of several ranks that is not all of them")
    if hvd.rank() < 2:
        with pytest.raises(UserError, match="root_rank 0 on rank 0, 1 on rank 1"):
            hvd.broadcast(tf.constant([1.0]), hvd.rank(), process_set=SETS["two"])
    if hvd.rank() < 2:
        with pytest.raises(UserError, match="root_rank 0 on rank 0, 1 on rank 1"):
            hvd.broadcast_variables([variable()], hvd.rank(), process_set=SETS["two"])
    hvd.broadcast_object(None)


OUTSIDE = {
    "allreduce": lambda x, s: hvd.allreduce(x, process_set=s),
    "sparse": lambda x, s: hvd.allreduce(tf.IndexedSlices(x, tf.range(4)), process_set=s),
    "grouped": lambda x, s: hvd.grouped_allreduce([x, x], process_set=s),
    "allgather": lambda x, s: hvd.allgather(x, process_set=s),
    "broadcast": lambda x, s: hvd.broadcast(x, s.ranks[0], process_set=s),
    "broadcast_": lambda x, s: hvd.broadcast_([variable().value], s.ranks[0], process_set=s),
    "broadcast_object": lambda x, s: hvd.broadcast_object(1, s.ranks[0], process_set=s),
    "allgather_object": lambda x, s: hvd.allgather_object(1, process_set=s),
    "alltoall": lambda x, s: hvd.alltoall(x, process_set=s),
    "reducescatter": lambda x, s: hvd.reducescatter(x, process_set=s),
    "function": lambda x, s: tf.function(lambda x: hvd.allreduce(x, process_set=s))(x),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_set_of_other_ranks_is_refused(name):
    other = next(one for one in SETS.values() if not one.included())
    with pytest.raises(UserError, match=f"on rank {hvd.rank()}, which is not one of them.*included") as found:
        OUTSIDE[name](tf.ones(4), other)
    assert isinstance(found.value, tf.errors.InvalidArgumentError)


def test_models_that_differ_are_horovods_error_too():
    own = tf.Variable(tf.zeros(4 if hvd.rank() == 1 else 3))
    with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1 has"):
        hvd.broadcast_variables([own], 0)
    with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1 has"):
        hvd.GradientExchange()([tf.zeros(own.shape)], [own])
