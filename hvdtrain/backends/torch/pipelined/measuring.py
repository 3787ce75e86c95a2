"""Checks and costs of the blocks of a PyTorch model that is to be partitioned over ranks.

Restores everything. A model may also be built block by block (`block_names`, `build_block`): no rank has it whole.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.backends.torch import blocks, placement
from hvdtrain.backends.torch.blocks import Named
from hvdtrain.backends.torch.buffers import remember
from hvdtrain.backends.torch.modules import flat_bytes, like, tensors_of
from hvdtrain.backends.torch.pipelined.stage import UNDO
from hvdtrain.backends.torch.snapshot import Modules, attributes_kept
from hvdtrain.core.errors import UserError
from hvdtrain.planning.pipeline.blocks import Block

Task = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


def chain(spec: Any) -> Named:
    """Return the named blocks of a model, else its children, an `nn.Sequential`'s in its place."""
    model = spec.model
    if isinstance(model, Blocks):
        return list(model.named_children())
    if spec.blocks is not None:
        return blocks.chain(spec, "pipeline", UNDO)
    found = _children(model)
    try:
        blocks.refuse_outside(model, found, UNDO)
    except UserError:
        raise _without_blocks(model) from None
    return found


def _children(module: torch.nn.Module, prefix: str = "") -> Named:
    found: Named = []
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        plain = type(child) is torch.nn.Sequential and len(child) > 0 and not _hooked(child)
        found += _children(child, f"{full}.") if plain else [(full, child)]
    return found


def _hooked(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks beside its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks)


def _without_blocks(model: torch.nn.Module) -> UserError:
    return UserError(f"pipeline with {type(model).__name__}, which has no named blocks, and whose "
                     "children in sequence are not the model", "an nn.Sequential, or blocks(model) -> [(name, module)] "
                     "in the model file", f"define blocks, or {UNDO}")


def check(spec: Any, named: Named, task: Task, one: Tensors, other: Tensors) -> None:
    """Raise `UserError` unless the blocks one after the other are the model, and ``task`` needs its outputs alone.

    ``one``, ``other``: two batches of tensors, which the task is run with.
    """
    model = spec.model
    x = input_of(model, task, one)
    if spec.blocks is None and not isinstance(model, torch.nn.Sequential) and not blocks.alike(model, named, x)[0]:
        raise _without_blocks(model)
    blocks.check_chain(model, named, x, UNDO)
    _check_task(model, task, one, other)


def input_of(model: torch.nn.Module, task: Task, batch: Tensors) -> Any:
    """Return the model's input; `UserError` where the task draws random numbers before it, or calls it otherwise."""
    before = placement.random_arrays()
    x = blocks.model_input(model, task, batch, UNDO)
    if not blocks.equal(before, placement.random_arrays()):
        placement.load_random(before)
        raise UserError("task draws random numbers before it calls the model, and the first and last "
                        "rank of a pipeline would draw different ones", "a task whose x depends on the batch alone",
                        f"draw them in the data's source or in a block, or {UNDO}")
    return x


def _check_task(model: torch.nn.Module, task: Task, one: Tensors, other: Tensors) -> None:
    """Raise `UserError` where the task's loss of given outputs depends on parameters, or on an earlier forward pass.

    The loss is taken twice for the same outputs, with other parameters and after another forward pass the second time.
    A ``task`` that cannot run here at all passes.
    """
    random, buffers_back = placement.random_arrays(), remember(model)
    params: list[torch.Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    factor = 1.0
    with attributes_kept(Modules(model)):
        try:
            with torch.no_grad():
                outputs = model(input_of(model, task, one))
            first = loss_of(model, task, one, outputs)
            reads = first.requires_grad and any(
                g is not None for g in torch.autograd.grad(first, params, allow_unused=True))
            with torch.no_grad():
                factor = 2.0  # which a multiplication by a half undoes to the bit
                torch._foreach_mul_(params, factor)
                model(input_of(model, task, other))
                second = loss_of(model, task, one, outputs)
        except UserError:
            raise
        except Exception:  # a user's code, which may need the device that the model is not on yet
            return
        finally:
            if factor != 1.0:
                with torch.no_grad():
                    torch._foreach_mul_(params, 1 / factor)
            buffers_back()
            placement.load_random(random)
    found = float(first.detach()), float(second)
    if reads or all(map(math.isfinite, found)) and found[0] != found[1]:
        raise UserError(f"task gives the loss {found[0]:.6g} and, with other parameters and the same outputs, "
                        f"{found[1]:.6g}" if not reads else "task reads parameters of the model",
                        "a loss of the outputs of model(x) and the batch alone: the rank that "
                        "computes it has only the last blocks", "return values that task reads from the model (a "
                        f"penalty on weights, an auxiliary loss) as outputs of the model, use weight_decay, or {UNDO}")


def loss_of(model: torch.nn.Module, task: Task, batch: Tensors, outputs: Any) -> torch.Tensor:
    calls = 0

    def forward(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if len(args) != 1 or named:
            raise blocks.called_with(args, named, UNDO)
        return like(outputs, [t.clone() for t in tensors_of(outputs)])

    state_of = placement.random_arrays()
    with blocks.forward_of(model, forward):
        loss_sum = torch.as_tensor(task(model, batch)[0])
    placement.load_random(state_of)
    if calls != 1:
        raise UserError(f"task calls the model {calls} times", "model(x), once", f"fix task, or {UNDO}")
    return loss_sum


def measure(named: Named, x: Any, device: torch.device) -> tuple[tuple[Block, ...], list[Any]]:
    """Return each block's costs for ``x``, one at a time on ``device``, and each block's input on the host."""
    came: list[Any] = []
    return blocks.measure(named, x, device, came), came


class Blocks(torch.nn.Module):
    """Chain of named blocks: each gets the output of the one before."""

    def forward(self, x: Any) -> Any:
        for block in self.children():
            x = block(x)
        return x


class ByBlock:
    """Builds the blocks of a model: ``names() -> [name]``, ``build(name) -> block``."""

    def __init__(self, names: Callable[[], Any], build: Callable[[str], Any]) -> None:
        self.names = [str(name) for name in names()]
        self._build = build
        self._prints: dict[str, int] = {}
        self._built = 0
        odd = [name for name in self.names if not name or "." in name or self.names.count(name) > 1]
        if odd or not self.names:
            raise UserError(f"block_names gives {self.names[:6]}", "the names of the model's blocks, each once and "
                            "without a dot", "fix block_names in the model file")

    def block(self, name: str) -> torch.nn.Module:
        """Return a block and restore generators. Errors: `UserError` for one with other weights than before."""
        self._built += 1
        with placement.seeded_apart(self._built):
            block = self._build(name)
        if not isinstance(block, torch.nn.Module):
            raise UserError(f"build_block gives a {type(block).__name__} for {name!r}", "a torch.nn.Module",
                            "fix build_block in the model file")
        found = _print(block)
        if self._prints.setdefault(name, found) != found:
            raise UserError(f"build_block gives block {name!r} other weights when random generators are at another "
                            "place", "weights that depend only on the block, equal to those of build()",
                            "start build_block with a seed from the block's name")
        return block

    def outline(self) -> Blocks:
        """Return all blocks without their values, one built after the other."""
        model = Blocks()
        for name in self.names:
            model.add_module(name, self.block(name).to("meta"))
        return model


def _print(block: torch.nn.Module) -> int:
    """Return a checksum of a block's parameters and buffers."""
    found = 0
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(flat_bytes(tensor).numpy().tobytes(), found)
    return found
