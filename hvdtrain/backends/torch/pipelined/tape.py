"""Recording of a model builder's tensor operations without their memory, and replay of some of them.

A model is built on the device "meta", where tensors have shapes and no values, while every operation is recorded.
`Tape.fill` replays on the host the operations that the wanted tensors come from, in the builder's order; of the others
it draws the random numbers alone, so that the generator advances as in the builder. So a rank gets some blocks of a
model to the bit, and never holds the rest. A builder that looks at values, or has own generators, raises `Inexact`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hvdtrain.backends.torch.placement import cpu_random, set_cpu_random

MOST_VALUES_BYTES = 1 << 26
"""Most bytes of tensors with values (arrays of numpy, a file of weights) that a tape holds."""

CPU, META = torch.device("cpu"), torch.device("meta")

_WITH_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_file, torch.scalar_tensor}
"""Makers of tensors from a caller's values, which they keep."""


OWN_RANDOM = "random numbers from a builder's own generators or seeds"

TRUNCATED = "_no_grad_trunc_normal_"
"""What `torch.nn.init.trunc_normal_` calls: it draws until the numbers are within bounds."""

STATISTICS = ("running_mean", "running_var")
"""Arguments of operations that may be written to, whatever their declaration says."""

_WHERE: dict[Any, Any] = {vars(torch._C.TensorBase)[name].__get__: value
                          for name, value in (("is_meta", False), ("is_cpu", True), ("device", CPU))}
"""What a builder is told of a tensor without values, so that it does what it does on the host."""


class Inexact(Exception):
    """A model cannot be built in parts to the same values."""


class Ref(NamedTuple):
    """A tensor without values: a window of the memory known as ``key``."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Ref:
        """Return the window of a tensor on "meta"."""
        return cls(tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()),
                   int(tensor.storage_offset()))

    def covers(self, nbytes: int) -> bool:
        """Return whether it is all of a memory of ``nbytes``."""
        n = 1
        for dim in self.size:
            n *= dim
        return n * self.dtype.itemsize >= nbytes


class Operation(NamedTuple):
    """``function`` of ``args`` and ``named``, with `Ref` for tensors; ``draws``: random numbers.

    ``reads``, ``writes``: keys of memory. ``made``: what it returned in memory of its own.
    """

    function: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    draws: bool
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[Ref | None, ...]


class _ToMeta(TorchFunctionMode):
    """Gives every tensor that is made without values the device "meta", which it reports as the CPU."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils._device import _device_constructors

        self._makers = set(_device_constructors()) - _WITH_VALUES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _WHERE:
            return _WHERE[func]
        if func in self._makers and torch.device(kwargs.get("device") or "cpu") == CPU:
            kwargs["device"] = META
        return func(*args, **kwargs)


