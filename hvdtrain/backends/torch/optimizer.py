"""The update of PyTorch's parameters: optimizer and schedule by name, warm-up, clipping, and whether there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch import placement
from hvdtrain.backends.torch.slices import Slices
from hvdtrain.config import Config
from hvdtrain.errors import UserError, nearest
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.precision.scaler import LossScale


KERNELS = ("fused", "foreach", "capturable")
"""Entries of an optimizer's groups that say how an update is computed, not what it is."""

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
               torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD,
               torch.optim.Rprop)
"""Those whose update of an element depends on that element's gradient and state alone."""


class TorchOptimizer:
    """Implements `hvdtrain.protocols.Optimizer` over ``tensors``: the run's parameters, flat vectors, or ``slices``'.

    An update's rate is the schedule's times min(1, (t + 1) / warmup_steps) for update t (Goyal et al. 2017, arXiv
    1706.02677). ``scale``: while it is on, every update looks at the norm. ``adopted``: the optimizer of a compiled
    Keras model (`hvdtrain.backends.torch.keras.optim`), in place of config's; its rate is its own, scaled. Over slices
    no update is left out here, as other ranks make theirs: whether there is one has been decided before.
    """

    def __init__(self, config: Config, tensors: Sequence[torch.Tensor], steps_per_epoch: int,
                 scale: LossScale | None = None, adopted: Any = None, slices: Slices | None = None) -> None:
        schedule = config.schedule
        self.tensors, self._slices = list(tensors), slices
        self._warmup = schedule.warmup_steps
        self._interval = schedule.interval
        self.updates = 0
        base = schedule.linear_scaling_base
        self.base_lr = config.lr * (config.global_batch / base if base else 1.0)
        self.adopted = adopted
        if adopted is not None:
            self.base_lr = adopted.rate
        updated = self.tensors if slices is None else slices.owned
        self.optimizer = _optimizer(config, updated, self.base_lr) if adopted is None else adopted
        self.schedule = _schedule(config, self.optimizer)
        groups = self.optimizer.param_groups  # some schedules (OneCycleLR) have rates of their own
        self._obeys_lr = all(group.get("initial_lr", group["lr"]) == self.base_lr for group in groups)
        self._config, self._scale = config, scale or LossScale()
        self._device = self.tensors[0].device if self.tensors else placement.device()
        self._on_gpu = any(t.device.type == "cuda" for t in self.tensors)
        self.looks = self._on_gpu and slices is None
        self.needs_all: str = getattr(adopted, "needs_all", "")
        self._left_out: torch.Tensor | None = None
        self.elementwise = type(self.optimizer) in ELEMENTWISE if adopted is None else bool(adopted.elementwise)

    # --- the update ----------------------------------------------------------------------------------------------

    def step(self, grads: Sequence[torch.Tensor], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None) -> tuple[bool, float]:
        """Clip by the global norm and update; return (finite, norm), as `hvdtrain.protocols.Optimizer` says."""
        known, norm = norm is not None, math.nan if norm is None else norm
        if known:
            _clip(grads, clip_norm, norm)
        elif self._slices is None and (clip_norm > 0 or look or self._scale.on):
            norms = [torch.linalg.vector_norm(g).float().to(self._device) for g in grads]
            norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
            if not math.isfinite(norm):
                return False, norm
            _clip(grads, clip_norm, norm)
        elif self.looks:
            self._left_out = any_not_finite(grads, self._device)
            if not self._gate(self._left_out) and self.skipped():
                return False, norm
        self._take(grads, buckets)
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
        if self._slices is not None:
            self._slices.link()
        self._follow()
        factor, groups = self._factor(), self.optimizer.param_groups
        for group in groups:  # a model may have been given another memory order since the optimizer was made
            if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
                _refuse_fused(group["params"], self._config.optimizer.args)
                group["fused"] = False
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates):
            group["lr"] = rate * factor
        self.optimizer.step()
        if self._slices is not None:
            self._slices.written()
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        self.updates += 1
        if self.schedule is not None and self._interval == "step":
            self.schedule.step()

    def _gate(self, not_finite: torch.Tensor) -> bool:
        """Have the next update leave parameters and state alone where ``not_finite`` (scalar, on the device) is true.

        Returns False where the optimizer cannot: only PyTorch's fused kernels read such a flag on the device.
        """
        groups = self.optimizer.param_groups
        if self.adopted is not None or not all(group.get("fused") for group in groups):
            return False
        setattr(self.optimizer, "found_inf", not_finite.float())  # noqa: B010  (torch declares it nowhere)
        return True

    def skipped(self) -> bool:
        """Return whether the device left the last update out; by the next step it has decided."""
        found, self._left_out = self._left_out, None
        return found is not None and bool(found)

    # --- the rate ------------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Let a per-epoch schedule move."""
        if self.schedule is not None and self._interval == "epoch":
            self.schedule.step()

    def _factor(self) -> float:
        return min(1.0, (self.updates + 1) / self._warmup) if self._warmup else 1.0

    def _follow(self) -> None:
        """Take over the rate of an adopted optimizer, which its owner or a schedule of Keras may have moved."""
        if self.adopted is not None:
            self.adopted.follow()

    def learning_rate(self) -> float:
        """Return the rate of the next update."""
        self._follow()
        return float(self.optimizer.param_groups[0]["lr"]) * self._factor()

    # --- what it keeps -------------------------------------------------------------------------------------------

    def slots(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield (slot, index of the tensor, array of its shape) of all state that has a tensor's shape."""
        for i, tensor in enumerate(self.tensors):
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    yield key, i, value

    def plain_sgd(self) -> bool:
        """Return whether an update is rate x gradient (weight decay aside)."""
        if self.adopted is not None:
            return bool(self.adopted.plain_sgd())
        groups = self.optimizer.param_groups
        return type(self.optimizer) is torch.optim.SGD and all(group["momentum"] == 0 for group in groups)

    def bytes_to_come(self) -> int:
        """Return the bytes of two moments of every tensor, as Adam keeps them; 0 with state, or where none will be.

        Of a split model those on the one GPU whose memory is probed.
        """
        if self.optimizer.state or self.plain_sgd():
            return 0
        probed = [t for t in self.tensors if t.device == placement.device() or not self._on_gpu]
        return 2 * sum(t.numel() * t.element_size() for t in probed)

    def describe(self) -> dict[str, str]:
        """In words, for the summary."""
        s = self._config.schedule
        words = {"optimizer": f"{self.kind()}, lr {self.base_lr:g}"}
        if self.adopted is not None:
            words |= self.adopted.describe()
        if self.schedule is not None:
            words["schedule"] = f"{type(self.schedule).__name__} per {s.interval}"
        if s.warmup_steps:
            words["warm-up"] = f"linear over {s.warmup_steps} steps"
        if s.linear_scaling_base:
            before = self.base_lr * s.linear_scaling_base / self._config.global_batch
            words["lr scaling"] = f"{before:g} x {self._config.global_batch}/{s.linear_scaling_base}"
        return words

    def made_of(self) -> str:
        """Return what has to be the same on every rank, as a line."""
        if self.adopted is None:
            return f"optimizer {self.kind()}"
        words = [self.adopted.name, *self.adopted.describe().values(), f"rate {self.learning_rate():g}"]
        return f"optimizer {' '.join(words)}"

    def kind(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__ if self.adopted is None else f"Keras' {self.adopted.name}"

    def scalars(self) -> dict[str, Any]:
        """JSON-able state beside the optimizer's tensors: all of a group, as schedules also move betas and momentum."""
        groups = [_plain({k: v for k, v in g.items() if k != "params"}) for g in self.optimizer.param_groups]
        schedule = {} if self.schedule is None else _plain(self.schedule.state_dict())
        return {
            "optimizer": self.kind(),
            "updates": self.updates,
            "base_lr": self.base_lr,
            "groups": groups,
            "schedule": schedule,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise `UserError` if `scalars` of another optimizer are given."""
        own, then = self.kind(), state["optimizer"]
        if then != own:
            raise UserError(f"the checkpoint was made with {then}", f"{own}, as configured now",
                            f"{_again(then)}, or start anew")

    def load_scalars(self, state: dict[str, Any]) -> None:
        """Undo `scalars`; a base rate configured otherwise than then scales every rate of the checkpoint.

        The kernels stay this run's: the checkpoint's may be for another device or memory order.
        """
        self.updates = int(state["updates"])
        if self.schedule is not None and state["schedule"]:
            self.schedule.load_state_dict({**self.schedule.state_dict(), **state["schedule"]})
        for group, saved in zip(self.optimizer.param_groups, state["groups"]):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()
                          if k not in KERNELS})
        before = state.get("base_lr", self.base_lr)
        if before != self.base_lr and self._obeys_lr:
            self._rescale(self.base_lr / before)

    def _rescale(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            for key in {"lr", "initial_lr"} & set(group):
                group[key] *= factor
        if self.schedule is not None:
            self.schedule.base_lrs = [rate * factor for rate in self.schedule.base_lrs]


def _again(kind: str) -> str:
    """How to have the optimizer that `TorchOptimizer.scalars` called ``kind``."""
    keras = kind.startswith("Keras' ")
    return "compile the model with it and leave optimizer.name auto" if keras else f"set optimizer.name: {kind}"


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """The entries of a schedule's state that are plain numbers, strings or lists of them."""
    def ok(v: Any) -> bool:
        if isinstance(v, (list, tuple)):
            return all(ok(x) for x in v)
        return v is None or isinstance(v, (bool, int, str)) or (isinstance(v, float) and math.isfinite(v))
    return {k: v for k, v in value.items() if ok(v)}


def _optimizer(config: Config, params: Sequence[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name, any case; auto is Adam. Without ``params`` its one group is empty."""
    classes = {n.lower(): c for n, c in vars(torch.optim).items()
               if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}
    name = "adam" if config.optimizer.name == "auto" else config.optimizer.name.lower()
    unusable = {"lbfgs": "needs a closure that is evaluated several times a step",
                "sparseadam": "takes sparse gradients, which are not exchanged here"}
    if name in unusable or name not in classes:
        why = unusable.get(name, "is not in torch.optim")
        raise UserError(
            f"optimizer {config.optimizer.name!r} {why}",
            nearest(name, [c.__name__ for k, c in classes.items() if k not in unusable]),
            "correct optimizer.name",
        )
    try:
        make: Any = classes[name]  # each has a signature of its own
        own = config.optimizer.args
        _refuse_fused(params, own)
        return make([{"params": list(params)}], lr=lr, **_fused(make, params, own), **own)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {classes[name].__name__} refused args {config.optimizer.args}: {error}",
                        "keyword arguments it knows", "correct optimizer.args") from None


def _fused(make: Any, params: Sequence[torch.Tensor], own: dict[str, Any]) -> dict[str, bool]:
    """``fused=True`` for SGD on a CPU, unless the user asks for another way: one pass over memory instead of three.

    PyTorch takes it on its own nowhere. Same arithmetic; an update may differ from the default's by one rounding.
    Not for parameters in another memory order (channels_last): the kernel walks parameter, gradient and momentum as
    they lie in memory, and gradients lie row by row in their bucket.
    """
    usual = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and p.is_contiguous()
                for p in params)
    asked = {"fused", "foreach", "differentiable"} & set(own)
    return {"fused": True} if make is torch.optim.SGD and usual and not asked else {}


def _refuse_fused(params: Sequence[torch.Tensor], own: dict[str, Any]) -> None:
    """Raise `UserError` where the user's ``fused=True`` would mix up elements; see `_fused`."""
    if own.get("fused") and not all(p.is_contiguous() for p in params):
        raise UserError("optimizer.args.fused with parameters that are not contiguous (channels_last)",
                        "parameters whose gradients lie in memory as they do", "leave optimizer.args.fused out")


def _schedule(config: Config, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of torch.optim.lr_scheduler by name, or None."""
    named = config.schedule
    if named.name.lower() in ("none", ""):
        return None
    space = torch.optim.lr_scheduler
    classes = {n.lower(): c for n, c in vars(space).items()
               if isinstance(c, type) and issubclass(c, space.LRScheduler) and not n.startswith("_")
               and c not in (space.LRScheduler, space.ReduceLROnPlateau, space.ChainedScheduler, space.SequentialLR)}
    if named.name.lower() not in classes:
        raise UserError(f"schedule {named.name!r} is not one of torch.optim.lr_scheduler's",
                        nearest(named.name, [c.__name__ for c in classes.values()]), "correct schedule.name")
    try:
        return classes[named.name.lower()](optimizer, **named.args)
    except (TypeError, ValueError) as error:
        raise UserError(f"schedule {named.name} refused args {named.args}: {error}", "keyword arguments it knows",
                        "correct schedule.args") from None


def _clip(grads: Sequence[torch.Tensor], clip_norm: float, norm: float) -> None:
    """Bring ``grads`` of the global ``norm`` to ``clip_norm``; a part of a model may have none."""
    if 0 < clip_norm < norm and grads:
        torch._foreach_mul_(list(grads), clip_norm / norm)


def any_not_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a boolean scalar on ``device``: whether any element of ``tensors`` is NaN or infinite.

    A largest magnitude is NaN or infinite exactly where an element is; unlike a sum of squares it never overflows.
    """
    largest = (torch.linalg.vector_norm(x, ord=torch.inf) for x in tensors if x.numel())
    return ~torch.stack([one.isfinite().to(device) for one in largest]).all()


def slot_share(config: Config) -> float:
    """Return the bytes of optimizer state for each byte of a parameter, as the configured optimizer makes them."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    made = TorchOptimizer(config, [param], 1)
    made.step([torch.zeros_like(param)], [], 0.0, False)
    held = [v for v in made.optimizer.state.get(param, {}).values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(v.numel() * v.element_size() for v in held) / (param.numel() * param.element_size())


def state_bytes(opt: TorchOptimizer) -> int:
    """Return the bytes of an optimizer's state; before its first step those that it is going to have."""
    held = sum(v.numel() * v.element_size() for entries in opt.optimizer.state.values()
               for v in entries.values() if isinstance(v, torch.Tensor))
    if held or opt.adopted is not None:
        return held
    return int(slot_share(opt._config) * sum(t.numel() * t.element_size() for t in opt.tensors))


def check_slots(optimizer: torch.optim.Optimizer) -> None:
    """Assert that every tensor an optimizer keeps for a parameter, its step counter aside, is where that is."""
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.device == param.device, f"{key} on {value.device}, its parameter on {param.device}"
