"""The call of a torch optimizer's step: without the profiler's range, unless somebody looks or hooks in."""

import functools

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdtrain.backends.torch import losses, task
from hvdtrain.backends.torch.schedules import update
from hvdtrain.config import Named


class Sgd(torch.optim.SGD):
    """A user's own class."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


def made(cls=torch.optim.SGD):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return weight, cls([weight], lr=0.5)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Sgd, torch.optim.AdamW])
def test_a_step_is_that_of_the_optimizer(cls):
    (own, optimizer), (other, reference) = made(cls), made(cls)
    update(optimizer)
    reference.step()
    assert torch.equal(own, other) and not torch.equal(own, torch.ones(3)) and torch.is_grad_enabled()
    assert getattr(optimizer, "calls", 1) == 1


def test_hooks_profilers_and_schedules_see_eachupdate():
    _, optimizer = made()
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook,
                     register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: seen.append(1))
        update(optimizer)
        handle.remove()
        update(optimizer)
    assert len(seen) == 4
    with torch.profiler.profile() as profiled:
        update(optimizer)
    assert any("SGD.step" in event.key for event in profiled.key_averages())
    StepLR(optimizer, 1)
    update(optimizer)
    assert optimizer._opt_called


def test_a_step_that_was_replaced_is_called(monkeypatch):
    seen, step = [], torch.optim.SGD.step

    @functools.wraps(step)
    def counted(*args):
        seen.append(1)
        return step(*args)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    update(made()[1])
    assert seen == [1]


@pytest.mark.parametrize("shape", [(8,), (4, 16), (4, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_few_labels_weigh_what_many_do(shape, dtype, monkeypatch):
    loss = losses.Loss(Named("cross_entropy", {"ignore_index": 3}))
    targets = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    few = float(loss.weight(targets))
    monkeypatch.setattr(losses, "FEW", 0)
    assert few == float(loss.weight(targets)) < shape[0]


@pytest.mark.parametrize(("outputs", "targets", "broadcasts"), [((8, 1), (8,), True), ((8,), (8, 1), True),
                         ((8, 2), (8, 2), False), ((8, 10), (8,), False), ((8, 10), (8, 1), False)])
def test_a_loss_whose_shapes_were_spread_is_found(outputs, targets, broadcasts):
    of = torch.broadcast_shapes(outputs, targets) if broadcasts else outputs[:1]
    assert task._broadcast(torch.zeros(of), torch.zeros(outputs), torch.zeros(targets)) is broadcasts
