"""Parameters without a gradient are left as they are, as plain PyTorch leaves them, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import apart, config, fitted, lockstep, solo  # noqa: E402
from torch import nn  # noqa: E402

from hvdtrain.config import DataConfig, DataParallelConfig, ExchangeConfig, Named, PipelineConfig  # noqa: E402

N, BATCH = 96, 16


class Conditional(nn.Module):
    """Has a layer that only marked samples use, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.used, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        mark = (x[:, 7] > 5).to(x.dtype)[:, None]
        return self.used(x) + mark * self.sometimes(x) if bool(mark.any()) else self.used(x)


def model() -> nn.Module:
    torch.manual_seed(3)
    return Conditional()


def data() -> tuple[np.ndarray, np.ndarray]:
    """Batches 0 and 2 of 16 have marked samples: of batch 0 the first four, which are one rank's."""
    g = np.random.default_rng(0)
    x, y = g.normal(size=(N, 8)).astype(np.float32), g.normal(size=(N, 1)).astype(np.float32)
    x[:, 7] = 0
    x[:4, 7] = x[40, 7] = 10
    return x, y


def plain(optimizer, epochs: int = 2, clip: float = 0.0, zeros: bool = False) -> list[np.ndarray]:
    """Return the weights after plain PyTorch's loop; with ``zeros`` a missing gradient is one of zeros."""
    net, (x, y) = model(), map(torch.from_numpy, data())
    opt = optimizer(net.parameters())
    for _ in range(epochs):
        for b in range(0, N, BATCH):
            opt.zero_grad()
            nn.functional.mse_loss(net(x[b:b + BATCH]), y[b:b + BATCH]).backward()
            for p in net.parameters():
                if zeros and p.grad is None:
                    p.grad = torch.zeros_like(p)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
    return [t.detach().numpy() for _, t in sorted(net.state_dict().items())]


ADAMW = Named("AdamW", {"weight_decay": 0.1})
BASE = config(epochs=2, global_batch=BATCH, lr=0.05, optimizer=ADAMW, metrics=[],
              data=DataConfig(shuffle=False, prefetch=0),
              exchange=ExchangeConfig(bucket_mb=0.00002))
WAYS = {
    "adamw": {}, "accumulate": {"accumulate": 3}, "uneven": {"shares": [3, 1]}, "without samples": {"shares": [0, 1]},
    "clip": {"clip_norm": 0.5}, "zero 1": {"data_parallel": DataParallelConfig("zero", 1)},
    "zero 2": {"data_parallel": DataParallelConfig("zero", 2)},
    "momentum": {"optimizer": Named("SGD", {"momentum": 0.9})},
    "zero 2, accumulate": {"data_parallel": DataParallelConfig("zero", 2), "accumulate": 2},
}


