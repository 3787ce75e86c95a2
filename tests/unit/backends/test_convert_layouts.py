"""Layouts of layers between PyTorch and Keras: closed forms, there and back to the bit, matching, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.backends.interchange import layers
from hvdtrain.backends.interchange.layers import KINDS, Ends, Layer, Model, Weight
from hvdtrain.backends.interchange.pairing import UNSUPPORTED, carry, carry_moments, hints, pair
from hvdtrain.core.errors import UserError

H, D, E = 2, 3, 6
"""Heads, size of one, width."""
SHAPES = {
    "dense": ({"weight": (5, 4), "bias": (5,)}, {"kernel": (4, 5), "bias": (5,)}),
    "embedding": ({"weight": (7, 3)}, {"embeddings": (7, 3)}),
    "layer norm": ({"weight": (4,), "bias": (4,)}, {"gamma": (4,), "beta": (4,)}),
    "group norm": ({"weight": (4,), "bias": (4,)}, {"gamma": (4,), "beta": (4,)}),
    "rms norm": ({"weight": (4,)}, {"scale": (4,)}),
    "batch norm": ({"weight": (4,), "bias": (4,), "running_mean": (4,), "running_var": (4,)},
                   {"gamma": (4,), "beta": (4,), "moving_mean": (4,), "moving_variance": (4,)}),
    "attention": ({"in_proj_weight": (3 * E, E), "in_proj_bias": (3 * E,), "out_proj.weight": (E, E),
                   "out_proj.bias": (E,)},
                  {"query/kernel": (E, H, D), "query/bias": (H, D), "key/kernel": (E, H, D), "key/bias": (H, D),
                   "value/kernel": (E, H, D), "value/bias": (H, D), "attention_output/kernel": (H, D, E),
                   "attention_output/bias": (E,)}),
    "lstm": ({"weight_ih_l0": (8, 3), "weight_hh_l0": (8, 2), "bias_ih_l0": (8,), "bias_hh_l0": (8,)},
             {"kernel": (3, 8), "recurrent_kernel": (2, 8), "bias": (8,)}),
    "gru": ({"weight_ih_l0": (6, 3), "weight_hh_l0": (6, 2), "bias_ih_l0": (6,), "bias_hh_l0": (6,)},
            {"kernel": (3, 6), "recurrent_kernel": (2, 6), "bias": (2, 6)}),
    "conv 1d": ({"weight": (5, 4, 3), "bias": (5,)}, {"kernel": (3, 4, 5), "bias": (5,)}),
    "conv 2d": ({"weight": (5, 4, 3, 2), "bias": (5,)}, {"kernel": (3, 2, 4, 5), "bias": (5,)}),
    "conv 3d": ({"weight": (5, 4, 3, 2, 1)}, {"kernel": (3, 2, 1, 4, 5)}),
    "transposed conv 1d": ({"weight": (4, 5, 3)}, {"kernel": (3, 5, 4)}),
    "transposed conv 2d": ({"weight": (4, 5, 3, 2)}, {"kernel": (3, 2, 5, 4)}),
    "transposed conv 3d": ({"weight": (4, 5, 3, 2, 1)}, {"kernel": (3, 2, 1, 5, 4)}),
    "depthwise conv 1d": ({"weight": (8, 1, 3)}, {"kernel": (3, 4, 2)}),
    "depthwise conv 2d": ({"weight": (8, 1, 3, 2)}, {"kernel": (3, 2, 4, 2)}),
}


def layer(kind, shapes, name="a", said="", **more):
    weights = {role: Weight(f"{name}.{role}", shape, **more) for role, shape in shapes.items()}
    return Layer(name, kind, said or kind, weights)


def models(*kinds, names=None, keras_names=None):
    """Return a torch and a Keras model of these kinds of layers."""
    names = names or [f"layer_{i}" for i in range(len(kinds))]
    sides = [tuple(layer(kind, SHAPES[kind][side], name) for kind, name in zip(kinds, those))
             for side, those in ((0, names), (1, keras_names or names))]
    return Model("torch", sides[0]), Model("tensorflow", sides[1])


def drawn(model, seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(w.shape).astype(np.float32) for name, w in model.weights().items()}


def test_every_kind_is_tested():
    assert set(SHAPES) == set(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_there_and_back_is_the_same_to_the_bit(kind):
    torch, keras = models(kind)
    pairs = pair(torch, keras)
    there = drawn(keras, 1)
    if kind == "lstm":  # one bias there, of which torch makes two: only from Keras and back
        arrays, ways = there, ("torch", "keras")
    else:
        arrays, ways = drawn(torch), ("keras", "torch")
    back = carry(pairs, carry(pairs, arrays, ways[0]), ways[1])
    assert sorted(back) == sorted(arrays)
    assert all(back[name].tobytes() == arrays[name].tobytes() for name in arrays)
    assert not kind == "lstm" or carry(pairs, drawn(torch), "keras")["layer_0.bias"].shape == (8,)
    if kind != "lstm":
        again = carry(pairs, carry(pairs, there, "torch"), "keras")
        assert all(again[name].tobytes() == there[name].tobytes() for name in there)


def moved(kind, to="keras", flats=None):
    torch, keras = models(kind)
    arrays = drawn(torch if to == "keras" else keras)
    return arrays, carry(pair(torch, keras, flats=flats), arrays, to)


def test_closed_forms():
    a, b = moved("conv 2d")
    assert b["layer_0.kernel"][1, 0, 3, 4] == a["layer_0.weight"][4, 3, 1, 0]
    a, b = moved("transposed conv 2d")
    assert b["layer_0.kernel"][1, 0, 4, 3] == a["layer_0.weight"][3, 4, 1, 0]
    a, b = moved("depthwise conv 2d")
    assert b["layer_0.kernel"][2, 1, 3, 1] == a["layer_0.weight"][3 * 2 + 1, 0, 2, 1]
    a, b = moved("attention")
    assert b["layer_0.key/kernel"][4, 1, 2] == a["layer_0.in_proj_weight"][E + 1 * D + 2, 4]
    assert b["layer_0.value/bias"][1, 0] == a["layer_0.in_proj_bias"][2 * E + D]
    assert b["layer_0.attention_output/kernel"][1, 2, 5] == a["layer_0.out_proj.weight"][5, D + 2]
    a, b = moved("gru")
    assert b["layer_0.kernel"][1, 0] == a["layer_0.weight_ih_l0"][2, 1]  # Keras' first gate is z, torch's second
    assert b["layer_0.bias"][1, 5] == a["layer_0.bias_hh_l0"][5]


def test_attention_with_three_matrices():
    shapes = {"q_proj_weight": (E, E), "k_proj_weight": (E, 4), "v_proj_weight": (E, 5), "out_proj.weight": (E, E)}
    kernels = {"query/kernel": (E, H, D), "key/kernel": (4, H, D), "value/kernel": (5, H, D),
               "attention_output/kernel": (H, D, E)}
    torch = Model("torch", (layer("attention", shapes),))
    pairs = pair(torch, Model("tensorflow", (layer("attention", kernels),)))
    arrays = drawn(torch)
    there = carry(pairs, arrays, "keras")
    assert there["a.key/kernel"][3, 1, 2] == arrays["a.k_proj_weight"][D + 2, 3]
    assert all((carry(pairs, there, "torch")[n] == a).all() for n, a in arrays.items())


def test_a_linear_after_a_flatten_of_channels_first():
    """torch flattens x (N, C, H, W), Keras the same values as (N, H, W, C): the products must be the same."""
    C, rows, columns = 3, 2, 4
    torch = Model("torch", (layer("dense", {"weight": (5, C * rows * columns)}),))
    keras = Model("tensorflow", (layer("dense", {"kernel": (C * rows * columns, 5)}),))
    pairs = pair(torch, keras, flats={"a": (C, rows, columns)})
    arrays = drawn(torch)
    there = carry(pairs, arrays, "keras")
    x = np.random.default_rng(5).standard_normal((7, C, rows, columns)).astype(np.float32)
    np.testing.assert_allclose(x.transpose(0, 2, 3, 1).reshape(7, -1) @ there["a.kernel"],
                               x.reshape(7, -1) @ arrays["a.weight"].T, rtol=1e-5, atol=1e-5)
    assert (carry(pairs, there, "torch")["a.weight"] == arrays["a.weight"]).all()
    assert "flattened as (3, 2, 4)" in pairs.rows()[0][2]
    with pytest.raises(UserError, match="multiply to its 24 inputs"):
        pair(torch, keras, flats={"a": (3, 3, 3)})


def test_a_flatten_that_cannot_be_known_is_said():
    torch = Model("torch", (layer("conv 2d", {"weight": (8, 1, 3, 3)}, "conv"),
                            layer("dense", {"weight": (5, 32)}, "h")))
    keras = Model("tensorflow", (layer("conv 2d", {"kernel": (3, 3, 1, 8)}, "conv"),
                                 layer("dense", {"kernel": (32, 5)}, "h")))
    assert "--flatten h=8,2,2" in hints(pair(torch, keras))[0]
    assert not hints(pair(torch, keras, flats={"h": (8, 2, 2)}))


def test_layers_are_matched_by_name_then_by_order():
    kinds = ("dense", "layer norm", "dense")
    torch, keras = models(*kinds, names=["x", "n", "y"])
    crossed = Model("tensorflow", (keras.layers[2], keras.layers[1], keras.layers[0]))
    found = pair(torch, crossed)
    assert found.how == "by name" and [e.keras.name for e in found.ends] == ["x", "n", "y"]
    torch, keras = models(*kinds, names=["0", "1", "2"], keras_names=["dense_4", "layer_normalization", "dense_5"])
    found = pair(torch, keras)
    assert found.how == "by kind and order" and [e.keras.name for e in found.ends][2] == "dense_5"
    found = pair(torch, keras, said={"0": "dense_5"})
    assert [e.keras.name for e in found.ends] == ["dense_5", "layer_normalization", "dense_4"]
    assert any("--pair" in text for text in hints(found))
    # other orders, but some names are equal
    torch, keras = models(*kinds, names=["x", "n", "y"], keras_names=["x", "n", "z"])
    crossed = Model("tensorflow", (keras.layers[1], keras.layers[0], keras.layers[2]))
    assert [e.keras.name for e in pair(torch, crossed).ends] == ["x", "n", "z"]


def test_a_convolution_with_groups_may_be_depthwise_in_torch():
    torch = Model("torch", (layer("depthwise conv 2d", {"weight": (8, 1, 3, 3)}),))
    keras = Model("tensorflow", (layer("conv 2d", {"kernel": (3, 3, 1, 8)}),))
    arrays = drawn(torch)
    assert carry(pair(torch, keras), arrays, "keras")["a.kernel"][0, 2, 0, 7] == arrays["a.weight"][7, 0, 0, 2]


@pytest.mark.parametrize("change, words", [
    (lambda t, k: (t, Model(k.framework, k.layers[:1])), "layer norm b .* has no counterpart in the Keras model"),
    (lambda t, k: (Model(t.framework, t.layers[:1]), k), "layer norm b .* has no counterpart in the torch model"),
    (lambda t, k: (t, Model(k.framework, (k.layers[0], layer("group norm", SHAPES["layer norm"][1], "b")))),
     "layer norm and group norm"),
    (lambda t, k: (t, Model(k.framework, (k.layers[0], layer("group norm", SHAPES["layer norm"][1], "c")))),
     "no counterpart in the Keras model; expected a layer of the kind layer norm there, where group norm c are left"),
    (lambda t, k: (t, Model(k.framework, (layer("dense", {"kernel": (4, 5)}), k.layers[1]))),
     "bias has no counterpart"),
    (lambda t, k: (t, Model(k.framework, (layer(UNSUPPORTED + "of no use", {"kernel": (4, 5)}), k.layers[1]))),
     "is not converted: of no use"),
])
def test_models_that_are_no_twins(change, words):
    torch, keras = change(*models("dense", "layer norm", names=["a", "b"]))
    with pytest.raises(UserError, match=words):
        pair(torch, keras)


@pytest.mark.parametrize("kind, shapes, words", [
    ("dense", {"kernel": (5, 5), "bias": (5,)}, r"gives \(4, 5\); expected \(5, 5\)"),
    ("attention", {**SHAPES["attention"][1], "query/kernel": (E, 4, 2)}, r"do not match"),
    ("depthwise conv 2d", {"kernel": (3, 2, 3, 2)}, r"do not match"),
])
def test_the_first_pair_that_does_not_fit_is_named(kind, shapes, words):
    torch = models(kind)[0]
    keras = Model("tensorflow", (layer(kind, shapes, "layer_0", said="Theirs"),))
    with pytest.raises(UserError, match=f"layer_0.*and Theirs layer_0.*{words}"):
        carry(pair(torch, keras), drawn(torch), "keras")


def test_types_and_names_that_do_not_fit():
    torch, keras = models("dense")
    half = Model("tensorflow", (layer("dense", SHAPES["dense"][1], "layer_0", dtype="float16"),))
    with pytest.raises(UserError, match="of different types: float16, float32"):
        carry(pair(torch, half), drawn(torch), "keras")
    with pytest.raises(UserError, match="no layer 'layr_0'.*did you mean 'layer_0'"):
        pair(torch, keras, said={"layr_0": "layer_0"})


def test_moments_go_as_their_weights_do():
    torch, keras = models("batch norm", "attention")
    frozen = {role: Weight(w.name, w.shape, trainable=not role.startswith(("running", "moving")))
              for one in (torch, keras) for role, w in one.layers[0].weights.items()}
    torch = Model("torch", (Layer("layer_0", "batch norm", "B", {r: frozen[r] for r in torch.layers[0].weights}),
                            torch.layers[1]))
    keras = Model("tensorflow", (Layer("layer_0", "batch norm", "B", {r: frozen[r] for r in keras.layers[0].weights}),
                                 keras.layers[1]))
    pairs = pair(torch, keras)
    moments = {name: a for name, a in drawn(torch).items() if torch.weights()[name].trainable}
    there = carry_moments(pairs, moments, "keras")
    assert sorted(there) == sorted(name for name, w in keras.weights().items() if w.trainable)
    assert all((carry_moments(pairs, there, "torch")[name] == a).all() for name, a in moments.items())


def test_moments_that_cannot_go():
    torch, keras = models("lstm")
    with pytest.raises(UserError, match="two biases -> their sum"):
        carry_moments(pair(torch, keras), drawn(torch), "keras")
    half = Model("tensorflow", (layer("dense", SHAPES["dense"][1], "layer_0", trainable=False),))
    with pytest.raises(UserError, match="only some of its weights are trained"):
        carry_moments(pair(models("dense")[0], half), {}, "keras")


def test_settings_that_differ_are_told():
    torch = Layer("n", "layer norm", "LayerNorm", {}, {"epsilon": 1e-5})
    assert layers.remark(Ends(torch, Layer("n", "layer norm", "", {}, {"epsilon": 1e-3}))) == [
        "epsilon of n is 1e-05 in PyTorch and 0.001 in Keras"]
    assert not layers.remark(Ends(torch, torch))


def test_a_model_survives_json():
    import json

    for model in models("attention", "dense"):
        assert Model.from_dict(json.loads(json.dumps(model.to_dict()))) == model
