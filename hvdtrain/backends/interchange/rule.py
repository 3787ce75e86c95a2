"""An optimizer's update rule without its framework, and its state in PyTorch and in Keras.

Conventions of the two:

- SGD with momentum u. PyTorch keeps b <- u b + g and moves by -r b; Keras keeps m <- u m - r g and moves by m. With r
  the rate of the next update, m = -r b makes the next steps the same while the rate stays.
- Adam. Both keep the same two moments. PyTorch divides by sqrt(v / (1 - beta2^t)) + eps, Keras (as Kingma & Ba 2014,
  arXiv 1412.6980, at the end of their section 2) by (sqrt(v) + eps) / sqrt(1 - beta2^t): eps itself is scaled too.
- Weight decay. AdamW and every Keras optimizer shrink a weight by rate x decay on its own; PyTorch's SGD and Adam add
  decay x weight to the gradient. Without momentum these are the same for SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError

Slots = dict[str, dict[str, np.ndarray]]
"""State by slot and weight: "momentum" of SGD, "m", "v" and "vmax" of Adam, in PyTorch's convention."""

TORCH_SLOTS = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq", "vmax": "max_exp_avg_sq"}
KERAS_SLOTS = {"momentum": "momentums", "m": "_momentums", "v": "_velocities", "vmax": "_velocity_hats"}
"""What the frameworks call the slots: a key of the state in PyTorch, an attribute of the optimizer in Keras."""


