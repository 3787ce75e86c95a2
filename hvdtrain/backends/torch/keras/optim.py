"""The optimizer that a Keras model was compiled with, as an optimizer of PyTorch.

Warm-up, scaling and schedules are `hvdtrain.backends.torch.optimizer.TorchOptimizer`'s; updates are Keras'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import torch

from hvdtrain.backends.keras.facts import apply_gradients, refuse_own_work
from hvdtrain.backends.torch.keras import without_tensorflow
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError

ELEMENTWISE = (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Nadam,
               keras.optimizers.Adamax, keras.optimizers.Adagrad, keras.optimizers.Adadelta, keras.optimizers.RMSprop,
               keras.optimizers.Ftrl, keras.optimizers.Lion)
"""Those whose update of an element depends on that element's gradient and state alone."""


def compiled_optimizer(config: Config, model: keras.Model) -> CompiledOptimizer | None:
    """Return the compiled optimizer of ``model`` if ``config`` leaves it the choice, else None."""
    own = model.optimizer if getattr(model, "compiled", False) else None
    if config.optimizer.name != "auto" or own is None:
        return None
    _refuse(own)
    scheduled = isinstance(own._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
    if scheduled and config.schedule.on:
        raise UserError(f"schedule is {config.schedule.name} and the compiled optimizer has a schedule of its own",
                        "one schedule", "set schedule.name to none, or compile with a plain rate")
    base = config.schedule.linear_scaling_base
    return CompiledOptimizer(own, model.trainable_variables, config.global_batch / base if base else 1.0)


class CompiledOptimizer(torch.optim.Optimizer):
    """Optimizer ``own`` of Keras, built for ``variables``, with the rate of the one parameter group.

    The group's rate is ``own``'s times ``scale``. It follows a schedule of Keras and what the optimizer's owner sets
    during the run (a callback); ``own``'s rate itself is only read, so that a second run with the same model begins
    from what its owner gave. State is ``own``'s variables, live.
    """

    def __init__(self, own: keras.optimizers.Optimizer, variables: list[Any], scale: float = 1.0) -> None:
        self.own, self._variables, self._scale = own, variables, scale
        clip = own.global_clipnorm
        self.needs_all = f"global_clipnorm {clip:g} of {type(own).__name__}" if clip else ""
        built_for = [id(v) for v in getattr(own, "_trainable_variables", [])]
        if not own.built or built_for != [id(v) for v in variables]:
            own.build(variables)  # not twice: its history would be lost
        self._read()
        super().__init__([v.value for v in variables], {"lr": self._given * scale})
        for index, entries in enumerate(_slots(own, variables)):
            if entries:
                self.state[variables[index].value] = entries

    @property
    def scheduled(self) -> bool:
        """True if the rate comes from a schedule of Keras."""
        return isinstance(self.own._learning_rate, keras.optimizers.schedules.LearningRateSchedule)

    def own_schedule(self) -> object | None:
        return self.own._learning_rate if self.scheduled else None

    @property
    def name(self) -> str:
        return type(self.own).__name__

    @property
    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    @property
    def elementwise(self) -> bool:
        """True if an element's update depends on that element alone."""
        own = self.own
        excluded = getattr(own, "_exclude_from_weight_decay", None) or getattr(
            own, "_exclude_from_weight_decay_pattern", None)
        unlike = own.clipnorm or own.global_clipnorm or own.use_ema or excluded  # what treats tensors each by itself
        kept = type(own).__module__.startswith("keras.src.backend.")  # the same rule, by Keras for this backend
        return not unlike and (isinstance(own, ELEMENTWISE) if kept else type(own) in ELEMENTWISE)

    def over(self, vectors: Sequence[torch.Tensor]) -> CompiledOptimizer:
        """Return an optimizer of the same kind for ``vectors``, parameters (n,) that it updates in place."""
        with without_tensorflow():
            own = type(self.own).from_config(self.own.get_config())
            return CompiledOptimizer(own, [keras.Variable(vector) for vector in vectors], self._scale)

    def settings(self) -> dict[str, Any]:
        with without_tensorflow():  # which Keras asks for where it describes a schedule
            return dict(self.own.get_config())

    def plain_sgd(self) -> bool:
        return isinstance(self.own, keras.optimizers.SGD) and not (self.own.momentum or self.own.use_ema)

    def describe(self) -> dict[str, str]:
        return {"schedule": f"{type(self.own._learning_rate).__name__} per step"} if self.scheduled else {}

    def _read(self) -> None:
        """Read count and rate from the device, which waits for it: not in every step."""
        self._updates = int(keras.ops.convert_to_numpy(self.own._iterations))
        self._version = None if self.scheduled else self.own._learning_rate.value._version
        self._given = _number(self.own.learning_rate)

    def follow(self) -> None:
        """Take over a rate that has changed since the last update; a schedule of PyTorch's continues from it."""
        if self.scheduled:
            with keras.device("cpu"):
                self.param_groups[0]["lr"] = _number(self.own._learning_rate(self._updates)) * self._scale
        elif self.own._learning_rate.value._version != self._version:  # somebody wrote to it
            before = self._given
            self._read()
            if self._given != before:
                self.param_groups[0]["lr"] = self._given * self._scale

    def resume(self) -> None:
        """Give ``own`` the rate of a checkpoint, which callbacks had set; they read and change it there."""
        if not self.scheduled and self._scale and self.rate != self._given * self._scale:
            self.own.learning_rate = self.rate / self._scale
            self._read()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one ``apply`` with the group's rate."""
        assert closure is None
        grads = [variable.value.grad for variable in self._variables]
        kept, rate = self.own._learning_rate, self.rate
        self.own.__dict__["_learning_rate"] = lambda: rate
        try:
            apply_gradients(self.own, grads, self._variables)
        finally:
            self.own.__dict__["_learning_rate"] = kept
        self._updates += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into ``own``'s variables; `UserError` before anything is changed if it does not fit.

        Slots that only one of the two runs has, by its settings (momentum, amsgrad), begin here or are left out.
        """
        params = self.param_groups[0]["params"]
        own = {i: self.state[p] for i, p in enumerate(params) if p in self.state}
        words = [{key for entries in side.values() for key in entries} for side in (own, state_dict["state"])]
        own, got = ({i: {key: tensor for key, tensor in entries.items() if key in words[0] & words[1]}
                     for i, entries in side.items()} for side in (own, state_dict["state"]))
        shapes = [{(i, key): tuple(torch.as_tensor(tensor).shape) for i, entries in side.items()
                   for key, tensor in entries.items()} for side in (own, got)]
        if shapes[0] != shapes[1]:
            odd = sorted(f"{key} of parameter {i}" for i, key in dict(shapes[0].items() ^ shapes[1].items()))
            raise UserError(f"the checkpoint's optimizer state differs in {odd[:3]}", f"the state of {self.name}",
                            "resume with the model and optimizer of that run")
        with torch.no_grad():
            for param in params:
                for key in words[0] - words[1] if param in self.state else ():
                    if key in self.state[param]:  # "average": of use_ema, which starts with the weights
                        self.state[param][key].copy_(param if key == "average" else torch.zeros_like(param))
            for i, entries in own.items():
                for key, tensor in entries.items():
                    tensor.copy_(torch.as_tensor(got[i][key]))
        self._read()


def _number(rate: Any) -> float:
    """Return a rate in the short decimal that its float32 stands for."""
    return float(str(keras.ops.convert_to_numpy(rate).astype("float32")))


_COUNTER = re.compile(r"_\d+$")
"""What Keras puts behind a name that it has given in this process before."""


def _slots(own: keras.optimizers.Optimizer, variables: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Return for each variable the tensors that ``own`` keeps for it, by name.

    Keras names such a tensor by the variable's path and a word: ``mlp_dense_0_linear_kernel_momentum``. Those with
    other names (the count of updates) come with the first variables, in their order.
    """
    stems = [variable.path.replace("/", "_") + "_" for variable in variables]
    found: list[dict[str, torch.Tensor]] = [{} for _ in variables]
    for slot in own.variables:
        if slot is own._learning_rate:
            continue
        fitting = [i for i, stem in enumerate(stems) if slot.name.startswith(stem)]
        longest = max((len(stems[i]) for i in fitting), default=0)
        word = slot.name[longest:].replace("/", "_") if fitting else _COUNTER.sub("", slot.name.replace("/", "_"))
        # Of variables with one path each has its own slot, in their order.
        best = [i for i in fitting if len(stems[i]) == longest] or list(range(len(variables)))
        free = next((i for i in best if word not in found[i]), best[0])
        key, n = word, 1
        while key in found[free]:
            n, key = n + 1, f"{word}#{n + 1}"
        found[free][key] = slot.value
    return found


def _refuse(own: keras.optimizers.Optimizer) -> None:
    """Raise `UserError` for an optimizer that would repeat the run's own work, or whose rate cannot be read."""
    refuse_own_work(own)
    held = own._learning_rate
    if not isinstance(held, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule)):
        raise UserError("the compiled optimizer's rate is a function", "a number or one of Keras' schedules",
                        "compile with one")
