"""Named blocks of a PyTorch model that is to be split: checks that they are the model, and their costs.

Devices hold nothing before; the partition is `hvdtrain.planning.pipeline`'s.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch import modules, placement
from hvdtrain.backends.torch.buffers import remember
from hvdtrain.backends.torch.modules import count_samples, like, modes_kept, tensors_of
from hvdtrain.backends.torch.pipelined.over_devices import OverDevices
from hvdtrain.core.errors import UserError
from hvdtrain.planning.pipeline.blocks import Block

Named = list[tuple[str, torch.nn.Module]]

UNDO = "set model_parallel: 1"
"""How to do without a model that is split."""

REPEATS, MOST_REPEATS, LEAST_S = 3, 10, 0.02
"""Timed runs of each block after one for warm-up, of which the shortest counts: so many at least, and more until they
have taken so long, as a short one is easily disturbed."""

FEW_PAGES = 64
"""New pages of memory in a timed run beyond which it counts only where all have more. While the heap grows to what a
block needs the system clears them one by one, for up to twice what the block itself takes; steps find them there."""


def chain(spec: Any, wish: str = "model_parallel", undo: str = UNDO) -> Named:
    """Return the named blocks of a model, in the order of its forward pass.

    ``blocks(model)`` of the model file, or the children of an `nn.Sequential`. ``wish``: the key that asks for blocks,
    ``undo``: how to do without, for errors. Errors: `UserError` without either, and for parameters in no block.
    """
    model = spec.model
    if spec.blocks is not None:
        found = [(str(name), block) for name, block in spec.blocks(model)]
    elif isinstance(model, torch.nn.Sequential):
        found = list(model.named_children())
    else:
        raise UserError(f"{wish} with {type(model).__name__}, which has no named blocks",
                        "an nn.Sequential, or blocks(model) -> [(name, module)] in the model file",
                        f"define blocks, or {undo}")
    refuse_outside(model, found, undo)
    return found


def refuse_outside(model: torch.nn.Module, found: Named, undo: str = UNDO) -> None:
    """Raise `UserError` for a parameter or buffer that is in no block."""
    held = {id(t) for _, block in found for t in (*block.parameters(), *block.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in held:
            raise UserError(f"{name} of the model is in none of its blocks ({', '.join(n for n, _ in found[:6])})",
                            "every parameter and buffer in a block, which has a device",
                            f"fix blocks(model), or {undo}")


class _Captured(Exception):
    """Ends a task's run at its call of the model."""


def model_input(model: torch.nn.Module, task: Callable[..., Any], batch: tuple[torch.Tensor, ...],
                undo: str = UNDO) -> Any:
    """Return the one argument that ``task`` gives to the model; `UserError` where it calls it otherwise."""
    caught: list[tuple[tuple[Any, ...], Any]] = []

    def forward(*args: Any, **named: Any) -> Any:
        caught.append((args, named))
        raise _Captured

    with forward_of(model, forward), contextlib.suppress(_Captured):
        task(model, batch)
    args, named = caught[0] if caught else ((), None)
    if len(args) != 1 or named:
        raise called_with(args, named, undo)
    return args[0]


def called_with(args: Sequence[Any], named: Any, undo: str = UNDO) -> UserError:
    """Return the error of a task that does not call the model once with one argument; ``named`` None: never."""
    given = "no call" if named is None else f"{len(args)} arguments" + (" by name" if named else "")
    return UserError(f"task gives {given} to a partitioned model", "model(x), once", f"fix task, or {undo}")


def refuse_shared(parts: Iterable[tuple[int, Named]], places: str, remedy: str) -> None:
    """Raise `UserError` where blocks of two places share a parameter or buffer; ``parts``: place and blocks of each."""
    owner: dict[int, tuple[int, str]] = {}
    for place, blocks in parts:
        for name, block in blocks:
            for tensor in (*block.parameters(), *block.buffers()):
                first, other = owner.setdefault(id(tensor), (place, name))
                if first != place:
                    raise UserError(f"blocks {other} and {name} share a parameter or buffer but are on two {places}",
                                    "both on one", f"untie them, or {remedy}")


