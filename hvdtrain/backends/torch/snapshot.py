"""State around a forward pass: buffers, attributes and random generators, as they were when it began.

Buffers are replaced by copies, not written to, so that autograd counts no write to the model's.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.backends.torch.placement import cpu_random, set_cpu_random
from hvdtrain.core.errors import UserError

LARGE = 1 << 16
"""Elements of a buffer that is copied only where it has been seen to change."""
FEW = 64
"""Entries of an attribute's containers up to which they are copied."""

_OWN = frozenset(vars(torch.nn.Module())) | {"forward"}
"""Attributes that every module has; ``forward``: what transforms put there."""
_GONE = object()
_CONTAINERS = (list, dict, set, deque)


class Modules:
    """The modules of a block, and which of their large buffers change in a forward pass (``written``).

    Among ``named`` are objects of a user's own classes that the modules have as attributes: they may count as well.
    """

    def __init__(self, block: torch.nn.Module) -> None:
        self.named: list[tuple[str, Any]] = [(f"{n}." if n else "", module) for n, module in block.named_modules()]
        self.written = {id(module) for _, module in self.named if isinstance(module, _BatchNorm)}
        self.learnt = False
        self.named += {id(value): (f"{prefix}{name}.", value) for prefix, module in self.named
                       for name, value in vars(module).items() if name not in _OWN and _plain(value)}.values()


def _plain(value: Any) -> bool:
    """Return whether a value is an object with attributes of a class that is neither Python's nor a framework's."""
    home = type(value).__module__.partition(".")[0]
    others = home in sys.stdlib_module_names or home in ("torch", "numpy", "keras")
    return (hasattr(value, "__dict__") and not others
            and not isinstance(value, (torch.nn.Module, torch.Tensor, type)))


class Memory:
    """Buffers and attributes of a block from one moment on; `settle` keeps what has changed since then."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._buffers: list[tuple[str, dict[str, Any], str, torch.Tensor, int, torch.Tensor | None]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for prefix, module in modules.named:
            own = vars(module)
            self._attributes.append((own, {k: copied(v) for k, v in own.items() if k not in _OWN}))
            for name, buffer in own.get("_buffers", {}).items() if isinstance(module, torch.nn.Module) else ():
                if buffer is not None:
                    small = buffer.numel() < LARGE or id(module) in modules.written or not modules.learnt
                    copy = buffer.detach().clone() if small else None
                    self._buffers.append((prefix + name, own["_buffers"], name, buffer, buffer._version, copy))

    def settle(self) -> None:
        """Keep the copies of what forward has changed; `UserError` for a large buffer that changes newly."""
        kept = []
        for entry in self._buffers:
            title, holder, name, buffer, version, copy = entry
            now = holder.get(name)
            if now is buffer and buffer._version == version and (copy is None or _same(copy, buffer)):
                continue
            if copy is None:
                raise UserError(f"buffer {title} changes in a forward pass, and did not before",
                                "buffers that change in all passes or in none", "exclude its block from remat")
            if buffer.numel() >= LARGE:
                self._modules.written |= {id(m) for _, m in self._modules.named if vars(m).get("_buffers") is holder}
            kept.append(entry)
        self._buffers = kept
        self._modules.learnt = True
        self._attributes = [(own, changed) for own, before in self._attributes if (changed := _changed(own, before))]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore buffers and attributes of then for the body; after it, those of now."""
        buffers = [(holder, name, holder[name]) for _, holder, name, _, _, copy in self._buffers if copy is not None]
        attributes = [(own, {k: own.get(k, _GONE) for k in before}) for own, before in self._attributes]
        try:
            for _, holder, name, _, _, copy in self._buffers:
                if copy is not None:
                    holder[name] = copy.clone()
            for own, before in self._attributes:
                _assign(own, {k: copied(v) for k, v in before.items()})
            yield
        finally:
            for holder, name, buffer in buffers:
                holder[name] = buffer
            for own, now in attributes:
                _assign(own, now)


@contextlib.contextmanager
def attributes_kept(modules: Modules) -> Iterator[None]:
    """Restore attributes, generators and small tensors of ``modules`` after the body, not of Keras' layers."""
    own = [vars(m) for _, m in modules.named if not of_keras(m)]
    before = [(values, {k: copied(v) for k, v in values.items() if k not in _OWN}) for values in own]
    backs = [back for values in own for k, v in values.items() if k not in _OWN and (back := _way_back(v))]
    try:
        yield
    finally:
        for values, found in before:
            _assign(values, _changed(values, found))
        for back in backs:
            back()


def of_keras(module: Any) -> bool:
    return any(c.__module__.partition(".")[0] == "keras" for c in type(module).__mro__)


