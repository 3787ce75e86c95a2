"""Changes of a Keras model's layers, variables, `trainable` and `compile()` by callbacks, on any backend of Keras.

Owns the comparison with the model that the run began with. The ranks agree in `hvdtrain.engine.model_changes`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from hvdtrain.backends.keras.compiled import setup_of
from hvdtrain.backends.keras.freezing import KerasFreezing
from hvdtrain.core.errors import UserError, some


class _Look(NamedTuple):
    """The model at one moment. The objects are kept, so that no other one gets the id of one that has gone.

    ``flags``: `trainable` of layers, then of variables, as each holds it itself.
    """

    layers: list[Any]
    variables: list[Any]
    flags: list[bool]
    compiled: Any
    optimizer: Any

    def equals(self, other: _Look) -> bool:
        return (self.flags == other.flags and self.compiled is other.compiled and self.optimizer is other.optimizer
                and _same(self.layers, other.layers) and _same(self.variables, other.variables))

    def switched(self, flags: Mapping[int, bool]) -> _Look:
        """Return a copy with other ``flags``, by the ids of layers and variables."""
        return self._replace(flags=[flags.get(id(x), flag)
                                    for x, flag in zip((*self.layers, *self.variables), self.flags)])


class KerasFacts:
    """Implements `hvdtrain.core.protocols.ModelFacts` of ``model``.

    ``inner``: follows what changes of parameters, where the framework can; without it `trainable` is what it is before
    the first step, where Keras traces its own. ``retrace``: drops what was traced for other variables.
    """

    def __init__(self, model: keras.Model, inner: Any = None, retrace: Callable[[], None] = lambda: None) -> None:
        self._model, self._inner, self._retrace = model, inner, retrace
        self._refused: list[str] = []
        self._assembled = self._begun = self._last = self._look()
        self._trained = [id(v) for v in model.trainable_variables]
        self.frozen: frozenset[int] = frozenset()
        """The indices of the run's variables that are frozen for now."""
        self._freezing: KerasFreezing | None = None
        self._steps, self._resumed, self._noted = 0, False, False

    def _look(self) -> _Look:
        model = self._model
        layers = model._flatten_layers()
        variables = [v for layer in layers for v in (*layer._trainable_variables, *layer._non_trainable_variables)]
        optimizer, own = getattr(model, "optimizer", None), setup_of(model).optimizer
        return _Look(layers, variables, [x._trainable for x in (*layers, *variables)],
                     getattr(model, "_compile_config", None), own if optimizer is None else optimizer)

    def renew(self) -> None:
        self._last = self._look()
        if self._inner is not None:
            self._inner.renew()

    def changes(self) -> list[str]:
        self._steps += 1  # `changes` is called once before each step, on every rank
        before, now = self._last, self._look()
        followed = [] if self._inner is None else self._inner.changes()
        if now.equals(before):
            return followed
        self._last = now
        optimizers = (before.optimizer, setup_of(self._model).optimizer)  # Keras callbacks are given the run's own
        self._refused = [*_replaced("layer", before.layers, now.layers),
                         *_replaced("variable", before.variables, now.variables),
                         *(["the model was compiled again"] if now.compiled is not before.compiled else []),
                         *(["the model got a new optimizer"] if now.compiled is before.compiled and not any(
                             now.optimizer is each for each in optimizers) else [])]
        return [*self._refused, *(_switched(before, now) if self._inner is None else []), *followed]

    def follow(self, changes: Sequence[str], note: Callable[[str], None]) -> int | None:
        refused, self._refused = self._refused, []
        if refused:
            raise UserError(f"a callback changed the model while it trains: {some(refused, between='; ')}",
                            "the layers, variables, optimizer and compile() as they were at the start of the run",
                            "change the model before the run, or end the run (model.stop_training = True) and fit "
                            "again")
        if self._inner is not None:
            return self._inner.follow(changes, note)
        if self._steps == 1 and not self._resumed:
            self._begin(changes)
        elif not self._noted and self._last.flags != self._begun.flags:
            self._noted = True
            note(f"{some(changes, between='; ')}: this has no effect on the run, as in Keras until compile() is called "
                 "again. The run trains the variables that were trainable at the first step; to change that, end the "
                 "run and fit again. Later changes of trainable have no effect and are not reported")
        return None

    def freeze(self, freezing: KerasFreezing) -> None:
        """Freeze for the first epoch what is to be unfrozen later; the run's parts are made for all of it."""
        self._freezing = freezing
        self.set_frozen(0)
        self.renew()

    def set_frozen(self, epoch: int) -> list[str]:
        if self._freezing is None:
            return []
        self._freezing.set_epoch(epoch)
        if self._inner is not None:
            return []
        flags, before = self._freezing.flags(epoch), self.frozen
        self._last, begun = self._last.switched(flags), self._begun.switched(flags)
        if begun.flags != self._begun.flags:
            self._begin_with(begun)
        names = {id(x): name for name, x, _ in self._freezing.objects}
        return [names[self._trained[i]] for i in sorted(before - self.frozen) if self._trained[i] in names]

    def late(self) -> str:
        return "" if self._inner is None else str(self._inner.late())

    def _begin(self, changes: Sequence[str]) -> None:
        """Train what is trainable before the first step. Errors: `UserError` for variables outside the optimizer."""
        trained = {id(v) for v in self._model.trainable_variables}
        if not trained or trained - set(self._trained):
            raise UserError(f"a callback changed the model before the first step: {some(changes, between='; ')}",
                            "some or all of the variables that were trainable when fit was called",
                            "set trainable before fit, and compile again")
        self._begin_with(self._last)

    def _begin_with(self, begun: _Look) -> None:
        self._begun = begun
        with self.as_begun():
            trained = {id(v) for v in self._model.trainable_variables}
        self.frozen = frozenset(i for i, one in enumerate(self._trained) if one not in trained)
        self._retrace()

    def take_in(self, names: Sequence[str]) -> int | None:
        return None if self._inner is None else self._inner.take_in(names)

    def extend(self, first: int, spans: Sequence[tuple[int, int]] | None) -> None:
        if self._inner is not None:
            self._inner.extend(first, spans)

    @contextlib.contextmanager
    def as_begun(self) -> Iterator[None]:
        """Give layers and variables in the body the `trainable` that they had at the first step.

        A graph that is traced later, for another number of samples, is then the same model.
        """
        begun = self._begun
        switched = [(x, x._trainable, flag) for x, flag in zip((*begun.layers, *begun.variables), begun.flags)
                    if x._trainable != flag]
        try:
            for x, _, flag in switched:
                x._trainable = flag
            yield
        finally:
            for x, own, _ in switched:
                x._trainable = own

    def saved(self) -> dict[str, Any]:
        """Return how the model differs from what its user built, JSON-able; {} where it does not."""
        if self._inner is None:
            changed = {str(i): flag for i, (was, flag) in enumerate(zip(self._assembled.flags, self._begun.flags))
                       if was != flag}
            return {"trainable_at_first_step": changed} if changed else {}
        found: dict[str, Any] = self._inner.saved()
        begun, now = self._begun, self._look()
        layers = {str(i): flag for i, (was, flag) in enumerate(zip(begun.flags, now.flags))
                  if was != flag and i < len(begun.layers)}
        return {**found, "layers_trainable": layers} if layers else found

    def resume(self, rest: Mapping[str, Any]) -> list[list[str]]:
        if self._inner is None:
            flags = [rest.get("trainable_at_first_step", {}).get(str(i), flag)
                     for i, flag in enumerate(self._assembled.flags)]
            self._resumed = True
            self._begin_with(self._assembled._replace(flags=flags))
            return []
        found: list[list[str]] = self._inner.resume(rest)
        for i, flag in rest.get("layers_trainable", {}).items():
            if int(i) < len(self._begun.layers):
                self._begun.layers[int(i)]._trainable = bool(flag)
        for variable in self._begun.variables:  # of which ``inner`` has set the tensors
            variable._trainable = bool(variable.value.requires_grad)
        self.renew()
        return found