class Tape(TorchDispatchMode):
    """Operations of a builder that is called within it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._held: list[Any] = []
        self._nbytes: dict[int, int] = {}
        self._value_bytes = 0
        self._before: torch.Tensor = cpu_random()
        self._mark: torch.Tensor = self._before
        self._why = ""
        self._covered: set[int] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the body's operations. Errors: `Inexact`, or whatever a builder raises that needs values."""
        self._before = cpu_random()
        torch.manual_seed(0x5EED_07A9E)  # nothing draws from it; whoever seeds or draws is noticed
        self._mark = cpu_random()
        try:
            with _standing_in(list(self._stand_ins())), _ToMeta(), self:
                yield
            self._check_generator()
        finally:
            set_cpu_random(self._before)
        if self._why:
            raise Inexact(self._why)

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield (module, name of a function in it, its replacement while a builder runs)."""
        for name in ("get_rng_state", "set_rng_state", "seed", "initial_seed"):
            for module in (torch, torch.random):
                yield module, name, lambda *_, **__: self._refuse(OWN_RANDOM)
        yield torch, "manual_seed", self._seeded
        yield torch.random, "manual_seed", self._seeded
        own = getattr(torch.nn.init, TRUNCATED, None)
        if own is not None:
            yield torch.nn.init, TRUNCATED, lambda *args, **kwargs: self._drawn(own, *args, **kwargs)

    def _seeded(self, seed: int) -> torch.Generator:
        """Record that the builder seeds PyTorch's generator."""
        self.operations.append(Operation(torch.default_generator.manual_seed, (int(seed),), {}, True, frozenset(),
                                         frozenset(), ()))
        return torch.default_generator

    def _drawn(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record a function that looks at the random numbers it draws as one operation."""
        with torch._C.DisableTorchFunction():
            if not tensor.is_meta or kwargs.get("generator") is not None or args[4:] not in ((), (None,)):
                self._refuse(OWN_RANDOM)
            self._check_generator()
            ref = Ref.of(tensor)
            key = frozenset({ref.key})
            self._covered |= key if ref.covers(self._nbytes[ref.key]) else frozenset()
            self.operations.append(Operation(function, (ref, *args), kwargs, True, key, key, (None,)))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **kwargs)
        returned = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if draws and (any(not t.is_meta for t in (*given, *returned)) or kwargs.get("generator") is not None):
            self._refuse(OWN_RANDOM)
        if any(t.is_meta for t in (*given, *returned)):
            self._record(func, args, kwargs, given, returned, draws)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor],
                returned: Sequence[torch.Tensor], draws: bool) -> None:
        if draws:
            self._check_generator()
        self._held += [t for t in (*given, *returned) if t.is_meta]  # so that no other memory gets a key again
        reads = frozenset(Ref.of(t).key for t in given if t.is_meta)
        for tensor in self._held[-len(given) - len(returned):]:
            self._nbytes[Ref.of(tensor).key] = tensor.untyped_storage().nbytes()
        made = tuple(None if not t.is_meta or Ref.of(t).key in reads else Ref.of(t) for t in returned)
        if any(not t.is_meta for t in returned):
            self._refuse("an operation that reads values")
        written = {Ref.of(t).key for t in _written(func, args, kwargs) if t.is_meta}
        if any(not t.is_meta for t in _written(func, args, kwargs)):
            self._refuse("an operation that writes to a tensor with values")
        writes = frozenset(written | {ref.key for ref in made if ref is not None})
        if writes:
            self._note(func, [*(t for t in _written(func, args, kwargs)), *returned])
            self.operations.append(Operation(func, tree_map(self._kept, args), tree_map(self._kept, kwargs), draws,
                                             reads, writes, made))

    def _note(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Note which memory has all its values; an operation called empty gives none."""
        if "empty" in func.name():
            return
        for tensor in tensors:
            ref = Ref.of(tensor)
            if ref.covers(self._nbytes[ref.key]):
                self._covered.add(ref.key)

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            return Ref.of(value)
        self._value_bytes += value.untyped_storage().nbytes()
        if self._value_bytes > MOST_VALUES_BYTES:
            self._refuse("many values from outside the model")
        return value.detach().clone()

    def _check_generator(self) -> None:
        if not torch.equal(cpu_random(), self._mark):
            self._refuse(OWN_RANDOM)

    def _refuse(self, why: str) -> NoReturn:
        """Raise `Inexact`, also at the end, should the builder continue."""
        self._why = why
        raise Inexact(why)

    def fill(self, wanted: Collection[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return tensors on "meta" with their values on the host, by id; restores random generators."""
        there = {id(t): t.detach() for t in wanted if not t.is_meta}
        wanted = [t for t in wanted if t.is_meta]
        keys = {Ref.of(t).key for t in wanted if t.numel()}
        if keys - self._covered:
            raise Inexact("a tensor without values")
        needed, does = set(keys), set()
        for i in reversed(range(len(self.operations))):
            operation = self.operations[i]
            others = operation.draws and operation.reads - operation.writes
            if operation.writes & needed or others:
                does.add(i)
                needed |= operation.reads
        random = any(self.operations[i].draws for i in does)  # tables and statistics need no numbers drawn
        memory: dict[int, torch.UntypedStorage] = {}
        now = cpu_random()
        set_cpu_random(self._before)
        try:
            with torch.no_grad():
                for i, operation in enumerate(self.operations):
                    if i in does:
                        self._do(operation, memory)
                    elif operation.draws and random:
                        self._do(operation, {})
        finally:
            set_cpu_random(now)
        empty = torch.UntypedStorage(0)
        return there | {id(t): _window(memory.get(Ref.of(t).key, empty), Ref.of(t)) for t in wanted}

    def _do(self, operation: Operation, memory: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                if value.key not in memory:
                    memory[value.key] = torch.UntypedStorage(self._nbytes[value.key])
                return _window(memory[value.key], value)
            return CPU if isinstance(value, torch.device) else value

        named = {name: real(value) if isinstance(value, torch.device) else value
                 for name, value in operation.named.items()}
        args, named = tree_map(real, (operation.args, named), is_leaf=lambda v: isinstance(v, Ref))
        out = operation.function(*args, **named)
        for ref, tensor in zip(operation.made, [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]):
            if ref is not None:
                if Ref.of(tensor)[1:] != ref[1:]:
                    raise Inexact("memory with a different layout without values")
                memory[ref.key] = tensor.untyped_storage()


@contextlib.contextmanager
def _standing_in(functions: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace functions of modules within the body."""
    own = [(module, name, getattr(module, name)) for module, name, _ in functions]
    try:
        for module, name, other in functions:
            setattr(module, name, other)
        yield
    finally:
        for module, name, function in own:
            setattr(module, name, function)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to; BatchNorm's do not declare that they write to its statistics."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write or argument.name in STATISTICS:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in found if isinstance(t, torch.Tensor)]


def _window(storage: torch.UntypedStorage, ref: Ref) -> torch.Tensor:
    return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)
