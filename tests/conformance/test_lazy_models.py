"""Models that their first data build, in both frameworks."""

from __future__ import annotations

import contextlib

import pytest
from first_sample_tools import Chunks, X, Y, alone, calling, need, same
from small_runs import CLASSES, FEATURES, config, fitted, lockstep, weights

from hvdtrain.core.errors import UserError

# --- a Keras model that is built by its data -------------------------------------------------------------------------

def named_inputs(keras):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(CLASSES)

        def call(self, x):
            return self.layer(x["a"] + x["b"])
    return Model()


def test_a_model_without_an_input_shape_is_built_from_the_data():
    keras = need("tensorflow")
    for model, data in ((calling("tensorflow", lambda self, x: self.layer(x), lazily=True), (X, Y)),
                        (keras.Sequential([keras.layers.Dense(CLASSES)]), Chunks())):
        run = fitted(alone(model, data))
        assert [v.shape for v in run.spec.model.weights] == [(FEATURES, CLASSES), (CLASSES,)]


def test_lazy_layers_of_pytorch_are_built_from_the_data():
    torch = need("torch")

    def model(rank=0):
        torch.manual_seed(rank)
        return torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(CLASSES))

    one, other = lockstep(2, config(global_batch=10, max_steps=1), model, (X, Y), weights)
    assert [a.shape for a in one] == [(8,), (8, FEATURES), (8,), (), (8,), (8,), (8,), (CLASSES,), (CLASSES, 8)]
    assert same(one, other)
    built = alone(model(), Chunks()).spec.model
    assert all(m.training for m in built.modules()) and int(built[1].num_batches_tracked) == 0


def test_a_model_of_named_inputs_is_built_from_the_data():
    from hvdtrain.data.layout import named

    keras = need("tensorflow")
    run = fitted(alone(named_inputs(keras), named(({"a": X, "b": X}, Y))))
    assert len(run.spec.model.weights) == 2


def test_ranks_build_alike_and_share_rank_0s_weights():
    keras = need("tensorflow")
    models = {rank: keras.Sequential([keras.layers.Dense(CLASSES)]) for rank in range(2)}
    one, other = lockstep(2, config(global_batch=10, max_steps=1), models.get, (X, Y), weights)
    assert len(one) == 2 and same(one, other)


def test_a_model_that_cannot_be_built_from_the_data_is_told_in_words():
    with contextlib.suppress(AttributeError), pytest.raises(UserError, match="does not take the data, x float32"):
        alone(calling("tensorflow", lambda self, x: self.layer(x[:, :, None, 0]) + x[:, :7], lazily=True), (X, Y))