def _way_back(value: Any) -> Callable[[], Any] | None:
    """Return what restores the state of now to a generator or a small tensor or array; None for others."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray) and value.size < LARGE and value.flags.writeable and value.dtype != object:
        return partial(np.copyto, value, value.copy())
    if isinstance(value, torch.Tensor) and value.numel() < LARGE and value.layout == torch.strided:
        return partial(_write_back, value, value._version, value.detach().clone())
    return None


def _write_back(tensor: torch.Tensor, version: int, copy: torch.Tensor) -> None:
    if tensor._version != version or not _same(copy, tensor):
        with torch.no_grad():
            tensor.detach().copy_(copy)


def attributes(modules: Modules) -> dict[str, Any]:
    """Return copies of the attributes that users gave to ``modules``, by name."""
    return {prefix + k: copied(v.detach().clone() if isinstance(v, torch.Tensor) else v)
            for prefix, m in modules.named for k, v in vars(m).items() if k not in _OWN}


def _same(copy: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Return whether a buffer is unchanged; False on a GPU, where the answer would have to wait."""
    return copy.device.type == "cpu" and torch.equal(copy, buffer)


def _assign(own: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _GONE:
            own.pop(name, None)
        else:
            own[name] = value


def _changed(own: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``before`` that are others now, and those that were not there."""
    found = {k: v for k, v in before.items() if k not in own or not _alike(v, own[k])}
    if len(own) - len(before) + len(found) > 0:
        found |= {k: _GONE for k in own if k not in before and k not in _OWN}
    return found


def copied(value: Any) -> Any:
    """Return a copy of lists, dicts and sets with at most `FEW` entries, and of such in them; anything else itself."""
    if type(value) not in _CONTAINERS or len(value) > FEW:
        return value
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return type(value)(copied(v) for v in value)


def _alike(copy: Any, value: Any) -> bool:
    """Return whether ``value`` is what `copied` made ``copy`` of, unchanged."""
    if copy is value:
        return True
    if type(copy) is not type(value) or type(copy) not in _CONTAINERS or len(copy) != len(value):
        return False
    if isinstance(copy, dict):
        return all(k in value and _alike(v, value[k]) for k, v in copy.items())
    return all(map(_alike, copy, value))


States = dict[str, Any]

_MT19937_BYTES = 4 * 624 + 4
"""Of numpy's struct: 624 words and the position among them."""


class Generators:
    """Python's, numpy's and PyTorch's own generators, on the CPU and on ``devices``; no generator of a model's own.

    States are in the formats of each library: as arrays they would take ten times as long.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = {str(d): d for d in devices if d.type == "cuda"}
        self._numpy = _Numpy()

    def take(self) -> States:
        found: States = {"python": random.getstate(), "numpy": self._numpy.take(), "torch": cpu_random()}
        for name, device in self._cuda.items():
            found[name] = torch.cuda.get_rng_state(device)
        return found

    def put(self, states: States) -> None:
        for name, state in states.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                self._numpy.put(state)
            elif name == "torch":
                set_cpu_random(state)
            else:
                torch.cuda.set_rng_state(state, self._cuda[name])

    def drawn_from(self, before: States) -> States:
        """Return those of ``before`` that have moved on since."""
        now = self.take()
        return {name: state for name, state in before.items() if not _EQUAL.get(name, torch.equal)(state, now[name])}


class _Numpy:
    """numpy's global generator, whose `numpy.random.get_state` takes 40 us: asked only if its words have changed.

    A normal number that is kept for the next draw is in no word, so a state with one is never taken for the same.
    """

    def __init__(self) -> None:
        self._module: Any = np.random
        self._words, self._state = b"", self._module.get_state()

    def take(self) -> Any:
        """Return what `numpy.random.set_state` takes; the same object where nothing was drawn in between."""
        words = self._read()
        if not words or words != self._words or self._state[3]:
            self._words, self._state = words, self._module.get_state()
        return self._state

    def put(self, state: Any) -> None:
        np.random.set_state(state)
        self._words = b""

    def _read(self) -> bytes:
        """Return the words of the generator in its memory; none where it is of another kind."""
        found = self._module.get_bit_generator()
        if type(found).__name__ != "MT19937":
            return b""
        return ctypes.string_at(found.ctypes.state_address, _MT19937_BYTES)


def _numpy_equal(one: Any, other: Any) -> bool:
    return one is other or one[2:] == other[2:] and np.array_equal(one[1], other[1])


_EQUAL: dict[str, Callable[[Any, Any], bool]] = {"python": lambda a, b: a == b, "numpy": _numpy_equal}
