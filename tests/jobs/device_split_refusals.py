"""Cases of models that cannot be partitioned over devices, or not on these: see `device_split_cases`."""

import dataclasses

import numpy as np
from device_split_tools import (
    CONFIG,
    arrays,
    built,
    close,
    data_of,
    refused,
    sample,
    sequential,
    spec_of,
    split,
    step_of,
    train,
    where,
)

from hvdtrain.config import Named


def case_what_cannot_be_split_is_said(folder):
    """Too few devices, too many for the blocks, branches, blocks that are not the model, tasks that look inside."""
    import keras

    refused("model_parallel is 3 and TensorFlow has started with 2 logical CPU devices", lambda: step_of(
        spec_of(sequential()), split(model_parallel=3), sample=sample))
    short_one = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
    refused("model_parallel is 2 and the model has 1 block (dense", lambda: step_of(
        spec_of(short_one), split(), sample=sample))
    x = keras.Input((12,))
    y = keras.layers.Dense(12)(x)
    branched = keras.Model(x, keras.layers.Dense(5)(keras.layers.Add()([x, y])))
    refused("a functional model with branches", lambda: step_of(spec_of(branched), split(), sample=sample))
    mlp = built("mlp")
    refused("an output that differs from the model's", lambda: step_of(
        dataclasses.replace(mlp, blocks=lambda m: [*mlp.blocks(m), ("again", keras.layers.Rescaling(2.0))]), split()))
    refused("belongs to no block", lambda: step_of(
        dataclasses.replace(mlp, blocks=lambda m: mlp.blocks(m)[1:]), split()))
    shared = keras.layers.Dense(12)
    twice = keras.Sequential([keras.Input((12,)), keras.layers.Dense(12)])
    refused("share", lambda: step_of(spec_of(twice, blocks=lambda m: [
        ("a", twice.layers[0]), ("b", keras.Sequential([twice.layers[0], shared]))]), split(), sample=sample))
    inside = step_of(spec_of(sequential(), task=lambda m, batch: (keras.ops.sum(m.layers[0](batch[0])), 1.0)), split(),
                     sample=sample)
    refused("the task uses model.layers", lambda: train(inside, data_of(steps=1)))


class Between:
    """Makes Keras models of two blocks that do something besides them; ``drawing``: a first block that draws."""

    def __new__(cls, extra, drawing=None):
        import keras

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.first = drawing() if drawing else keras.layers.Dense(16, activation="tanh")
                self.second = keras.layers.Dense(5)
                self(keras.Input((12,)))

            def call(self, x, training=None):
                return self.second(extra(self, self.first(x), training))

        keras.utils.set_random_seed(7)
        return Model()


def case_what_only_training_shows_is_refused(folder):
    """Check the refusal of a call that acts only in training, adds to the loss, or differentiates the model."""
    import keras
    import tensorflow as tf

    def step(model, **parts):
        return step_of(spec_of(model, blocks=lambda m: [("first", m.first), ("second", m.second)], **parts),
                       split(optimizer=Named("sgd")), sample=sample)

    for extra in (lambda m, x, training: keras.random.dropout(x, 0.5, seed=3) if training else x,
                  lambda m, x, training: x * 2.0 if training else x,
                  lambda m, x, training: tf.nn.dropout(x, 0.5) if training else x):
        refused("an output that differs from the model's in training", lambda extra=extra: step(Between(extra)))

    def add_loss(model, x, training):
        model.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x

    refused("the model's blocks add 0 to the loss where the model adds 0.0", lambda: step(Between(add_loss)))

    class Draws(keras.layers.Dense):
        def __init__(self):
            super().__init__(16, activity_regularizer="l2")

        def call(self, x, training=None):
            return tf.nn.dropout(super().call(x), 0.5) if training else super().call(x)

    def nothing(model, x, training):
        return x

    train(step(Between(nothing, Draws)), data_of(steps=1))  # its draws cannot be repeated: nothing can be said
    made = step(Between(nothing, lambda: keras.Sequential([
        keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)])))
    means = [v.numpy() for v in made.model.variables if "moving_mean" in v.path]
    seeds = [v.numpy().tolist() for v in made.model.variables if "seed_generator" in v.path]
    assert seeds == [[1, 0]] and not np.any(means), (seeds, means)

    def penalty(of_input):
        def task(model, batch):
            x, y = batch
            logits = None if of_input else model(x)
            with tf.GradientTape() as tape:
                tape.watch(x if of_input else logits)
                logits = model(x) if of_input else logits
                top = tf.reduce_sum(tf.square(logits))
            slope = tape.gradient(top, x if of_input else logits)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            return tf.reduce_sum(loss) + 0.1 * tf.reduce_sum(tf.square(slope)), tf.cast(tf.shape(x)[0], tf.float32)
        return task

    refused("differentiates through a model that is partitioned", lambda: train(
        step(Between(nothing), task=penalty(True)), data_of(steps=1)))
    whole = step_of(spec_of(Between(nothing), task=penalty(False)), dataclasses.replace(CONFIG, optimizer=Named("sgd")))
    parts = step(Between(nothing), task=penalty(False))
    close({"losses": train(parts, data_of())}, {"losses": train(whole, data_of())})
    close(arrays(parts), arrays(whole))


def case_too_large_is_said_before_anything_moves(folder):
    """Check the message for devices whose memory is too small; the variables stay in host memory."""
    from hvdtrain.backends.tensorflow import placement

    real = placement.capacity_bytes
    placement.capacity_bytes = lambda devices, local: ((60_000, 60_000), 0)
    spec = built("mlp")
    try:
        text = refused("has 58.6 KiB", lambda: step_of(spec, split()))
    finally:
        placement.capacity_bytes = real
    assert "stage" in text and "parameters" in text and set(where(spec.model.weights)) == {"CPU:0"}, text
