"""Rows of training: what several ranks compute is what plain PyTorch computes on whole batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain.config import CheckpointConfig, DataParallelConfig, Named
from hvdtrain.core.protocols import Control
from jobs import kit
from torch_models import gpt


def start(control: Control) -> dict[str, Any]:
    """Say what each rank computes on, and look at the facts that the run knows of its device."""
    from hvdtrain.backends import load

    facts = control.gather(load("torch").device_facts())
    assert all(f.memory_bytes > 0 for f in facts), f"a device without memory: {facts}"
    x, y = kit.vectors(64)
    trainer = kit.fitted(kit.config(control), kit.perceptron(), (x, y))
    assert trainer.run is not None
    own = {str(p.device.type) for p in trainer.run.spec.model.parameters()}
    devices = control.gather(sorted(own))
    assert all(d == [kit.device().type] for d in devices), f"parameters are on {devices}"
    device_s = trainer.run.parts.stage.device_s()
    assert (device_s is None) != kit.ON_GPU, f"the device's clock tells {device_s}"
    assert device_s is None or 0 < device_s < 60
    told = ", ".join(f"rank {r}: {f.name} ({f.kind}, {f.memory_bytes / 2**30:.0f} GiB)" for r, f in enumerate(facts))
    clock = "" if device_s is None else f"; a step takes the device {1e3 * device_s:.2f} ms by its events"
    return {"detail": f"{told}; wire: {trainer.run.collectives.name}{clock}", "numbers": {"device_s": device_s}}


def training(control: Control) -> dict[str, Any]:
    """Train a GPT with shares 3:1, two micro-batches and clipping, over both wires."""
    data, start_model = kit.tokens(96), kit.decoder()
    want = kit.plainly(start_model, data, 16, gpt.task, clip=0.5)
    found = {}
    for wire in ("shared", "mpi"):
        model = kit.decoder()
        kit.fitted(kit.config(control, collectives=wire, shares=[3, 1], accumulate=2, clip_norm=0.5, check_every=2),
                   model, data)
        found[wire] = kit.same(control, model, want, start_model)
    return {"detail": "weights within " + ", ".join(f"{far:.0e} ({wire})" for wire, far in found.items())
            + " of plain PyTorch's largest after 6 steps", "numbers": found}


def precision(control: Control) -> dict[str, Any]:
    """Train in bf16 and fp16: near the same type in plain PyTorch, and steps that overflow are left out."""
    data, start_model = kit.tokens(96), kit.decoder()
    numbers: dict[str, Any] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = kit.decoder()
        kit.fitted(kit.config(control, precision=name, loss_scale=1024.0), model, data)
        exact = kit.plainly(start_model, data, 16, gpt.task)
        narrow = kit.plainly(start_model, data, 16, gpt.task, dtype)
        rounding = max(kit.apart(narrow, exact), 1e-3)
        far = kit.same(control, model, narrow, start_model, tolerance=4 * rounding)
        numbers[name] = {"apart": far, "rounding": rounding}
    model = kit.decoder()
    trainer = kit.fitted(kit.config(control, precision="fp16", loss_scale=float(2**24), nan_guard="skip"), model,
                         kit.tokens(320))
    assert trainer.run is not None
    scale = trainer.run.parts.scale.of(control.rank)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters()), "weights are not finite"
    assert scale <= 2**24 and kit.apart(model, start_model) > 1e-3, f"nothing was learnt at a loss scale of {scale}"
    numbers["scale"] = scale
    told = [f"{name} within {numbers[name]['apart']:.0e} of plain {name}, which is {numbers[name]['rounding']:.0e} "
            "from fp32" for name in ("bf16", "fp16")]
    return {"detail": "; ".join(told) + f"; a loss scale of 2^24 came down to {scale:g}", "numbers": numbers}


def batchnorm(control: Control) -> dict[str, Any]:
    """Train convolutions with BatchNorm over ranks of different shares."""
    def net() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
                             nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))

    data = kit.vectors(96)
    model = net()
    kit.fitted(kit.config(control, sync_batchnorm=True, shares=[3, 1]), model, data)
    far = kit.same(control, model, kit.plainly(net(), data, 16, kit.classes), net())
    return {"detail": f"weights and statistics within {far:.0e} of the whole batch's", "numbers": {"apart": far}}


def zero(control: Control) -> dict[str, Any]:
    """Train with both stages; compare weights with replicas' and count the bytes of state."""
    data = kit.vectors(96)
    adam: dict[str, Any] = {"optimizer": Named("Adam"), "lr": 1e-2, "clip_norm": 1.0}

    def trained(**keys: Any) -> tuple[nn.Module, int]:
        model = kit.perceptron()
        run = kit.fitted(kit.config(control, **adam, **keys), model, data).run
        assert run is not None
        return model, run.parts.state.optimizer.optimizer and state_bytes(run.parts.state.optimizer.optimizer)

    replicas, whole = trained()
    told, numbers = [], {"replicate_bytes": whole}
    for stage in (1, 2):
        model, own = trained(data_parallel=DataParallelConfig("zero", stage=stage, shards=[3, 1]))
        far = kit.same(control, model, replicas, kit.perceptron(), tolerance=1e-5)
        parts = control.gather(own / whole)
        assert abs(parts[0] - 0.75) < 0.05 and abs(parts[1] - 0.25) < 0.05, f"state of {parts} for shards 3:1"
        told.append(f"stage {stage}: " + ("the same bits" if far == 0 else f"within {far:.0e}")
                    + f", state {', '.join(f'{p:.0%}' for p in parts)}")
        numbers[f"stage_{stage}"] = {"apart": far, "parts": parts}
    return {"detail": "; ".join(told), "numbers": numbers}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state that has more than one element."""
    return sum(v.nbytes for entries in optimizer.state.values() for v in entries.values()
               if isinstance(v, torch.Tensor) and v.numel() > 1)


def checkpoint(control: Control) -> dict[str, Any]:
    """Train with dropout; continue from the middle: the same bits, so the device's random state came along."""
    def net() -> nn.Sequential:
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))

    data = kit.vectors(80)  # 5 steps, so that the checkpoint of the third is the newest
    settings: dict[str, Any] = {"deterministic": True, "optimizer": Named("Adam"), "lr": 1e-2}
    whole = net()
    saved = kit.fitted(kit.config(control, checkpoint=CheckpointConfig(every_steps=3, at_end=False), **settings),
                       whole, data)
    assert saved.run is not None
    resumed = net()
    path = control.bcast(str(saved.run.out))
    run = kit.fitted(kit.config(control, resume=path, **settings), resumed, data).run
    assert run is not None and run.timeline.totals.steps == 2, "the run did not go on from step 3"
    far = max(control.gather(kit.apart(resumed, whole)))
    assert far == 0, f"weights differ by {far:.1e} after 2 more steps from a checkpoint"
    assert kit.apart(whole, net()) > 1e-3
    return {"detail": "5 steps, and 2 after a checkpoint of 3: the same bits, with dropout and Adam"}


