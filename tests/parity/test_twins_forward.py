"""Twins hold the same function: names, sizes, outputs, gradients and refusals.

Does not train; that is test_loss_curves.py.
"""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
import torch  # noqa: E402
from twins import copy_torch_to_keras, pairs  # noqa: E402

import tf_models.bert  # noqa: E402
import tf_models.cnn  # noqa: E402
import tf_models.device_split  # noqa: E402
import tf_models.gpt  # noqa: E402
import tf_models.lstm  # noqa: E402
import tf_models.mlp  # noqa: E402
import tf_models.resnet  # noqa: E402
import tf_models.vit  # noqa: E402
import torch_models.bert  # noqa: E402
import torch_models.cnn  # noqa: E402
import torch_models.device_split  # noqa: E402
import torch_models.gpt  # noqa: E402
import torch_models.lstm  # noqa: E402
import torch_models.mlp  # noqa: E402
import torch_models.resnet  # noqa: E402
import torch_models.vit  # noqa: E402

TWINS = {"mlp": (torch_models.mlp, tf_models.mlp), "cnn": (torch_models.cnn, tf_models.cnn),
         "resnet": (torch_models.resnet, tf_models.resnet), "gpt": (torch_models.gpt, tf_models.gpt),
         "device_split": (torch_models.device_split, tf_models.device_split),
         "lstm": (torch_models.lstm, tf_models.lstm), "vit": (torch_models.vit, tf_models.vit),
         "bert": (torch_models.bert, tf_models.bert)}

# Family, arguments, shape of one sample (None: that of `example`), and the builder where not `build`.
VARIANTS = {
    "mlp": ("mlp", {}, None),
    "mlp-image": ("mlp", {"hidden": [32], "activation": "tanh"}, (8, 8)),
    "mlp-silu": ("mlp", {"in_features": 12, "hidden": (8, 8, 8), "classes": 3, "activation": "silu"}, (12,)),
    "mlp-gelu": ("mlp", {"activation": "gelu"}, None),
    "cnn": ("cnn", {}, None),
    "cnn-channel-axis": ("cnn", {}, (8, 8, 1)),
    "cnn-batch": ("cnn", {"norm": "batch"}, None),
    "cnn-none": ("cnn", {"norm": "none"}, None),
    "cnn-odd-colour": ("cnn", {"in_shape": (9, 11, 3), "channels": [12, 10, 6]}, (9, 11, 3)),
    "resnet": ("resnet", {}, None),
    "resnet-batch": ("resnet", {"norm": "batch", "depth": 1}, None),
    "resnet-grey-odd": ("resnet", {"in_shape": (9, 11), "width": 12, "depth": 2, "classes": 4}, (9, 11)),
    "gpt": ("gpt", {}, None),
    "gpt-short": ("gpt", {"vocab": 20, "context": 9, "width": 24, "depth": 2, "heads": 3, "dropout": 0.5},
                  (7,)),
    "device_split": ("device_split", {"in_features": 20, "hidden": 12}, (20,)),
    "resnet-plain": ("resnet", {"kind": "plain", "depths": [1, 2], "in_shape": (33, 31, 3), "classes": 4,
                                "norm": "batch", "stem": "imagenet"}, (33, 31, 3), "deep"),
    "resnet-bottleneck": ("resnet", {"kind": "bottleneck", "depths": [1, 1], "in_shape": (9, 9), "classes": 4,
                                     "norm": "group", "stem": "auto"}, (9, 9), "deep"),
    "resnet-wide": ("resnet", {"depth": 10, "widen": 1, "in_shape": (16, 16, 3), "classes": 4}, (16, 16, 3),
                    "wide_resnet"),
    "gpt-tied": ("gpt", {"vocab": 20, "context": 9, "width": 24, "depth": 1, "heads": 3, "tied": True}, (9,)),
    "vit": ("vit", {"depth": 1}, None),
    "vit-grey": ("vit", {"in_shape": (8, 12), "width": 24, "depth": 2, "heads": 3, "classes": 4}, (8, 12)),
    "bert": ("bert", {"depth": 2}, None),
    "bert-tied": ("bert", {"vocab": 20, "context": 9, "width": 24, "depth": 1, "heads": 3, "tied": True}, (7,)),
    "lstm": ("lstm", {}, None),
    "lstm-narrow": ("lstm", {"features": 3, "width": 12, "depth": 1, "classes": 4}, (6, 3)),
}
SHALLOW = {"resnet": {"depth": 1}, "gpt": {"depth": 1}, "vit": {"depth": 1}, "bert": {"depth": 1}}
"""Arguments where the number of blocks does not matter."""
EACH_FAMILY = pytest.mark.parametrize("family", TWINS)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def twins(variant: str):
    """Build a variant in both frameworks with the same, everywhere non-trivial, weights."""
    family, args, _, *builder = VARIANTS[variant]
    torch_file, tf_file = TWINS[family]
    torch.manual_seed(1)
    torch_model, keras_model = (getattr(file, *(builder or ["build"]))(**args) for file in (torch_file, tf_file))
    with torch.no_grad():  # zero biases and unit gammas would hide a wrong pairing
        for name, tensor in torch_model.state_dict().items():
            if tensor.is_floating_point():
                # Centred, for an offset common to a residual stream costs every LayerNorm its digits: torch
                # alone was then 1e-4 from its own float64 result, and is 1e-6 so.
                tensor.add_((torch.rand_like(tensor) - (0 if "var" in name else 0.5)) * 0.1)
    copy_torch_to_keras(torch_model, keras_model, torch_file.blocks, tf_file.blocks)
    return torch_file, tf_file, torch_model, keras_model


