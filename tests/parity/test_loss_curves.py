"""Twins that start from the same weights learn alike: 20 SGD steps, plain framework loops in one process."""
from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
import torch  # noqa: E402
from twins import copy_torch_to_keras  # noqa: E402

import tf_models.cnn  # noqa: E402
import tf_models.gpt  # noqa: E402
import tf_models.mlp  # noqa: E402
import tf_models.resnet  # noqa: E402
import torch_models.cnn  # noqa: E402
import torch_models.gpt  # noqa: E402
import torch_models.mlp  # noqa: E402
import torch_models.resnet  # noqa: E402

STEPS, BATCH = 20, 16
CASES = {
    "mlp": (torch_models.mlp, tf_models.mlp, {}, 0.1),
    "cnn-group": (torch_models.cnn, tf_models.cnn, {"norm": "group"}, 0.05),
    "cnn-batch": (torch_models.cnn, tf_models.cnn, {"norm": "batch"}, 0.05),
    "cnn-none": (torch_models.cnn, tf_models.cnn, {"norm": "none"}, 0.05),
    "resnet": (torch_models.resnet, tf_models.resnet, {"width": 8, "depth": 1}, 0.05),
    "gpt": (torch_models.gpt, tf_models.gpt, {"width": 64, "depth": 2}, 0.1),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches(model_file) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut `STEPS` different batches, the last one short, out of few samples, which can be learned."""
    x, y = model_file.example(3 * BATCH)
    orders = [np.random.default_rng(step).permutation(len(x))[:BATCH] for step in range(STEPS)]
    orders[-1] = orders[-1][:5]
    return [(x[order], y[order]) for order in orders]


def curve_torch(model_file, model, momentum: float, lr: float) -> list[float]:
    """Train; return the mean loss of each step before its update."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    losses = []
    for x, y in batches(model_file):
        batch = torch.from_numpy(x), torch.from_numpy(y)
        if hasattr(model_file, "task"):
            loss_sum, weight = model_file.task(model, batch)
        else:
            loss_sum = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
            weight = len(y)
        loss = loss_sum / weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def curve_keras(model_file, model, momentum: float, lr: float) -> list[float]:
    """Train; return the mean loss of each step before its update."""
    optimizer = keras.optimizers.SGD(lr, momentum=momentum)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            if hasattr(model_file, "task"):
                loss_sum, weight = model_file.task(model, (x, y), training=True)
                loss = loss_sum / weight
            else:
                logits = model(x, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
                loss = tf.reduce_sum(losses) / tf.cast(tf.shape(losses)[0], tf.float32)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return [float(step(tf.constant(x), tf.constant(y))) for x, y in batches(model_file)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_curves_are_one(case, momentum):
    torch_file, tf_file, args, lr = CASES[case]
    torch.manual_seed(7)
    torch_model, keras_model = torch_file.build(**args), tf_file.build(**args)
    copy_torch_to_keras(torch_model, keras_model, torch_file.blocks, tf_file.blocks)
    # The frameworks round differently; momentum and a large step would amplify that beyond what is asked.
    lr = lr * (1 - momentum)
    curve = curve_torch(torch_file, torch_model, momentum, lr)
    assert max(curve) - min(curve) > 0.01 * curve[0], f"nothing was learned: {curve}"
    np.testing.assert_allclose(curve_keras(tf_file, keras_model, momentum, lr), curve, rtol=1e-4)
