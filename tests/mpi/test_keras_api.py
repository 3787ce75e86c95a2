"""Horovod's Keras API on Keras 3, by ranks: weights equal to each other's and to one process on the whole batch."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
from keras_ranks import (  # noqa: E402
    OPTIMIZERS,
    RNG,
    X,
    Y,
    close,
    compiled,
    equal_on_ranks,
    equal_to,
    fit,
    mine,
    mlp,
    only,
    ranks_fit,
    reference,
)

from hvdtrain.core.errors import UserError  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)

WORDS = RNG.integers(0, 20, size=(48, 4))


@pytest.fixture
def hvd(control):
    import hvdtrain.keras as hvd

    hvd.init()
    return hvd


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_equals_one_process_on_the_whole_batch(hvd, control, name):
    only(hvd, {"sgd": 3, "adafactor": 3, "momentum": 4, "adamw": 4}.get(name, 2))
    model = ranks_fit(hvd, compiled(mlp(), hvd.DistributedOptimizer(OPTIMIZERS[name](), check_every=3)))
    equal_to(model, reference(name), control)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_layer_without_a_gradient_stays_as_under_plain_fit(hvd, control, scaled):
    from unused_keras import chain

    only(hvd, 2)

    def trained(wrap, x, batch):
        inner = keras.optimizers.AdamW(0.01, weight_decay=0.3)
        optimizer = wrap(keras.optimizers.LossScaleOptimizer(inner) if scaled else inner)
        model = compiled(chain(), optimizer)
        with pytest.warns(UserWarning, match="Gradients do not exist for variables .*trunk/never"):
            fit(model, x, x[:, :4], batch)
        return model

    x = np.concatenate([X, X], 1)
    first, whole = chain().get_weights(), trained(lambda optimizer: optimizer, x, 12)
    model = trained(hvd.DistributedOptimizer, mine(hvd, x), 6)
    equal_to(model, whole.get_weights(), control)
    for i in (2, 3, 4, 5, 8, 9):
        np.testing.assert_array_equal(model.get_weights()[i], first[i])


def test_a_layer_frozen_in_the_middle_of_a_fit_is_as_under_plain_fit(hvd, control):
    """Keras asks for `make_train_function(force=True)`; without it the change has no effect there either."""
    only(hvd, 2)

    class Freeze(keras.callbacks.Callback):
        def __init__(self, forced):
            super().__init__()
            self.forced = forced

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.layers[0].trainable = False
                self.model.make_train_function(force=self.forced)

    for forced in (False, True):
        whole, model = (compiled(mlp(), wrap(OPTIMIZERS["adamw"]())) for wrap in (lambda own: own,
                                                                                  hvd.DistributedOptimizer))
        fit(whole, X, Y, 12, callbacks=[Freeze(forced)])
        ranks_fit(hvd, model, callbacks=[Freeze(forced)])
        equal_to(model, whole.get_weights(), control)


@pytest.mark.parametrize("passes, eagerly, name", [(2, False, "adam"), (4, True, "momentum")])
def test_passes_are_accumulated_into_one_update(hvd, control, passes, eagerly, name):
    only(hvd, 2)
    size = hvd.size()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), backward_passes_per_step=passes,
                                         average_aggregated_gradients=True)
    model = compiled(mlp(), optimizer, run_eagerly=eagerly)
    fit(model, mine(hvd, X, 24), mine(hvd, Y, 24), 24 // passes // size)
    assert int(optimizer.iterations) == 4
    equal_to(model, reference(name, 24), control)


def test_passes_are_summed_unless_averaging_is_asked_for(hvd, control):
    only(hvd, 4)
    model = compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2))
    fit(model, mine(hvd, X, 24), mine(hvd, Y, 24), 12 // hvd.size())
    equal_to(model, reference("sgd", 24), control)


def test_local_layers_keep_their_gradients(hvd, control):
    only(hvd, 3)
    model, size = mlp(), hvd.size()
    first, last = model.layers
    own = {g: [v.numpy() for v in layer.trainable_weights] for g, layer in (("first", first), ("last", last))}
    compiled(model, hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=last, check_every=1))
    x, y = mine(hvd, X[:12]), mine(hvd, Y[:12])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    local = tape.gradient(loss, [v.value for v in last.trainable_weights])
    model.train_on_batch(x, y)
    for v, w, g in zip(last.trainable_weights, own["last"], local):
        np.testing.assert_allclose(v.numpy(), w - 0.1 * g / size, atol=1e-6)
    single = compiled(mlp(), keras.optimizers.SGD(0.1))
    single.train_on_batch(X[:12], Y[:12])
    close(first.get_weights(), single.layers[0].get_weights(), 1e-6)
    for _ in range(3):  # the guard looks after update 2 and leaves the local layer alone
        model.train_on_batch(x, y)
    kernels = control.gather(last.kernel.numpy())
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4


def test_a_global_clip_beside_local_layers_is_refused(hvd):
    only(hvd, 2)
    model = mlp()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=1.0))
    for v in model.layers[-1].trainable_weights:
        optimizer.register_local_var(v)
    with pytest.raises(UserError, match="Use clipnorm"):
        fit(compiled(model, optimizer), X[:4], Y[:4], 2)


@pytest.mark.parametrize("how", ["gathered", "dense", "two passes"])
def test_sparse_gradients_of_embeddings(hvd, control, how):
    only(hvd, 3 if how == "gathered" else 2)

    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.layers.Input((4,), dtype="int32"), keras.layers.Embedding(20, 5),
                                 keras.layers.Flatten(), keras.layers.Dense(3)])
    passes = 2 if how == "two passes" else 1
    make = OPTIMIZERS["adam" if how == "gathered" else "momentum"]  # Keras' Adam squares each sparse row by itself
    ours = compiled(model(), hvd.DistributedOptimizer(make(), sparse_as_dense=how == "dense",
                                                      backward_passes_per_step=passes,
                                                      average_aggregated_gradients=True))
    batch = 12 * passes
    fit(ours, mine(hvd, WORDS, batch), mine(hvd, Y, batch), 12 // hvd.size())
    equal_to(ours, fit(compiled(model(), make()), WORDS, Y, batch).get_weights(), control)


@pytest.mark.parametrize("form", ["outside", "inside", "by compile", "local"])
def test_a_loss_scale_skips_alike_where_one_rank_has_nan(hvd, control, form):
    only(hvd, 4 if form == "inside" else 2)
    scaled, sgd = keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(0.1)
    model, more = mlp(), {"scale": 1024.0}
    if form == "outside":
        optimizer = hvd.DistributedOptimizer(scaled(sgd, initial_scale=more["scale"]))
    elif form == "inside":
        optimizer = scaled(hvd.DistributedOptimizer(sgd), initial_scale=more["scale"])
    elif form == "local":
        optimizer = scaled(hvd.PartialDistributedOptimizer(sgd, local_layers=model.layers[0]), initial_scale=1024.0)
    else:
        optimizer, model.dtype_policy = hvd.DistributedOptimizer(sgd), keras.DTypePolicy("mixed_float16")
        more["scale"] = 2.0**15
    compiled(model, optimizer)
    x, y = mine(hvd, X), mine(hvd, Y)
    batch = 12 // hvd.size()
    if hvd.rank() == 1:
        y = y.copy()
        y[batch:2 * batch] = np.nan  # the second batch
    if form == "local":  # the layer that is not local sees no NaN: only the flag tells the other ranks
        model.layers[1].trainable = False
        compiled(model, optimizer)
    fit(model, x, y, batch, epochs=1)
    used = model.optimizer
    assert isinstance(used, scaled) and float(used.dynamic_scale) == more["scale"] / 2
    assert int(used.iterations) == 3
    assert all(np.isfinite(w).all() for w in model.get_weights())
    if form != "local":
        keep = np.r_[0:12, 24:48]
        single = fit(compiled(mlp(), keras.optimizers.SGD(0.1)), X[keep], Y[keep], 12, epochs=1)
        equal_to(model, single.get_weights(), control)


def test_nan_of_one_rank_reaches_all(hvd):
    only(hvd, 2)
    x = X[:8] * (np.nan if hvd.rank() == 1 else 1.0)
    model = fit(compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), check_every=1)), x, Y[:8], 2)
    assert all(np.isnan(w).all() for w in model.get_weights())


class OwnStep(keras.Sequential):
    """A model with a train step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("way", ["steps_per_execution", "run_eagerly", "train_step", "tf.function", "eager loop"])
