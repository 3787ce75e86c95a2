"""Gradients of `hvdtrain.tensorflow` over 2, 3 or 4 ranks: exchanges in closed form, tapes against one process."""

import functools

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

import hvdtrain.tensorflow as hvd  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.comm.collectives.mpi import MpiCollectives  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.job import world  # noqa: E402
from hvdtrain.tensorflow.transports import PlainMpi  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module", autouse=True)
def job(control):
    """Initialize the package again, as in a job of its own."""
    reason = horovod.horovod_reason("tensorflow")
    if reason:
        pytest.skip(reason)
    hvd.shutdown()
    hvd.init()


@pytest.fixture(params=["horovod", "plain MPI"])
def carried(request, comm, monkeypatch):
    """Run over the job's transport and that of jobs without Horovod, without memory that ranks share."""
    monkeypatch.setattr(world(), "shared", [None])
    if request.param == "plain MPI":
        mpi = PlainMpi(MpiCollectives(comm, timeout_s=30), list(range(hvd.size())))
        monkeypatch.setattr(world(), "wires", {0: mpi})
    return request.param


FEW = pytest.mark.usefixtures("few_ranks")


def ranks(fn=float):
    return np.array([fn(r) for r in range(hvd.size())])


# --- gradients -----------------------------------------------------------------------------------------------------

def variables():
    return [tf.Variable(tf.zeros([3, 4])), tf.Variable(tf.zeros([5])), tf.Variable(tf.zeros([6, 2])),
            tf.Variable(tf.zeros([2], tf.float16)), tf.Variable(tf.zeros([4], tf.float64))]


def gradients(scale, sparse=True):
    own = scale * (hvd.rank() + 1.0)
    rows = tf.IndexedSlices(tf.fill([hvd.rank() + 1, 2], own), tf.range(hvd.rank() + 1), tf.constant([6, 2]))
    return [tf.fill([3, 4], own), None, rows if sparse else tf.convert_to_tensor(rows), tf.cast(tf.fill([2], own),
            tf.float16), tf.cast(tf.fill([4], own), tf.float64)]


def check(found, factor, rtol=1e-6):
    total = factor * (hvd.size() + 1) * hvd.size() / 2
    assert found[1] is None
    np.testing.assert_allclose(found[0], np.full((3, 4), total), rtol=rtol)
    np.testing.assert_allclose(found[3], np.full(2, total), rtol=max(rtol, 1e-3))
    np.testing.assert_allclose(found[4], np.full(4, total), rtol=rtol)
    assert found[3].dtype == tf.float16 and found[4].dtype == tf.float64
    below = [factor * sum(r + 1 for r in range(hvd.size()) if row <= r) for row in range(6)]
    np.testing.assert_allclose(tf.convert_to_tensor(found[2])[:, 0], below, rtol=rtol, atol=1e-12)


OPTIONS = [{}, {"op": "Sum"}, {"gradient_predivide_factor": 3.0}, {"groups": 2}, {"groups": "lists"},
           {"sparse_as_dense": True}, {"compression": "fp16"}, {"compression": "bf16"}, {"compression": "int8"}]


@FEW
@pytest.mark.parametrize("carried, options", [("plain MPI", {}), ("plain MPI", {"compression": "fp16"}),
                                              *(("horovod", options) for options in OPTIONS)], ids=str,
                         indirect=["carried"])
def test_exchange(carried, options):
    options, own = dict(options), variables()
    factor = 1.0 if options.get("op") == "Sum" else 1 / hvd.size()
    options["op"] = getattr(hvd, options.get("op", "Average"))
    rtol = {"bf16": 1e-2, "fp16": 2e-3, "int8": 2e-2}.get(options.get("compression"), 1e-6)
    options["compression"] = getattr(hvd.Compression, options.get("compression", "none"))
    if options.get("groups") == "lists":
        options["groups"] = [[own[0], own[4]], [own[3]]]
    exchange = hvd.GradientExchange(**options)
    check(exchange(gradients(1.0), own), factor, rtol)

    @tf.function
    def step(scale):
        return [g for g in exchange(gradients(scale), own) if g is not None]

    for scale in (1.0, 2.0):
        found = step(tf.constant(scale))
        check([found[0], None, *found[1:]], scale * factor, rtol)
    assert isinstance(found[1], tf.IndexedSlices) != bool(options.get("sparse_as_dense"))