def refuse_own_work(optimizer: Any) -> None:
    """Raise `UserError` for an optimizer that would repeat what the run does."""
    distributed = sys.modules.get("hvdtrain.keras.exchange")
    if distributed is not None and distributed.exchange_of(optimizer) is not None:
        raise UserError("the optimizer is a DistributedOptimizer, and Trainer.fit exchanges gradients itself",
                        "a plain optimizer", "compile with the optimizer inside it, or use plain model.fit")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or getattr(optimizer, "loss_scale_factor", None):
        raise UserError("the optimizer scales the loss", "one that does not",
                        "compile without mixed_float16 and loss_scale_factor")
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise UserError("the optimizer accumulates gradients (gradient_accumulation_steps)", "one that does not",
                        "set accumulate in the configuration, which every rank shares")


def apply_gradients(own: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Update by Keras' optimizer ``own``; a gradient of None leaves its variable and state as they are.

    The run reports such variables by name, in place of Keras' warning. Without any gradient, of a rank's shard of a
    model, the update is counted all the same; Keras would refuse it.
    """
    if all(grad is None for grad in grads):
        own._update_model_variables_moving_average(own._trainable_variables)  # of use_ema
        own.iterations.assign_add(1)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist for variables")
        own.apply(list(grads), list(variables))


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(a is b for a, b in zip(these, those))


def _replaced(kind: str, before: Sequence[Any], now: Sequence[Any]) -> list[str]:
    old, new = set(map(id, before)), set(map(id, now))
    return [*(f"{kind} {_name(x, i)} was removed" for i, x in enumerate(before) if id(x) not in new),
            *(f"{kind} {_name(x, i)} was added" for i, x in enumerate(now) if id(x) not in old)]


def _switched(before: _Look, now: _Look) -> list[str]:
    """Return what is now trainable or no longer; of a layer alone, if what is in it changed the same way."""
    was = dict(zip(map(id, (*before.layers, *before.variables)), before.flags))
    changed = {id(x): flag for x, flag in zip((*now.layers, *now.variables), now.flags) if was.get(id(x), flag) != flag}
    inside = {id(x): id(layer) for layer in now.layers
              for x in (*layer._layers, *layer._trainable_variables, *layer._non_trainable_variables)}
    found = []
    for kind, members in (("layer", now.layers), ("variable", now.variables)):
        for i, x in enumerate(members):
            if id(x) in changed and changed.get(inside.get(id(x), 0)) != changed[id(x)]:
                found.append(f"{kind} {_name(x, i)} is {'trainable now' if changed[id(x)] else 'no longer trainable'}")
    return found


def _name(x: Any, number: int) -> str:
    """Return a name of a layer or variable that is the same on all ranks: Keras counts layers within a process."""
    if not isinstance(x, keras.layers.Layer):
        return f"{x.name} (number {number})"
    plain = keras.src.utils.naming.to_snake_case(type(x).__name__)
    return f"{plain} (number {number})" if re.fullmatch(plain + r"(_\d+)?", x.name) else str(x.name)