def test_every_way_to_train(hvd, control, way):
    only(hvd, 3 if way == "steps_per_execution" else 2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), check_every=3)
    model = mlp()
    if way == "train_step":
        model = OwnStep(model.layers)
    if way in ("tf.function", "eager loop"):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = keras.losses.mean_squared_error(y, model(x, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
        step = tf.function(step) if way == "tf.function" else step
        batch = 12 // hvd.size()
        x, y = mine(hvd, X), mine(hvd, Y)
        for i in [*range(0, len(x), batch)] * 2:
            step(x[i:i + batch] * 1.0, y[i:i + batch])
    else:
        more = {"steps_per_execution": 3} if way == "steps_per_execution" else {"run_eagerly": way == "run_eagerly"}
        ranks_fit(hvd, compiled(model, optimizer, **more))
    if way in ("tf.function", "eager loop"):  # the loss there is a sum over samples' means
        equal_to(model, reference("adam"), control, 1e-4)
    else:
        equal_to(model, reference("adam"), control)


def test_xla_is_refused_with_a_word(hvd, monkeypatch):
    only(hvd, 2)
    model = compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    with pytest.raises(UserError, match="jit_compile=False to model.compile"):
        fit(model, X[:4], Y[:4], 2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    step = tf.function(lambda: optimizer.apply([tf.ones([2])], [variable]), jit_compile=True)
    variable = keras.Variable(np.zeros(2, "float32"))
    with pytest.raises(UserError, match="jit_compile=False"):
        step()
    gpu = type("Gpu", (), {"device_type": "GPU"})()
    with monkeypatch.context() as patch:  # Keras would choose XLA where it sees a GPU
        patch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
        assert compiled(mlp(), keras.optimizers.SGD(0.1)).jit_compile
        assert not compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))).jit_compile


