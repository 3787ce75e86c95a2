"""Blocks that keep only their inputs from forward to backward, and are computed once more there (the key ``remat``).

Owns which blocks those are, and the forward pass that stands in for theirs. How a block is computed again exactly,
whether it can be, and what that saves and costs are `hvdtrain.backends.torch.recompute`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hvdtrain.backends.torch.placement import synchronize
from hvdtrain.backends.torch.recompute.costs import OUTSIDE, Seconds, Storages, found
from hvdtrain.backends.torch.recompute.frame import Block, Check, Clock, Frame
from hvdtrain.backends.torch.recompute.random import Generators
from hvdtrain.backends.torch.recompute.trial import Trial
from hvdtrain.backends.torch.stage import TorchStage
from hvdtrain.backends.torch.transforms.sync_batchnorm import SyncBatchNorm
from hvdtrain.core.protocols import Batch, BlockCost

Named = Sequence[tuple[str, torch.nn.Module]]

ROUNDS = 3
"""Passes in which blocks are timed, after the one that tells bytes; the shortest counts."""


class Recomputed:
    """Stands in for the forward pass of a block; ``beneath``: what stood there before, None for the class's own.

    ``storages``: while it is measured what the block saves, which it then keeps. A copy or a pickle of the block has
    the forward pass beneath.
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
        """The block's own forward pass."""
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

    ``samples``: gives so many samples to try the blocks with; None: they are not tried before they train. ``names``: of
    all blocks, where other ranks have some; this rank recomputes its own.
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
        self._placed: dict[str, Recomputed] = {}
        self._installed = False
        self._refusals: dict[str, str] | None = None

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        """Have the chosen blocks recomputed, from now on."""
        self._installed = True
        for name in self.chosen:
            module = self._named[name]
            if not isinstance(vars(module).get("forward"), Recomputed):
                placed = Recomputed(module, self._blocks[name])
                self._placed[name] = vars(module)["forward"] = placed

    def remove(self, model: torch.nn.Module) -> None:
        """Give every block its own forward pass back."""
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
        """Recompute these blocks and no others from the next step on."""
        self._take_off()
        self.chosen = tuple(name for name in self._named if name in names)
        if self._installed:
            self.install(self._model)

    def refusal(self, name: str) -> str:
        """Return why a block cannot be recomputed exactly, in words; "" where it can.

        The first call tries all blocks with a few samples; nothing of that remains.
        """
        if self._refusals is None:
            self._refusals = told(self._model, self._named)
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
    def _only(self, names: Collection[str]) -> Iterator[list[Recomputed]]:
        """Within it, these blocks are recomputed."""
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
        """Within it, these blocks are recomputed and looked at."""
        with self._only(names) as placed:
            for one in placed:
                one.block.check = check
            try:
                yield
            finally:
                for one in placed:
                    one.block.check = None

    def costs(self, batch: Batch) -> list[BlockCost]:
        """Measure every block on ``batch``: bytes in one pass, seconds to compute it again in a few more."""
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
        return found(names, storages, rounds[1:])

    def describe(self) -> dict[str, str]:
        """Return the recomputed blocks, for the summary."""
        return {"recomputed": ", ".join(self.chosen)} if self.chosen else {}

    def caveats(self) -> list[str]:
        """Return nothing: it is exact."""
        return []


TRIED = 2
"""Samples that blocks are tried with: BatchNorm needs two."""


def told(model: torch.nn.Module, named: Mapping[str, Any]) -> dict[str, str]:
    """Return why, by name, for those blocks of ``model``."""
    if _compiled(model):
        return dict.fromkeys(named, "the model was given to torch.compile, which computes blocks its own way "
                                    "(hvdtrain compiles with compile: auto)")
    return {name: why for name, block in named.items() if (why := _why(block))}


def _why(block: Any) -> str:
    if not isinstance(block, torch.nn.Module):
        return f"it is a {type(block).__name__} and no module"
    if _compiled(block):
        return "it was given to torch.compile (hvdtrain compiles with compile: auto)"
    for name, module in block.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'it'} is compiled by torch.jit"
        if name and (hook := _hook(module)):
            return f"module {name} in it has a forward hook {hook}, which would be called once more"
    return ""


def _compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _hook(module: torch.nn.Module) -> str:
    """The name of a user's hook; "" without one. Old spectral and weight norms are hooks, and channels_last is."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    for hook in hooks:
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.partition(".")[0] not in ("torch", "hvdtrain"):
            return str(getattr(hook, "__qualname__", type(hook).__name__))
    return ""
