"""PyTorch's BatchNorm layers over the samples of all ranks, compared with one layer over the joined batch."""

import copy
import gc
import io
import weakref
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from small_runs import config, fitted, lockstep, samples  # noqa: E402
from small_runs import weights as arrays  # noqa: E402
from sync_models import with_norms  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_tools import attached, batch, close, mlp, one_thread, run, weights  # noqa: E402, F401

from hvdtrain.backends.torch import Ops  # noqa: E402
from hvdtrain.backends.torch.transforms.sync_batchnorm import SyncBatchNorm, release  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.comm.reducer.transport import Transport  # noqa: E402
from hvdtrain.config import Config, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

CUTS = [[9], [4, 5], [0, 9], [1, 8], [5, 0, 4], [0, 0, 9], [3, 1, 4, 1]]
"""Samples by rank, 9 in all: one rank, unequal ones, and ranks with nothing."""
LAYERS = [(lambda: nn.BatchNorm1d(3), (3,)), (lambda: nn.BatchNorm1d(3, affine=False), (3, 4)),
          (lambda: nn.BatchNorm2d(3, momentum=None, eps=1e-3), (3, 2, 5)),
          (lambda: nn.BatchNorm3d(3, track_running_stats=False), (3, 2, 2, 2)), (lambda: nn.BatchNorm2d(3), (3, 1, 1))]
SYNC = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1, sync_batchnorm=True)


def synchronised(model, wire):
    """Return the transform, installed."""
    made = SyncBatchNorm(model, Transport(wire, Ops()), in_parts=False)
    made.install(model)
    return made


def drawn(make, shape, n=9):
    """Return a layer whose parameters are not their first ones, n samples, and an outer gradient."""
    torch.manual_seed(1)
    layer = make()
    for param in layer.parameters():
        nn.init.uniform_(param, 0.5, 1.5)
    return layer, torch.randn(n, *shape) * 3 + 100, torch.randn(n, *shape)


def passed(layer, x, outer, times=2):
    """(output, gradient of x) of the last of ``times`` passes; the layer keeps gradients and statistics."""
    for _ in range(times):
        layer.zero_grad()
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(outer)
    return y.detach(), own.grad


def near(got, want, rtol=2e-5):
    got, want = (np.asarray(t.detach(), np.float64) for t in (got, want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * np.abs(want).max(initial=0.0))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("make, shape", LAYERS, ids=["1d", "1d plain", "2d average", "3d untracked", "2d pixels"])
def test_a_cut_batch_is_normalised_as_the_joined_one(make, shape, cut):
    """Values, gradients and running statistics in closed form: torch's own layer over the whole batch, in float64."""
    layer, x, outer = drawn(make, shape)
    whole = copy.deepcopy(layer).double()
    y, dx = passed(whole, x.double(), outer.double())
    layers = [copy.deepcopy(layer) for _ in cut]
    ends = np.cumsum([0, *cut])

    def rank(control, wire):
        own, part = layers[control.rank], slice(ends[control.rank], ends[control.rank + 1])
        synchronised(own, wire)
        return passed(own, x[part], outer[part])

    rows = LockstepWorld(len(cut)).run(rank)
    near(torch.cat([row[0] for row in rows]), y)
    near(torch.cat([row[1] for row in rows]), dx, rtol=2e-4)  # of differences of numbers that are large beside them
    for i, param in enumerate(whole.parameters()):
        near(sum(list(own.parameters())[i].grad for own in layers), param.grad, rtol=1e-4)
    for own in layers:
        assert own.state_dict().keys() == whole.state_dict().keys()
        for name, buffer in own.named_buffers():
            near(buffer, whole.get_buffer(name))
            assert torch.equal(buffer, layers[0].get_buffer(name))  # the same bits on every rank


def test_channels_last_and_half_precision_keep_their_kind():
    layer, x, outer = drawn(lambda: nn.BatchNorm2d(3), (3, 4, 4), 8)
    y, dx = passed(copy.deepcopy(layer), x - 100, outer)
    layers = [copy.deepcopy(layer) for _ in range(2)]

    def rank(control, wire):
        part = slice(4 * control.rank, 4 * control.rank + 4)
        synchronised(layers[control.rank], wire)
        own = (x[part] - 100).to(torch.bfloat16, memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            return passed(layers[control.rank], own, outer[part].bfloat16())

    rows = LockstepWorld(2).run(rank)
    for got, want in zip(zip(*rows), (y, dx)):
        assert all(g.dtype == torch.bfloat16 and g.is_contiguous(memory_format=torch.channels_last) for g in got)
        near(torch.cat(got).float(), want, rtol=2e-2)
    assert layers[0].weight.grad.dtype == torch.float32


def test_ranks_with_other_loss_scales_share_the_gradient_of_the_loss():
    layer, x, outer = drawn(lambda: nn.BatchNorm1d(3), (3,))
    _, dx = passed(copy.deepcopy(layer), x, outer)
    layers = [copy.deepcopy(layer) for _ in range(2)]

    def rank(control, wire):
        part, factor = (slice(0, 4), 1.0) if control.rank == 0 else (slice(4, 9), 1024.0)
        across = synchronised(layers[control.rank], wire)
        across.begin(factor, True)
        return passed(layers[control.rank], x[part], outer[part] * factor)[1] / factor

    near(torch.cat(LockstepWorld(2).run(rank)), dx, rtol=2e-4)


def test_evaluation_and_trials_need_no_other_rank():
    """On a transport whose other rank never comes: torch's own results."""
    layer, x, outer = drawn(lambda: nn.BatchNorm1d(3), (3,))
    plain = copy.deepcopy(layer)

    def rank(control, wire):
        if control.rank:
            return None
        with synchronised(layer, wire).local_statistics():
            trained = passed(layer, x, outer, 1)
        layer.eval()
        return trained, layer(x).detach()

    (trained, evaluated), _ = LockstepWorld(2).run(rank, timeout_s=5.0)
    want = passed(plain, x, outer, 1)
    assert all(torch.equal(a, b) for a, b in zip(trained, want))
    assert torch.equal(evaluated, plain.eval()(x).detach())


def test_copies_pickles_and_released_models_are_torchs_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.SyncBatchNorm(3)))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    synchronised(model, NullCollectives(0, 2))
    assert type(model[1]) is not nn.BatchNorm1d and isinstance(model[1], nn.BatchNorm1d)
    assert type(model[2][0]) is not nn.SyncBatchNorm
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    for other in (copy.deepcopy(model), torch.load(held, weights_only=False)):
        assert type(other[1]) is nn.BatchNorm1d and type(other[2][0]) is nn.SyncBatchNorm
        assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())
    release(model)
    assert type(model[1]) is nn.BatchNorm1d and type(model[2][0]) is nn.SyncBatchNorm
    synchronised(model, NullCollectives())  # one rank: nothing is replaced
    assert type(model[1]) is nn.BatchNorm1d