# --- callbacks, files ------------------------------------------------------------------------------------------------


def test_the_broadcast_covers_statistics_and_slots_but_no_generators(hvd, control):
    only(hvd, 3)
    root = hvd.size() - 1
    model = mlp(hvd.rank(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=hvd.rank()))
    norm, dropout = model.layers[1:3]
    norm.moving_mean.assign(np.full(8, float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.0))
    compiled(model, optimizer)
    optimizer.build(model.trainable_variables)
    optimizer.variables[2].assign(optimizer.variables[2] + hvd.rank())
    optimizer.iterations.assign(10 * hvd.rank())
    local = model.layers[-1].bias
    local.assign(np.full(3, float(hvd.rank())))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root, local_variables=[local])
    callback.set_model(model)
    callback.on_train_batch_begin(0)
    assert callback.broadcast_done
    np.testing.assert_array_equal(norm.moving_mean.numpy(), np.full(8, float(root)))
    np.testing.assert_array_equal(local.numpy(), np.full(3, float(hvd.rank())))
    assert int(optimizer.iterations) == 10 * root and float(np.max(optimizer.variables[2])) == root
    seeds = control.gather(dropout.seed_generator.state.numpy().tolist())
    assert seeds[0] != seeds[1]


class Counts(keras.layers.Layer):
    """Keeps the sum of the last samples, and counts large ones; has a rate that callbacks set."""

    def build(self, shape):
        self.last = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="last")
        self.large = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="large")
        self.rate = self.add_weight(shape=(), initializer="ones", trainable=False, name="rate")

    def call(self, x, training=None):
        if training:
            self.last.assign(tf.reduce_sum(x, 0))
            self.large.assign_add(tf.reduce_sum(tf.cast(x > 0.3, "int32")))
        return x