@dataclass(frozen=True)
class Rule:
    """SGD or Adam with all settings of its updates.

    ``base_lr``: as configured; ``lr``: of now, without warm-up; ``next_lr``: of the next update. ``updates``: done so
    far. ``decay``: weight decay apart from the gradient.
    """

    family: str
    base_lr: float
    lr: float
    next_lr: float
    updates: int
    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    amsgrad: bool = False

    def slots(self) -> tuple[str, ...]:
        """Return the slots of every trained weight."""
        if self.family == "sgd":
            return ("momentum",) if self.momentum else ()
        return ("m", "v", "vmax") if self.amsgrad else ("m", "v")

    def in_torch(self) -> tuple[str, dict[str, Any]]:
        """Return its name in torch.optim and the keyword arguments besides lr."""
        if self.family == "sgd":
            args = {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": self.decay}
            return "SGD", {k: v for k, v in args.items() if v}
        adam: dict[str, Any] = {"betas": list(self.betas), "eps": self.epsilon, "weight_decay": self.decay}
        return "AdamW" if self.decay else "Adam", adam | ({"amsgrad": True} if self.amsgrad else {})

    def in_keras(self) -> tuple[str, dict[str, Any]]:
        """Return its name in keras.optimizers and the keyword arguments besides learning_rate."""
        decay = {"weight_decay": self.decay} if self.decay else {}
        if self.family == "sgd":
            args = {"momentum": self.momentum, "nesterov": self.nesterov}
            return "SGD", {k: v for k, v in args.items() if v} | decay
        args = {"beta_1": self.betas[0], "beta_2": self.betas[1], "epsilon": self.epsilon}
        return "AdamW" if self.decay else "Adam", args | decay | ({"amsgrad": True} if self.amsgrad else {})

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Rule:
        """Undo `to_dict`."""
        return cls(**{**plain, "betas": tuple(plain["betas"])})


def from_torch(name: str, group: Mapping[str, Any], base_lr: float, next_lr: float, updates: int) -> Rule:
    """Return the rule of a torch optimizer's group; `UserError` for one that Keras' optimizers do not follow."""
    rates: dict[str, Any] = {"base_lr": float(base_lr), "lr": float(group["lr"]), "next_lr": float(next_lr),
                             "updates": int(updates)}
    decay = float(group.get("weight_decay", 0.0))
    _refuse(name, "maximize", group.get("maximize"))
    if name == "SGD":
        momentum = float(group["momentum"])
        _refuse(name, "dampening", group["dampening"])
        if momentum and decay:
            _refuse(name, "weight_decay with momentum (included in the gradient here, separate in Keras)", decay)
        return Rule("sgd", **rates, momentum=momentum, nesterov=bool(group["nesterov"]), decay=decay)
    if name in ("Adam", "AdamW"):
        if name == "Adam" and not group.get("decoupled_weight_decay"):
            _refuse(name, "weight_decay (included in the gradient here, separate in Keras and in AdamW)", decay)
        return Rule("adam", **rates, decay=decay, betas=(float(group["betas"][0]), float(group["betas"][1])),
                    epsilon=float(group["eps"]), amsgrad=bool(group["amsgrad"]))
    raise _unknown(name)


def from_keras(name: str, settings: Mapping[str, Any], base_lr: float, lr: float, next_lr: float,
               updates: int) -> Rule:
    """Return the rule of a Keras optimizer's ``get_config()``; `UserError` for one that torch.optim does not have."""
    rates: dict[str, Any] = {"base_lr": float(base_lr), "lr": float(lr), "next_lr": float(next_lr),
                             "updates": int(updates)}
    decay = float(settings.get("weight_decay") or 0.0)
    for key in ("clipnorm", "clipvalue", "global_clipnorm"):
        _refuse(name, f"{key} (set clip_norm in the configuration instead)", settings.get(key))
    _refuse(name, "use_ema", settings.get("use_ema"))
    _refuse(name, "gradient_accumulation_steps (set accumulate in the configuration instead)",
            settings.get("gradient_accumulation_steps"))
    if name == "SGD":
        momentum = float(settings["momentum"])
        if momentum and decay:
            _refuse(name, "weight_decay with momentum (separate from the gradient here, included in PyTorch)", decay)
        return Rule("sgd", **rates, momentum=momentum, nesterov=bool(settings["nesterov"]), decay=decay)
    if name in ("Adam", "AdamW"):
        return Rule("adam", **rates, decay=decay, betas=(float(settings["beta_1"]), float(settings["beta_2"])),
                    epsilon=float(settings["epsilon"]), amsgrad=bool(settings["amsgrad"]))
    raise _unknown(name)


def require_one_rule(optimizer: Any) -> None:
    """Raise `UserError` for an optimizer that updates some weights by another rule.

    Parameter groups of PyTorch, and weights left out of a Keras optimizer's decay (``exclude_from_weight_decay``),
    which its ``get_config()`` does not tell.
    """
    groups = len(getattr(optimizer, "param_groups", ()))
    _refuse(type(optimizer).__name__, f"{groups} parameter groups", "whose options differ" if groups > 1 else "")
    left_out = getattr(optimizer, "_exclude_from_weight_decay", None) or getattr(
        optimizer, "_exclude_from_weight_decay_pattern", None)
    if getattr(optimizer, "weight_decay", None):
        _refuse(type(optimizer).__name__, "exclude_from_weight_decay", "for some weights" if left_out else "")


def velocity(rule: Rule, buffers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Keras' momentum from PyTorch's, m = -rate x b, in float64 and rounded once."""
    return {name: (b.astype(np.float64) * -rule.next_lr).astype(b.dtype) for name, b in buffers.items()}


def buffer(rule: Rule, velocities: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return PyTorch's momentum from Keras', b = -m / rate, computed in float64; `UserError` for a rate of 0."""
    if not (math.isfinite(rule.next_lr) and rule.next_lr > 0):
        raise UserError(f"the rate of the next update is {rule.next_lr}", "a rate above 0, by which Keras' momentum is "
                        "divided", "convert a checkpoint of a step with such a rate")
    return {name: (m.astype(np.float64) / -rule.next_lr).astype(m.dtype) for name, m in velocities.items()}


def same_updates(steps: Mapping[str, float], updates: int) -> int:
    """Return the count of updates of all weights; `UserError` naming a weight with another (torch's Adam)."""
    for name, step in steps.items():
        if int(step) != updates:
            raise UserError(f"{name} has had {int(step)} updates and the run {updates}",
                            "the same number, since Keras counts once for all weights",
                            "convert the weights alone: give a file as TARGET")
    return updates


def remarks(rule: Rule, warmup_steps: int) -> list[str]:
    """Return what of the training trajectory is not exactly the same afterwards."""
    found = []
    if rule.family == "sgd" and rule.momentum and rule.updates < warmup_steps:
        found.append(f"update {rule.updates} is within the {warmup_steps} of the warm-up: PyTorch's momentum "
                     "follows a growing rate at once, Keras' keeps the earlier rates, so the trajectories "
                     "differ until the warm-up ends")
    if rule.family == "adam" and rule.updates * (1 - rule.betas[1]) < 1:
        factor = 1 / math.sqrt(1 - rule.betas[1] ** max(1, rule.updates))
        found.append(f"Adam's epsilon {rule.epsilon:g} weighs {factor:.1f} times as much in Keras as in PyTorch at "
                     f"update {rule.updates}, less later: this matters for weights with small gradients")
    return found


def _refuse(name: str, what: str, value: Any) -> None:
    """Raise `UserError` for a setting that is in use and has no counterpart."""
    if value:
        raise UserError(f"{name} with {what} {value}", "settings that both frameworks' optimizers have",
                        "convert the weights alone: give a file as TARGET")


def _unknown(name: str) -> UserError:
    return UserError(f"the optimizer is {name}", "SGD, Adam or AdamW, whose state both frameworks have",
                     "convert the weights alone: give a file as TARGET")
