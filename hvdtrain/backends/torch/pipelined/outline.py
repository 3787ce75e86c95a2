"""The outline of a PyTorch model: built as its user builds it, but without the memory of its tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.backends.torch import keras
from hvdtrain.backends.torch.pipelined.by_block import ByBlock
from hvdtrain.backends.torch.pipelined.tape import MOST_VALUES_BYTES, Inexact, Tape
from hvdtrain.cluster.machine import memory


def outline(make: Callable[[], Any], names: Callable[[], Any] | None = None,
            build_block: Callable[[str], Any] | None = None) -> Any:
    """Return what ``make`` builds with its parameters and buffers on the device "meta", which holds no values.

    It is built there at once, and what its builder does is recorded. Where that cannot be, its blocks are built one
    after the other, if the model file builds blocks (``names``, ``build_block``); else it is built on the host, whose
    memory is given back. A model of Keras, which cannot be cut, is returned as it is. `source_of` tells what fills it.
    """
    tape = Tape()
    try:
        with tape.recording():
            model = make()
        if not isinstance(model, torch.nn.Module) or keras.is_keras(model):
            raise Inexact("a model that is none of PyTorch's own")
        if sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if not t.is_meta) > MOST_VALUES_BYTES:
            raise Inexact("many values that come from elsewhere")
        _SOURCES[model] = tape
    except Exception as error:  # noqa: BLE001 a user's code, which may look at values
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
    """Return why an outline cannot be filled in parts, in words; "" where it can, or is none."""
    return _WHY.get(model, "")


def source_of(model: torch.nn.Module) -> Tape | ByBlock | None:
    """Return what fills the blocks of an outline; None where the model is to be built whole."""
    return _SOURCES.get(model)


def free() -> None:
    """Give the memory of what nobody holds any more back to the host."""
    gc.collect()
    memory.give_back()
