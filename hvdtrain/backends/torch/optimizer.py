"""The update of PyTorch's parameters: warm-up, clipping, slices under ZeRO. `optim` makes optimizers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hvdtrain.backends.torch import optim, placement, resuming, schedules
from hvdtrain.backends.torch.optim import OptimizerSpec
from hvdtrain.config import Config
from hvdtrain.core.errors import count
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.precision import LossScale

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
               torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD,
               torch.optim.Rprop)
"""Those whose update of an element depends on that element's gradient and state alone."""


class Slices:
    """Row-major elements [begin, end) of each of ``wholes``, which this rank updates under ZeRO; (0, 0): none of it.

    ``tensors``: one parameter (end - begin,) for each, empty ones too: a view of the whole's memory, so that there is
    no second replica. Of a whole that is not contiguous it is a copy, written back after each update.
    """

    def __init__(self, wholes: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> None:
        self.spans: list[tuple[int, int]] = []
        self.tensors: list[torch.nn.Parameter] = []
        self._wholes: list[torch.Tensor] = []
        self.extend(wholes, spans)

    def extend(self, wholes: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> list[torch.nn.Parameter]:
        """Add slices ``spans`` of ``wholes``; return their parameters, empty ones too."""
        first = len(self._wholes)
        self._wholes += wholes
        self.spans += spans
        self.tensors += [torch.nn.Parameter(self._slice(i), requires_grad=p.requires_grad)
                         for i, p in enumerate(wholes, first)]
        return self.tensors[first:]

    def _slice(self, i: int) -> torch.Tensor:
        begin, end = self.spans[i]
        return self._wholes[i].detach().reshape(-1)[begin:end]

    def link(self) -> None:
        """Point each slice at its whole's memory of now, which a model that was moved or cast has elsewhere."""
        for i, (tensor, whole) in enumerate(zip(self.tensors, self._wholes)):
            memory = whole.data_ptr() + self.spans[i][0] * whole.element_size()
            if tensor.numel() and (tensor.data_ptr() != memory or not whole.is_contiguous()):
                tensor.data = self._slice(i)

    @torch.no_grad()
    def written(self) -> None:
        """Bring what was updated into the wholes, and drop the gradients that it was updated from."""
        for tensor, whole, (begin, end) in zip(self.tensors, self._wholes, self.spans):
            tensor.grad = None
            if tensor.numel() and not whole.is_contiguous():
                row_major = whole.detach().reshape(-1)
                row_major[begin:end] = tensor
                whole.copy_(row_major.view(whole.shape))

    @torch.no_grad()
    def take_over(self, state: dict[torch.Tensor, dict[str, Any]], whole_state: dict[torch.Tensor, dict[str, Any]]
                  ) -> None:
        """Copy into ``state`` of the slices what an optimizer over the wholes holds of them; empty ``whole_state``."""
        for tensor, whole, (begin, end) in zip(self.tensors, self._wholes, self.spans):
            for key, value in whole_state.get(whole, {}).items() if tensor.numel() else ():
                own = state[tensor].get(key)
                if isinstance(value, torch.Tensor):
                    # A count of a 0-d parameter has the parameter's shape too.
                    each = own.shape == tensor.shape if isinstance(own, torch.Tensor) else value.shape == whole.shape
                    value = value.reshape(-1)[begin:end] if each else value
                    if isinstance(own, torch.Tensor):  # which its owner may hold elsewhere too
                        own.copy_(value)
                        continue
                    value = value.clone()
                state[tensor][key] = value
        whole_state.clear()


class TorchOptimizer:
    """Implements `hvdtrain.core.protocols.Optimizer` over ``tensors``: the run's parameters, flat vectors, or slices.

    An update's rate is the schedule's times min(1, (t + 1) / warmup_steps) for update t (Goyal et al. 2017, arXiv
    1706.02677). ``scale``: while it is on, every update looks at the norm. ``adopted``: the optimizer of a compiled
    Keras model (`hvdtrain.backends.torch.keras.optim`), in place of config's; its rate is its own, scaled. Over slices
    no update is left out here, as other ranks make theirs: that has been decided before. ``spec``: the model file's
    optimizer; its groups are of ``names``, parallel to ``tensors``.
    """

    traced = None

    def __init__(self, config: Config, tensors: Sequence[torch.Tensor], steps_per_epoch: int,
                 scale: LossScale | None = None, adopted: Any = None, slices: Slices | None = None,
                 names: Sequence[str] = (), spec: OptimizerSpec | None = None) -> None:
        schedule = config.schedule
        self.tensors, self.slices, self.optimizer_spec = list(tensors), slices, spec or OptimizerSpec()
        self._warmup = schedule.warmup_steps
        self.interval: str = schedule.interval
        self.updates = 0
        base = schedule.linear_scaling_base
        self.base_lr = self.optimizer_spec.rate(config) * (config.global_batch / base if base else 1.0)
        self.adopted = adopted
        if adopted is not None:
            self.base_lr = adopted.rate
        updated = [t for t in self.tensors if slices is None or t.numel()]
        of = [n for n, t in zip(names, self.tensors) if slices is None or t.numel()]
        self.optimizer = self.optimizer_spec.make(config, of, updated, self.base_lr) if adopted is None else adopted
        groups = self.optimizer.param_groups
        rates = self._rates = [float(group["lr"]) for group in groups]
        self.ratios = [rate / self.base_lr if self.base_lr else 1.0 for rate in rates]
        self.settings = resuming.settings_of(self.optimizer, adopted is not None)
        self.overruled: frozenset[str] = frozenset()
        self.changes: list[str] = []
        self._complete = False
        self._shown = rates.index(self.base_lr) if self.base_lr in rates else 0
        self.config, self._scale = config, scale or LossScale()
        self.schedule = schedules.make_schedule(config, self.optimizer, self.ratios)
        self._obeys_lr = all(group.get("initial_lr", group["lr"]) == rate for group, rate in zip(groups, rates))
        self._rates_changed = False
        self._device = self.tensors[0].device if self.tensors else placement.device()
        self._on_gpu = any(t.device.type == "cuda" for t in self.tensors)
        self.looks = self._on_gpu and slices is None
        self.needs_all: str = getattr(adopted, "needs_all", "")
        self._left_out: torch.Tensor | None = None
        self.elementwise = type(self.optimizer) in ELEMENTWISE if adopted is None else bool(adopted.elementwise)

    def step(self, grads: Sequence[torch.Tensor], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        known, norm = norm is not None, math.nan if norm is None else norm
        if known:
            _clip(grads, clip_norm, norm)
        elif self.slices is None and (clip_norm > 0 or look or self._scale.on):
            norms = [torch.linalg.vector_norm(g).float().to(self._device) for g in grads]
            norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
            if not math.isfinite(norm):
                return False, norm
            _clip(grads, clip_norm, norm)
        elif self.looks:
            self._left_out = any_not_finite(grads, self._device)
            if not _gate(self, self._left_out) and self.skipped():
                return False, norm
        self._take(grads, buckets)
        for i in unused:
            self.tensors[i].grad = None  # as torch.optim knows a parameter that has no part in the loss
        self._update()
        if self.updates == 1:
            check_slots(self.optimizer)
        return True, norm

    def _take(self, grads: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> None:
        """Point each param.grad at its gradient, where it is not there already."""
        if not buckets:
            for tensor, grad in zip(self.tensors, grads):
                if tensor.grad is not grad:
                    tensor.grad = grad
            return
        for bucket, flat_N in zip(buckets, grads):
            begin, itemsize = flat_N.data_ptr(), flat_N.element_size()
            for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes):
                tensor = self.tensors[i]
                if tensor.grad is None or tensor.grad.data_ptr() != begin + offset * itemsize:
                    tensor.grad = flat_N[offset:offset + tensor.numel()].view(shape)

    def _update(self) -> None:
        """Make one update at the rate of now, then let a per-step schedule move."""
        if self.slices is not None:
            self.slices.link()
        self._follow()
        factor, groups = self._factor(), self.optimizer.param_groups
        if self._complete:
            resuming.complete_slots(self.optimizer)
            self._complete = False
        for group in groups:  # a model may have been given another memory order since the optimizer was made
            if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
                optim.refuse_fused(group["params"], self.optimizer_spec.asks_fused(self.config))
                group["fused"] = False
        begin_momenta(self.optimizer)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates):
            group["lr"] = rate * factor
        schedules.update(self.optimizer)
        if self.slices is not None:
            self.slices.written()
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        self.updates += 1
        if self.schedule is not None and self.interval == "step":
            schedules.move(self.schedule)

    def skipped(self) -> bool:
        found, self._left_out = self._left_out, None
        return found is not None and bool(found)

    def end_epoch(self) -> None:
        if self.schedule is not None and self.interval == "epoch":
            schedules.move(self.schedule)

    def evaluated(self, value: float) -> None:
        if schedules.is_plateau(self.schedule):
            self.schedule.step(value)

    def _factor(self) -> float:
        return min(1.0, (self.updates + 1) / self._warmup) if self._warmup else 1.0

    def _follow(self) -> None:
        """Take over the rate of an adopted optimizer, which its owner or a schedule of Keras may have changed."""
        if self.adopted is not None:
            self.adopted.follow()

    def learning_rate(self) -> float:
        """Return the rate of the next update; of several groups, of one with the base rate if there is one."""
        self._follow()
        return float(self.optimizer.param_groups[self._shown]["lr"]) * self._factor()

    def own_schedule(self) -> object | None:
        return None if self.adopted is None else self.adopted.own_schedule()

    def slots(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        for i, tensor in enumerate(self.tensors):
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    yield key, i, value

    def plain_sgd(self) -> bool:
        if self.adopted is not None:
            return bool(self.adopted.plain_sgd())
        groups = self.optimizer.param_groups
        return type(self.optimizer) is torch.optim.SGD and all(group["momentum"] == 0 for group in groups)

    def bytes_to_come(self) -> int:
        """Return the bytes of Adam's moments to come, of a split model on the probed GPU; 0 with state."""
        if self.optimizer.state or self.plain_sgd():
            return 0
        probed = [t for t in self.tensors if t.device == placement.device() or not self._on_gpu]
        return 2 * sum(t.numel() * t.element_size() for t in probed)

    def describe(self) -> dict[str, str]:
        s = self.config.schedule
        whose = " (the model file's)" if self.optimizer_spec.kind else ""
        words = {"optimizer": f"{self.kind()}, lr {self.base_lr:g}{whose}"}
        if self.optimizer_spec.groups:
            words["parameter groups"] = "; ".join(group.words() for group in self.optimizer_spec.groups)
        if self.adopted is not None:
            words |= self.adopted.describe()
        if self.schedule is not None:
            unit = f"evaluation of {s.followed}" if s.plateau else s.interval
            words["schedule"] = f"{type(self.schedule).__name__} per {unit}"
        if s.warmup_steps:
            words["warm-up"] = f"linear over {count(s.warmup_steps, 'step')}"
        if s.linear_scaling_base:
            before = self.base_lr * s.linear_scaling_base / self.config.global_batch
            words["lr scaling"] = f"{before:g} x {self.config.global_batch}/{s.linear_scaling_base}"
        return words

    def made_of(self) -> str:
        if self.adopted is None:
            sums = "".join(f" group {group.checksum():08x}" for group in self.optimizer_spec.groups)
            return f"optimizer {self.kind()}{self.optimizer_spec.words()}{sums}"
        words = [self.adopted.name, *self.adopted.describe().values(), f"rate {self.learning_rate():g}"]
        return f"optimizer {' '.join(words)}"

    def kind(self) -> str:
        return type(self.optimizer).__name__ if self.adopted is None else f"Keras' {self.adopted.name}"

    def scalars(self) -> dict[str, Any]:
        """Return JSON-able state beside the optimizer's tensors: whole groups, as schedules change them."""
        self._follow()
        groups = [schedules.plain({k: v for k, v in g.items() if k != "params"}) for g in self.optimizer.param_groups]
        schedule = {} if self.schedule is None else schedules.plain(self.schedule.state_dict())
        return {
            "optimizer": self.kind(),
            "updates": self.updates,
            "base_lr": self.base_lr,
            "groups": groups,
            "schedule": schedule,
            "settings": self.settings,
            **({"group_names": [list(group.names) for group in self.optimizer_spec.groups], "group_rates": self._rates}
               if self.optimizer_spec.groups else {}),
        }

    def load_scalars(self, state: dict[str, Any]) -> None:
        """Undo `scalars`, but for settings that differ from that run's (`resuming.load_groups`).

        A base rate configured otherwise than then scales the rates of the checkpoint that follow it.
        """
        self.updates, self._complete = int(state["updates"]), True
        if self.schedule is not None and state["schedule"]:
            self.schedule.load_state_dict(schedules.merged(self.schedule.state_dict(), state["schedule"]))
        resuming.load_groups(self, state)
        then = resuming.rates_before(self, state, self._rates)
        self._rates_changed = not all(map(partial(math.isclose, rel_tol=1e-9), self._rates, then))
        if self._obeys_lr:
            resuming.rescale(self, [now / before if before and now != before else 1.0
                                    for now, before in zip(self._rates, then)])
        if self.adopted is not None and self.schedule is None:
            self.adopted.resume()

    def resumed(self, epochs: int, rescheduled: bool) -> None:
        follows_rate = self.schedule is not None and not schedules.is_plateau(self.schedule)
        if rescheduled or follows_rate and self._rates_changed:
            self.schedule = resuming.reschedule(self, self._rates, epochs)


def _clip(grads: Sequence[torch.Tensor], clip_norm: float, norm: float) -> None:
    """Scale ``grads`` of the global ``norm`` down to ``clip_norm``."""
    if 0 < clip_norm < norm and grads:
        torch._foreach_mul_(list(grads), clip_norm / norm)


def begin_momenta(optimizer: Any) -> None:
    """Begin the momentum of tensors whose first gradient comes later than others', which fused kernels of SGD lack.

    PyTorch's other kernels begin it with the gradient, whatever the dampening.
    """
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.state) == sum(
            len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        used = [p for p in group["params"] if p.grad is not None] if group["momentum"] and group.get("fused") else []
        new = [p for p in used if p not in optimizer.state]
        for p in new if len(new) < len(used) else ():
            first = torch.zeros_like(p, memory_format=torch.preserve_format)
            if part := group["dampening"] / group["momentum"]:
                grad = -p.grad if group["maximize"] else p.grad
                first += part * torch.add(grad, p.detach(), alpha=group["weight_decay"])
            optimizer.state[p]["momentum_buffer"] = first


def _gate(opt: TorchOptimizer, not_finite: torch.Tensor) -> bool:
    """Have the next update leave parameters and state alone where ``not_finite`` (scalar, on the device) is true.

    Returns False where the optimizer cannot: only PyTorch's fused kernels read such a flag on the device.
    """
    groups = opt.optimizer.param_groups
    if opt.adopted is not None or not all(group.get("fused") for group in groups):
        return False
    setattr(opt.optimizer, "found_inf", not_finite.float())  # torch declares it nowhere
    return True


def any_not_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a boolean on ``device``: any element of ``tensors`` is NaN or infinite; never overflows."""
    largest = (torch.linalg.vector_norm(x, ord=torch.inf) for x in tensors if x.numel())
    return ~torch.stack([one.isfinite().to(device) for one in largest]).all()


def slot_share(config: Config, spec: OptimizerSpec | None = None) -> float:
    """Return the bytes of optimizer state for each byte of a parameter, as the run's optimizer makes them."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    made = TorchOptimizer(config, [param], 1, spec=(spec or OptimizerSpec()).plain())
    made.step([torch.zeros_like(param)], [], 0.0, False)
    held = [v for v in made.optimizer.state.get(param, {}).values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(v.numel() * v.element_size() for v in held) / (param.numel() * param.element_size())


def order_of(opt: TorchOptimizer) -> list[int]:
    """Return the indices of ``opt.tensors`` in the order in which the optimizer numbers them: group by group."""
    if opt.adopted is not None:
        return list(range(len(opt.tensors)))
    index = {id(t): i for i, t in enumerate(opt.tensors)}
    return [index[id(p)] for group in opt.optimizer.param_groups for p in group["params"]]


def state_bytes(opt: TorchOptimizer) -> int:
    """Return the bytes of an optimizer's state; before its first step those that it is going to have."""
    held = sum(v.numel() * v.element_size() for entries in opt.optimizer.state.values()
               for v in entries.values() if isinstance(v, torch.Tensor))
    if held or opt.adopted is not None:
        return held
    return int(slot_share(opt.config, opt.optimizer_spec) * sum(t.numel() * t.element_size() for t in opt.tensors))


def check_slots(optimizer: torch.optim.Optimizer) -> None:
    """Assert that every tensor an optimizer keeps for a parameter, its step counter aside, is where that is."""
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.device == param.device, f"{key} on {value.device}, its parameter on {param.device}"
