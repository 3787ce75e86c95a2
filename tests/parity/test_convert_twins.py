"""Conversions with both frameworks in one process: every model of the project, every kind of layer, every kind of file.

Outputs on random input are equal to 1e-5 of the largest, there and back gives the same bits.
"""
from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import tf_models.bert  # noqa: E402
import tf_models.cnn  # noqa: E402
import tf_models.gpt  # noqa: E402
import tf_models.lstm  # noqa: E402
import tf_models.mlp  # noqa: E402
import tf_models.resnet  # noqa: E402
import tf_models.vit  # noqa: E402
import torch_models.bert  # noqa: E402
import torch_models.cnn  # noqa: E402
import torch_models.gpt  # noqa: E402
import torch_models.lstm  # noqa: E402
import torch_models.mlp  # noqa: E402
import torch_models.resnet  # noqa: E402
import torch_models.vit  # noqa: E402
from hvdtrain import Config, Trainer  # noqa: E402
from hvdtrain.backends.interchange.pairing import carry, hints, pair  # noqa: E402
from hvdtrain.backends.tensorflow import convert as keras_side  # noqa: E402
from hvdtrain.backends.torch import convert as torch_side  # noqa: E402
from hvdtrain.checkpoint import read_snapshot  # noqa: E402
from hvdtrain.commands import train  # noqa: E402
from hvdtrain.commands.convert import cli as check  # noqa: E402
from hvdtrain.commands.convert import request as places  # noqa: E402
from hvdtrain.commands.convert import worker  # noqa: E402
from hvdtrain.commands.convert.request import Request, completed  # noqa: E402
from hvdtrain.config import DataConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

L = keras.layers
DEEP = {"depths": (1, 1), "in_shape": (32, 32, 3), "classes": 10, "norm": "batch", "stem": "imagenet"}
TWINS = {
    "mlp": (torch_models.mlp, tf_models.mlp, {}),
    "cnn-group": (torch_models.cnn, tf_models.cnn, {"norm": "group"}),
    "cnn-batch": (torch_models.cnn, tf_models.cnn, {"norm": "batch"}),
    "resnet": (torch_models.resnet, tf_models.resnet, {"width": 8, "depth": 1, "norm": "batch"}),
    "deep-plain": (torch_models.resnet, tf_models.resnet, {**DEEP, "kind": "plain"}),
    "deep-bottleneck": (torch_models.resnet, tf_models.resnet, {**DEEP, "kind": "bottleneck"}),
    "wide_resnet": (torch_models.resnet, tf_models.resnet, {"depth": 10, "widen": 1, "classes": 10}),
    "lstm": (torch_models.lstm, tf_models.lstm, {"width": 12}),
    "gpt": (torch_models.gpt, tf_models.gpt, {"width": 32, "depth": 2}),
    "gpt-tied": (torch_models.gpt, tf_models.gpt, {"width": 32, "depth": 2, "tied": True}),
    "bert-tied": (torch_models.bert, tf_models.bert, {"width": 32, "depth": 2, "tied": True}),
    "vit": (torch_models.vit, tf_models.vit, {"width": 32, "depth": 2}),
}
BUILDERS = {"deep-plain": "deep", "deep-bottleneck": "deep", "wide_resnet": "wide_resnet"}
"""Of those that `build` does not make."""


def random_weights(model):
    """Other values than the initial ones, also for what begins as zeros and ones; variances above 0."""
    draw = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=draw) + 0.5 if name.endswith("var") else
                         0.3 * torch.randn(tensor.shape, generator=draw) + tensor)


def there_and_back(torch_model, keras_model, x, **hints_given):
    """Carry both ways; return the matching."""
    random_weights(torch_model)
    pairs = pair(torch_side.describe(torch_model), keras_side.describe(keras_model), **hints_given)
    before = torch_side.arrays(torch_model)
    given = carry(pairs, before, "keras")
    assert sorted(given) == sorted(v for v in keras_side.arrays(keras_model))
    keras_side.assign(keras_model, given)
    assert check.apart(keras_side.outputs(keras_model, x), torch_side.outputs(torch_model, x)) <= 1e-5
    after = carry(pairs, keras_side.arrays(keras_model), "torch")
    assert sorted(after) == sorted(before)
    return pairs, before, after


