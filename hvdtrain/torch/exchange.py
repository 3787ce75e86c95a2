"""Exchange the gradients of optimizers over this project's transports: `ParameterExchange`, `joined`.

Owns what the ranks compare before gradients are added, and the gradients' way in and out of the transport's memory. A
step of the optimizer is `hvdtrain.torch.optimizer`'s.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hvdtrain import job
from hvdtrain.comm.collectives.host_sums import RankNotes
from hvdtrain.core.errors import UserError
from hvdtrain.core.process_sets import Average, Sum, global_process_set
from hvdtrain.torch import basics
from hvdtrain.torch.gradient_plan import WHAT, ExchangeSettings, ParameterPlan, ParamFacts
from hvdtrain.torch.ops import sparse_allreduce_async
from hvdtrain.torch.transports import HorovodWire

JOINED, NEW = -1, 0
"""Notes of a rank in `joined`, and of one whose plan is missing or does not fit any more."""
SUMMED = (torch.float32, torch.float64)
"""Types that are summed as they are; other floating point is summed as float32."""


Row = tuple[int, str, dict[str, ParamFacts]]
"""Of a rank: the optimizer's serial number or 0, its settings, its parameters by name."""


_numbers, _order = itertools.count(1), itertools.count()
_plans: weakref.WeakValueDictionary[int, ParameterPlan] = weakref.WeakValueDictionary()
_exchanges: weakref.WeakValueDictionary[int, ParameterExchange] = weakref.WeakValueDictionary()
"""By the number of the exchange's first plan, which ranks know each other's by."""
_made: weakref.WeakValueDictionary[int, ParameterExchange] = weakref.WeakValueDictionary()
"""In the order in which this rank made them."""
_notes: list[tuple[Any, Callable[..., list[int]]]] = []


def exchange_notes(note: int, bounded: bool = True) -> list[int]:
    """Return what each rank brings to the next exchange: the number of its plan, `NEW` or `JOINED`. Collective."""
    here = job.world()
    if not _notes or _notes[0][0] is not here:
        shared = basics.shared_wire(global_process_set)
        _notes[:] = [(here, RankNotes(shared).exchange if shared is not None else
                      lambda note, what, bounded: here.control.gather(note))]
    return _notes[0][1](note, WHAT, bounded)


