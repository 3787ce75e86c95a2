"""The key freeze with PyTorch: plain PyTorch's training at any number of ranks, through checkpoints, and its errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import apart, fitted, lockstep, solo  # noqa: E402
from torch import nn  # noqa: E402
from unfreezing import BASE, BATCH, EPOCHS, N, arrays, data  # noqa: E402

from hvdtrain.backends.torch.freezing import TorchFreezing  # noqa: E402
from hvdtrain.config import CheckpointConfig, DataParallelConfig, EarlyStopConfig, Named, PipelineConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine.loop import measure  # noqa: E402

UNFREEZE = {"body": 2, "middle": 1}
WAYS = {"accumulate": {"accumulate": 2}, "zero": {"data_parallel": DataParallelConfig("zero", 2)}, "ema": {"ema": 0.5}}


class Body(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())


def model() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential()
    for name, part in (("body", Body()), ("middle", nn.Linear(8, 8)), ("act", nn.Tanh()), ("head", nn.Linear(8, 1))):
        net.add_module(name, part)
    net.body[1].running_mean += 0.3
    return net


def plain():
    """Freeze the body with its BatchNorm for good, the middle for one epoch."""
    net, (x, y) = frozen(), map(torch.from_numpy, data())
    net.middle.requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), 0.05, weight_decay=0.1)
    for t in range(EPOCHS * N // BATCH):
        net.middle.requires_grad_(t >= N // BATCH)
        b = t * BATCH % N
        opt.zero_grad()
        nn.functional.mse_loss(net(x[b:b + BATCH]), y[b:b + BATCH]).backward()
        opt.step()
    return arrays(net)


def frozen() -> nn.Module:
    """Return the model whose user has frozen the body."""
    net = model()
    net.body.requires_grad_(False)
    net.body[1].eval()
    return net


@pytest.mark.parametrize("made, freeze", [(model, {"body": 99, "mid*": 1}), (frozen, {"middle": 1})])
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_frozen_layers_and_statistics_do_not_move(tmp_path, ranks, made, freeze):
    """By the key or the user: the training of plain PyTorch, with BatchNorm in evaluation mode."""
    setting = replace(BASE, out=str(tmp_path), freeze=freeze)
    before = [t.detach().numpy().copy() for t in model().body.state_dict().values()]
    for run in lockstep(ranks, setting, lambda rank: made(), data(), fitted):
        after = [t.detach().numpy() for t in run.spec.model.body.state_dict().values()]
        assert all(map(np.array_equal, before, after))
        assert apart(arrays(run.spec.model), plain()) < 1e-5
        said = "step 4: 2 unfrozen parameters (middle.weight, middle.bias) join"
        assert any(note.startswith(said) for note in run.notes)
        assert not any("BatchNorm" in note for note in run.notes)


def grouped(rank=0):
    """Return the model with a normalisation that does not depend on the ranks."""
    made = model()
    made.body[1] = nn.GroupNorm(2, 8)
    return made


@pytest.mark.parametrize("stop, way", [(4, "accumulate"), (10, "zero"), (10, "ema")])
def test_a_resumed_run_unfreezes_as_one_that_never_stopped(tmp_path, stop, way):
    """Stopped at the end of an epoch, and in the middle of one, after the body joined; then on more ranks."""
    setting = replace(BASE, freeze=UNFREEZE, checkpoint=CheckpointConfig(at_end=True), **WAYS[way])

    want = arrays(fitted(solo(replace(setting, out=str(tmp_path / "whole")), grouped(), data())).spec.model)
    cut = replace(setting, max_steps=stop, out=str(tmp_path / "cut"))
    lockstep(2, cut, grouped, data(), fitted)
    again = replace(setting, resume=cut.out, out=str(tmp_path / "on"))
    for run in lockstep(3, again, grouped, data(), fitted):
        assert apart(arrays(run.spec.model), want) < 1e-5


@pytest.mark.parametrize("args", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}])
def test_momentum_begins_with_the_first_gradient(tmp_path, args):
    """Of SGD's fused kernel, which fails for some tensors with and some without momentum."""
    found = []
    for more in ({}, {"fused": False}):
        setting = replace(BASE, freeze={"body": 1}, max_steps=7, lr=0.01, optimizer=Named("SGD", {**args, **more}),
                          out=str(tmp_path / str(more)))
        found.append(arrays(fitted(solo(setting, grouped(), data())).spec.model))
    assert apart(*found) < 1e-5