@pytest.fixture(scope="module", params=VARIANTS)
def each(request):
    """Return (the variant, its twins), built once for all tests, which leave the weights as they are."""
    return request.param, *twins(request.param)


def samples(variant: str, B: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return B samples of the variant's shape and, for each logit vector, the class it should name."""
    family, args, shape, *_ = VARIANTS[variant]
    if shape is None:
        return TWINS[family][0].example(B)
    rng = np.random.default_rng(3)
    if family in ("gpt", "bert"):
        x, y = rng.integers(0, args["vocab"], (2, B, *shape))
        return x, np.where(rng.random(y.shape) < 0.3, -1, y)
    return rng.random((B, *shape), dtype=np.float32), rng.integers(0, args.get("classes", 10), B)


def loss_torch(torch_file, model, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    batch = torch.from_numpy(x), torch.from_numpy(y)
    if hasattr(torch_file, "task"):
        return torch_file.task(model, batch)[0]
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def loss_keras(tf_file, model, x, y):
    if hasattr(tf_file, "task"):
        return tf_file.task(model, (x, y))[0]
    return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))


def test_block_names_and_parameter_counts_agree(each):
    variant, torch_file, tf_file, torch_model, keras_model = each
    names = [name for name, _ in torch_file.blocks(torch_model)]
    assert names == [name for name, _ in tf_file.blocks(keras_model)]
    assert names[-1] == ("second" if variant == "device_split" else "head") and len(set(names)) == len(names)
    count_torch = sum(parameter.numel() for parameter in torch_model.parameters())
    assert count_torch == sum(np.prod(v.shape) for v in keras_model.trainable_variables)
    paired = pairs(torch_model, keras_model, torch_file.blocks, tf_file.blocks)
    assert {id(p.variable) for p in paired} == {id(v) for v in keras_model.weights}


def test_outputs_are_equal(each):
    variant, _, _, torch_model, keras_model = each
    x, _ = samples(variant)
    with torch.no_grad():
        expected = torch_model.eval()(torch.from_numpy(x)).numpy()
    assert expected.shape[0] == len(x) and np.ptp(expected) > 0.01
    np.testing.assert_allclose(np.asarray(keras_model(x, training=False)), expected, **TOLERANCE)