class ParameterExchange:
    """Sums of one optimizer's gradients over all ranks; none of it is collective before `run`.

    ``names``: of all parameters. ``groups``: the optimizer's own list, which may grow. ``hook``: called with each
    parameter that is exchanged, once.
    """

    def __init__(self, names: dict[torch.Tensor, str], groups: list[dict[str, Any]], settings: ExchangeSettings,
                 hook: Callable[[torch.Tensor], None]) -> None:
        self.names, self.groups, self.settings, self.hook = names, groups, settings, hook
        self.serial = 0
        self.plan: ParameterPlan | None = None
        self._dense: list[torch.Tensor] = []
        self._sparse: list[torch.Tensor] = []
        self._densified: list[bool] = []
        self._planned: list[tuple[torch.Tensor, bool, torch.dtype]] = []
        _made[next(_order)] = self

    @torch.no_grad()
    def run(self) -> None:
        """Replace each ``param.grad`` by its sum or mean over ranks; a rank without one brings zeros. Collective."""
        while True:
            grads = self._fitting()
            if self.plan is not None:
                self.plan.fill(grads)
            active = {n for n in exchange_notes(NEW if self.plan is None else self.plan.number) if n != JOINED}
            if self.plan is not None and len(active) == 1:
                break
            make_plan(self)
        self._take(self.plan.add(), grads)
        if self._sparse:
            self._exchange_rows()

    def params(self) -> list[torch.Tensor]:
        return [p for group in self.groups for p in group["params"]]

    def _fitting(self) -> list[torch.Tensor | None]:
        """Return the dense gradients as they are to be exchanged; drops a plan that does not fit any more."""
        if self.plan is not None and (self.plan.world is not job.world() or self._changed()):
            self.plan = None
        if self.plan is None:
            return []
        grads: list[torch.Tensor | None] = []
        for param, densified in zip(self._dense, self._densified):
            grad = param.grad
            if grad is not None and (grad.is_sparse or grad.requires_grad):
                if grad.is_sparse and not densified:
                    self.plan = None
                    return []
                grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            grads.append(grad)
        return grads

    def _changed(self) -> bool:
        """Return whether parameters were added, replaced, frozen, released or converted since the plan was made."""
        params = self.params()
        return len(params) != len(self._planned) or any(
            p is not planned or p.dtype != dtype or _trains(p) != trained
            for p, (planned, trained, dtype) in zip(params, self._planned))

    def _take(self, sums: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        """Write the sums over the gradients, where autograd has put them."""
        into, copied = [], []
        for param, grad, total, densified in zip(self._dense, grads, sums, self._densified):
            if not total.numel():
                continue
            if densified:
                param.grad = total.to(param.dtype).to_sparse(1)
                continue
            if grad is None:
                grad = param.grad = torch.empty_like(param)
            into.append(grad)
            copied.append(total)
        if into:
            torch._foreach_copy_(into, copied)

    def _exchange_rows(self) -> None:
        """Gather the rows of sparse gradients; a rank without one brings none."""
        op = Average if self.settings.average else Sum
        handles = []
        for param in self._sparse:
            grad = param.grad
            if grad is None:
                rows = param.new_empty((0, *param.shape[1:]))
                grad = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.int64), rows, param.shape)
            grad = grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)
            handles.append(sparse_allreduce_async(grad, f"rows.{self.serial}.{self.names[param]}", op))
        for param, handle in zip(self._sparse, handles):
            param.grad = handle().coalesce()

    def row(self) -> Row:
        """Return what the ranks compare; gives names to parameters that were added."""
        facts = {}
        for p in self.params():
            name = self.names.setdefault(p, f"added.{len(self.names)}")
            facts[name] = ParamFacts(tuple(p.shape), _summed(p.dtype), _trains(p),
                                     p.grad is not None and p.grad.is_sparse)
        return self.serial, str(self.settings), facts

    def adopt(self, plan: ParameterPlan, serial: int) -> None:
        """Use ``plan`` from now on."""
        self.plan, self.serial = plan, serial
        _exchanges[serial] = self
        params = self.params()
        by_name = {self.names[p]: p for p in params if p in self.names}
        self._dense = [by_name[n] for n in plan.dense]
        self._sparse = [by_name[n] for n in plan.sparse]
        self._densified = [n in plan.densified for n in plan.dense]
        self._planned = [(p, _trains(p), p.dtype) for p in params]
        for p in (*self._dense, *self._sparse):
            self.hook(p)


def _trains(param: torch.Tensor) -> bool:
    """Return whether an update of this rank alone would change a parameter."""
    return param.requires_grad or param.grad is not None


def _summed(dtype: torch.dtype) -> str:
    return str(dtype if dtype in SUMMED else torch.float32).removeprefix("torch.")


def make_plan(exchange: ParameterExchange | None) -> ParameterPlan:
    """Compare the ranks' parameters, and plan their exchange; collective over all ranks, None for one in `joined`.

    A parameter is exchanged where it is trained on any rank. Errors: `UserError`, the same on every rank; on one in
    `joined` alone, where its optimizer is not the others'.
    """
    rows: list[Row | None] = job.world().control.gather(None if exchange is None else exchange.row())
    found = differences(rows)
    if found:
        raise UserError(found, "one optimizer of the same parameters and arguments on every rank",
                        "build the same model and optimizers on every rank, and step them in the same order")
    number, present = next(_numbers), [row for row in rows if row]
    serial = max(row[0] for row in present) or number
    items = {}
    for name, facts in sorted(present[0][2].items()):
        every = [row[2][name] for row in present]
        if any(f.trains for f in every):
            items[name] = ParamFacts(facts.shape, facts.dtype, True, any(f.sparse for f in every))
    own = exchange or _unstepped(serial, present[0])
    found = "" if exchange else differences([present[0], own.row()])
    if found:
        raise UserError(f"hvd.join() on a rank whose optimizer others have changed: {found}",
                        "the same parameters on every rank", "add parameters, or convert them, before hvd.join()")
    plan = _plans[number] = ParameterPlan(number, items, own.settings, own.params()[0].device)
    own.adopt(plan, serial)
    return plan


