"""Computing in 16 bits with PyTorch: where autocast is on, and what stays float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_tools import SGD, TwoRanksInOne, attached, batch, close, cut, mlp, one_thread, run, tied, weights  # noqa: E402,F401

from hvdtrain.backends.torch.task import loss_sum  # noqa: E402
from hvdtrain.backends.torch.transforms.precision import widened  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.parallel.precision import Precision  # noqa: E402

PLAIN = replace(SGD, optimizer=Named("sgd"), loss_scale=1024.0)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Seen(nn.Module):
    """Passes on what it gets, and adds its type to ``types``; a trial would put back a list that it held."""

    def __init__(self, types):
        super().__init__()
        self.add = types.append

    def forward(self, x):
        self.add(x.dtype)
        return x


def made(own, model, config=PLAIN, wire=None, bucket_mb=0.0005, **parts):
    """Return a step whose only real rank computes in ``own``."""
    wire = wire or NullCollectives()
    return attached(model, config, wire, bucket_mb=bucket_mb, precision=Precision((own, "fp32")[:wire.size]), **parts)


@pytest.mark.parametrize("own", TYPES)
@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
def test_the_model_computes_narrow_and_the_gradient_is_float32_and_unscaled(own, wire):
    seen = []
    step = made(own, mlp(extra=[Seen(seen)]), wire=wire())
    exact = made("fp32", mlp(extra=[Seen([])]), wire=wire())
    for s in (step, exact):
        s.zero()
        for i, micro in enumerate(cut(batch(0), 20, 12)):
            loss, _ = s.forward_backward(micro, 1 / 32, i == 1)
            assert loss.dtype == torch.float32
        s.exchange()
    assert seen == [TYPES[own]] * 2 and not torch.is_autocast_enabled("cpu")
    for p, q in zip(step.model.parameters(), exact.model.parameters()):
        assert p.grad.dtype == p.dtype == torch.float32
        assert 0 < (p.grad - q.grad).abs().max() < 2e-2 * q.grad.abs().max()
    assert step.apply(0.0, False)[0]
    assert {a.dtype for a in step.state()[0]["model"].values()} == {np.dtype("float32")}


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
def test_a_bucket_with_unused_parameters_is_unscaled_once(wire):
    """It is full only when the step is over, and none of its gradients may keep the scale."""
    x = np.random.default_rng(0).integers(1, 7, (8, 4))  # no 0: parameter "sometimes" is not used either
    targets = np.roll(x, -1)

    def task(model, parts):
        return F.cross_entropy(model(parts[0]).flatten(0, 1).float(), parts[1].flatten(), reduction="sum"), 8

    step, exact = (made(own, tied(), wire=wire(), bucket_mb=1, task=task) for own in ("fp16", "fp32"))
    for s in (step, exact):
        assert run(s, [(x, targets)], 1 / 8)[0][0]
    close(weights(step), weights(exact), 5e-3)


def test_evaluation_and_trials_compute_in_the_same_type():
    seen = []
    step = made("bf16", mlp(extra=[Seen(seen)]))
    step.evaluate(batch(0))
    step.trial(batch(0))
    assert seen == [torch.bfloat16] * 2 and set(step.eval_totals()) == {"loss", "accuracy"}


def test_losses_that_autocast_refuses_are_taken_in_float32():
    class Probability(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 1)

        def forward(self, x):
            return torch.sigmoid(self.linear(x))

    torch.manual_seed(0)
    model = Probability()
    x, y = batch(0)
    loss = replace(PLAIN, loss=Named("binary_cross_entropy"), metrics=["accuracy"])
    step = made("fp16", model, loss)
    total, _ = step.forward_backward((x, (y[:, None] % 2).astype(np.float32)), 1 / 32, True)
    with torch.no_grad():
        want = F.binary_cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y[:, None] % 2).float())
    assert float(total) / 32 == pytest.approx(float(want), rel=1e-2) and total.dtype == torch.float32


def test_a_loss_by_name_is_outside_autocast_and_a_task_is_inside():
    seen = []

    def loss(outputs, targets):
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return outputs[:, 0]

    def task(model, parts):
        outputs = model(parts[0])
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        loss_sum(loss, widened(outputs), parts[1], (), Named())
        return outputs.float().sum(), len(outputs)

    assert run(made("fp16", mlp(), task=task), [batch(0)], 1 / 32)[0][0]
    assert seen == [(torch.float16, True), (torch.float32, False)]


def test_the_scale_comes_back_with_a_checkpoint():
    step, other = made("fp16", mlp()), made("fp16", mlp(start=4))
    step.scale.update([0])
    step.scale.update([])
    other.load(*step.state())
    assert other.scale.state() == step.scale.state() == {"loss_scale": [512.0, 1, 1]}
    made("bf16", mlp()).load(*step.state())  # without a scale of its own
    before = made("bf16", mlp()).state()
    other.load(*before)
    assert other.scale.value == 512


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_another_type_are_refused(dtype):
    with pytest.raises(UserError, match=f"precision bf16 with parameters of {str(dtype)[6:]}; expected float32"):
        made("bf16", mlp().to(dtype))
    made("fp32", mlp().to(dtype))