def test_gradients_are_equal(each):
    variant, torch_file, tf_file, torch_model, keras_model = each
    x, y = samples(variant)
    torch_model.zero_grad()
    loss_torch(torch_file, torch_model.eval(), x, y).backward()
    with tf.GradientTape() as tape:
        loss = loss_keras(tf_file, keras_model, tf.constant(x), tf.constant(y))
    every = pairs(torch_model, keras_model, torch_file.blocks, tf_file.blocks)
    trained = [pair for pair in every if pair.variable.trainable]
    for pair, gradient in zip(trained, tape.gradient(loss, [p.variable.value for p in trained])):
        expected = pair.to_keras(pair.tensor.grad.numpy())
        # The scale of a whole gradient bounds the error of its small entries, which are sums of large ones.
        np.testing.assert_allclose(tf.convert_to_tensor(gradient).numpy(), expected, rtol=1e-4,
                                   atol=1e-5 * max(1.0, np.abs(expected).max()), err_msg=pair.name)


@pytest.mark.parametrize("variant", ["cnn-batch", "resnet-batch", "resnet-wide"])
def test_batchnorm_uses_and_moves_its_statistics_alike(variant):
    torch_file, tf_file, torch_model, keras_model = twins(variant)
    x, _ = samples(variant, B=64)
    expected = torch_model.train()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(np.asarray(keras_model(x, training=True)), expected, **TOLERANCE)
    for pair in pairs(torch_model, keras_model, torch_file.blocks, tf_file.blocks):
        # torch's moving variance is the unbiased one: n / (n - 1) larger, n >= 64 * 4 * 4 values a channel.
        expected = pair.to_keras(pair.tensor.detach().numpy())
        np.testing.assert_allclose(pair.variable.numpy(), expected, rtol=1e-3, atol=1e-5, err_msg=pair.name)


@EACH_FAMILY
def test_examples_are_equal_and_the_same_each_time(family):
    torch_file, tf_file = TWINS[family]
    for ours, theirs, again in zip(torch_file.example(3), tf_file.example(3), torch_file.example(3)):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, again)
        assert len(ours) == 3 and ours.dtype == theirs.dtype


@EACH_FAMILY
def test_a_seed_fixes_the_first_weights(family):
    torch_file, tf_file = TWINS[family]
    args = SHALLOW.get(family, {})

    def torch_weights(seed):
        torch.manual_seed(seed)
        return np.concatenate([p.detach().numpy().ravel() for p in torch_file.build(**args).parameters()])

    def keras_weights(seed):
        keras.utils.set_random_seed(seed)
        return np.concatenate([v.numpy().ravel() for v in tf_file.build(**args).trainable_variables])

    for weights in (torch_weights, keras_weights):
        first = weights(4)
        np.testing.assert_array_equal(weights(4), first)
        assert not np.array_equal(weights(5), first)


@EACH_FAMILY
def test_blocks_called_in_order_are_the_model(family):
    torch_file, tf_file = TWINS[family]
    x, _ = torch_file.example(2)
    torch_model, keras_model = torch_file.build(), tf_file.build()
    out_torch, out_keras = torch.from_numpy(x), tf.constant(x)
    for _, block in torch_file.blocks(torch_model):
        out_torch = block(out_torch)
    for _, block in tf_file.blocks(keras_model):
        out_keras = block(out_keras)
    assert torch.equal(out_torch, torch_model(torch.from_numpy(x)))
    np.testing.assert_array_equal(np.asarray(out_keras), np.asarray(keras_model(x)))


def test_one_graph_serves_every_batch_size(each):
    variant, torch_file, tf_file, torch_model, keras_model = each
    traces = []

    def call(x):
        traces.append(x.shape)
        return keras_model(x, training=True)

    x, _ = samples(variant)
    graph = tf.function(call, input_signature=[tf.TensorSpec((None, *x.shape[1:]), x.dtype)])
    assert [len(graph(x[:B])) for B in (1, 3, 5)] == [1, 3, 5] and len(traces) == 1
    copy_torch_to_keras(torch_model, keras_model, torch_file.blocks, tf_file.blocks)  # training moves statistics


def test_gpt_looks_only_at_the_past():
    x, _ = samples("gpt")
    later = x.copy()
    later[:, 40:] = (x[:, 40:] + 1) % 96
    _, _, torch_model, keras_model = twins("gpt")
    with torch.no_grad():
        both = {"torch": lambda tokens: torch_model(torch.from_numpy(tokens)).numpy(),
                "keras": lambda tokens: np.asarray(keras_model(tokens))}
        for name, model in both.items():
            before, after = model(x), model(later)
            np.testing.assert_allclose(before[:, :40], after[:, :40], atol=1e-6, err_msg=name)
            assert not np.allclose(before[:, 40:], after[:, 40:]), name


