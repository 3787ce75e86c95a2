"""PyTorch's own optimizers and schedules by name, with optional warm-up and linear scaling of the rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.config import Config
from hvdtrain.errors import UserError, nearest


_KERNELS = ("fused", "foreach", "capturable")
"""Entries of an optimizer's groups that say how an update is computed, not what it is."""


class Optimization:
    """An optimizer, its schedule, and the warm-up factor laid over it for the length of one update.

    The factor is min(1, (t + 1) / warmup_steps) for update t (Goyal et al. 2017, arXiv 1706.02677). ``adopted``: the
    optimizer of a compiled Keras model (`hvdtrain.backends.torch.keras.optim`), in place of config's; its rate is its
    own, scaled.
    """

    def __init__(self, config: Config, params: Iterable[torch.nn.Parameter], steps_per_epoch: int,
                 adopted: Any = None) -> None:
        schedule = config.schedule
        self._warmup = schedule.warmup_steps
        self._interval = schedule.interval
        self.updates = 0
        base = schedule.linear_scaling_base
        self.base_lr = config.lr * (config.global_batch / base if base else 1.0)
        self._adopted = adopted
        if adopted is not None:
            self.base_lr = adopted.rate
        self.optimizer = _optimizer(config, params, self.base_lr) if adopted is None else adopted
        self.schedule = _schedule(config, self.optimizer)
        groups = self.optimizer.param_groups  # some schedules (OneCycleLR) have rates of their own
        self._obeys_lr = all(group.get("initial_lr", group["lr"]) == self.base_lr for group in groups)
        self._config = config

    def joined(self) -> None:
        """Look at the parameters' memory order once more: a model may have been moved since the optimizer was made."""
        for group in self.optimizer.param_groups:
            if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
                _refuse_fused(group["params"], self._config.optimizer.args)
                group["fused"] = False

    def step(self) -> None:
        """One update, then let a per-step schedule move."""
        self._follow()
        factor = self._factor()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate * factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        self.updates += 1
        if self.schedule is not None and self._interval == "step":
            self.schedule.step()

    def gate(self, not_finite: torch.Tensor) -> bool:
        """Have the next `step` leave parameters and state alone where ``not_finite`` (scalar, on the device) is true.

        Returns False where the optimizer cannot: only PyTorch's fused kernels read such a flag on the device.
        """
        groups = self.optimizer.param_groups
        if self._adopted is not None or not all(group.get("fused") for group in groups):
            return False
        setattr(self.optimizer, "found_inf", not_finite.float())  # noqa: B010  (torch declares it nowhere)
        return True

    def end_epoch(self) -> None:
        """Let a per-epoch schedule move."""
        if self.schedule is not None and self._interval == "epoch":
            self.schedule.step()

    def _factor(self) -> float:
        return min(1.0, (self.updates + 1) / self._warmup) if self._warmup else 1.0

    def _follow(self) -> None:
        """Take over the rate of an adopted optimizer, which its owner or a schedule of Keras may have moved."""
        if self._adopted is not None:
            self._adopted.follow()

    def rate(self) -> float:
        """The rate of the next update."""
        self._follow()
        return float(self.optimizer.param_groups[0]["lr"]) * self._factor()

    def plain_sgd(self) -> bool:
        """Whether an update is rate x gradient (weight decay aside)."""
        if self._adopted is not None:
            return bool(self._adopted.plain_sgd())
        groups = self.optimizer.param_groups
        return type(self.optimizer) is torch.optim.SGD and all(group["momentum"] == 0 for group in groups)

    def describe(self) -> dict[str, str]:
        """In words, for the summary."""
        s = self._config.schedule
        words = {"optimizer": f"{self._kind()}, lr {self.base_lr:g}"}
        if self._adopted is not None:
            words |= self._adopted.describe()
        if self.schedule is not None:
            words["schedule"] = f"{type(self.schedule).__name__} per {s.interval}"
        if s.warmup_steps:
            words["warm-up"] = f"linear over {s.warmup_steps} steps"
        if s.linear_scaling_base:
            before = self.base_lr * s.linear_scaling_base / self._config.global_batch
            words["lr scaling"] = f"{before:g} x {self._config.global_batch}/{s.linear_scaling_base}"
        return words

    def _kind(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__ if self._adopted is None else f"Keras' {self._adopted.name}"

    def scalars(self) -> dict[str, Any]:
        """JSON-able state beside the optimizer's tensors: all of a group, as schedules also move betas and momentum."""
        groups = [_plain({k: v for k, v in g.items() if k != "params"}) for g in self.optimizer.param_groups]
        schedule = {} if self.schedule is None else _plain(self.schedule.state_dict())
        return {
            "optimizer": self._kind(),
            "updates": self.updates,
            "base_lr": self.base_lr,
            "groups": groups,
            "schedule": schedule,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise `UserError` if `scalars` of another optimizer are given."""
        own, then = self._kind(), state["optimizer"]
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
                          if k not in _KERNELS})
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
    """How to have the optimizer that `Optimization.scalars` called ``kind``."""
    keras = kind.startswith("Keras' ")
    return "compile the model with it and leave optimizer.name auto" if keras else f"set optimizer.name: {kind}"


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """The entries of a schedule's state that are plain numbers, strings or lists of them."""
    def ok(v: Any) -> bool:
        if isinstance(v, (list, tuple)):
            return all(ok(x) for x in v)
        return v is None or isinstance(v, (bool, int, str)) or (isinstance(v, float) and math.isfinite(v))
    return {k: v for k, v in value.items() if ok(v)}


def _optimizer(config: Config, params: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name, any case; auto is Adam."""
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
        params = list(params)
        _refuse_fused(params, own)
        return make(params, lr=lr, **_fused(make, params, own), **own)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {classes[name].__name__} refused args {config.optimizer.args}: {error}",
                        "keyword arguments it knows", "correct optimizer.args") from None


def _fused(make: Any, params: list[torch.nn.Parameter], own: dict[str, Any]) -> dict[str, bool]:
    """``fused=True`` for SGD on a CPU, unless the user asks for another way: one pass over memory instead of three.

    PyTorch takes it on its own nowhere. Same arithmetic; an update may differ from the default's by one rounding.
    Not for parameters in another memory order (channels_last): the kernel walks parameter, gradient and momentum as
    they lie in memory, and gradients lie row by row in their bucket.
    """
    usual = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and p.is_contiguous()
                for p in params)
    asked = {"fused", "foreach", "differentiable"} & set(own)
    return {"fused": True} if make is torch.optim.SGD and usual and not asked else {}


def _refuse_fused(params: list[torch.nn.Parameter], own: dict[str, Any]) -> None:
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
