"""Keras' own optimizers and schedules by name, with optional warm-up and linear scaling of the rate.

Owns which optimizer and rate a run has: a compiled model's own (optimizer.name auto), a model file's (`groups`), else
by name with ``lr``. Updates are `optimizer`'s.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers import schedules

from hvdtrain.backends.keras.compiled import setup_of
from hvdtrain.backends.keras.facts import refuse_own_work
from hvdtrain.backends.keras.one_cycle import OneCycle
from hvdtrain.backends.keras.schedules import ReduceLROnPlateau, SequentialLR
from hvdtrain.backends.pairs import metric_of
from hvdtrain.backends.tensorflow import groups
from hvdtrain.config import Config, ScheduleConfig
from hvdtrain.config.run_length import members_of
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.core.resolve import load_callable


@keras.saving.register_keras_serializable(package="hvdtrain")
class WarmUp(schedules.LearningRateSchedule):
    """``base`` times ``scale`` times min(1, (t + 1) / warmup_steps) for update t (Goyal et al. 2017, arXiv 1706.02677).

    ``base``: a rate or another schedule; ``warmup_steps`` 0: no warm-up.
    """

    def __init__(self, base: Any, warmup_steps: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.base = base if isinstance(base, schedules.LearningRateSchedule) else float(base)
        self.warmup_steps, self.scale = warmup_steps, scale

    def __call__(self, step: Any) -> Any:
        rate = self.base(step) if callable(self.base) else keras.ops.convert_to_tensor(self.base, "float32")
        if self.scale != 1.0:
            rate = rate * self.scale
        if not self.warmup_steps:
            return rate
        done = (keras.ops.cast(step, "float32") + 1.0) / self.warmup_steps
        return rate * keras.ops.minimum(done, 1.0)

    def get_config(self) -> dict[str, Any]:
        base = schedules.serialize(self.base) if callable(self.base) else self.base
        return {"base": base, "warmup_steps": self.warmup_steps, "scale": self.scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        base = config["base"]
        return cls(**{**config, "base": schedules.deserialize(base) if isinstance(base, dict) else base})


class Slice(NamedTuple):
    """Row-major elements [begin, end) of the model's variable ``number``, which has ``shape``."""

    number: int
    begin: int
    end: int
    shape: tuple[int, ...]


