"""Activation checkpointing of blocks (the key ``remat``): which blocks, and whether they compute the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch.modules import flat_bytes, same_bits
from hvdtrain.backends.torch.placement import synchronize
from hvdtrain.backends.torch.recompute import OUTSIDE, Block, Check, Clock, Frame, Seconds, Storages, block_costs
from hvdtrain.backends.torch.snapshot import Generators, Modules, attributes, attributes_kept
from hvdtrain.backends.torch.stage import TorchStage
from hvdtrain.backends.torch.transforms.sync_batchnorm import SyncBatchNorm
from hvdtrain.core.errors import UserError, some
from hvdtrain.core.protocols import Batch, BlockCost

Named = Sequence[tuple[str, torch.nn.Module]]

ROUNDS = 3
"""Passes in which blocks are timed, after the one that tells bytes; the shortest counts."""


class RecomputedForward:
    """Replacement of a block's forward pass; ``beneath``: the one it replaced, None for the class's own.

    ``storages``: notes what the block saves while it is measured. Copies and pickles have the forward pass beneath.
    """

    def __init__(self, module: torch.nn.Module, block: Block) -> None:
        self.module, self.block = module, block
        self.beneath: Any = vars(module).get("forward")
        block.compute = self.compute
        self.storages: Storages | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Compute the block; where a backward may follow, keep its inputs only."""
        if not torch.is_grad_enabled():
            return self.compute(*args, **named)
        if self.storages is not None:
            self.storages.given(self.block.name, (args, named))
            with torch.autograd.graph.saved_tensors_hooks(self.storages.of(self.block.name), _itself):
                return self.compute(*args, **named)
        return Frame(self.block, args, named).run(args, named)

    def compute(self, *args: Any, **named: Any) -> Any:
        """Compute the block's own forward pass."""
        if self.beneath is not None:
            return self.beneath(*args, **named)
        return type(self.module).forward(self.module, *args, **named)

    def __reduce__(self) -> Any:
        if self.beneath is not None:
            return _itself, (self.beneath,)
        return getattr, (self.module, "forward")


def _itself(value: Any) -> Any:
    return value


