"""PyTorch's own pipeline, torch.distributed.pipelining, as its documentation shows it: stages and a schedule.

Owns which blocks are a rank's stage: those that it is told, else about as many for each. Messages go over Gloo (NCCL on
GPUs); what travels is found by its own first step.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common
from hvdtrain.config import FOR_EACH


def prepare(setup: Setup) -> Prepared:
    """Return a job whose ranks are the stages of one replica, in the order that it is told."""
    import torch

    cut, size = setup.cut, setup.control.size
    spec, device = common.spec_of(setup)
    places = cut.places or tuple(range(size))
    place = places.index(setup.control.rank)
    wire = common.process_group(setup, device, place)
    blocks = list(spec.blocks(spec.model))
    starts = cut.names or even([name for name, _ in blocks], size * cut.chunks)
    mine = [_module(chunk).to(device).train() for chunk in chunks(blocks, starts)[place::size]]
    opt = common.optimizer(torch.nn.ModuleList(mine))
    loss = common.loss_of(spec)
    schedule = _schedule(mine, place, setup, device, lambda output, target: loss(lambda _: output, (None, target)))
    last = [0.0]
    batches = setup.whole_batches

    def step(i: int) -> None:
        x, y = (torch.from_numpy(a).to(device, non_blocking=True) for a in batches[i % len(batches)])
        opt.zero_grad()
        losses: list[Any] = []
        schedule.step(*([x] if place == 0 else []), return_outputs=False,
                      **({"target": y, "losses": losses} if place == size - 1 else {}))
        opt.step()
        last[0] = float(torch.stack(losses).detach().mean()) if losses else 0.0

    sync = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    return Prepared(step, lambda: last[0], lambda: [p for chunk in mine for p in common.arrays_of(chunk)], wire, sync,
                    split=True)


def even(names: list[str], parts: int) -> tuple[str, ...]:
    """Return the blocks that all parts but the first begin with, about as many in each. Pure."""
    return tuple(names[len(names) * k // parts] for k in range(1, parts))


def chunks(blocks: list[tuple[str, Any]], starts: tuple[str, ...]) -> list[list[tuple[str, Any]]]:
    """``blocks`` in consecutive runs, each but the first beginning with one of ``starts``. Pure."""
    found: list[list[tuple[str, Any]]] = [[]]
    for name, block in blocks:
        if name in starts:
            found.append([])
        found[-1].append((name, block))
    return found


def _module(chunk: list[tuple[str, Any]]) -> Any:
    """Return the blocks one after the other, what goes in and out of them contiguous, which its messages have to be.

    An image model with channels last otherwise ends it: "input tensor has to be contiguous".
    """
    import torch

    class Contiguous(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.contiguous()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0].contiguous()

    class Chunk(torch.nn.Sequential):
        def forward(self, x: Any) -> Any:
            x = super().forward(Contiguous.apply(x) if x.requires_grad else x)
            return Contiguous.apply(x)

    return Chunk(OrderedDict(chunk))


def _schedule(mine: list[Any], place: int, setup: Setup, device: Any, loss: Any) -> Any:
    """Return the schedule of this rank over its chunks."""
    from torch.distributed import pipelining

    cut, size = setup.cut, setup.control.size
    stages: list[Any] = [pipelining.PipelineStage(chunk, k * size + place, size * len(mine), device)
                         for k, chunk in enumerate(mine)]
    micros = cut.micro_batches or FOR_EACH * size
    if cut.order == "interleaved":
        return pipelining.ScheduleInterleaved1F1B(stages, micros, loss_fn=loss)
    kind = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[cut.order]
    return kind(stages[0], micros, loss_fn=loss)