def test_an_average_of_weights_that_were_frozen_starts_from_them(tmp_path):
    """For the best weights, which are of an epoch before the body joined, and for a run that is resumed unfrozen."""
    asked = replace(BASE, freeze={"body": 2}, ema=0.5, eval_every=1, checkpoint=CheckpointConfig(at_end=True),
                    early_stop=EarlyStopConfig("loss", mode="max", patience=3), out=str(tmp_path / "best"))
    runs = lockstep(2, asked, grouped, (data(), data()),
                    lambda run: (fitted(run), measure(run, run.eval_feeds[""])["loss"]))
    for run, loss in runs:
        assert any("weights of step 4, the best" in note for note in run.notes)
        assert all(map(torch.equal, run.spec.model.body.parameters(), grouped().body.parameters()))
        assert loss == pytest.approx(run.state.metrics["loss"], rel=1e-6)
    cut = replace(BASE, freeze=["body"], ema=0.5, max_steps=4, out=str(tmp_path / "cut"), checkpoint=asked.checkpoint)
    fitted(solo(cut, grouped(), data()))
    run = solo(replace(cut, freeze=[], resume=cut.out, out=str(tmp_path / "on")), grouped(), data())
    own = grouped().body
    kept = {name: array for name, array in run.average.arrays() if name.startswith("body.")}
    assert len(kept) == 4 and all(np.array_equal(array, own.state_dict()[name.removeprefix("body.")].numpy())
                                  for name, array in kept.items())


def test_stages_of_a_pipeline_keep_frozen_layers(tmp_path):
    def chain(rank=0):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    setting = replace(BASE, freeze=["0", "2.bias"], max_steps=6)
    want = fitted(solo(replace(setting, out=str(tmp_path / "1")), chain(), data())).spec.model.state_dict()
    cut = replace(setting, pipeline=PipelineConfig(2), out=str(tmp_path / "2"))
    for run in lockstep(2, cut, chain, data(), fitted):
        got = run.parts.state.state()[0]["model"]
        assert apart(list(got.values()), [want[name].numpy() for name in got]) < 1e-5
    with pytest.raises(UserError, match="freeze with epochs and a pipeline"):
        replace(setting, freeze={"0": 1}, pipeline=PipelineConfig(2)).check()


def test_a_shared_parameter_is_frozen_by_any_of_its_names():
    net = model()
    net.head = nn.Linear(8, 8)
    net.head.weight = net.middle.weight
    TorchFreezing(net, ["head.weight"])
    assert not net.middle.weight.requires_grad and net.head.bias.requires_grad and net.body[1].training


def test_unfrozen_batchnorm_takes_statistics_again(tmp_path):
    run = fitted(solo(replace(BASE, freeze=UNFREEZE, out=str(tmp_path)), model(), data()))
    assert run.spec.model.body[1].training and int(run.spec.model.body[1].num_batches_tracked) == 8


@pytest.mark.parametrize("freeze, said", [
    (["bodi"], "'bodi', which matches no parameter.*mean 'body'"), (["*"], "nothing to train"),
    ({"*": 1}, "nothing to train at the start")])
def test_patterns_that_make_no_sense_are_refused(tmp_path, freeze, said):
    with pytest.raises(UserError, match=said):
        solo(replace(BASE, freeze=freeze, out=str(tmp_path)), model(), data())