@pytest.mark.parametrize("name", TWINS)
def test_the_models_of_the_project(name):
    torch_file, tf_file, args = TWINS[name]
    torch_model, keras_model = (getattr(file, BUILDERS.get(name, "build"))(**args) for file in (torch_file, tf_file))
    x = check.inputs(torch_file.example, [], [])
    pairs, before, after = there_and_back(torch_model, keras_model, x)
    assert pairs.how == "by name" and not hints(pairs)[1:]
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    with torch.no_grad():
        for parameter in torch_model.parameters():
            parameter.zero_()
    torch_side.assign(torch_model, after)
    assert check.apart(keras_side.outputs(keras_model, x), torch_side.outputs(torch_model, x)) <= 1e-5


class Wrapped(nn.Module):
    """Layers one after the other, with what torch lays out otherwise around them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *x):
        return self.run(self, *x)


def first(x):
    """Channels last to channels first, and back with `last`."""
    return x.movedim(-1, 1)


def last(x):
    return x.movedim(1, -1)


def functional(shape, *layers):
    given = x = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    return keras.Model(given, x)


KINDS = {
    "conv 1d": ((9, 3), lambda: nn.Conv1d(3, 4, 3), L.Conv1D(4, 3)),
    "conv 2d with groups": ((7, 8, 4), lambda: nn.Conv2d(4, 6, (3, 2), groups=2), L.Conv2D(6, (3, 2), groups=2)),
    "conv 3d": ((4, 5, 6, 2), lambda: nn.Conv3d(2, 3, 2), L.Conv3D(3, 2)),
    "depthwise 1d": ((9, 3), lambda: nn.Conv1d(3, 6, 3, groups=3), L.DepthwiseConv1D(3, depth_multiplier=2)),
    "depthwise 2d": ((7, 8, 3), lambda: nn.Conv2d(3, 6, 3, groups=3), L.DepthwiseConv2D(3, depth_multiplier=2)),
    "depthwise as groups": ((7, 8, 4), lambda: nn.Conv2d(4, 8, 3, groups=4), L.Conv2D(8, 3, groups=4)),
    "transposed 1d": ((5, 3), lambda: nn.ConvTranspose1d(3, 4, 3), L.Conv1DTranspose(4, 3)),
    "transposed 2d": ((5, 4, 3), lambda: nn.ConvTranspose2d(3, 4, (3, 2), 2), L.Conv2DTranspose(4, (3, 2), 2)),
    "transposed 3d": ((3, 4, 2, 3), lambda: nn.ConvTranspose3d(3, 4, 2), L.Conv3DTranspose(4, 2)),
    "batch norm": ((6, 4), lambda: nn.BatchNorm1d(4, eps=1e-3), L.BatchNormalization()),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_over_channels(name):
    shape, build, keras_layer = KINDS[name]
    model = Wrapped(lambda self, x: last(self.layer(first(x))), layer=build())
    x = [np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)]
    _, before, after = there_and_back(model, functional(shape, keras_layer), x)
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)


def test_a_chain_of_other_layers():
    """Unlike names, so that kind and order decide: embedding, norms, GRU, a dense layer and an einsum."""
    model = Wrapped(lambda s, x: s.e(s.d(s.r(s.g(s.n(s.emb(x)))[0]))), emb=nn.Embedding(11, 6), n=nn.LayerNorm(6),
                    g=nn.GRU(6, 5, batch_first=True), r=nn.RMSNorm(5, eps=1e-6), d=nn.Linear(5, 4), e=nn.Linear(4, 3))
    given = keras.Input((7,), dtype="int64")
    hidden = L.GRU(5, return_sequences=True)(L.LayerNormalization(epsilon=1e-5)(L.Embedding(11, 6)(given)))
    hidden = L.Dense(4)(L.RMSNormalization(epsilon=1e-6)(hidden))
    twin = keras.Model(given, L.EinsumDense("abc,cd->abd", (None, 3), bias_axes="d")(hidden))
    x = [np.random.default_rng(0).integers(0, 11, (3, 7))]
    pairs, before, after = there_and_back(model, twin, x)
    assert pairs.how == "by kind and order"
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)


def test_an_lstm_by_its_output():
    model = Wrapped(lambda s, x: s.rnn(x)[0], rnn=nn.LSTM(3, 4, batch_first=True))
    twin = functional((6, 3), L.LSTM(4, return_sequences=True))
    x = [np.random.default_rng(0).standard_normal((2, 6, 3)).astype(np.float32)]
    _, _, after = there_and_back(model, twin, x)
    torch_side.assign(model, after)  # its two biases are now their sum and nothing
    assert check.apart(keras_side.outputs(twin, x), torch_side.outputs(model, x)) <= 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_attention(bias):
    model = Wrapped(lambda s, q, kv: s.att(q, kv, kv, need_weights=False)[0],
                    att=nn.MultiheadAttention(12, 3, batch_first=True, bias=bias))
    query, value = keras.Input((5, 12)), keras.Input((7, 12))
    twin = keras.Model([query, value], L.MultiHeadAttention(3, 4, use_bias=bias)(query, value))
    draw = np.random.default_rng(0)
    x = [draw.standard_normal((2, n, 12)).astype(np.float32) for n in (5, 7)]
    _, before, after = there_and_back(model, twin, x)
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)


def test_a_flatten_of_channels_first():
    """Without the hint the outputs are apart and the hint is named; with it they are equal."""
    def flat(self, x):
        return self.head(self.conv(first(x)).flatten(1))

    model = Wrapped(flat, conv=nn.Conv2d(2, 3, 3), head=nn.Linear(3 * 4 * 4, 5))
    twin = functional((6, 6, 2), L.Conv2D(3, 3), L.Flatten(), L.Dense(5))
    x = [np.random.default_rng(0).standard_normal((3, 6, 6, 2)).astype(np.float32)]
    pairs = pair(torch_side.describe(model), keras_side.describe(twin))
    assert "--flatten head=3,4,4" in hints(pairs)[0]
    keras_side.assign(twin, carry(pairs, torch_side.arrays(model), "keras"))
    assert check.apart(keras_side.outputs(twin, x), torch_side.outputs(model, x)) > 1e-2
    there_and_back(model, twin, x, flats={"head": (3, 4, 4)})


def test_layers_that_are_refused():
    keras_model = functional((9, 3), L.Dense(4))
    for layer, words in ((nn.LSTM(3, 4, 2), "several layers"), (nn.ConvTranspose1d(4, 4, 3, groups=2), "no groups"),
                         (nn.MultiheadAttention(4, 2, add_bias_kv=True), "add_bias_kv")):
        with pytest.raises(UserError, match=words):
            pair(torch_side.describe(Wrapped(None, layer=layer)), keras_side.describe(keras_model))
    for twin, words in ((functional((9, 3), L.SeparableConv1D(4, 3)), "two layers"),
                        (functional((9, 3), L.GRU(4, reset_after=False)), "reset_after"),
                        (functional((9, 3), L.Bidirectional(L.LSTM(4))), "two directions"),
                        (functional((9, 3), L.EinsumDense("abc,cde->abde", (None, 2, 2))), "equation")):
        with pytest.raises(UserError, match=words):
            pair(torch_side.describe(nn.Sequential(nn.Linear(3, 4))), keras_side.describe(twin))


def request(tmp_path, source, target, model, twin, **more):
    places_ = [places.ModelPath(tmp_path / name, places.kind_of_file(tmp_path / name)) for name in (source, target)]
    return Request(*places_, model, twin, {"hidden": [6]}, {"hidden": [6]}, **more)


CHAIN = ["a.pt", "b.keras", "c.safetensors", "d.weights.h5", "e.pth", "f-keras.safetensors", "g.pt"]


def test_every_kind_of_file(tmp_path):
    """From file to file and framework to framework; the last holds the bits of the first."""
    torch.manual_seed(3)
    torch.save(torch_models.mlp.build(hidden=[6]).state_dict(), tmp_path / CHAIN[0])
    names = "torch_models.mlp:build", "tf_models.mlp:build"
    for i, (source, target) in enumerate(zip(CHAIN, CHAIN[1:])):
        mine, twin = names[::1 if i % 2 == 0 else -1]
        asked, exchange = request(tmp_path, source, target, mine, twin), tmp_path / f"{i}.exchange"
        worker.read(asked, exchange)
        report = worker.write(asked, exchange, tmp_path)
        assert report["apart"] <= 1e-5 and (tmp_path / target).is_file()
    want, got = (torch.load(tmp_path / name, weights_only=True) for name in (CHAIN[0], CHAIN[-1]))
    assert list(want) == list(got) and all(torch.equal(want[n], got[n]) for n in want)


def test_outputs_that_differ_make_nothing(tmp_path):
    torch.save(torch_models.mlp.build(hidden=[6]).state_dict(), tmp_path / "a.pt")
    asked = request(tmp_path, "a.pt", "b.keras", "torch_models.mlp:build", "tf_models.mlp:build")
    asked.twin_args["activation"] = "tanh"
    worker.read(asked, tmp_path / "x")
    with pytest.raises(UserError, match="twins' outputs differ by .*at most 1e-05.*activations"):
        worker.write(asked, tmp_path / "x", tmp_path)
    assert not (tmp_path / "b.keras").exists()
    unchecked = request(tmp_path, "a.pt", "b.keras", "torch_models.mlp:build", "tf_models.mlp:build", check=False)
    worker.read(unchecked, tmp_path / "y")
    assert "apart" not in worker.write(unchecked, tmp_path / "y", tmp_path)


def swapped(zero=True):
    """Two layers of one shape in the other order than in `straight`, and a last one that hides it."""
    net = Wrapped(lambda s, x: s.h(torch.relu(s.b(torch.relu(s.a(x))))), a=nn.Linear(4, 4), b=nn.Linear(4, 4),
                  h=nn.Linear(4, 2))
    with torch.no_grad():
        net.h.weight.mul_(0 if zero else 1)
        net.h.bias.fill_(1)
    return net


def straight(zero=True):
    first_made, second = L.Dense(4, activation="relu", name="b"), L.Dense(4, activation="relu", name="a")
    given = keras.Input((4,))
    return keras.Model(given, L.Dense(2, name="h")(second(first_made(given))))


def test_a_weight_of_zero_hides_no_wrong_pair(tmp_path):
    torch.save(swapped().state_dict(), tmp_path / "a.pt")
    text = f"{__file__}:"
    asked = Request(places.ModelPath(tmp_path / "a.pt", "state_dict"), places.ModelPath(tmp_path / "b.keras", "keras"),
                    text + "swapped", text + "straight", input_shape=[4])
    worker.read(asked, tmp_path / "x")
    with pytest.raises(UserError, match="with random weights of the same pairs they differ"):
        worker.write(asked, tmp_path / "x", tmp_path)
    right = Request(asked.source, asked.target, asked.model, asked.twin, pairs={"a": "b", "b": "a"}, input_shape=[4])
    worker.read(right, tmp_path / "y")
    assert worker.write(right, tmp_path / "y", tmp_path)["apart_by_chance"] <= 1e-5
    made = keras.models.load_model(tmp_path / "b.keras")
    assert not made.get_layer("h").kernel.numpy().any(), "SOURCE's weights, not the random ones"


class Runs:
    """A class whose unpickling runs code, as a hostile pickle's does."""

    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_is_not_run_and_no_advice_to_run_it_is_given(tmp_path, capsys):
    torch.save({"a.weight": Runs()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="Python objects other than tensors") as told:
        torch_side.read_file(nn.Linear(2, 2), tmp_path / "a.pt")
    assert "weights_only" not in str(told.value) and "run\n" not in capsys.readouterr().out


def test_mistakes_about_models_and_files(tmp_path):
    torch.save(torch_models.mlp.build(hidden=[6]).state_dict(), tmp_path / "a.pt")
    torch.save({"epoch": 3, "model": {}}, tmp_path / "nested.pt")
    (tmp_path / "text.pt").write_text("no tensors")
    (tmp_path / "text.keras").write_text("no archive")
    (tmp_path / "text.safetensors").write_text("no tensors")
    mlp, twin = "torch_models.mlp:build", "tf_models.mlp:build"
    for source, model, words in (("nested.pt", mlp, "holds a dict with .'epoch', 'model'"), ("text.pt", mlp, "cannot"),
                                 ("text.keras", twin, "does not match"), ("text.safetensors", twin, "does not match"),
                                 ("text.safetensors", mlp, "does not match"), ("a.pt", twin, "a file of torch"),
                                 ("a.pt", "torch_models.cnn:build", "does not take model_args")):
        with pytest.raises(UserError, match=words):
            worker.read(request(tmp_path, source, "b.keras", model, twin), tmp_path / "x")
    with pytest.raises(UserError, match="does not take random input .*--input_shape"):
        worker.read(request(tmp_path, "a.pt", "b.keras", mlp, twin, input_shape=[3]), tmp_path / "x")
    asked = request(tmp_path, "a.pt", "b.pt", mlp, mlp)
    worker.read(asked, tmp_path / "x")
    with pytest.raises(UserError, match="both models of torch"):
        worker.write(asked, tmp_path / "x", tmp_path)


NETS = """
def keras_net():
    import keras
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(3)])
    net.compile(optimizer=keras.optimizers.{optimizer}, loss=keras.losses.SparseCategoricalCrossentropy(True))
    return net

def torch_net():
    import torch
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
"""


def trained(tmp_path, optimizer, **more):
    """Return a run of three steps of a compiled Keras model; what a conversion of it to torch needs."""
    (tmp_path / "nets.py").write_text(NETS.replace("{optimizer}", optimizer))
    draw = np.random.default_rng(0)
    data = draw.standard_normal((24, 4)).astype(np.float32), draw.integers(0, 3, 24)
    config = Config(model=f"{tmp_path}/nets.py:keras_net", global_batch=8, max_steps=3, eval_every=0, progress="off",
                    data=DataConfig(prefetch=0), out=str(tmp_path / "run"), **more)
    Trainer(config).fit(data=data)
    asked = completed(Request(places.source_of(str(tmp_path / "run"), print), places.target_of(str(tmp_path / "new")),
                              twin=f"{tmp_path}/nets.py:torch_net"))
    worker.read(asked, tmp_path / "x")
    return asked, data


def test_a_compiled_model_s_optimizer_goes_over(tmp_path):
    """Its rate and settings are in no configuration: they come from the optimizer, and go into the new one."""
    asked, data = trained(tmp_path, "AdamW(0.01, weight_decay=0.02, amsgrad=True)")
    (tmp_path / "new").mkdir()
    report = worker.write(asked, tmp_path / "x", tmp_path / "new")
    assert report["slots"] == ["m", "v", "vmax"] and report["apart"] <= 1e-5
    assert any("sparse_categorical_crossentropy" in text for text in report["notes"])
    config = train.parse(["--config", str(tmp_path / "new" / "config.yaml"), "--max_steps", "4"], env={})
    assert config.lr == 0.01 and config.optimizer.name == "AdamW" and config.optimizer.args["weight_decay"] == 0.02
    new, old = (read_snapshot(tmp_path / name / "checkpoints" / "step-00000003") for name in ("new", "run"))
    of = {name.partition("_kernel_")[2]: a for name, a in old.tensors["optimizer"].items() if "dense_" in name}
    held = new.tensors["optimizer"]
    shown = {key: held[f"2.weight/{key}"] for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    assert held["2.weight/step"] == 3 and len(of) >= 3
    assert all(any(a.shape == b.T.shape and (a == b.T).all() for b in of.values()) for a in shown.values())
    result = Trainer(config).fit(data=data)
    assert result.steps == 4 and np.isfinite(result.loss)


@pytest.mark.parametrize("optimizer, words", [
    ("Adam(keras.optimizers.schedules.CosineDecay(0.1, 9))", "follows CosineDecay"), ("Lion(0.01)", "is Lion"),
    ("SGD(0.01, clipnorm=1.0)", "clip_norm")])
def test_what_a_compiled_optimizer_has_alone_is_refused(optimizer, words, tmp_path):
    with pytest.raises(UserError, match=words):
        trained(tmp_path, optimizer)
