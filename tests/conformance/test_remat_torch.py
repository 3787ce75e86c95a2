"""Recomputed blocks of PyTorch models: the bits of training with and without, for each kind of layer."""

from __future__ import annotations

import copy
import io
import random

import numpy as np
import pytest
from one_step import OneStep, TwoRanksInOne, batch

torch = pytest.importorskip("torch", reason="needs PyTorch")

from remat_layers import EXACT, REFUSED, WIDTH  # noqa: E402
from torch import nn  # noqa: E402
from torch_tools import one_thread  # noqa: E402, F401

from hvdtrain.backends.torch import memory  # noqa: E402
from hvdtrain.parallel.precision import Precision  # noqa: E402
from torch_models import gpt  # noqa: E402


def some(n):
    return tuple(array[:n] for array in batch(0))


def model(make):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, WIDTH), make(), nn.Linear(WIDTH, 5))


def outcome(made, names=(), steps=2, micros=2, clip=0.0, **more):
    """Weights, buffers, losses and random states after some steps, and the reasons why blocks are refused."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    step = OneStep("torch", made, sample=some, **more)
    remat = step.parts.remat
    why = {name: remat.refusal(name) for name in remat.names} if names else {}
    remat.choose(names)
    pairs = []
    for t in range(steps):
        x, y = batch(t)
        cut = len(x) // micros
        cuts = [slice(i * cut, (i + 1) * cut) for i in range(micros)]
        pairs.append(step.run([(x[one], y[one]) for one in cuts], 1 / 32, clip))
    states = {name: array.tobytes() for name, array in step.parts.stage.generators.state().items()}
    step.leave()
    assert not any("forward" in vars(m) for m in made.modules())
    return why, ({n: t.detach().numpy().tobytes() for n, t in made.state_dict().items()}, pairs, states)


@pytest.mark.parametrize("kind", EXACT)
def test_recomputed_blocks_train_to_the_same_bits(kind):
    _, plain = outcome(model(EXACT[kind]))
    why, again = outcome(model(EXACT[kind]), "012")
    assert not any(why.values()) and again == plain


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_computed_again_is_refused_by_name(kind):
    make, words = REFUSED[kind]
    made = model(make)
    before = {n: t.clone() for n, t in made.state_dict().items()}
    step = OneStep("torch", made, sample=some)
    why = {name: step.parts.remat.refusal(name) for name in "012"}
    assert words in why["1"] and not why["0"] and not why["2"]
    assert all(torch.equal(t, before[n]) for n, t in made.state_dict().items()) and made[0].weight.grad is None


def test_a_block_that_is_never_called_is_refused():
    made = model(nn.Tanh)
    spare = nn.Linear(3, 3)
    step = OneStep("torch", made, sample=some, blocks=lambda m: [("first", m[0]), ("spare", spare)])
    assert "not called" in step.parts.remat.refusal("spare") and not step.parts.remat.refusal("first")


class Tree(nn.Module):
    """A module of three inputs and two outputs, called twice, with a list that it fills."""

    class Inner(nn.Module):

        def __init__(self):
            super().__init__()
            self.line, self.drop = nn.Linear(12, 12), nn.Dropout(0.3)

        def forward(self, x, others, *, kept, scale, flag=None):
            kept.append(len(kept))
            out = torch.tanh(self.line(x["x"]) * scale + others[0])
            return {"y": self.drop(out), "n": len(kept)}, [out.detach()]

    def __init__(self):
        super().__init__()
        self.inner, self.out = self.Inner(), nn.Linear(12, 5)

    def forward(self, x):
        kept = [1]
        one, rest = self.inner({"x": x}, (x, None), kept=kept, scale=2.0, flag="a")
        two, _ = self.inner({"x": one["y"]}, tuple(rest), kept=kept, scale=0.5)
        return self.out(two["y"]) * len(kept) + two["n"]


@pytest.mark.parametrize("more", [
    {}, {"clip": 0.1}, {"micros": 1}, {"wire": TwoRanksInOne()},
    {"precision": Precision(("bf16",), 0)}, {"precision": Precision(("fp16",), 0)}], ids=str)
def test_trees_of_inputs_and_blocks_that_are_called_twice(more):
    def made():
        torch.manual_seed(3)
        return Tree()

    named = {"blocks": lambda m: [("inner", m.inner), ("out", m.out)], **more}
    assert outcome(made(), ["inner", "out"], **named)[1] == outcome(made(), **named)[1]


def test_evaluation_keeps_everything_and_copies_are_plain():
    made = model(lambda: nn.Dropout(0.5))
    step = OneStep("torch", made, sample=some)
    step.parts.remat.choose("01")
    x = torch.from_numpy(batch(0)[0])
    with torch.no_grad():
        assert made.eval()(x).grad_fn is None
    double = copy.deepcopy(made)
    assert double[0].forward.__self__ is double[0]
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (double, loaded):
        assert torch.equal(other(x), made(x)) and other.state_dict().keys() == made.state_dict().keys()
    step.leave()
    assert "forward" not in vars(made[0])


def test_memory_that_runs_out_while_a_block_is_computed_again_leaves_all_as_it_was():
    full = []

    class Fails(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            out = torch.tanh(super().forward(x)) * torch.rand(())
            if full:
                raise MemoryError("for the test")
            return torch.tanh(out)

    made = model(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Fails(WIDTH, WIDTH)))
    step = OneStep("torch", made)
    step.parts.remat.choose("1")
    step.zero()
    loss, _ = step.parts.stage.loss_of(batch(0))
    state, means = torch.get_rng_state(), made[1][0].running_mean.clone()
    full.append(True)
    with pytest.raises(MemoryError, match="for the test"):
        loss.backward()
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(means, made[1][0].running_mean)
    assert made[1][1].calls == 1 and int(made[1][0].num_batches_tracked) == 1


def test_costs_are_what_the_memory_of_a_pass_falls_by():
    torch.manual_seed(0)
    step = OneStep("torch", gpt.build(depth=4, width=32, dropout=0.1), task=gpt.task, weight=gpt.weight,
                   blocks=gpt.blocks, sample=gpt.example)
    remat, given = step.parts.remat, gpt.example(4)

    def peak():
        return int(memory.traced(step.parts, given).live_E.max())

    found = {cost.name: cost for cost in remat.costs(given)}
    assert list(found) == remat.names and all(cost.forward_s > 0 for cost in found.values())
    before = peak()
    for names in (["block_0"], ["block_0", "block_1", "block_2"], remat.names):
        remat.choose(names)
        saved = sum(found[name].saved_bytes for name in names)
        # Where the last block is recomputed too, its own memory is there when backward begins.
        inner = found["block_3"].inner_bytes if "block_3" in names else 0
        assert before - peak() == pytest.approx(saved - inner, rel=0.05)
    assert peak() < 0.5 * before