def check_chain(model: torch.nn.Module, blocks: Named, x: Any, undo: str = UNDO) -> list[str]:
    """Raise `UserError` unless the blocks one after the other are the model; on the device where they are.

    In evaluation and then in the mode the model is in, where both must also draw the same random numbers. Returns the
    names of the buffers that a forward pass in that mode changes, and restores them.
    """
    names = f"blocks of {type(model).__name__} in sequence ({', '.join(name for name, _ in blocks[:6])})"
    with modes_kept(model):
        model.eval()
        if not alike(model, blocks, x)[0]:
            raise UserError(f"{names} give an output that differs from the "
                            "model's", "forward as a loop over the blocks: "
                            "x = block(x)", f"move what forward does between them into blocks, or {undo}")
    same, changed = alike(model, blocks, x)
    if not same:
        raise UserError(f"{names} give an output that differs from the model's in training",
                        "forward as a loop over the blocks: x = block(x)", "move what forward does between "
                        f"them only in training (dropout, self.training) into blocks, or {undo}")
    return changed


def alike(model: torch.nn.Module, blocks: Named, x: Any) -> tuple[bool, list[str]]:
    """Return (model and blocks give and draw the same for ``x``, buffers that the model changes); restores all."""
    with torch.no_grad(), _put_back(model) as put_back:
        whole, value = tensors_of(model(x)), x
        drawn, changed = placement.random_arrays(), put_back()[1]
        try:
            for _, block in blocks:
                value = block(value)
            parts = tensors_of(value)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False, changed
        same = len(parts) == len(whole) and all(a.shape == b.shape and torch.allclose(
            a.float(), b.float(), rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in zip(parts, whole))
        return same and equal(drawn, placement.random_arrays()), changed


def check_parts(model: torch.nn.Module, blocks: Named, task: Callable[..., Any], batch: tuple[torch.Tensor, ...],
                least: int) -> None:
    """Raise `UserError` where ``task`` has another loss when the blocks see a batch in two parts than in one.

    So does one that reads what a forward pass left on a block, which is that of the last part. BatchNorm and dropout
    layers are in evaluation for it, and everything is where a forward pass still draws or changes buffers. A ``task``
    that cannot run here at all passes. ``least``: fewest samples of a part.
    """
    if count_samples(model_input(model, task, batch)) < 2 * least:
        return
    with modes_kept(model):
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) or modules.drops(module):
                module.training = False
        found = _losses(model, blocks, task, batch, least)
        if found is None:
            model.eval()
            found = _losses(model, blocks, task, batch, least)
    if found is None or not all(map(math.isfinite, found)):
        return
    one, two = found
    narrow = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    if not math.isclose(one, two, rel_tol=3e-2 if narrow else 1e-4, abs_tol=1e-2 if narrow else 1e-5):
        raise UserError(f"task gives the loss {one:.6g} for a batch in one part and {two:.6g} "
                        "in two", "a loss of the outputs of model(x), each of which depends on its own sample",
                        "return values that task reads from a block (an auxiliary loss) as outputs of the model, or "
                        "set split_micro_batches: 1 or model_parallel: 1")


def _losses(model: torch.nn.Module, blocks: Named, task: Callable[..., Any], batch: tuple[torch.Tensor, ...],
            least: int) -> tuple[float, float] | None:
    """Return the task's loss of a batch in one part and in two; None where they cannot be compared. Restores all."""
    split = OverDevices([[block for _, block in blocks]], [torch.device("cpu")], 2, least)
    with _put_back(model) as put_back:
        try:
            one = float(torch.as_tensor(task(model, batch)[0]).detach())
        except Exception:  # a user's code, which may need the devices that the model is not on yet
            return None
        drew, changed = put_back()
        if drew or changed:
            return None
        with forward_of(model, split.forward):
            return one, float(torch.as_tensor(task(model, batch)[0]).detach())


@contextlib.contextmanager
def forward_of(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the model's forward pass by ``forward`` within the body."""
    kept = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]
        if kept is not None:
            vars(model)["forward"] = kept


@contextlib.contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[Callable[[], tuple[bool, list[str]]]]:
    """Restore buffers and generators after the body and when called: (numbers were drawn, changed buffers)."""
    random, buffers_back = placement.random_arrays(), remember(model)

    def put_back() -> tuple[bool, list[str]]:
        drew = not equal(random, placement.random_arrays())
        placement.load_random(random)
        return drew, buffers_back()

    try:
        yield put_back
    finally:
        put_back()


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return {k: a.tobytes() for k, a in one.items()} == {k: a.tobytes() for k, a in other.items()}  # some are NaN


