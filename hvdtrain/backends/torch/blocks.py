"""The named blocks of a PyTorch model that is to be split: which they are, whether they are the model, what they cost.

Owns what has to be true of such a model, and the measuring, before which nothing is allocated on the devices. The cut
is `hvdtrain.parallel`'s; `split` puts the blocks where they belong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdtrain.backends.torch import placement
from hvdtrain.backends.torch.pipeline import count_samples, tensors_of
from hvdtrain.errors import UserError
from hvdtrain.parallel.memory import Block

Named = list[tuple[str, torch.nn.Module]]

REPEATS = 3
"""Timed runs of each block, after one for warm-up; the shortest counts."""


def chain(spec: Any) -> Named:
    """The named blocks of a model, in the order of its forward pass.

    ``blocks(model)`` of the model file, or the children of an `nn.Sequential`. Errors: `UserError` without either,
    and for parameters that are in no block.
    """
    model = spec.model
    if spec.blocks is not None:
        found = [(str(name), block) for name, block in spec.blocks(model)]
    elif isinstance(model, torch.nn.Sequential):
        found = list(model.named_children())
    else:
        raise UserError(f"model_parallel with {type(model).__name__}, which has no named blocks",
                        "an nn.Sequential, or blocks(model) -> [(name, module)] in the model file",
                        "define blocks, or set model_parallel: 1")
    held = {id(t) for _, block in found for t in (*block.parameters(), *block.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in held:
            raise UserError(f"{name} of the model is in none of its blocks ({', '.join(n for n, _ in found[:6])})",
                            "every parameter and buffer in a block, which has a device",
                            "mend blocks(model), or set model_parallel: 1")
    return found


class _Captured(Exception):
    """Not an error: the end of a task's run up to its model."""


def model_input(model: torch.nn.Module, task: Callable[..., Any], batch: tuple[torch.Tensor, ...]) -> Any:
    """What ``task`` gives to the model; `UserError` unless it is one argument of tensors (B, ...)."""
    caught: list[Any] = []

    def forward(*args: Any, **named: Any) -> Any:
        caught.append((args, named))
        raise _Captured

    kept = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        with contextlib.suppress(_Captured):
            task(model, batch)
    finally:
        del vars(model)["forward"]
        if kept is not None:
            vars(model)["forward"] = kept
    if not caught or len(caught[0][0]) != 1 or caught[0][1]:
        given = "no call" if not caught else f"{len(caught[0][0])} arguments" + (" by name" if caught[0][1] else "")
        raise UserError(f"task gives {given} to a model that is to be split", "model(x), once",
                        "mend task, or set model_parallel: 1")
    count_samples(caught[0][0][0])
    return caught[0][0][0]


def check_chain(model: torch.nn.Module, blocks: Named, x: Any) -> None:
    """Raise `UserError` unless the blocks one after the other are the model; on the device where they are."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            whole, value = _first(model(x)), x
            try:
                for _, block in blocks:
                    value = block(value)
                parts = _first(value)
                same = parts.shape == whole.shape and torch.allclose(parts, whole, rtol=1e-4, atol=1e-5, equal_nan=True)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                same = False
    finally:
        for module, training in modes.items():
            module.training = training
    if not same:
        names = ", ".join(name for name, _ in blocks[:6])
        raise UserError(f"blocks of {type(model).__name__} one after the other ({names}) do not give what the model "
                        "gives", "forward as a loop over the blocks: x = block(x)",
                        "put what forward does between them into blocks, or set model_parallel: 1")


def _first(value: Any) -> torch.Tensor:
    return tensors_of(value)[0].float()


def measure(blocks: Named, x: Any, device: torch.device) -> tuple[Block, ...]:
    """Seconds and bytes of each block on ``device``, for an input of one part; the model is as before afterwards.

    One block at a time is on the device. ``activation_bytes``: what autograd keeps for backward beside parameters.
    """
    found = []
    value = placement.moved(x, device)
    for name, block in blocks:
        home = next((t.device for t in (*block.parameters(), *block.buffers())), device)
        block.to(device)
        try:
            with _kept_bytes(block) as kept:
                value, cost_s = _timed(block, value, device, kept)
        finally:
            block.to(home)
        size = sum(t.numel() * t.element_size() for t in (*block.parameters(), *block.buffers()))
        found.append(Block(name, cost_s, size, kept[0]))
    return tuple(found)


@contextlib.contextmanager
def _kept_bytes(block: torch.nn.Module) -> Iterator[list[int]]:
    """Within it, what a forward pass saves for its backward is counted: the sum, tensors counted once, in a list."""
    own = {t.untyped_storage().data_ptr() for t in block.parameters()}
    seen: dict[int, int] = {}
    total = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = tensor.numel() * tensor.element_size()
            total[0] = sum(seen.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def _timed(block: torch.nn.Module, value: Any, device: torch.device, kept: list[int]) -> tuple[Any, float]:
    """(what the block makes of ``value``, shortest seconds of forward and backward); ``kept`` counts the first run."""
    buffers = {name: b.detach().clone() for name, b in block.named_buffers()}
    out, best_s, first = value, float("inf"), 0
    for turn in range(1 + REPEATS):
        begun = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors_of(value)]
        placement.synchronize([device])
        begin = time.perf_counter()
        out = block(_like(value, begun))
        first = first or kept[0]
        wanted = [t for t in (*begun, *block.parameters()) if t.requires_grad]
        ended = [t for t in tensors_of(out) if t.requires_grad]
        if ended and wanted:
            torch.autograd.grad(ended, wanted, [torch.ones_like(t) for t in ended], allow_unused=True)
        placement.synchronize([device])
        if turn:
            best_s = min(best_s, time.perf_counter() - begin)
    kept[0] = first
    with torch.no_grad():
        for name, buffer in block.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])
    return _like(out, [t.detach() for t in tensors_of(out)]), best_s


def _like(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree ``value`` with other tensors, in the order of `tensors_of`."""
    rest = iter(tensors)

    def built(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(rest)
        if isinstance(part, (tuple, list)):
            return type(part)(built(v) for v in part)
        return {k: built(v) for k, v in part.items()} if isinstance(part, dict) else part

    return built(value)
