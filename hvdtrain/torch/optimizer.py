"""`DistributedOptimizer`: an optimizer of PyTorch whose gradients are summed over ranks before its update.

Owns Horovod's interface around a step. The exchange is `hvdtrain.torch.exchange`'s, or Horovod's own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain import job
from hvdtrain.backends.torch.gradients import hooked
from hvdtrain.backends.torch.optim import updating_fused
from hvdtrain.cluster import horovod
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.machine import memory
from hvdtrain.comm.compression import kind_of
from hvdtrain.core.errors import NotSupported, UserError, WrongValue
from hvdtrain.core.process_sets import Adasum, Average, ProcessSet, Sum, global_process_set
from hvdtrain.torch import basics
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.exchange import ParameterExchange
from hvdtrain.torch.functions import loading
from hvdtrain.torch.gradient_plan import WHAT, ExchangeSettings


class WrongOrder(UserError, AssertionError):
    """Calls of an optimizer in an order that would lose gradients."""


class _Passes:
    """Backward passes since the last exchange: how many each parameter has seen, and how many it may."""

    def __init__(self, per_step: int) -> None:
        self.per_step, self.seen = per_step, False
        self._counters: list[list[int]] = []
        self._watched: set[int] = set()

    def watch(self, param: torch.Tensor) -> None:
        """Count the gradients of a parameter, once."""
        if id(param) in self._watched:
            return
        self._watched.add(id(param))
        counter = [0]
        self._counters.append(counter)

        def computed(_: torch.Tensor) -> None:
            self.seen = True
            counter[0] += 1
            if counter[0] > self.per_step:
                raise WrongOrder(f"more than {self.per_step} backward passes before optimizer.step()",
                                 f"at most backward_passes_per_step={self.per_step}",
                                 "raise backward_passes_per_step to accumulate gradients")
        hooked(param, computed)

    def reset(self) -> None:
        """Begin to count from 0."""
        self.seen = False
        for counter in self._counters:
            counter[0] = 0


class _ExchangingOptimizer(torch.optim.Optimizer):
    """Methods that come before those of the user's own optimizer class; made by `DistributedOptimizer`."""

    _hvd_passes: _Passes
    _hvd_exchange: ParameterExchange | None
    _hvd_ranks: int
    _parameter_names: dict[torch.Tensor, str]
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _synchronized: bool
    _should_synchronize: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Return the number of backward passes that a step sums."""
        return self._hvd_passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that a step sums."""
        self._hvd_passes.per_step = passes
        self._hvd_passes.reset()

    def synchronize(self) -> None:
        """Exchange the gradients now, as for clipping; then call `step` in `skip_synchronize`. Collective."""
        _check_shards(self.op, self._hvd_ranks)
        if self._hvd_exchange is not None:
            self._hvd_exchange.groups = self.param_groups
            self._hvd_exchange.run()
        self._hvd_passes.reset()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step` update without an exchange, inside of this context."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def __getstate__(self) -> Any:
        raise UserError("a copy or pickle of a DistributedOptimizer", "its state_dict()",
                        "wrap an optimizer of the copied model, and load the state into it")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange the gradients, and update; what ``closure`` computes is exchanged, too. Collective."""
        exchanging = self._should_synchronize
        if exchanging and self._synchronized:
            warnings.warn("optimizer.step() called without optimizer.skip_synchronize() context after "
                          "optimizer.synchronize(): gradients are exchanged twice, which takes time", stacklevel=2)
        if exchanging and closure is None:
            self.synchronize()
        elif exchanging and closure is not None:
            closure = self._exchanging(closure)
        overflow = getattr(self, "found_inf", None)  # of a GradScaler, before the exchange
        if exchanging and overflow is not None and not overflow and not _finite(_params(self)):
            raise WrongOrder("GradScaler.step() with a gradient of another rank that overflows, before an exchange",
                             "optimizer.synchronize() and scaler.unscale_(optimizer) first",
                             "then call scaler.step(optimizer) in optimizer.skip_synchronize()")
        fused = closure is None and self._hvd_exchange is not None and type(self).__bases__[1] is torch.optim.SGD
        with updating_fused(self) if fused else contextlib.nullcontext():
            loss = super().step() if closure is None else super().step(closure)
        self._synchronized = False
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the class below calls PyTorch's hooks around a step

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def exchanged() -> Any:
            loss = closure()
            self.synchronize()
            if self._hvd_exchange is not None and isinstance(self, torch.optim.LBFGS):  # which decides by the loss
                total = job.world().control.sum(np.array([float(loss.detach() if torch.is_tensor(loss) else loss)]))
                loss = torch.as_tensor(total[0] / (self._hvd_ranks if self.op == Average else 1))
            return loss
        return exchanged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Errors: `WrongOrder` where some are computed and not exchanged yet."""
        if self._hvd_exchange is not None and self._hvd_passes.seen:
            raise WrongOrder("optimizer.zero_grad() after loss.backward() and before optimizer.step()",
                             "optimizer.step() or optimizer.synchronize() first, or zero_grad() before backward()",
                             "move zero_grad()")
        super().zero_grad(set_to_none=set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer, and begin a step."""
        self._hvd_passes.reset()
        self._synchronized, self._should_synchronize = False, True
        with loading(self):
            super().load_state_dict(state_dict)


def DistributedOptimizer(optimizer: torch.optim.Optimizer, named_parameters: Any = None,
                         compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
                         gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
                         sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set) -> Any:
    """Return ``optimizer`` as one whose `step` first sums the gradients over all ranks.

    It has the optimizer's class, parameter groups and state, and `synchronize`, `skip_synchronize` and
    `set_backward_passes_per_step`. ``named_parameters``: as of ``model.named_parameters()``, each name once, all
    parameters of the optimizer. ``compression``: `Compression`. ``backward_passes_per_step``: backward passes whose
    gradients are summed before an exchange. ``op``: `Average`, `Sum` or `Adasum`. ``gradient_predivide_factor``,
    ``groups``: how Horovod divides and fuses; shared memory needs neither. ``sparse_as_dense``: sparse gradients
    travel as dense ones. ``process_set``: ranks that exchange. A parameter without a gradient on a rank counts as
    zeros there. Errors: `ValueError`, `UserError`.
    """
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    kind = kind_of(compression, Compression)
    _check(optimizer, op, gradient_predivide_factor, groups, backward_passes_per_step)
    names = _names(optimizer, named_parameters)
    job.world()
    ranks = (process_set.size() or 1) if process_set.included() else 1
    if ranks > 1 and not _ours(optimizer, op, kind, process_set):
        return _by_horovod(optimizer, list(names.items()), compression, kind, backward_passes_per_step, op,
                           gradient_predivide_factor, groups, sparse_as_dense, process_set)
    base = optimizer.__class__
    made: Any = object.__new__(type(base.__name__, (_ExchangingOptimizer, base), {"__module__": base.__module__}))
    # Not __init__, whose arguments a class of the user's may have others of; and the state of a resumed one stays.
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    made.op, made.gradient_predivide_factor, made.process_set = op, gradient_predivide_factor, process_set
    made.sparse_as_dense, made._compression, made._parameter_names = sparse_as_dense, compression, names
    made._synchronized, made._should_synchronize = False, True
    made._hvd_passes, made._hvd_ranks, made._hvd_exchange = _Passes(backward_passes_per_step), ranks, None
    if ranks > 1:
        settings = ExchangeSettings(op == Average, compression, sparse_as_dense)
        made._hvd_exchange = ParameterExchange(names, made.param_groups, settings, made._hvd_passes.watch)
        memory.keep_freed()  # as a step frees its gradients, which would be mapped again in the next
        for param in _params(optimizer):
            if param.requires_grad:
                made._hvd_passes.watch(param)
    return made


def _check(optimizer: Any, op: int, predivide: float, groups: Any, passes: int) -> None:
    """Raise for arguments that do not go together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"DistributedOptimizer of a {type(optimizer).__qualname__}", "an optimizer of torch.optim",
                        "pass the optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1)")
    if isinstance(optimizer, _ExchangingOptimizer):
        raise UserError("DistributedOptimizer of a DistributedOptimizer", "an optimizer of torch.optim", "wrap it once")
    if op not in (Average, Sum, Adasum):
        raise WrongValue(f"op={op} for gradients", "hvd.Average, hvd.Sum or hvd.Adasum", "pass one of them")
    if predivide != 1.0 and op != Average:
        raise WrongValue(f"gradient_predivide_factor={predivide:g} with another op", "op=hvd.Average", "leave it out")
    if passes < 1:
        raise WrongValue(f"backward_passes_per_step={passes}", "1 or more", "pass the number of backward passes")
    if groups is None or isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return
    members = [p for group in groups for p in group] if isinstance(groups, list) else None
    if members is None or any(not isinstance(p, torch.Tensor) for p in members):
        raise WrongValue(f"groups={groups!r}", "a positive number, or a list of lists of parameters",
                         "pass one of them")
    if len({id(p) for p in members}) < len(members):
        raise WrongValue("groups with a parameter that occurs twice", "each parameter once", "leave it in one group")


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _finite(params: list[torch.Tensor]) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in params if p.grad is not None)


def _names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[torch.Tensor, str]:
    """Return a name for each parameter. Errors: `ValueError` for names that occur twice or are missing."""
    if named_parameters is None:
        named = [(f"group{i}.{j}", p) for i, group in enumerate(optimizer.param_groups)
                 for j, p in enumerate(group["params"])]
    else:
        named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise WrongValue("named_parameters without names", "pairs of name and parameter",
                         "pass model.named_parameters()")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise WrongValue(f"named_parameters with the name {', '.join(twice)} more than once", "each name once",
                         "name the parameters of each model apart, such as (f'generator.{name}', p)")
    known = {id(p) for _, p in named}
    lacking = [tuple(p.shape) for p in _params(optimizer) if id(p) not in known]
    if lacking:
        raise WrongValue(f"named_parameters without {len(lacking)} of the optimizer's parameters, of shapes "
                         f"{', '.join(map(str, lacking[:3]))}", "a name for each",
                         "pass the named_parameters() of all models, or leave named_parameters out")
    return {p: name for name, p in named}


def _ours(optimizer: torch.optim.Optimizer, op: int, kind: str, process_set: ProcessSet) -> bool:
    """Return whether this project's transports exchange the gradients, rather than Horovod's optimizer."""
    here, params = job.world(), _params(optimizer)
    plain = op != Adasum and process_set.process_set_id == 0 and kind and all(p.is_floating_point() for p in params)
    on_cpu = all(p.device.type == "cpu" for p in params)
    if plain and (on_cpu and basics.shared_wire(process_set) is not None or kind not in ("none", "fp16")):
        return True
    if here.hvd is None and not (plain and on_cpu):
        raise NotSupported("DistributedOptimizer with op=hvd.Adasum, a process set, compression of your own or a GPU, "
                           "over plain MPI", "a Horovod that was built here", horovod.BUILD)
    return here.hvd is None


def _by_horovod(optimizer: torch.optim.Optimizer, named: Sequence[tuple[torch.Tensor, str]], compression: Any,
                kind: str, passes: int, op: int, predivide: float, groups: Any, sparse_as_dense: bool,
                process_set: ProcessSet) -> Any:
    """Return Horovod's own, whose waits end within the job's bound."""
    hvd, ranks = job.world().hvd, process_set.size() or 1
    if kind not in ("", "none", "fp16"):
        raise NotSupported(f"compression {kind} with op=hvd.Adasum or a process set", "Compression.none or fp16",
                           "leave compression out")
    theirs = hvd.Compression.fp16 if kind == "fp16" else hvd.Compression.none if kind else compression
    state, defaults = optimizer.state, optimizer.defaults
    made = hvd.DistributedOptimizer(
        optimizer, [(name, p) for p, name in named], theirs, passes, {Average: hvd.Average, Sum: hvd.Sum,
                                                                      Adasum: hvd.Adasum}[op],
        predivide, 0, groups, sparse_as_dense, job.wire(process_set).theirs)
    made.state.update(state)
    made.defaults.update(defaults)
    timeout_s, inner = horovod.stall_bound(os.environ), made.synchronize

    def synchronize() -> None:
        _check_shards(op, ranks)
        with deadline(timeout_s, WHAT), pulse.waiting(WHAT):
            inner()
    made.synchronize = synchronize
    return made


def _check_shards(op: int, ranks: int) -> None:
    """Refuse a step that is not the mean of the batches of `hvdtrain.torch.shard`, if the script uses it."""
    data = sys.modules.get("hvdtrain.torch.data")
    if data is not None:
        data.check_step(op == Average, ranks)