def test_nobody_looks_at_what_fills_a_sequence_up():
    x, _ = samples("bert")
    x[:, 40:] = 0
    _, _, torch_model, keras_model = twins("bert")
    with torch.no_grad():
        short = torch_model(torch.from_numpy(x[:, :40])).numpy()
        np.testing.assert_allclose(torch_model(torch.from_numpy(x))[:, :40].numpy(), short, atol=1e-5)
        x[:, 40:] = 1
        assert not np.allclose(torch_model(torch.from_numpy(x))[:, :40].numpy(), short, atol=1e-3)
    x[:, 40:] = 0
    np.testing.assert_allclose(np.asarray(keras_model(x))[:, :40], short, **TOLERANCE)


def test_gpt_dropout_acts_in_training_only():
    _, _, torch_model, keras_model = twins("gpt-short")
    x, _ = samples("gpt-short")
    tokens = torch.from_numpy(x)
    assert not torch.equal(torch_model.train()(tokens), torch_model(tokens))
    assert torch.equal(torch_model.eval()(tokens), torch_model(tokens))
    graph = tf.function(lambda tokens, training: keras_model(tokens, training=training))
    assert not np.array_equal(graph(x, True), graph(x, True))
    np.testing.assert_array_equal(graph(x, False), graph(x, False))


@torch.no_grad()
def test_gpt_task_sums_over_the_tokens_that_count():
    _, _, torch_model, keras_model = twins("gpt-short")
    x, y = samples("gpt-short")
    torch_model.eval()
    logits = torch_model(torch.from_numpy(x)).double().numpy()
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -sum(log_p[i, t, y[i, t]] for i, t in zip(*np.nonzero(y != -1)))
    counted = int((y != -1).sum())
    assert 0 < counted < y.size
    both = {"torch": torch_models.gpt.task(torch_model, (torch.from_numpy(x), torch.from_numpy(y))),
            "keras": tf_models.gpt.task(keras_model, (tf.constant(x), tf.constant(y)))}
    for name, (loss_sum, weight) in both.items():
        assert float(loss_sum) == pytest.approx(expected, rel=1e-5), name
        assert int(weight) == counted, name
    assert torch_models.gpt.weight((x, y)) == tf_models.gpt.weight((x, y)) == float(counted)


def test_gpt_task_without_a_token_that_counts_is_zero_with_zero_gradients():
    torch_file, tf_file, torch_model, keras_model = twins("gpt-short")
    x, y = samples("gpt-short")
    y = np.full_like(y, -1)
    loss, weight = torch_file.task(torch_model, (torch.from_numpy(x), torch.from_numpy(y)))
    loss.backward()
    assert loss.item() == weight.item() == torch_file.weight((x, y)) == 0
    assert all(not p.grad.any() for p in torch_model.parameters())
    with tf.GradientTape() as tape:
        loss, weight = tf_file.task(keras_model, (tf.constant(x), tf.constant(y)))
    assert float(loss) == float(weight) == tf_file.weight((x, y)) == 0
    for gradient in tape.gradient(loss, [v.value for v in keras_model.trainable_variables]):
        assert not np.any(tf.convert_to_tensor(gradient).numpy())


INVALID = [
    ("mlp", {"in_features": 0}), ("mlp", {"hidden": ()}), ("mlp", {"hidden": (8, 0)}), ("mlp", {"hidden": 8}),
    ("mlp", {"hidden": (8.0,)}), ("mlp", {"classes": -1}), ("mlp", {"activation": "rleu"}),
    ("cnn", {"in_shape": (8,)}), ("cnn", {"in_shape": (8, 8, 1, 1)}), ("cnn", {"in_shape": (3, 8)}),
    ("cnn", {"channels": []}), ("cnn", {"channels": (True,)}), ("cnn", {"classes": 0}),
    ("cnn", {"norm": "layer"}),
    ("resnet", {"in_shape": 32}), ("resnet", {"width": 0}), ("resnet", {"depth": 1.0}), ("resnet", {"classes": 0}),
    ("resnet", {"norm": "none"}),
    ("gpt", {"vocab": 0}), ("gpt", {"context": "64"}), ("gpt", {"width": 130}), ("gpt", {"depth": 0}),
    ("lstm", {"features": 0}), ("lstm", {"width": 1.5}), ("lstm", {"depth": 0}), ("lstm", {"classes": -2}),
    ("gpt", {"heads": 0}), ("gpt", {"dropout": 1.0}), ("gpt", {"dropout": -0.1}), ("gpt", {"dropout": "0.1"}),
]


