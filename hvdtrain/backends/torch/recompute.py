"""Second forward pass of a block in backward, whose first pass keeps its inputs only, and its costs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.modules import same_bits
from hvdtrain.backends.torch.snapshot import Generators, Memory, Modules
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import BlockCost

LOCK = threading.RLock()
"""Held while a block is computed again: of a split model each device has a thread in backward, and the random
generators are those of the process."""


NEAR = 8
"""Most tensors that one operation saves."""


class EndOfPass(BaseException):
    """Ends the second pass once all that is needed is made. Not an `Exception`, which a block's own code may catch."""


class SavedTensor:
    """Placeholder of a tensor that a forward pass saved for backward; ``value``: that tensor, once recomputed.

    It lives as long as the operation whose backward needs it, and so does ``value``. ``first``: the tensor at the end
    of the first pass, kept while the block is tried.
    """

    __slots__ = ("frame", "like", "value", "first", "__weakref__")

    def __init__(self, frame: Frame, like: tuple[Any, ...]) -> None:
        self.frame, self.like = frame, like
        self.value: torch.Tensor | None = None
        self.first: torch.Tensor | None = None


class Block:
    """A block and how it computes.

    ``compute``: its forward pass. ``tapes``: what joint statistics of several ranks are recorded on, innermost last.
    ``writes``: it writes to its inputs, which are copied then. ``learnt``: one pass has shown that. ``late``: numbers
    of the saved tensors that the operation which saves them writes to; None before a `Check`: it runs to its end.
    """

    def __init__(self, name: str, module: torch.nn.Module, generators: Generators, kinds: list[str],
                 tapes: list[Tape]) -> None:
        self.name, self.generators, self.kinds, self.tapes = name, generators, kinds, tapes
        self.compute: Callable[..., Any] = module.forward
        self.modules = Modules(module)
        self.writes = self.learnt = False
        self.late: set[int] | None = None
        self.check: Check | None = None
        self.clock = Clock()

    def refused(self, why: str) -> UserError:
        """Return the error of a block that does not compute the same again."""
        return UserError(f"remat: block {self.name} {why}", "a block that recomputes the same values from its inputs, "
                         "buffers and the random generators of Python, numpy and "
                         "PyTorch", "exclude the block from remat")


class Check:
    """Observations while blocks are tried: those called, and those that save other bits the second time."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.differ: set[str] = set()
        self._begun: dict[SavedTensor, torch.Tensor] = {}

    def begin(self, saved: SavedTensor, tensor: torch.Tensor) -> None:
        """Note a tensor as it is when it is saved."""
        saved.first = tensor.detach()
        self._begun[saved] = saved.first.clone()

    def first(self, block: Block, all_saved: list[weakref.ref[SavedTensor]]) -> None:
        """Compare all of them at the end of the first pass: torch.rrelu fills in its noise when that is saved."""
        self.called.add(block.name)
        block.late = block.late or set()
        for number, ref in enumerate(all_saved):
            saved = ref()
            begun = None if saved is None else self._begun.pop(saved, None)
            if saved is not None and saved.first is not None and begun is not None:
                if not same_bits(begun, saved.first):
                    block.late.add(number)
                    saved.first = saved.first.clone()

    def second(self, block: Block, all_saved: list[weakref.ref[SavedTensor]]) -> None:
        """Compare. Memory of bytes, such as an LSTM's workspace, has gaps that are never written or read."""
        for saved in (ref() for ref in all_saved):
            if saved is not None and saved.value is not None and saved.first is not None:
                if saved.value.dtype != torch.uint8 and not same_bits(saved.first, saved.value):
                    self.differ.add(block.name)


class Clock:
    """Observer of second passes."""

    def start(self) -> None:
        """Note that a block is about to be computed again."""

    def stop(self, block: Block) -> None:
        """Note that ``block`` has been computed again."""


