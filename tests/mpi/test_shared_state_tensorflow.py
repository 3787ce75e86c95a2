"""State that ranks of a TensorFlow model share beside its parameters: statistics and the optimizer's state."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from tensorflow_tools import X, Y, attached, batch, close, cut, mlp, run, weights  # noqa: E402

from hvdtrain.backends.tensorflow import collectives  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.comm.collectives.mpi import MpiCollectives  # noqa: E402
from hvdtrain.config import Config, ExchangeConfig  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("few_ranks")]


@pytest.fixture(params=[pytest.param("horovod", marks=pytest.mark.world_size(3)),
                        pytest.param("mpi", marks=pytest.mark.world_size(2))])
def wire(request, control, comm):
    if request.param == "mpi":
        return MpiCollectives(comm, timeout_s=60)
    reason = horovod.horovod_reason("tensorflow")
    if reason:
        pytest.skip(reason)
    return collectives("horovod", control, ExchangeConfig(),
                       lambda name, exchange: horovod.start_horovod(name, exchange, control))


@pytest.mark.parametrize("alone", [0, 1], ids=["rank 0 ran", "rank 1 ran"])
def test_statistics_of_the_only_rank_with_samples_win(wire, alone):
    def build():
        return mlp(extra=[keras.layers.BatchNormalization()])

    step, single = attached(build(), wire=wire, rank=wire.rank), attached(build())
    for t in range(4):
        run(single, [batch(t)], 1 / 32)
        run(step, [batch(t)] if wire.rank == alone else [], 1 / 32)
    step.sync_buffers()
    close(weights(step), weights(single), 1e-5)


def test_statistics_are_averaged_by_the_samples_seen(wire):
    model = mlp(extra=[keras.layers.BatchNormalization()])
    step = attached(model, wire=wire, rank=wire.rank)
    for part in cut(batch(0), *[4] * wire.rank):  # rank r sees 4 r samples
        step.forward_backward(part, 1 / 32, False)
    model.layers[1].moving_mean.assign(np.full(16, float(wire.rank) or np.nan))
    step.sync_buffers()
    ranks = np.arange(wire.size)
    np.testing.assert_allclose(model.layers[1].moving_mean.numpy(), np.full(16, (ranks**2).sum() / ranks.sum()), 1e-6)


class Written(keras.layers.Layer):
    """Holds what a forward pass would write: a count, a flag, a narrow float."""

    def __init__(self):
        super().__init__(name="written")
        self.count = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="count")
        self.flag = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False, name="flag")
        self.narrow = self.add_weight(shape=(2,), dtype="bfloat16", initializer="ones", trainable=False, name="narrow")

    def call(self, x):
        return x


def test_what_is_written_is_reduced(wire):
    model = mlp(extra=[Written()])
    step, layer = attached(model, wire=wire, rank=wire.rank), model.get_layer("written")
    buffers = step.parts.buffers
    names = {name.rpartition("/")[2]: name for name in buffers.writable()}
    buffers.track(list(names.values()))
    buffers.keep()
    layer.count.assign(wire.rank + 2)
    layer.flag.assign(wire.rank == 1)
    layer.narrow.assign([wire.rank, 1.0])
    assert buffers.noticed() == []
    buffers.combine({names["count"]: "sum", names["flag"]: "any", names["narrow"]: "first"}, samples=wire.rank + 1)
    assert int(layer.count.numpy()) == sum(rank + 2 for rank in range(wire.size)) and bool(layer.flag.numpy())
    assert [float(x) for x in layer.narrow.numpy()] == [0, 1]
    layer.count.assign(wire.rank)
    assert buffers.sync() == [names["count"]] and int(layer.count.numpy()) == 0


def test_an_optimizer_with_history_on_rank_0_only_is_shared(wire, control):
    model = mlp(seed=3 + wire.rank)
    model.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if wire.rank == 0:
        model.fit(X, Y, epochs=2, batch_size=32, verbose=0)
    step = attached(model, Config(), wire=wire, rank=wire.rank)
    run(step, cut(tuple(a[8 * wire.rank:] for a in batch(0)), 8), 1 / 32)
    optimizer = [v.numpy() for v in step.optimizer.own.variables]
    assert int(optimizer[0]) == 5
    root = control.bcast([*weights(step), *optimizer])
    close([*weights(step), *optimizer], root, 0)


class Still(keras.layers.Layer):
    """Adds what no gradient comes of, as TensorFlow knows before a graph runs."""

    def build(self, shape):
        self.still = self.add_weight(shape=(64, 64), name="still")

    def call(self, x):
        return x + tf.reduce_mean(tf.sign(self.still.value))


@pytest.mark.world_size(2)
def test_gradients_that_are_known_to_be_zero_leave_once_for_each_step(comm):
    """TensorFlow would run a node that is fed constants alone while it optimises the graph, and not in it."""
    wire, settings = MpiCollectives(comm, timeout_s=60), Config(exchange=ExchangeConfig(bucket_mb=0.01))
    step = attached(mlp(extra=[Still()]), settings, wire=wire, rank=wire.rank)
    single = attached(mlp(extra=[Still()]), settings)
    for t in range(3):
        run(single, [batch(t)], 1 / 32)
        run(step, [batch(t)] if wire.rank == 0 else [], 1 / 32)
    close(weights(step), weights(single), 1e-5)