@FEW
def test_what_is_owed_comes_back():
    """topk sends a tenth of the entries of the same gradient, and in turn all but the smallest."""
    own = [tf.Variable(tf.zeros([40]))]
    exchange = hvd.GradientExchange(op=hvd.Sum, compression=hvd.Compression.topk.of(0.1))
    grad = tf.range(1.0, 41.0) * (hvd.rank() + 1)
    step = tf.function(lambda g: exchange([g], own)[0])
    steps = 50
    came = sum(step(grad).numpy() for _ in range(steps))
    total = np.arange(1, 41) * sum(ranks(lambda r: r + 1.0)) * steps
    np.testing.assert_allclose(came.sum(), total.sum(), rtol=0.25)
    assert (came[10:] > 0).all()


@FEW
def test_what_is_owed_outlives_a_gradient_that_is_no_number():
    own = [tf.Variable(tf.zeros([8]))]
    exchange = hvd.GradientExchange(compression=hvd.Compression.int8)
    bad = tf.fill([8], np.float32("nan") if hvd.rank() == 1 else 1.0)
    assert not np.isfinite(exchange([bad], own)[0]).any()
    np.testing.assert_allclose(exchange([tf.ones([8])], own)[0], np.ones(8), rtol=1e-2)


@FEW
def test_a_compression_of_ones_own():
    class Halved(hvd.Compression.none):
        project = ""

        @staticmethod
        def compress(tensor):
            return tensor / 2, "twice"

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2 if ctx == "twice" else None

    out = hvd.GradientExchange(compression=Halved)([tf.fill([3], float(hvd.rank()))], [tf.Variable(tf.zeros([3]))])
    np.testing.assert_allclose(out[0], [ranks().mean()] * 3, rtol=1e-6)


def test_adasum_of_equal_gradients_is_one_of_them():
    own, grad = [tf.Variable(tf.zeros([4]))], tf.constant([1.0, -2.0, 3.0, 0.5])
    exchange = hvd.GradientExchange(op=hvd.Adasum)
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(UserError, match="1, 2, 4, 8"):
            exchange([grad], own)
    else:
        np.testing.assert_allclose(exchange([grad], own)[0], grad, rtol=1e-5)


def test_ranks_of_other_models_are_told_the_first_difference():
    own = [tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([4 if hvd.rank() == 1 else 3]), name="kernel")]
    with pytest.raises(UserError, match=r"at place 1 of the gradients rank 1 has a gradient of kernel.*\[4\].*\[3\]"):
        hvd.GradientExchange()([tf.zeros(v.shape) for v in own], own)


@FEW
def test_xla_is_refused_by_name():
    own = [tf.Variable(tf.zeros([2]))]
    exchange = hvd.GradientExchange()
    with pytest.raises(UserError, match="jit_compile=False"):
        tf.function(lambda g: exchange([g], own), jit_compile=True)(tf.ones([2]))


@FEW
def test_two_exchanges_of_one_graph_keep_apart():
    own = [tf.Variable(tf.zeros([2]))]
    one, two = hvd.GradientExchange(op=hvd.Sum), hvd.GradientExchange(op=hvd.Sum)

    @tf.function
    def step(x):
        inner = tf.function(lambda g: one([g], own)[0])
        return one([x], own)[0], two([2 * x], own)[0], inner(3 * x), inner(4 * x)

    for value in (1.0, 2.0):
        for n, out in enumerate(step(tf.fill([2], value))):
            np.testing.assert_array_equal(out, [value * (n + 1) * hvd.size()] * 2)