def _unstepped(serial: int, row: Row) -> ParameterExchange:
    """Return the exchange, of this rank in `joined`, that others know by ``serial``, or step for the first time."""
    if serial in _exchanges:
        return _exchanges[serial]
    for _, one in sorted(_made.items()):
        if not one.serial and not differences([row, one.row()]):
            return one
    raise UserError(f"hvd.join() on a rank without the optimizer of {_some(row[2])}, which others step",
                    "the same optimizers on every rank", "make the optimizer before hvd.join(), and keep it until then")


def differences(rows: Sequence[Row | None]) -> str:
    """Return the first difference between what ranks want to exchange, "" for none. Pure."""
    present = [(rank, row) for rank, row in enumerate(rows) if row is not None]
    first, (serial, settings, params) = present[0]
    for rank, (other, theirs, others) in present[1:]:
        if other and serial and other != serial:
            return (f"rank {first} steps an optimizer of {_some(params)}, rank {rank} another one, of "
                    f"{_some(others)}")
        serial = serial or other
        if settings != theirs:
            return f"rank {rank} has an optimizer with {theirs}, rank {first} one with {settings}"
        lacking = sorted(set(params) ^ set(others))
        if lacking:
            has, lacks = (first, rank) if lacking[0] in params else (rank, first)
            return f"rank {has} exchanges a gradient of {lacking[0]}, rank {lacks} does not have that parameter"
        for name, facts in params.items():
            if (facts.shape, facts.dtype) != (others[name].shape, others[name].dtype):
                return (f"parameter {name} is {facts.dtype} {list(facts.shape)} on rank {first}, {others[name].dtype} "
                        f"{list(others[name].shape)} on rank {rank}")
    return ""


def _some(params: dict[str, ParamFacts]) -> str:
    names = list(params)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def join(device: int = -1) -> int:
    """Wait until every rank has called it; return the number of one that came last. Collective.

    Over Horovod, ranks that have not come yet continue with `allreduce` and the steps of `DistributedOptimizer`, in
    which those that wait count as zeros. A mean over ranks counts a rank that waits: `hvd.shard` gives exact means.
    """
    wire = basics.member_wire(global_process_set)
    if basics.shared_wire(global_process_set) is None or not isinstance(wire, HorovodWire):
        last = wire.join(device)
    else:
        last = _both(wire, device)
    basics.renumber()
    return last


def _both(wire: HorovodWire, device: int) -> int:
    """Join Horovod's collectives, in a thread, and the exchanges in shared memory."""
    found: Future[int] = Future()

    def horovods() -> None:
        try:
            found.set_result(wire.join(device))
        except BaseException as error:  # raised again below
            found.set_exception(error)

    threading.Thread(target=horovods, name="hvdtrain-join", daemon=True).start()
    joined()
    return found.result()


@torch.no_grad()
def joined() -> None:
    """Bring zeros to the other ranks' exchanges until all ranks are here. Collective."""
    for plan in list(_plans.values()):
        plan.clear()
    while True:
        active = {n for n in exchange_notes(JOINED, bounded=False) if n != JOINED}
        if not active:
            return
        number = active.pop()
        if active or number == NEW:
            make_plan(None)
            continue
        if number not in _plans:
            raise UserError("hvd.join() on a rank whose optimizer is gone, while others still step theirs",
                            "the optimizer, for which zeros are sent", "keep the optimizer until hvd.join() returns")
        _plans[number].add()
        _plans[number].clear()
