"""Gradients of `hvdtrain.tensorflow` and `hvdtrain.keras` in memory that ranks share, against the same over Horovod."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

import hvdtrain.keras as hvd  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.job import world  # noqa: E402
from hvdtrain.tensorflow import basics, transports  # noqa: E402
from hvdtrain.tensorflow.gradients import GradientExchange  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("few_ranks")]
SHAPES = ((transports.SMALL + 3,), (5, 7), (), (300, 128), (2, 2))
DTYPES = ("float32", "float32", "float32", "float64", "float16")


@pytest.fixture(scope="module", autouse=True)
def job(control):
    reason = horovod.horovod_reason("tensorflow")
    if reason:
        pytest.skip(reason)
    hvd.shutdown()
    hvd.init()


@pytest.fixture
def without(monkeypatch):
    """Leaves gradients to Horovod from when it is called."""
    return lambda: monkeypatch.setattr(world(), "shared", [None])


def gradients(rank, bad=None):
    rng = np.random.default_rng(rank)
    dense = [tf.constant(rng.standard_normal(shape), dtype) for shape, dtype in zip(SHAPES, DTYPES)]
    if bad is not None and rank == 1:
        dense[3] = tf.tensor_scatter_nd_update(dense[3], [[299, 127]], tf.constant([bad], tf.float64))
    sparse = tf.IndexedSlices(tf.fill([2, 4], 1.0 + rank), tf.constant([rank, 5]), tf.constant([8, 4]))
    return [*dense, None, sparse]


def variables():
    shapes = [*zip(SHAPES, DTYPES), ((3,), "float32"), ((8, 4), "float32")]
    return [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in shapes]


def alike(control, arrays):
    """Return whether all ranks hold the same bits."""
    return len(set(control.gather(b"".join(a.tobytes() for a in arrays)))) == 1


def exchanged(grads, own, inside, **options):
    exchange = GradientExchange(**options)
    call = tf.function(exchange, autograph=False) if inside else exchange
    found = [x if x is None else tf.convert_to_tensor(x).numpy() for x in (call(grads, own), call(grads, own))[1]]
    return found, next(iter(exchange._plans.values()))[0]._shared


@pytest.mark.parametrize("inside", [pytest.param(True, marks=pytest.mark.world_size(3), id="in a graph"),
                                    pytest.param(False, marks=pytest.mark.world_size(2), id="outside")])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}], ids=str)
def test_as_over_horovod(control, without, options, inside):
    own, grads = variables(), gradients(control.rank)
    got, carried = exchanged(grads, own, inside, **options)
    assert carried and got[5] is None
    without()
    want, carried = exchanged(grads, own, inside, **options)
    assert not carried
    for x, y in zip(got, want):
        if x is not None:
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=2e-3 if x.dtype == np.float16 else 1e-6, atol=1e-6)
    assert alike(control, [x for x in got[:5]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_all_ranks(control, bad):
    got, _ = exchanged(gradients(control.rank, bad), variables(), True)
    assert not np.isfinite(got[3][299, 127]) and np.isfinite(got[3]).sum() == got[3].size - 1
    assert all(np.isfinite(x).all() for i, x in enumerate(got) if x is not None and i != 3)


def test_other_exchanges_go_over_horovod(control):
    whole = tf.Variable([1, 2])
    for grads, own, options in (([tf.constant([1, 2])], [whole], {"op": hvd.Sum}),
                                (gradients(control.rank)[:2], variables()[:2], {"compression": hvd.Compression.bf16})):
        assert not exchanged(grads, own, True, **options)[1]


def test_ranks_in_different_exchanges_say_so(control):
    """On every rank, as itself, after which all continues."""
    exchange, (one, other) = GradientExchange(), (variables()[:2], variables()[1:3])
    mine, theirs = gradients(0)[:2], gradients(0)[1:3]
    for _ in range(2):
        exchange(mine, one)
        control.barrier("between plans")
        exchange(theirs, other)
    with pytest.raises(RuntimeError, match="ranks disagree: rank 0 entered allreduce"):
        exchange(*((theirs, other) if control.rank == 0 else (mine, one)))
    np.testing.assert_allclose(exchange(mine, one)[1], mine[1], rtol=1e-6)


def trained(control, steps_per_execution):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1024, activation="relu"), keras.layers.Dense(16),
                              keras.layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), check_every=2), "mse",
                  steps_per_execution=steps_per_execution)
    rng = np.random.default_rng(control.rank)
    model.fit(rng.standard_normal((64, 12)), rng.standard_normal((64, 3)), batch_size=8, epochs=2, verbose=0,
              shuffle=False)
    return [w.numpy() for w in model.trainable_variables]


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.world_size(2)),
                                                 pytest.param(4, marks=pytest.mark.world_size(3))])
def test_fit_ends_where_it_does_over_horovod(control, without, steps_per_execution):
    got = trained(control, steps_per_execution)
    assert alike(control, got)
    without()
    for x, y in zip(got, trained(control, steps_per_execution)):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_started_again_it_shares_memory_again(control):
    before = basics.shared_wire(hvd.global_process_set)
    hvd.shutdown()
    hvd.init()
    got, carried = exchanged(gradients(control.rank), variables(), True)
    assert carried and basics.shared_wire(hvd.global_process_set) is not before
    assert alike(control, got[:5])