class Fused(nn.BatchNorm1d):
    def forward(self, x):
        return torch.relu(super().forward(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_cannot_be_synchronised_is_named():
    model = nn.Sequential(nn.BatchNorm1d(3), Fused(3))
    with pytest.raises(UserError, match=r"Fused '1', which overrides forward"):
        synchronised(model, NullCollectives(0, 2))
    assert type(model[0]) is nn.BatchNorm1d  # all or none
    layer = nn.Sequential(nn.BatchNorm1d(3))

    def rank(control, wire):
        own = copy.deepcopy(layer)
        synchronised(own, wire)
        return own(torch.ones(control.rank, 3))

    with pytest.raises(UserError, match=r"BatchNorm '0' with 1 value per channel over all ranks"):
        LockstepWorld(2).run(rank)
    example = torch.ones(4, 3)
    for compiled in (torch.jit.script(layer), torch.jit.trace(layer, example),
                     nn.Sequential(torch.jit.script(layer[0]))):
        with pytest.raises(UserError, match=r"a scripted BatchNorm1d '0', which cannot be changed"):
            synchronised(compiled, NullCollectives(0, 2))


def test_what_a_rank_without_samples_computes_spreads_to_no_other():
    """Its placeholder, here of what is no number, counts for nothing: neither 0 nor 0 times NaN."""
    layer, x, outer = drawn(lambda: nn.BatchNorm1d(3), (3,))
    y, dx = passed(copy.deepcopy(layer), x, outer, 1)
    layers = [copy.deepcopy(layer) for _ in range(2)]

    def rank(control, wire):
        across, absent = synchronised(layers[control.rank], wire), control.rank == 1
        across.begin(1.0, not absent)
        own = x[:1] * torch.nan if absent else x
        return passed(layers[control.rank], own, outer[:len(own)] * (0.0 if absent else 1.0), 1)

    (got_y, got_dx), (_, none) = LockstepWorld(2).run(rank)
    near(got_y, y)
    near(got_dx, dx, rtol=2e-4)
    assert torch.equal(none, torch.zeros(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(layers[0].buffers(), layers[1].buffers()))


class Direction(nn.Module):
    """No number for a sample of zeros."""

    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


def test_the_first_stand_in_is_a_sample(tmp_path):
    """A rank that never had a sample of its own does not put zeros through the model."""
    def model(rank):
        torch.manual_seed(0)
        return nn.Sequential(Direction(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    settings = config(global_batch=16, max_steps=3, sync_batchnorm=True, shares=[1, 0], out=str(tmp_path))
    for made in lockstep(2, settings, model, samples(64), fitted):
        assert np.isfinite(made.state.loss) and all(np.isfinite(array).all() for array in arrays(made))


# --- after a run -----------------------------------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_run_the_model_waits_for_no_rank_and_holds_nothing_of_it(tmp_path):
    """Forward and backward on rank 0 alone, which would else wait until the world's timeout; torch.jit takes it."""
    models, steps = [with_norms("torch") for _ in range(2)], []

    def rank(run):
        fitted(run)
        steps.append(weakref.ref(run.parts.stage))
        if run.control.rank == 0:
            models[0].train()(torch.randn(8, 12)).sum().backward()

    lockstep(2, config(global_batch=16, max_steps=2, sync_batchnorm=True, out=str(tmp_path)), models.__getitem__,
             samples(64), rank)
    assert [type(m) for m in models[1].modules()] == [type(m) for m in with_norms("torch").modules()]
    torch.jit.script(models[0])
    gc.collect()
    assert [step() for step in steps] == [None, None]


def test_a_model_that_was_given_back_is_synchronised_again():
    single = attached(mlp(extra=[nn.BatchNorm1d(16)]), SYNC)
    for t in range(3):
        run(single, [batch(t, 16)], 1 / 16)
    models = [mlp(extra=[nn.BatchNorm1d(16)]) for _ in range(2)]

    def rank(control, wire):
        step = attached(models[control.rank], SYNC, wire)
        for t in range(3):
            step.join()
            step.join()
            part = slice(0, 5) if control.rank == 0 else slice(5, 16)
            run(step, [tuple(a[part] for a in batch(t, 16))], 1 / 16)
            step.evaluate(batch(t, 4))
            step.leave()
            step.leave()
            if control.rank == 0:
                kept = copy.deepcopy(step.model.state_dict())
                step.model(torch.from_numpy(batch(9)[0])).sum().backward()
                step.model.load_state_dict(kept)
        return weights(step)

    for got in LockstepWorld(2).run(rank):
        close(got, weights(single), 1e-5)


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


@pytest.mark.parametrize("seen", [0, 4], ids=["from the start", "later"])
def test_a_rank_without_samples_adds_nothing(seen):
    """Its model runs on a placeholder, which neither gradients nor statistics notice; no task meets an empty batch."""
    def task(model, batch):
        assert len(batch[0]) > 0
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") + 3.0, len(batch[0])

    single = attached(mlp(extra=[nn.BatchNorm1d(16), View()]), SYNC, task=task)
    steps = [None, None]
    # Not made by the ranks: threads share torch's generator.
    models = [mlp(extra=[nn.BatchNorm1d(16), View()]) for _ in steps]

    def rank(control, wire):
        step = steps[control.rank] = attached(models[control.rank], SYNC, wire, task=task)
        own = [batch(0, 16), batch(1, 16)]
        parts = [(own[0][0][:16 - seen], own[0][1][:16 - seen]), own[1]] if control.rank == 0 else [
            tuple(a[16 - seen:] for a in own[0]), tuple(a[:0] for a in own[1])]
        return [run(step, [part], 1 / 16)[1] for part in parts]

    rows = LockstepWorld(2).run(rank)
    for t in range(2):
        run(single, [batch(t, 16)], 1 / 16)
    assert rows[1][1] == [(0.0, 0.0)]
    assert all(torch.equal(a, b) for a, b in zip(steps[0].model.state_dict().values(),
                                                 steps[1].model.state_dict().values()))
    close(weights(steps[0]), weights(single), 1e-5)


def two():
    """Return a transport of two ranks in which nothing is exchanged."""
    return NullCollectives(0, 2)


def test_caveats():
    def words(norm, **changes):
        step = attached(mlp(extra=[norm]), replace(SYNC, **changes), two())
        return " ".join(step.caveats())

    assert words(nn.BatchNorm1d(16)) == ""
    assert "each micro-batch" in words(nn.BatchNorm1d(16), accumulate=2)
    assert "each micro-batch" in words(nn.BatchNorm1d(16), balance="auto")
    for norm in (nn.BatchNorm1d(16), nn.SyncBatchNorm(16)):  # torch's own is not: there is no torch.distributed
        assert "own samples, without sync_batchnorm: true" in words(norm, sync_batchnorm=False)
    assert words(nn.LayerNorm(16), accumulate=2) == ""


@pytest.mark.parametrize("shares, n, sync", [([0, 1], 8, False), ([1, 1], 2, True)], ids=["no sample", "one sample"])
def test_ranks_with_hardly_a_sample_measure_what_a_step_takes(shares, n, sync):
    changes = {"max_steps": 2, "global_batch": n, "shares": shares, "sync_batchnorm": sync}

    def trained(**more):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)) for _ in shares]
        return [arrays(run) for run in lockstep(2, config(**changes, **more), models.__getitem__, samples(24), fitted)]

    for own, plain in zip(trained(micro_batch="auto", remat="auto"), trained()):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(own, plain))