def split(control: Control) -> dict[str, Any]:
    """Split a GPT over the GPU and the CPU."""
    data, start_model = kit.tokens(48), kit.decoder()
    model = copy.deepcopy(start_model)
    trainer = kit.fitted(kit.config(control, model_parallel=2), model, data)
    assert trainer.run is not None
    far = kit.same(control, model, kit.plainly(start_model, data, 16, gpt.task), start_model)
    words = trainer.run.parts.describe()
    return {"detail": f"{words.get('split', '')}; weights within {far:.0e}", "numbers": {"apart": far}}


def command(control: Control) -> dict[str, Any]:
    """Run the command line with a recipe in YAML."""
    from hvdtrain.commands import train

    out, recipe = Path.cwd() / "command", Path.cwd() / "recipe.yaml"
    if control.rank == 0:
        recipe.write_text("model: torch_models.mlp:build\n"
                          "data: {name: synthetic, args: {samples: 256, shape: [8, 8]}}\n"
                          "global_batch: 32\nepochs: 1\nexchange_device: cpu\ncollectives: mpi\nprogress: plain\n")
    control.barrier("the recipe", 60.0)
    code = train.main(["--config", str(recipe), "--out", str(out), "--lr", "0.01"])
    done = control.bcast((out / "completed.json").exists() if control.rank == 0 else None)
    assert code == 0 and done, f"status {code}, completed: {done}"
    return {"detail": "8 steps from a recipe; completed.json is there"}