class Remat:
    """Implements `hvdtrain.core.protocols.Remat` for the blocks ``named`` of ``model``, which ``stage`` computes.

    ``samples``: returns n samples to try the blocks with; None: they are not tried before they train. ``names``: of all
    blocks, where other ranks have some; this rank recomputes its own.
    """

    collective = False

    def __init__(self, model: torch.nn.Module, named: Named, stage: TorchStage, sync: SyncBatchNorm | None,
                 samples: Callable[[int], Batch] | None, names: Sequence[str] = ()) -> None:
        self._model, self._named, self._stage, self._samples = model, dict(named), stage, samples
        self.names: Sequence[str] = list(names or self._named)
        self.chosen: tuple[str, ...] = ()
        generators, kinds = Generators(stage.devices), sorted({d.type for d in stage.devices})
        tapes = [] if sync is None else sync.tapes
        self._blocks = {name: Block(name, module, generators, kinds, tapes) for name, module in named
                        if isinstance(module, torch.nn.Module)}
        self._placed: dict[str, RecomputedForward] = {}
        self._installed = False
        self._refusals: dict[str, str] | None = None

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        self._installed = True
        for name in self.chosen:
            module = self._named[name]
            if not isinstance(vars(module).get("forward"), RecomputedForward):
                placed = RecomputedForward(module, self._blocks[name])
                self._placed[name] = vars(module)["forward"] = placed

    def remove(self, model: torch.nn.Module) -> None:
        self._installed = False
        self._take_off()

    def _take_off(self) -> None:
        for placed in self._placed.values():
            own = vars(placed.module)
            if own.get("forward") is not placed:
                continue  # somebody else has put another one there
            if placed.beneath is None:
                del own["forward"]
            else:
                own["forward"] = placed.beneath
        self._placed = {}

    def choose(self, names: Collection[str]) -> None:
        self._take_off()
        self.chosen = tuple(name for name in self._named if name in names)
        if self._installed:
            self.install(self._model)

    def refusal(self, name: str) -> str:
        """Return why a block cannot be recomputed exactly; the first call tries all blocks, and restores everything."""
        if self._refusals is None:
            self._refusals = refusals(self._model, self._named)
            left = [n for n in self._named if n not in self._refusals]
            if self._samples is not None and left:
                batch = self._samples(TRIED)
                self._refusals |= Trial(self._model, left, lambda: self._computing(batch), self._recomputing,
                                        self._stage.generators.state).refusals()
        return self._refusals.get(name, "")

    def _computing(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        for param in self._model.parameters():
            param.grad = None
        return self._stage.once(batch)

    @contextlib.contextmanager
    def _only(self, names: Collection[str]) -> Iterator[list[RecomputedForward]]:
        """Recompute these blocks within the body."""
        chosen, installed = self.chosen, self._installed
        self._installed = True
        try:
            self.choose(names)
            yield list(self._placed.values())
        finally:
            self._installed = installed
            self.choose(chosen)

    @contextlib.contextmanager
    def _recomputing(self, names: Collection[str], check: Check) -> Iterator[None]:
        """Recompute and check these blocks within the body."""
        with self._only(names) as placed:
            for one in placed:
                one.block.check = check
            try:
                yield
            finally:
                for one in placed:
                    one.block.check = None

    def costs(self, batch: Batch) -> list[BlockCost]:
        names = [name for name in self._named if not self.refusal(name)]
        storages = Storages((*self._model.parameters(), *self._model.buffers()))
        with self._only(names) as placed:
            for one in placed:
                one.storages = storages
            with torch.autograd.graph.saved_tensors_hooks(storages.of(OUTSIDE), _itself):
                self._stage.trial(batch)
            rounds = []
            for one in placed:
                one.storages = None
            for _ in range(1 + ROUNDS):
                clock = Seconds(partial(synchronize, self._stage.devices))
                for one in placed:
                    one.block.clock = clock
                self._stage.trial(batch)
                rounds.append(clock)
            for one in placed:
                one.block.clock = Clock()
        return block_costs(names, storages, rounds[1:])

    def describe(self) -> dict[str, str]:
        return {"recomputed": ", ".join(self.chosen)} if self.chosen else {}

    def caveats(self) -> list[str]:
        """Return []: it is exact."""
        return []


TRIED = 2
"""Samples that blocks are tried with: BatchNorm needs two."""


def refusals(model: torch.nn.Module, named: Mapping[str, Any]) -> dict[str, str]:
    """Return why blocks of ``model`` cannot be recomputed, as far as their modules show it, by name."""
    if _compiled(model):
        return dict.fromkeys(named, "the model was given to torch.compile, which computes blocks in its own way "
                                    "(hvdtrain compiles with compile: auto)")
    return {name: why for name, block in named.items() if (why := _why(block))}


def _why(block: Any) -> str:
    if not isinstance(block, torch.nn.Module):
        return f"it is a {type(block).__name__}, not a module"
    if _compiled(block):
        return "it was given to torch.compile (hvdtrain compiles with compile: auto)"
    for name, module in block.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'it'} is compiled by torch.jit"
        if name and (hook := _hook(module)):
            return f"module {name} in it has a forward hook {hook}, which would be called twice"
    return ""