def measure(blocks: Iterable[tuple[str, torch.nn.Module]], x: Any, device: torch.device,
            came: list[Any] | None = None) -> tuple[Block, ...]:
    """Return seconds and bytes of each block on ``device``, for an input of one part; restores the model.

    One block at a time is on the device. ``activation_bytes``: kept by autograd for backward beside parameters.
    ``came``: takes the input of each block, on the host. Where one thread computes, blocks are told apart by processor
    time: where that is rationed, a block's seconds depend on when it was throttled.
    """
    found: list[Block] = []
    value = placement.moved(x, device)
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begin, begin_own = time.perf_counter(), clock()
    for name, block in blocks:
        home = next((t.device for t in (*block.parameters(), *block.buffers())), device)
        if came is not None:
            came.append(placement.moved(value, torch.device("cpu")))
        block.to(device)
        try:
            with _kept_bytes(block) as kept:
                value, cost_s, forward_s = _timed(block, value, device, kept, clock, first=not found)
        finally:
            block.to(home)
        size = sum(t.numel() * t.element_size() for t in (*block.parameters(), *block.buffers()))
        given = sum(t.numel() * t.element_size() for t in tensors_of(value))
        found.append(Block(name, cost_s, size, kept[0], forward_s, given))
    own_s = clock() - begin_own
    slower = (time.perf_counter() - begin) / own_s if own_s > 0 and clock is time.process_time else 1.0
    return tuple(replace(block, cost_s=block.cost_s * slower, forward_s=block.forward_s * slower) for block in found)


@contextlib.contextmanager
def _kept_bytes(block: torch.nn.Module) -> Iterator[list[int]]:
    """Count what a forward pass saves for its backward within the body: the sum, tensors counted once, in a list."""
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


def _timed(block: torch.nn.Module, value: Any, device: torch.device, kept: list[int], clock: Callable[[], float],
           first: bool) -> tuple[Any, float, float]:
    """Return (output, shortest seconds of forward and backward, of forward alone) of the block for ``value``.

    ``kept`` counts the first run. ``first``: of the model, which gives no gradient to its input.
    """
    buffers_back = remember(block)
    out, held, forths, backs = value, 0, _Runs(), _Runs()
    began = clock()
    for turn in range(1 + MOST_REPEATS):
        if turn > REPEATS and clock() - began > LEAST_S and forths.clean and backs.clean:
            break
        begun = [t.detach().requires_grad_(t.is_floating_point() and not first) for t in tensors_of(value)]
        given = [t.clone() for t in begun]  # a block may write to what it gets, as a block within a model
        placement.synchronize([device])
        begin, pages = clock(), _new_pages()
        out = block(like(value, given))
        held = held or kept[0]
        placement.synchronize([device])
        if turn:
            forths.add(clock() - begin, _new_pages() - pages)
        wanted = [t for t in (*begun, *block.parameters()) if t.requires_grad]
        ended = [t for t in tensors_of(out) if t.requires_grad]
        ones = [torch.ones_like(t) for t in ended]
        placement.synchronize([device])
        begin, pages = clock(), _new_pages()
        if ended and wanted:
            torch.autograd.grad(ended, wanted, ones, allow_unused=True)
        placement.synchronize([device])
        if turn:
            backs.add(clock() - begin, _new_pages() - pages)
    kept[0] = held
    buffers_back()
    made = like(out, [t.detach() for t in tensors_of(out)])
    return made, forths.least_s + backs.least_s, forths.least_s


class _Runs:
    """Keeps the shortest timed run, of those with `FEW_PAGES` new pages at most if there is any (``clean``)."""

    def __init__(self) -> None:
        self.clean, self.least_s = False, math.inf

    def add(self, seconds: float, pages: int) -> None:
        if pages <= FEW_PAGES and not self.clean:
            self.clean, self.least_s = True, seconds
        elif pages <= FEW_PAGES or not self.clean:
            self.least_s = min(self.least_s, seconds)


def _new_pages() -> int:
    """Return the number of memory pages that the system has given to this thread."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_minflt