@pytest.mark.parametrize("family, args", INVALID)
def test_invalid_arguments_are_refused_in_the_same_words(family, args):
    said = []
    for model_file in TWINS[family]:
        with pytest.raises(ValueError, match=f"{next(iter(args))}: got .*; expected ") as refusal:
            model_file.build(**args)
        said.append(str(refusal.value))
    assert said[0] == said[1]


def test_inputs_of_another_shape_are_refused():
    images = np.zeros((2, 1, 8, 8), np.float32)
    for model, x in ((torch_models.cnn.build(), torch.from_numpy(images)), (tf_models.cnn.build(), images)):
        with pytest.raises(ValueError, match=r"got \(1, 8, 8\); expected \(8, 8, 1\)"):
            model(x)
    for model in (torch_models.resnet.build(depth=1), tf_models.resnet.build(depth=1)):
        x = np.zeros((2, 3, 32, 32), np.float32)
        with pytest.raises(ValueError, match=r"got \(3, 32, 32\); expected \(32, 32, 3\)"):
            model(torch.from_numpy(x) if isinstance(model, torch.nn.Module) else x)
    long = np.zeros((1, 65), np.int64)
    for model, x in ((torch_models.gpt.build(), torch.from_numpy(long)), (tf_models.gpt.build(), long)):
        with pytest.raises(ValueError, match="got 65; expected at most 64"):
            model(x)


@EACH_FAMILY
def test_keras_twin_comes_back_from_its_native_file(family, tmp_path):
    variant = {"mlp": "mlp-gelu", "cnn": "cnn-batch", "resnet": "resnet-batch", "gpt": "gpt-short",
               "device_split": "device_split", "lstm": "lstm-narrow", "vit": "vit-grey", "bert": "bert-tied"}[family]
    _, _, _, keras_model = twins(variant)
    x, _ = samples(variant)
    keras_model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.asarray(loaded(x)), np.asarray(keras_model(x)))


@pytest.mark.parametrize("package, others", [(torch_models, {"tensorflow", "keras", "tf_models"}),
                                             (tf_models, {"torch", "torch_models"})])
def test_model_files_import_one_framework_and_nothing_distributed(package, others):
    name = package.__name__
    code = (f"import sys, {name}.mlp, {name}.cnn, {name}.resnet, {name}.gpt, {name}.device_split, {name}.lstm, "
            f"{name}.vit, {name}.bert\n"
            f"print(sorted(set(sys.modules) & {others | {'hvdtrain', 'horovod', 'mpi4py'}}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(package.__file__).parents[1],
                          capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_weights_that_do_not_correspond_are_named():
    torch_file, tf_file = TWINS["mlp"]
    with pytest.raises(ValueError, match="blocks: got"):
        copy_torch_to_keras(torch_file.build(hidden=(8,)), tf_file.build(hidden=(8, 8)), torch_file.blocks,
                            tf_file.blocks)
    with pytest.raises(ValueError, match=r"dense_0/linear/kernel: got \(64, 8\) .*; expected \(64, 9\)"):
        copy_torch_to_keras(torch_file.build(hidden=(8,)), tf_file.build(hidden=(9,)), torch_file.blocks,
                            tf_file.blocks)
    torch_file, tf_file = TWINS["cnn"]
    with pytest.raises(ValueError, match="block conv_0: only one twin has .*norm/gamma"):
        copy_torch_to_keras(torch_file.build(norm="none"), tf_file.build(), torch_file.blocks, tf_file.blocks)
