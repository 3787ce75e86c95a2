"""Outline of a PyTorch model that no rank has whole: built without the memory of its tensors, measured, and filled.

Values come from a tape of the builder or from a file's blocks. Where a proof fails, `Inexact` is raised, and the model
is built whole instead.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch import blocks, keras, placement
from hvdtrain.backends.torch.blocks import Named
from hvdtrain.backends.torch.modules import like, tensors_of
from hvdtrain.backends.torch.pipelined import measuring
from hvdtrain.backends.torch.pipelined.measuring import ByBlock
from hvdtrain.backends.torch.pipelined.tape import META, MOST_VALUES_BYTES, Inexact, Tape
from hvdtrain.cluster.machine import memory
from hvdtrain.core.errors import UserError


def outline(make: Callable[[], Any], names: Callable[[], Any] | None = None,
            build_block: Callable[[str], Any] | None = None) -> Any:
    """Return the model of ``make`` with its parameters and buffers on the device "meta", which holds no values.

    It is built there at once, and its builder's operations are recorded. Where that cannot be, its blocks are built one
    after the other, if the model file builds blocks (``names``, ``build_block``); else it is built on the host, whose
    memory is given back. A model of Keras, which cannot be partitioned, is returned as it is.
    """
    tape = Tape()
    try:
        with tape.recording():
            model = make()
        if not isinstance(model, torch.nn.Module) or keras.is_keras(model):
            raise Inexact("a model that is not PyTorch's")
        if sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if not t.is_meta) > MOST_VALUES_BYTES:
            raise Inexact("many values from outside the model")
        _SOURCES[model] = tape
    except Exception as error:  # a user's code, which may look at values
        if names is not None and build_block is not None:
            by_block = ByBlock(names, build_block)
            model = by_block.outline()
            _SOURCES[model] = by_block
            return model
        model = make()
        if isinstance(model, torch.nn.Module) and not keras.is_keras(model):
            model.to("meta")
            _WHY[model] = " ".join(str(error).split())[:100] or type(error).__name__
    free()
    return model


_SOURCES: weakref.WeakKeyDictionary[torch.nn.Module, Tape | ByBlock] = weakref.WeakKeyDictionary()


_WHY: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def why_whole(model: torch.nn.Module) -> str:
    """Return why an outline cannot be filled in parts; "" where it can, or is none."""
    return _WHY.get(model, "")


def source_of(model: torch.nn.Module) -> Tape | ByBlock | None:
    """Return what fills the blocks of an outline; None where the model is to be built whole."""
    return _SOURCES.get(model)


def free() -> None:
    """Return the memory of unreachable objects to the host."""
    gc.collect()
    memory.give_back()


MADE_UP_STD = 0.02


def check_outline(model: torch.nn.Module, named: Named, task: measuring.Task, batch: measuring.Tensors) -> Any:
    """Raise `Inexact` unless blocks are the model and ``task`` needs its outputs alone; return the model's input.

    The model is run once without values: each block must get the very object that the one before gave, and the model
    return that of the last; a loss that depends on anything of the model then has no value.
    """
    try:
        x = measuring.input_of(model, task, batch)
        with _buffers_kept(model):  # some have values (a count of batches), and training would begin with others
            outputs = _passed(model, named, placement.moved(x, META))
        draw = torch.Generator().manual_seed(0)
        some = [torch.rand(t.shape, generator=draw).to(t.dtype) for t in tensors_of(outputs)]
        loss_sum = measuring.loss_of(model, task, batch, like(outputs, some))
    except UserError:
        raise
    except Exception as error:  # a user's code that looks at values
        raise Inexact(str(error)) from None
    if loss_sum.is_meta:
        raise Inexact("a task that reads parameters or their device")
    return x


@contextlib.contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore an outline's buffers and their values after the body."""
    before = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for holder, buffers in before:
            holder.clear()
            holder.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _passed(model: torch.nn.Module, named: Named, x: Any) -> Any:
    """Run the model and record the inputs and outputs of its blocks."""
    heard: list[tuple[torch.nn.Module, Any, Any]] = []

    def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        heard.append((module, (args, kwargs), output))

    hooks = [block.register_forward_hook(hook, with_kwargs=True) for _, block in named]
    try:
        with torch.no_grad():
            outputs = model(x)
    finally:
        for one in hooks:
            one.remove()
    value = x
    if [module for module, _, _ in heard] != [block for _, block in named]:
        raise Inexact("blocks that are not called exactly once in order")
    for _, (args, kwargs), output in heard:
        if len(args) != 1 or args[0] is not value or kwargs:
            raise Inexact("a forward pass with operations between blocks")
        value = output
    if outputs is not value:
        raise Inexact("a forward pass with operations after its last block")
    return outputs


def measure_in_parts(named: Named, source: Tape | ByBlock, x: Any,
            device: torch.device) -> tuple[tuple[Any, ...], list[Any]]:
    """Do `measuring.measure` with one block in memory at a time; one from a tape has made-up weights."""
    came: list[Any] = []
    made = _made_up(named, source) if isinstance(source, Tape) else ((name, source.block(name)) for name, _ in named)
    return blocks.measure(made, x, device, came), came


def _made_up(named: Named, tape: Tape) -> Iterator[tuple[str, torch.nn.Module]]:
    draw = torch.Generator().manual_seed(0)

    def values(t: torch.Tensor) -> torch.Tensor:
        made = torch.empty(t.shape, dtype=t.dtype)
        return made.normal_(0, MADE_UP_STD, generator=draw) if t.is_floating_point() else made.zero_()

    for name, block in named:
        found = tape.fill(list(block.buffers()))
        made = copy.deepcopy(block)
        for own, other in zip(block.modules(), made.modules()):
            for key, buffer in own._buffers.items():
                if buffer is not None:
                    other._buffers[key] = found[id(buffer)].clone()
        with torch.no_grad():
            made._apply(lambda t: values(t) if t.is_meta else t)
        _refuse_meta(made)
        yield name, made


def fill(model: torch.nn.Module, named: Named, numbers: Sequence[int], source: Tape | ByBlock) -> Named:
    """Give the blocks ``numbers`` of an outline their values in the model; return its blocks then."""
    if isinstance(source, Tape):
        _fill([named[i][1] for i in numbers], source)
        return named
    for i in numbers:
        model._modules[named[i][0]] = source.block(named[i][0])
    return [(name, getattr(model, name)) for name, _ in named]


def _fill(own: Sequence[torch.nn.Module], tape: Tape) -> None:
    tensors = list({id(t): t for block in own for t in (*block.parameters(), *block.buffers())}.values())
    found = tape.fill(tensors)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter stays itself, wherever it is held
    try:
        for block in own:
            block._apply(lambda t: found.get(id(t), t) if t.is_meta else t)
            _refuse_meta(block)
    except RuntimeError as error:
        raise Inexact(str(error)) from None
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _refuse_meta(block: torch.nn.Module) -> None:
    """Raise `Inexact` for a tensor without values, also one that is neither parameter nor buffer."""
    for module in block.modules():
        for value in vars(module).values():
            if any(t.is_meta for t in _held(value)):
                raise Inexact("a tensor that is neither parameter nor buffer")


def _held(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for child in value:
            yield from _held(child)
    elif isinstance(value, dict):
        for child in value.values():
            yield from _held(child)
