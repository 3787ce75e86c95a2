"""Ranks that build unlike models are told so before anything is exchanged, over every wire."""

from __future__ import annotations

import pytest
from small_runs import FEATURES, FRAMEWORKS, config, samples

from hvdtrain.cluster import horovod
from hvdtrain.core.errors import UserError
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


def torch_model(width=8, swapped=False, buffer=0):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            first, second = torch.nn.Linear(FEATURES, width), torch.nn.Linear(width, 5)
            for name, layer in [("b", second), ("a", first)] if swapped else [("a", first), ("b", second)]:
                setattr(self, name, layer)
            if buffer:
                self.register_buffer("seen", torch.zeros(buffer), persistent=False)

        def forward(self, x):
            return self.b(self.a(x))

    return Model()


def keras_model(width=8, swapped=False, buffer=0):
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    layers = [keras.layers.Dense(width, name="a"), *([keras.layers.BatchNormalization(name="n")] if buffer else [])]
    layers += [keras.layers.Dense(5, name="b")]
    return keras.Sequential([keras.Input((FEATURES,)), *(reversed(layers) if swapped else layers)])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("other, words", [({"width": 9}, r"a.* float32\[.*9.*\]"), ({"swapped": True}, "b"),
                                          ({"buffer": 3}, "seen|n/gamma")])
def test_the_first_difference_and_its_rank_are_named(control, framework, other, words, tmp_path):
    last = control.size - 1
    build = torch_model if framework == "torch" else keras_model
    wires = ["mpi"] + (["horovod"] if not horovod.horovod_reason(framework) else [])
    for wire in wires:
        model = build(**(other if control.rank == last else {}))
        with pytest.raises(UserError, match=f"the ranks' models differ: rank {last} has .*({words}).* where rank"):
            assemble(config(collectives=wire, global_batch=12), model, samples(24))