class Optimization:
    """The optimizer of a run, built for the model's trainable variables.

    ``base_lr``: the configured or compiled rate times the linear scaling; None if the user's schedule decides.
    ``compiled``: it is the one that the model was compiled with. ``whole``: build it at once; else by `build`, unless
    one over slices of the variables takes its place (`hvdtrain.backends.tensorflow.params`). Then ``slices`` gives the
    slice of each of the optimizer's variables, by number, except those that all ranks have; ``former``: the optimizer
    over whole variables, if it had state; ``names``: rank 0's of the optimizer's variables, since Keras counts names
    within a process.
    """

    def __init__(self, config: Config, spec: Any, steps_per_epoch: int, whole: bool = True) -> None:
        model: keras.Model = spec.model
        self._config, self._model = config, model
        self.trained = list(model.trainable_variables)
        self.slices: dict[int, Slice] | None = None
        self.former: keras.optimizers.Optimizer | None = None
        self.names: list[str] = []
        own = model.optimizer if getattr(model, "compiled", False) else None
        self.compiled = config.optimizer.name == "auto" and own is not None
        base = config.schedule.linear_scaling_base
        self._scale = config.global_batch / base if base else 1.0
        self.base_lr: float | None = None
        _refuse_epochs(config.schedule)
        if self.compiled:
            groups.refuse_both(spec)
        given = groups.own_optimizer(spec, config)
        self._of_file = given is not None
        self.overruled: frozenset[str] = frozenset()
        self.changes: list[str] = []
        left_out = ("learning_rate",) if given is None else ()  # copies of a compiled model get the first rank's rate
        self._settings = groups.settings_of(given or own, left_out) if given is not None or self.compiled else ""
        self.optimizer = self._create() if given is None and not self.compiled else self._adopt(given or own)
        refuse_own_work(self.optimizer)
        self._without_decay = groups.without_decay(spec, self.optimizer.weight_decay)
        self._left_out = groups.checksum(model, self._without_decay) if self._without_decay else ""
        self._decayed = len(model.trainable_variables) - len(self._without_decay)
        self._adopted = self.optimizer
        if whole:
            self.build()
        setup_of(model).optimizer = self.optimizer

    def built(self) -> bool:
        """Return whether the optimizer over whole variables has its state."""
        built_for = [id(v) for v in getattr(self.optimizer, "_trainable_variables", [])]
        return self.optimizer.built and built_for == list(map(id, self.trained))

    def build(self) -> None:
        """Give the optimizer its state, if it has none and no slices take its place."""
        if self.slices is None and not self.built():
            self.exclude()
            self.optimizer.build(self.trained)  # not twice: its history would be lost

    def exclude(self) -> None:
        """Leave the groups without weight decay out of it; of variables that are there, before there is any state."""
        groups.exclude(self.optimizer, self._without_decay)

    def keep(self, part: keras.Model) -> None:
        """Restrict the optimizer to ``part``, which has some of the model's variables, before there is any state."""
        self._model, self.trained = part, list(part.trainable_variables)

    def replace(self, made: keras.optimizers.Optimizer, slices: dict[int, Slice], shown: Any) -> None:
        """Put ``made``, an optimizer over slices, in the optimizer's place; callbacks see ``shown`` as the model's."""
        self.former = self.optimizer if self.built() else None
        self.optimizer, self.slices = made, slices
        setup_of(self._model).optimizer = shown

    def _create(self) -> keras.optimizers.Optimizer:
        named = self._config.optimizer
        classes = {n.lower(): c for n, c in vars(keras.optimizers).items()
                   if isinstance(c, type) and issubclass(c, keras.optimizers.Optimizer)
                   and c not in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)}
        name = "adam" if named.name == "auto" else named.name.lower()
        if name not in classes:
            raise UserError(f"optimizer {named.name!r} is not in keras.optimizers",
                            nearest(named.name, [c.__name__ for c in classes.values()]), "correct optimizer.name")
        given = named.args.get("learning_rate", self._config.lr * self._scale)
        self.base_lr = float(given) if isinstance(given, (int, float)) else None
        try:
            return classes[name](**{"learning_rate": self._rate(self._config.lr), **named.args})
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer {classes[name].__name__} refused args {named.args}: {error}",
                            "keyword arguments it accepts", "correct optimizer.args") from None

    def _adopt(self, own: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Return the optimizer of the compiled model or of its file, its rate changed only by what config asks for."""
        schedule = self._config.schedule
        given = _given_rate(own)
        self.base_lr = None if callable(given) else given * self._scale
        if schedule.on or schedule.warmup_steps or self._scale != 1.0:
            _put_rate(own, given, self._rate(given))
        elif _PUT in vars(own) or isinstance(own._learning_rate, WarmUp):  # what an earlier run asked for
            _put_rate(own, given, given)
        return own

    def _rate(self, base: Any) -> Any:
        """Return a number, or a schedule that starts from it; ``base``: a rate before scaling, or a schedule."""
        steps = self._config.schedule.warmup_steps
        named = self._config.schedule
        if callable(base) and not isinstance(base, schedules.LearningRateSchedule):
            raise UserError("the compiled optimizer's rate is a function", "a number or one of Keras' schedules",
                            "compile with a number, or leave schedule.* unset")
        if named.name.lower() in ("none", ""):
            if isinstance(base, schedules.LearningRateSchedule) or steps:
                return WarmUp(base, steps, self._scale)
            return float(base * self._scale)
        if isinstance(base, schedules.LearningRateSchedule):
            raise UserError(f"schedule is {named.name} and the compiled optimizer has a schedule of its own",
                            "one schedule", "set schedule.name to none, or compile with a plain rate")
        made = self._schedule(float(base * self._scale))
        return WarmUp(made, steps) if steps else made

    def _schedule(self, lr: float, name: str = "", given: Mapping[str, Any] | None = None) -> Any:
        """Return a schedule by name, by default the configured one; its initial rate is ``lr`` unless args give one."""
        named, inner = self._config.schedule, bool(name)
        name, given = name or named.name, dict(named.args if given is None else given)
        root = schedules.LearningRateSchedule
        classes = {n.lower(): c for n, c in vars(schedules).items()
                   if isinstance(c, type) and issubclass(c, root) and c is not root} | {"onecycle": OneCycle}
        classes |= {} if inner else {"reducelronplateau": ReduceLROnPlateau, "sequentiallr": SequentialLR}
        if ":" not in name and name.lower() not in classes:
            raise UserError(f"schedule {name!r} is not in keras.optimizers.schedules",
                            nearest(name, [c.__name__ for c in classes.values()]) + ", or module:callable",
                            "correct schedule.args.schedulers" if inner else "correct schedule.name")
        made = load_callable(name, "schedule.name") if ":" in name else classes[name.lower()]
        if made is ReduceLROnPlateau and given.get("mode", "auto") == "auto":
            given["mode"] = metric_of(named.followed).better
        if made is SequentialLR:
            given["schedulers"] = [self._schedule(lr, one, more) for one, more in members_of(name, given)]
        takes = inspect.signature(made).parameters
        start = {key: lr for key in ("initial_learning_rate", "max_learning_rate") if key in takes}
        try:
            return made(**{**start, **given})
        except (TypeError, ValueError) as error:
            raise UserError(f"schedule {made.__name__} refused args {given}: {error}",
                            "keyword arguments it accepts", "correct schedule.args") from None

    def plateau(self) -> ReduceLROnPlateau | None:
        """Return the schedule that follows evaluations, if the optimizer has one."""
        held = self.optimizer._learning_rate
        while isinstance(held, WarmUp):
            held = held.base
        return held if isinstance(held, ReduceLROnPlateau) else None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the optimizer as its user gave them, JSON-able; a plain rate is `base_lr`."""
        given = _given_rate(self._adopted)
        with instead(self.optimizer, "_learning_rate", tf.zeros([])):  # a schedule need not tell itself as text
            found = {**self.optimizer.get_config(), "name": None, "learning_rate": "constant"}
        if isinstance(given, schedules.LearningRateSchedule):
            found["learning_rate"] = type(given).__name__
            with contextlib.suppress(NotImplementedError):
                found["learning_rate"] += f" {given.get_config()}"
        return {k: v for k, v in found.items() if v is None or isinstance(v, (bool, int, float, str))}

    def resume(self, rest: Mapping[str, Any], rate_loaded: bool = True) -> None:
        """Apply the configured base rate after a load, if it differs from the stored one.

        A schedule or warm-up holds the new base already; a plain rate, which was loaded (``rate_loaded``; not if the
        checkpoint had a schedule), is scaled by new / stored. ``rest``: of the checkpoint's state.
        """
        stored_base_lr, plateau = rest.get("base_lr"), self.plateau()
        if plateau is not None:
            plateau.load(rest.get("plateau", {}))
        self._note_changes(rest)
        held = self.optimizer._learning_rate
        if callable(held) or not rate_loaded:
            return
        if stored_base_lr is not None and self.base_lr is not None \
                and not math.isclose(stored_base_lr, self.base_lr, rel_tol=1e-6):
            factor = self.base_lr / stored_base_lr if stored_base_lr else 0.0
            self.optimizer.learning_rate = float(held.numpy()) * factor if factor else self.base_lr
        if _PUT in vars(self._adopted):
            vars(self._adopted)[_PUT] = (vars(self._adopted)[_PUT][0], float(held.numpy()))

    def _note_changes(self, rest: Mapping[str, Any]) -> None:
        """Note which settings of an optimizer that the configuration does not give differ from the checkpoint's."""
        now, base_lr = self.settings(), rest.get("base_lr")
        by_itself = {"initial_learning_rate", "max_learning_rate"} & set(self._config.schedule.args)
        same = self._of_file and base_lr == self.base_lr
        self.overruled = frozenset({"lr"} if by_itself or same else ())
        if not (self.compiled or self._of_file):
            return
        then = rest.get("settings", now)
        self.changes = [f"{k} {then.get(k)} -> {now.get(k)}" for k in dict.fromkeys((*then, *now))
                        if then.get(k) != now.get(k)]
        if base_lr is not None and self.base_lr is not None and not math.isclose(base_lr, self.base_lr, rel_tol=1e-6):
            self.changes.append(f"learning rate {base_lr:g} -> {self.base_lr:g}")

    def made_of(self) -> str:
        held = self.optimizer._learning_rate
        name = type(self.optimizer).__name__ + (f" group {self._left_out}" if self._left_out else "")
        if isinstance(held, schedules.LearningRateSchedule):
            try:
                return f"{name} {type(held).__name__} {held.get_config()}{self._settings}"
            except NotImplementedError:
                return f"{name} {type(held).__name__}{self._settings}"
        return name + self._settings

    def own_schedule(self) -> schedules.LearningRateSchedule | None:
        """Return the schedule in the optimizer of the compiled model or of its file, or None."""
        given = _given_rate(self._adopted) if self.compiled or self._of_file else None
        return given if isinstance(given, schedules.LearningRateSchedule) else None

    def rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def describe(self) -> dict[str, str]:
        s, config = self._config.schedule, self._config
        held = self.optimizer._learning_rate
        while isinstance(held, WarmUp):
            held = held.base
        scheduled = isinstance(held, schedules.LearningRateSchedule)
        source = " (as compiled)" if self.compiled else " (the model file's)" if self._of_file else ""
        # A rate may also be a function of the user's, which is not called outside of updates.
        rate: Any = getattr(held, "initial_learning_rate", None) if scheduled or callable(held) else float(held)
        rate = getattr(held, "max_learning_rate", rate)
        if s.warmup_steps and not scheduled and rate is not None:
            rate = rate * self._scale
        rated = "" if rate is None else f", lr {float(rate):g}"
        words = {"optimizer": type(self.optimizer).__name__ + rated + source}
        if self._without_decay:
            words["parameter groups"] = (f"weight_decay 0: {count(len(self._without_decay), 'tensor')}; "
                                         f"as configured: {count(self._decayed, 'tensor')}")
        if scheduled:
            words["schedule"] = f"{type(held).__name__} per " + (f"evaluation of {s.followed}" if s.plateau else "step")
        if s.warmup_steps:
            words["warm-up"] = f"linear over {count(s.warmup_steps, 'step')}"
        if s.linear_scaling_base:
            words["lr scaling"] = f"x {config.global_batch}/{s.linear_scaling_base}"
        return words


_PUT = "_hvdtrain_rate"
"""Attribute of a compiled optimizer: (the rate its owner gave, the one that a run put in its place)."""


def _given_rate(optimizer: Any) -> Any:
    """Return the rate that the optimizer's owner gave, a number or a schedule, also after runs that changed it."""
    held = optimizer._learning_rate
    given, put = vars(optimizer).get(_PUT, (None, None))
    if callable(held):
        if held is put:
            return given
        while isinstance(held, WarmUp):  # of a run whose model was saved and loaded
            held = held.base
        return held
    now = float(held.numpy())
    same = put is not None and not callable(put) and math.isclose(now, put, rel_tol=1e-6)
    return given if same else now


def _put_rate(optimizer: Any, given: Any, rate: Any) -> None:
    """Set the rate and remember the former one; by `vars`, because Keras would track an attribute set plainly."""
    if callable(optimizer._learning_rate) and not callable(rate):
        rate = WarmUp(rate)  # Keras takes no plain number where a schedule was
    optimizer.learning_rate = rate
    vars(optimizer)[_PUT] = (given, rate)


def _refuse_epochs(schedule: ScheduleConfig) -> None:
    if schedule.interval == "epoch" and schedule.on:
        raise UserError(f"schedule.interval is epoch and {schedule.name} is a schedule of Keras, which counts steps",
                        "step", "set schedule.interval to step and multiply its steps by the steps per epoch")


@contextlib.contextmanager
def instead(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replace ``thing.name`` by ``value`` within; Keras would track an attribute that is set plainly."""
    before = vars(thing).get(name, thing)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        object.__delattr__(thing, name)
        if before is not thing:
            object.__setattr__(thing, name, before)


def give_back(own: keras.optimizers.Optimizer) -> None:
    """Remove the state of a Keras optimizer, so that it is as if it had never been built."""
    for name, held in list(vars(own).items()):
        holds = isinstance(held, (list, tuple)) and any(isinstance(v, keras.Variable) for v in held)
        if holds and name != "_variables":
            object.__setattr__(own, name, [])
    for v in own.variables:
        if v is not own._iterations and v is not own._learning_rate:
            own._untrack_variable(v)
    own._trainable_variables_indices.clear()
    own.built = False
    own._iterations.assign(0)


def alike(own: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return an optimizer of the kind and settings of ``own`` with the same rate, also where callbacks change it."""
    with instead(own, "_learning_rate", tf.zeros([])):  # a schedule or function of a user's need not be serializable
        made = type(own).from_config(own.get_config())
    if callable(own._learning_rate):
        made._untrack_variable(made._learning_rate)
        object.__setattr__(made, "_learning_rate", own._learning_rate)
    else:
        share(made, "_learning_rate", own._learning_rate)
    return made


def share(made: Any, name: str, variable: keras.Variable) -> None:
    """Have an optimizer use ``variable`` in place of its own of that name."""
    own = getattr(made, name)
    place = next(i for i, v in enumerate(made._variables) if v is own)
    made._untrack_variable(own)
    made._variables.insert(place, variable)
    object.__setattr__(made, name, variable)
