"""The key freeze with Keras on TensorFlow: Keras' own training at any number of ranks, through checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import apart, config, fitted, lockstep, samples, weights

from hvdtrain.config import CheckpointConfig, DataConfig, DataParallelConfig, Named, PipelineConfig
from hvdtrain.core.errors import UserError

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

N, BATCH, EPOCHS = 48, 24, 4
DATA = samples(N)
RUN = config(epochs=EPOCHS, global_batch=BATCH, lr=0.05, optimizer=Named("AdamW", {"weight_decay": 0.1}), metrics=[],
             data=DataConfig(shuffle=False, prefetch=0))
STEPS = N // BATCH


def model(norm=True):
    keras.utils.set_random_seed(2)
    layers = keras.layers
    body = keras.Sequential([layers.Dense(8), *([layers.BatchNormalization()] if norm else [])], name="body")
    made = keras.Sequential([keras.Input((12,)), body, layers.Dense(8, activation="tanh", name="middle"),
                             layers.Dense(5, name="head")])
    if norm:
        body.layers[1].moving_mean.assign(np.linspace(0, 1, 8))
    return made


def frozen():
    """Return the model whose user has frozen the body."""
    net = model()
    net.get_layer("body").trainable = False
    return net


def arrays(layer):
    return [v.numpy() for v in layer.weights]


def plain():
    """Return the arrays of Keras' own updates: body with its BatchNorm frozen, middle for one epoch."""
    net = model()
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
    optimizer.build(net.trainable_variables[4:])
    net.get_layer("body").trainable = False
    for t in range(EPOCHS * STEPS):
        x, y = (array[t % STEPS * BATCH:][:BATCH] for array in DATA)
        own = [v for layer in net.layers[0 if t >= STEPS else 2:] for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, net(x, training=True), True))
        optimizer.apply(tape.gradient(loss, [v.value for v in own]), own)
    return arrays(net)


@pytest.mark.parametrize("ranks, made, freeze", [
    (1, model, {"body": 99, "mid*": 1}), (2, frozen, {"middle": 1}), (3, model, {"body": 99, "mid*": 1})])
def test_frozen_layers_and_statistics_do_not_move(tmp_path, ranks, made, freeze):
    before = arrays(model().get_layer("body"))
    for run in lockstep(ranks, replace(RUN, freeze=freeze, out=str(tmp_path)), lambda rank: made(), DATA, fitted):
        assert all(map(np.array_equal, before, arrays(run.spec.model.get_layer("body"))))
        assert apart(arrays(run.spec.model), plain()) < 1e-5
        assert any(note.startswith("step 2: 2 unfrozen parameters (middle.kernel, middle.bias)") for note in run.notes)


def test_a_resumed_run_unfreezes_as_one_that_never_stopped(tmp_path):
    """Stopped in the middle of an epoch, after the body joined; then on more ranks."""
    setting = replace(RUN, freeze={"body": 2, "middle": 1}, checkpoint=CheckpointConfig(at_end=True), accumulate=2,
                      data_parallel=DataParallelConfig("zero"))
    whole, = lockstep(1, replace(setting, out=str(tmp_path / "whole")), lambda rank: model(False), DATA, fitted)
    cut = replace(setting, max_steps=5, out=str(tmp_path / "cut"))
    lockstep(2, cut, lambda rank: model(False), DATA, fitted)
    again = replace(setting, resume=cut.out, out=str(tmp_path / "on"))
    for run in lockstep(3, again, lambda rank: model(False), DATA, fitted):
        assert apart(weights(run), weights(whole)) < 1e-5


def test_unfrozen_batchnorm_takes_statistics_again(tmp_path):
    setting = replace(RUN, freeze={"body": 3}, out=str(tmp_path))
    before = model().get_layer("body").layers[1].moving_mean.numpy()
    for run in lockstep(2, setting, lambda rank: model(), DATA, fitted):
        assert not np.allclose(before, run.spec.model.get_layer("body").layers[1].moving_mean.numpy())
        assert any("BatchNorm computes its statistics over each rank's own samples" in note for note in run.notes)


def test_stages_of_a_pipeline_keep_frozen_layers(tmp_path):
    def chain():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((12,)), *(keras.layers.Dense(8, "tanh", name=n) for n in ("one", "two")),
                                 keras.layers.Dense(5, name="three")])

    setting = replace(RUN, freeze=["one"])
    alone, = lockstep(1, replace(setting, out=str(tmp_path / "a")), lambda rank: chain(), DATA, fitted)
    assert len(alone.parts.params.specs) == 4, "what is never trained is neither exchanged nor in the optimizer"
    runs = lockstep(2, replace(setting, pipeline=PipelineConfig(2), out=str(tmp_path / "b")), lambda rank: chain(),
                    DATA, fitted)
    held = {n: a for run in runs for n, a in run.parts.state.state()[0]["model"].items()}
    assert apart([held[n] for n in sorted(held)], weights(alone)) < 1e-5
    with pytest.raises(UserError, match="freeze with epochs and a pipeline"):
        replace(setting, freeze={"one": 1}, pipeline=PipelineConfig(2)).check()


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="'bodi', which matches no parameter.*mean 'body'"):
        lockstep(2, replace(RUN, freeze=["bodi"], out=str(tmp_path)), lambda rank: model(), DATA, fitted)