@pytest.mark.filterwarnings("ignore")
def test_what_layers_write_is_rank_0s_after_each_step(hvd, control, recwarn):
    only(hvd, 3)
    model = mlp(0, Counts(), keras.layers.BatchNormalization())
    annealing = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: model.layers[1].rate.assign(
        1 + epoch * (1 + hvd.rank())))
    ranks_fit(hvd, compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), callbacks=[annealing])
    last, large, rate = model.layers[1].weights
    assert float(rate) == 2 + hvd.rank(), "set by a callback, not by the layer"
    for value in (last.numpy().tolist(), int(large.numpy())):
        assert control.gather(value) == [value] * hvd.size()
    moving = control.gather(model.layers[2].moving_mean.numpy().tolist())
    assert moving[0] != moving[1], "each rank's own, as with Horovod"
    said = [str(w.message) for w in recwarn if "forward passes" in str(w.message)]
    assert len(said) == (hvd.rank() == 0) and all(
        "last, " in text and "moving" not in text and "rate" not in text for text in said)


def test_an_unbuilt_model_is_broadcast_after_the_first_batch(hvd, control):
    only(hvd, 2)

    class Late(keras.Model):
        """Makes its optimizer's slots in the first step."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.second = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            self.second.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}
    keras.utils.set_random_seed(hvd.rank())
    model = compiled(Late(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    ranks_fit(hvd, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert model.second.built
    equal_on_ranks(model, control)


def test_warm_up_raises_the_rate_to_that_of_all_ranks(hvd):
    only(hvd, 4)
    rates = []
    model = compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)))
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate)))
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=0)
    history = fit(model, mine(hvd, X), mine(hvd, Y), 12 // hvd.size(), epochs=3, callbacks=[warm, note]).history
    size = hvd.size()
    wanted = [0.4 / size * ((k + 1) / 4 * (size - 1) / 2 + 1) for k in range(8)] + [0.4] * 4
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [wanted[3], 0.4, 0.4], rtol=1e-6)


def test_a_model_goes_on_from_a_file_and_rank_0_alone_writes_it(hvd, control, tmp_path):
    only(hvd, 2)
    path = control.bcast(str(tmp_path / "best.keras"))
    model = compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
    written = []
    best.on_epoch_end = lambda epoch, logs=None, save=best.on_epoch_end: written.append(save(epoch, {"loss": -epoch}))
    ranks_fit(hvd, model, callbacks=[best])
    control.barrier("written", 30.0)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam and int(plain.optimizer.iterations) == 8
    again = hvd.load_model(path, compression=hvd.Compression.none, check_every=2)
    assert type(again.optimizer) is not keras.optimizers.Adam and isinstance(again.optimizer, keras.optimizers.Adam)
    ranks_fit(hvd, again)
    equal_to(again, reference("adam", epochs=4), control)


def test_keras_flavoured_collectives(hvd):
    only(hvd, 3)
    size, rank = hvd.size(), hvd.rank()
    assert float(hvd.allreduce(float(rank), name="a")) == (size - 1) / 2
    assert float(hvd.allreduce(float(rank), op=hvd.Sum)) == size * (size - 1) / 2
    np.testing.assert_array_equal(hvd.allgather(np.full((rank + 1, 2), rank)),
                                  np.repeat(np.arange(size), np.arange(size) + 1)[:, None] * [1, 1])
    np.testing.assert_array_equal(hvd.broadcast([rank, 5], size - 1), [size - 1, 5])
    np.testing.assert_array_equal(hvd.reducescatter(np.arange(2.0 * size)), [2.0 * rank, 2 * rank + 1])