def _compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _hook(module: torch.nn.Module) -> str:
    """Return the name of a user's hook; "" without one. Old spectral and weight norms are hooks."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    for hook in hooks:
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.partition(".")[0] not in ("torch", "hvdtrain"):
            return str(getattr(hook, "__qualname__", type(hook).__name__))
    return ""


Recomputing = Callable[[Sequence[str], Check], contextlib.AbstractContextManager[None]]
Computing = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class PassResult:
    """Results of one pass by kind and name, and observations while blocks were computed again."""

    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    error: str = ""

    def differs(self, other: PassResult) -> list[str]:
        """Return what of it is not in ``other`` to the bit."""
        return [f"{kind} {name}".rstrip() for kind, values in self.left.items() for name, value in values.items()
                if not equal(value, other.left[kind].get(name))]


class Trial:
    """Computes a batch with and without recomputing the blocks ``names`` of ``model``, and compares to the bit.

    Compares gradients, buffers, parameters that a forward pass writes, attributes, random generators, and the tensors
    that a block saves for backward, which show a mask even where its gradient is zero so far. Where a device gives
    other gradients each time, gradients do not count.

    ``computing``: a context that computes a batch's gradients, available within it, and restores buffers and
    generators. ``recomputing``: a context in which some blocks are recomputed. ``states``: of generators, by name.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str], computing: Computing, recomputing: Recomputing,
                 states: Callable[[], dict[str, np.ndarray]]) -> None:
        self._model, self._names, self._states = model, names, states
        self._computing, self._recomputing = computing, recomputing
        self._modules = Modules(model)

    def refusals(self) -> dict[str, str]:
        """Return why blocks cannot be recomputed exactly, by name."""
        with self._parameters_kept():
            plain, twice = self._pass(()), self._pass(())
            noise = set(twice.differs(plain))
            every = self._pass(self._names)
            found = {name: "its forward pass is not called when the model computes a batch"
                     for name in self._names if name not in every.check.called and not every.error}
            if not self._why(every, plain, noise) and not every.check.differ:
                return found
            for name in self._names:
                if name not in found and (why := self._why(self._pass([name]), plain, noise, name)):
                    found[name] = why
            return found

    @contextlib.contextmanager
    def _parameters_kept(self) -> Iterator[None]:
        """Restore parameters after the body: some forward passes write to them."""
        before = [(p, p.detach().clone()) for p in self._model.parameters()]
        try:
            yield
        finally:
            for param, copy in before:
                if not same_bits(param, copy):
                    param.data.copy_(copy)

    def _why(self, one: PassResult, plain: PassResult, noise: set[str], name: str = "") -> str:
        """Return what is wrong with a pass, or ""."""
        if one.error:
            return one.error
        wrong = [words for words in one.differs(plain) if words not in noise]
        if wrong:
            return f"recomputation changes values: {some(wrong)}"
        if name in one.check.differ:
            return "it saves different values for backward when recomputed"
        return ""

    def _pass(self, names: Sequence[str]) -> PassResult:
        found = PassResult()
        try:
            with attributes_kept(self._modules), self._recomputing(names, found.check), self._computing():
                found.left = self._left()
        except UserError as error:
            if not names:
                raise
            found.error = str(error)
        except Exception as error:  # a user's code, which ran without remat
            if not names:
                raise
            found.error = f"recomputing it raises {type(error).__name__}: {error}"
        return found

    def _left(self) -> dict[str, dict[str, Any]]:
        """Return the results of a pass; of tensors of the model a digest, since three passes are compared."""
        model = self._model
        return {
            "the gradient of": {n: p.grad if p.grad is None else digest(p.grad) for n, p in model.named_parameters()},
            "parameter": {n: digest(p) for n, p in model.named_parameters()},
            "buffer": {n: digest(b) for n, b in model.named_buffers()},
            "attribute": attributes(self._modules),
            "random generator": self._states(),
        }


def digest(tensor: torch.Tensor) -> bytes:
    own = tensor.detach()
    own = (own if own.layout == torch.strided else own.to_dense()).cpu()
    return hashlib.blake2b(flat_bytes(own).numpy().data, digest_size=16).digest()


def equal(one: Any, other: Any) -> bool:
    """Return whether tensors, arrays, numbers, texts and containers are equal, or other values of one type."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (int, float, complex, str, bytes, set, frozenset)):
        return bool(one == other) or one != one
    return True