# --- tapes ---------------------------------------------------------------------------------------------------------

ROWS = np.random.default_rng(3).standard_normal((24, 6)).astype(np.float32)
TARGETS = np.random.default_rng(4).standard_normal((24, 2)).astype(np.float32)
TOKENS = np.random.default_rng(5).integers(0, 11, 24)


class Net(keras.Model):
    """An embedding and two layers."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(7)
        self.table, self.hidden = keras.layers.Embedding(11, 6), keras.layers.Dense(9, activation="tanh")
        self.out = keras.layers.Dense(2)

    def call(self, tokens, rows):
        return self.out(self.hidden(self.table(tokens) + rows))


def train(wrap, part, graph, steps=4):
    model, optimizer = Net(), keras.optimizers.Adam(0.01)
    tokens, rows, targets = (tf.constant(x[part]) for x in (TOKENS, ROWS, TARGETS))
    model(tokens, rows)

    def step(tokens, rows, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tokens, rows) - targets))
        tape = wrap(tape, model)
        assert isinstance(tape, tf.GradientTape)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    run = tf.function(step) if graph else step
    for _ in range(steps):
        run(tokens, rows, targets)
    return [v.numpy() for v in model.trainable_variables]


@functools.cache
def one_process():
    """Return what one process trains on all samples."""
    return train(lambda tape, model: tape, slice(None), False)


@pytest.mark.parametrize("graph", [pytest.param(True, marks=pytest.mark.world_size(3)),
                                   pytest.param(False, marks=pytest.mark.world_size(2))], ids=["function", "eager"])
def test_a_loop_of_ones_own_follows_one_process(graph):
    n = 24 // hvd.size()
    part = slice(hvd.rank() * n, (hvd.rank() + 1) * n)
    own = train(lambda tape, model: hvd.DistributedGradientTape(tape), part, graph)
    single = one_process()
    for a, b in zip(own, single):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(own, hvd.broadcast_object(own, 1)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scaled", [pytest.param(True, marks=pytest.mark.world_size(3)),
                                    pytest.param(False, marks=pytest.mark.world_size(2))])
def test_local_layers_keep_their_gradient(scaled):
    model = Net()
    model(TOKENS[:1], ROWS[:1])
    local = {id(v) for v in model.out.trainable_variables}
    x = [v for v in model.trainable_variables]

    def grads(partial):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(TOKENS[:4], ROWS[:4])) * (hvd.rank() + 1.0)
        if partial:
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.out, scale_local_gradients=scaled)
            apart, shared = tape.get_local_and_global_gradients(loss, x)
            assert {id(v) for v, _ in apart} == local and len(shared) == len(x) - len(local)
        return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, x)]

    for v, plain, found in zip(x, grads(False), grads(True)):
        if id(v) in local:
            expected = plain / hvd.size() if scaled else plain
        else:
            expected = plain / (hvd.rank() + 1.0) * (hvd.size() + 1) / 2
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@FEW
def test_batch_norm_over_all_samples():
    size, rank = hvd.size(), hvd.rank()
    bounds = np.linspace(0, 24, size + 1).astype(int)
    bounds[1:-1] += 1  # unequal parts
    part = slice(bounds[rank], bounds[rank + 1])

    def run(layer, rows, weight):
        layer.build((None, 6))
        layer.gamma.assign(np.linspace(0.5, 1.5, 6))
        x = tf.constant(rows)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(layer(x, training=True)) * weight)
            return tape.gradient(loss, x)

        return step(x).numpy(), layer.moving_mean.numpy(), layer.moving_variance.numpy()

    weight = np.linspace(-1, 1, 6, dtype=np.float32)
    own = run(hvd.SyncBatchNormalization(), ROWS[part], weight)
    single = run(keras.layers.BatchNormalization(), ROWS, weight)
    np.testing.assert_allclose(own[0], single[0][part], rtol=1e-4, atol=1e-5)
    for a, b in zip(own[1:], single[1:]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
