"""PyTorch's parameters as flat buckets, and optimizers over parts of these in place of whole tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402
from torch_tools import SGD, attached, mlp, one_thread, tied  # noqa: E402,F401

from hvdtrain.config import Config, Named  # noqa: E402
from hvdtrain.core.buckets import plan_buckets  # noqa: E402

CUT = 131
"""Where the vector is cut, within a tensor and off every multiple of a processor's vectors."""


def parts_of(name="SGD", args=None, model=None):
    return attached(model or mlp(), Config(optimizer=Named(name, args or {}), lr=0.01)).parts


def after_20_steps(name, args):
    """(elementwise, parameters updated whole, parameters updated as two vectors) as flat arrays."""
    parts = parts_of(name, args)
    params, rng = parts.params, np.random.default_rng(1)
    (bucket,) = plan_buckets(params.specs, 16.0)
    flat_N = params.flat(bucket)
    vectors = [flat_N[:CUT].clone(), flat_N[CUT:].clone()]
    other = params.optimizer(vectors)
    for _ in range(20):
        grad_N = torch.from_numpy(rng.standard_normal(bucket.n).astype(np.float32))
        assert parts.optimizer.step([grad_N.clone()], [bucket], 0.0, False)[0]
        assert other.step([grad_N[:CUT].clone(), grad_N[CUT:].clone()], [], 0.0, False)[0]
    assert parts.optimizer.elementwise == other.elementwise
    return other.elementwise, params.flat(bucket).numpy(), torch.cat(vectors).numpy()


@pytest.mark.parametrize("name, args", [
    ("SGD", {"momentum": 0.9, "weight_decay": 1e-3, "fused": False}), ("Adam", {}), ("Adam", {"amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {}), ("Adagrad", {}), ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}), ("ASGD", {}), ("Rprop", {})])
def test_an_elementwise_update_of_vectors_has_the_bits_of_the_tensors(name, args):
    elementwise, whole_N, cut_N = after_20_steps(name, args)
    assert elementwise
    np.testing.assert_array_equal(cut_N, whole_N)


def test_fused_sgd_rounds_the_ends_of_a_tensor_otherwise_and_no_more():
    elementwise, whole_N, cut_N = after_20_steps("SGD", {"momentum": 0.9})
    assert elementwise
    np.testing.assert_allclose(cut_N, whole_N, rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_looks_at_whole_tensors_says_so():
    elementwise, whole_N, cut_N = after_20_steps("Adafactor", {})
    assert not elementwise and np.abs(cut_N - whole_N).max() > 1e-4


def test_a_bucket_is_read_and_written_back():
    params = parts_of().params
    before = [t.detach().clone() for t in params.tensors]
    buckets = plan_buckets(params.specs, 0.0005)
    flats = [params.flat(bucket) for bucket in buckets]
    assert len(buckets) > 1 and sum(map(len, flats)) == sum(t.numel() for t in before)
    for bucket, flat_N in zip(buckets, flats):
        params.write(bucket, 2 * flat_N)
    for tensor, was in zip(params.tensors, before):
        assert torch.equal(tensor, 2 * was) and tensor.requires_grad


def test_state_of_a_tensors_shape_is_told_by_slot():
    parts = parts_of("Adam")
    assert list(parts.optimizer.slots()) == []
    grads = [torch.ones_like(t) for t in parts.params.tensors]
    parts.optimizer.step(grads, [], 0.0, False)
    found = [(slot, i, tuple(x.shape)) for slot, i, x in parts.optimizer.slots()]
    assert found == [(slot, i, spec.shape) for i, spec in enumerate(parts.params.specs)
                     for slot in ("exp_avg", "exp_avg_sq")]


def test_parameters_know_their_blocks():
    def blocks(model):
        return [("table", model.table), ("rest", nn.ModuleList([model.middle, model.sometimes, model.never])),
                ("out", model.out)]

    model = tied()
    specs = attached(model, SGD, blocks=blocks).parts.params.specs
    assert {s.name: s.block for s in specs} == {
        "table.weight": 0, **{f"{name}.{kind}": 1 for name in ("middle", "sometimes", "never")
                              for kind in ("weight", "bias")}}, "a matrix of two blocks belongs to the first"
    assert {s.block for s in attached(tied()).parts.params.specs} == {0}
    split = plan_buckets(specs, 16.0, by_block=True)
    assert [{specs[i].block for i in bucket.params} for bucket in split] == [{1}, {0}]