class Tape:
    """Values that a forward pass got from other ranks, in order, for the pass that may not ask them again."""

    def __init__(self, items: list[Any] | None = None) -> None:
        self.items: list[Any] = [] if items is None else items
        self.replays, self._at = items is not None, 0

    def next(self) -> Any:
        """Return the value at this place of the first pass."""
        self._at += 1
        return self.items[self._at - 1]


class Frame:
    """A call of ``block`` that keeps its inputs only.

    PyTorch lets a pass hand over the tensors that it saves for backward and asks for each when it is needed
    (`torch.autograd.graph.saved_tensors_hooks`). The graph of the first pass is the one that backward walks: the second
    fills in the same tensors, in the order in which they are saved, so gradients are made by the same operations in the
    same order. The second pass ends with the last tensor that is asked for.
    """

    def __init__(self, block: Block, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._block = block
        copies = block.writes or not block.learnt
        self._inputs = tree_map(_copy if copies else _itself, (args, named))
        self._watched = [(t, t._version) for t in tree_tensors((args, named))]
        self._random = block.generators.take()
        self._memory = Memory(block.modules)
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                          for kind in block.kinds]
        self._tape = Tape()
        self._saved: list[weakref.ref[SavedTensor]] = []

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute the block, the first time."""
        block = self._block
        block.tapes.append(self._tape)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._hand_over, _ask_for):
                out = block.compute(*args, **named)
        finally:
            block.tapes.remove(self._tape)
        self._random = block.generators.drawn_from(self._random)
        self._memory.settle()
        self._settle_inputs(args, named)
        if block.check:
            block.check.first(block, self._saved)
        return out

    def _settle_inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the inputs themselves unless the block has written to them."""
        block = self._block
        wrote = any(t._version != version for t, version in self._watched)
        if wrote and block.learnt and not block.writes:
            raise block.refused("writes to its input, and did not in the first pass")
        block.writes, block.learnt = block.writes or wrote, True
        if not block.writes:
            # The copies of containers stay: a block may fill a list or dict that it is given.
            originals = iter([t for t, _ in self._watched])
            self._inputs = tree_map(lambda t: next(originals), self._inputs)
        else:
            self._watched = []

    def _hand_over(self, tensor: torch.Tensor) -> SavedTensor:
        saved = SavedTensor(self, (tensor.shape, tensor.dtype, tensor.device))
        if self._block.check:
            self._block.check.begin(saved, tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def value(self, saved: SavedTensor) -> torch.Tensor:
        """Return the tensor that ``saved`` stands for."""
        if saved.value is None:
            with LOCK:
                self._again()
        if saved.value is None:
            raise self._block.refused("saved fewer tensors when recomputed")
        return saved.value

    def _again(self) -> None:
        """Compute the block again, as far as what is still needed."""
        needed = [i for i, ref in enumerate(self._saved) if (saved := ref()) is not None and saved.value is None]
        if not needed:
            return
        if any(t._version != version for t, version in self._watched):
            raise self._block.refused("has an input that was modified afterwards")
        block, tape = self._block, Tape(self._tape.items)
        now = block.generators.take() if self._random else {}
        with contextlib.ExitStack() as stack:
            block.clock.start()
            stack.callback(block.clock.stop, block)
            stack.enter_context(self._memory.put_back())
            stack.callback(block.generators.put, {name: now[name] for name in self._random})
            block.generators.put(self._random)
            block.tapes.append(tape)
            stack.callback(block.tapes.remove, tape)
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._filler(needed[-1]), _itself))
            with contextlib.suppress(EndOfPass):
                args, named = tree_map(_written if block.writes else _alias, self._inputs)
                block.compute(*args, **named)
            if block.check:
                block.check.second(block, self._saved)

    def _filler(self, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the hook that takes the tensors of the second pass, and ends it after number ``last``.

        The operation that saves that one has not computed by then, which is fine unless it also writes to it.
        """
        late = self._block.late
        if late is None or any(last - NEAR < number <= last for number in late):
            last = len(self._saved)
        at = -1

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal at
            at += 1
            saved = self._saved[at]() if at < len(self._saved) else None
            value = tensor.detach()
            if saved is not None:
                if saved.like != (value.shape, value.dtype, value.device):
                    raise self._block.refused("saved different tensors when recomputed")
                saved.value = value
            if at == last:
                raise EndOfPass
            return value
        return fill


def _ask_for(saved: SavedTensor) -> torch.Tensor:
    return saved.frame.value(saved)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values for the second pass, so that hooks it gives to its input are not the input's."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be written to: not a leaf."""
    return _alias(tensor).clone()


def tree_map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with new lists, tuples and dicts, and every tensor changed."""
    # Not torch.utils._pytree's, which takes 30 times as long (37 us for one tensor), several times for each block.
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(tree_map(change, v) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(tree_map(change, v) for v in value))
    if type(value) is dict:
        return {k: tree_map(change, v) for k, v in value.items()}
    return value


def tree_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of ``value`` in the order of `tree_map`."""
    found: list[torch.Tensor] = []
    tree_map(lambda t: found.append(t) or t, value)  # type: ignore[func-returns-value]
    return found


OUTSIDE = ""
"""Stands for what is no block."""


class Storages:
    """Memory saved for backward: bytes of each storage, by block.

    Memory that only a block saves is what recomputing it spares, except its inputs (which recomputing needs),
    parameters, buffers and what other blocks save too. All of it is held until this goes, so that an address stays that
    of one storage.
    """

    def __init__(self, lasting: Iterable[torch.Tensor]) -> None:
        self._lasting = {t.untyped_storage().data_ptr() for t in lasting}
        self._held: list[Any] = []
        self._saved: dict[str, dict[int, int]] = {OUTSIDE: {}}
        self._inputs: dict[str, dict[int, int]] = {}

    def of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the hook that notes what ``name`` saves."""
        saved = self._saved.setdefault(name, {})

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._note(saved, tensor)
            return tensor
        return note

    def given(self, name: str, inputs: Any) -> None:
        """Note the inputs of a block."""
        for tensor in tree_tensors(inputs):
            self._note(self._inputs.setdefault(name, {}), tensor)

    def _note(self, into: dict[int, int], tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._held.append(tensor.detach())
            into[storage.data_ptr()] = storage.nbytes()

    def inner_bytes(self, name: str) -> int:
        """Return the bytes that only this block keeps from its forward pass to its backward, its inputs left out."""
        return sum(n for key, n in self._saved.get(name, {}).items()
                   if key not in self._inputs.get(name, {}) and not self._kept_by_others(name, key))

    def extra_bytes(self, name: str) -> int:
        """Return the bytes of the block's inputs that are kept only if it is recomputed."""
        return sum(n for key, n in self._inputs.get(name, {}).items()
                   if key not in self._saved.get(name, {}) and not self._kept_by_others(name, key))

    def _kept_by_others(self, name: str, key: int) -> bool:
        return key in self._lasting or any(key in saved for other, saved in self._saved.items() if other != name)


class Seconds(Clock):
    """Seconds of each block's second passes, over all its calls in one pass."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = synchronize
        self._begun = 0.0

    def start(self) -> None:
        self._synchronize()
        self._begun = time.perf_counter()

    def stop(self, block: Block) -> None:
        self._synchronize()
        self.seconds[block.name] = self.seconds.get(block.name, 0.0) + time.perf_counter() - self._begun


def block_costs(names: Sequence[str], storages: Storages, rounds: Sequence[Seconds]) -> list[BlockCost]:
    """Return the costs of the blocks ``names``; of several rounds the shortest seconds count."""
    return [BlockCost(name, storages.inner_bytes(name) - storages.extra_bytes(name),
                      min(r.seconds.get(name, 0.0) for r in rounds), storages.inner_bytes(name)) for name in names]