def arrays(run) -> list[np.ndarray]:
    return [t.detach().numpy().copy() for _, t in sorted(run.spec.model.state_dict().items())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_as_plain_pytorch(tmp_path, ranks, way):
    changes = dict(WAYS[way])
    if ranks != 2 and "shares" in changes:
        changes["shares"] = {1: [1], 3: [2, 0, 1]}[ranks]
    setting = config(**{**vars(BASE), "out": str(tmp_path), **changes})
    sgd = setting.optimizer.name == "SGD"

    def make(params):
        return torch.optim.SGD(params, 0.05, 0.9) if sgd else torch.optim.AdamW(params, 0.05, weight_decay=0.1)

    want, wrong = plain(make, clip=setting.clip_norm), plain(make, clip=setting.clip_norm, zeros=True)
    assert apart(wrong, want) > 1e-3, "zeros in place of no gradient are seen"

    def work(run):
        fitted(run)
        slots = {run.parts.params.names[i] for _, i, _ in run.parts.optimizer.slots()}
        return arrays(run), list(run.notes), slots

    found = [work(solo(setting, model(), data()))] if ranks == 1 else lockstep(
        ranks, setting, lambda rank: model(), data(), work)
    for got, notes, slots in found:
        assert apart(got, want) < 1e-5
        reports = [n for n in notes if "no step so far has used" in n]
        assert len(reports) == 1 and "never.weight, never.bias" in reports[0] and "sometimes" not in reports[0]
        assert not {name for name in slots if name.startswith("never")}, "state is made with the first gradient"


def test_a_step_that_uses_nothing_new_gathers_nothing(tmp_path):
    """Sets are gathered in steps where they change, not in all."""
    def work(run):
        gathered, inner = [], run.unused.gather
        run.unused.gather = lambda: (gathered.append(run.state.cursor.step), inner())
        fitted(run)
        return gathered, run.unused.agreed

    found = lockstep(2, config(**{**vars(BASE), "out": str(tmp_path)}), lambda rank: model(), data(), work)
    assert found[0] == found[1] and found[0][0] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert found[0][1] == frozenset({0, 1, 4, 5})


def test_a_frozen_layer_stays_as_it_is(tmp_path):
    """Freezing in the middle of a run: values, state and decay stop at once, and go on after unfreezing."""
    def loop() -> list[np.ndarray]:
        net, (x, y) = model(), map(torch.from_numpy, data())
        opt = torch.optim.AdamW(net.parameters(), 0.05, weight_decay=0.1)
        for t in range(12):
            net.used.weight.requires_grad_(not 4 <= t < 8)
            b = t % 6 * BATCH
            opt.zero_grad()
            nn.functional.mse_loss(net(x[b:b + BATCH]), y[b:b + BATCH]).backward()
            opt.step()
        return [t.detach().numpy() for _, t in sorted(net.state_dict().items())]

    from hvdtrain.engine.callbacks.base import Callback

    class Freeze(Callback):
        where = "all"

        def step_start(self, run):
            run.spec.model.used.weight.requires_grad_(not 4 <= run.state.cursor.step < 8)

    for ranks in (1, 2):
        def work(run):
            run.callbacks.insert(0, Freeze())
            fitted(run)
            return arrays(run)

        setting = config(**{**vars(BASE), "out": str(tmp_path / f"{ranks}")})
        got = lockstep(ranks, setting, lambda rank: model(), data(), work)[0]
        assert apart(got, loop()) < 1e-5


class Block(nn.Module):
    """Adds a layer's output where a sample is large, and has a layer that nothing uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(8, width), nn.Linear(8, width), nn.Linear(8, width)

    def forward(self, x):
        mark = (x.detach().abs().amax(1) > 2.5).to(x.dtype)[:, None]
        return self.used(x) + mark * self.sometimes(x) if bool(mark.any()) else self.used(x)


class Detached(Block):
    def forward(self, x):
        return super().forward(x.detach())


@pytest.mark.parametrize("last", (Block, Detached))
@pytest.mark.parametrize("ranks", (2, 4))
def test_stages_of_a_pipeline_agree_with_their_replicas(tmp_path, monkeypatch, ranks, last):
    """Also a stage whose output the next one takes no gradient of."""
    monkeypatch.chdir(tmp_path)

    def build():
        torch.manual_seed(2)
        return nn.Sequential(Block(8), last(1))

    g = np.random.default_rng(5)
    arrays = g.normal(size=(48, 8)).astype(np.float32), g.normal(size=(48, 1)).astype(np.float32)
    setting = config(**{**vars(BASE), "global_batch": 6, "shares": [], "clip_norm": 0.5})

    def work(run):
        fitted(run)
        held = {name: np.array(v) for name, v in run.parts.state.state()[0]["model"].items()}
        return held, len(run.unused.agreed), run.notes

    want, _, notes = work(solo(setting, build(), arrays))
    cut = config(**{**vars(setting), "pipeline": PipelineConfig(2, micro_batches=2), "out": str(tmp_path / "cut")})
    for got, unused, said in lockstep(ranks, cut, lambda rank: build(), arrays, work):
        assert unused >= 2 and apart([got[k] for k in sorted(got)], [want[k] for k in sorted(got)]) < 1e-5
        assert [n.split(" (")[0] for n in said if "no step so far" in n] == [
            n.split(" (")[0] for n in notes if "no step so far" in n]
