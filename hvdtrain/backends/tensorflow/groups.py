"""Groups of variables and the optimizer that a Keras model's file gives (`parameter_groups`, `optimizer`).

Owns the reading of both. Keras' optimizers differ by variable in weight decay alone, so a group has that option only.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from hvdtrain.backends.model_spec import called
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError

KEYS = ("params", "variables")
"""Keys of a group under which its variables may be listed."""


def without_decay(spec: Any, decay: float | None) -> list[keras.Variable]:
    """Return the variables that the file's `parameter_groups` leaves out of weight decay, in the model's order.

    ``decay``: the optimizer's, which a group may name too.

    Errors: `UserError` for what is no list of groups of the model's variables, and for other options.
    """
    if spec.parameter_groups is None:
        return []
    given = called(spec, "parameter_groups", spec.model)
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise _wrong(f"parameter_groups gives {_kind_of(given)}")
    trained = {id(v): i for i, v in enumerate(spec.model.trainable_variables)}
    owner: dict[int, int] = {}
    out: set[int] = set()
    for number, group in enumerate(given):
        key = next((k for k in KEYS if isinstance(group, Mapping) and k in group), None)
        if key is None:
            raise _wrong(f"group {number} of parameter_groups is {_kind_of(group)}")
        decays_not = _decays_not({k: v for k, v in group.items() if k != key}, number, decay)
        for variable in _listed(group[key], number):
            place = _place(variable, number, trained, spec.model)
            if owner.setdefault(place, number) != number:
                raise UserError(f"variable {variable.path} is in groups {owner[place]} and {number} of "
                                "parameter_groups", "each variable in one group", "leave it out of one of them")
            if decays_not:
                out.add(place)
    return [v for i, v in enumerate(spec.model.trainable_variables) if i in out]


def _listed(variables: Any, number: int) -> list[Any]:
    if isinstance(variables, keras.Variable):
        return [variables]
    if isinstance(variables, (str, Mapping)) or not isinstance(variables, Iterable):
        raise _wrong(f"the variables of group {number} of parameter_groups are {_kind_of(variables)}")
    return list(variables)


def _place(variable: Any, number: int, trained: Mapping[int, int], model: keras.Model) -> int:
    if id(variable) in trained:
        return trained[id(variable)]
    if not isinstance(variable, keras.Variable):
        raise _wrong(f"the variables of group {number} of parameter_groups hold {_kind_of(variable)}")
    if any(v is variable for v in model.variables):
        raise UserError(f"group {number} of parameter_groups has {variable.path}, which is not trained",
                        "variables of model.trainable_variables", "leave it out of the group")
    raise UserError(f"group {number} of parameter_groups has {variable.path}, which is not a variable of the model",
                    "variables of the model that it is given", "take them from model.trainable_variables")


def _decays_not(options: Mapping[str, Any], number: int, decay: float | None) -> bool:
    """Return whether a group has no weight decay; `UserError` for an option that Keras has for all variables only."""
    odd = {k: v for k, v in options.items() if k != "weight_decay"}
    if odd:
        raise UserError(f"group {number} of parameter_groups has {', '.join(odd)}", "only weight_decay: "
                        "a Keras optimizer has all other settings for all variables", "leave it out, or use PyTorch")
    own = options.get("weight_decay", decay)
    if own not in (0, None, decay):
        raise UserError(f"group {number} of parameter_groups has weight_decay {own!r}", f"0, or {decay}, which "
                        "the optimizer uses for all other variables", "set optimizer.args.weight_decay to it, once for "
                                                                      "all")
    return bool(options) and own in (0, None)


def own_optimizer(spec: Any, config: Config) -> keras.optimizers.Optimizer | None:
    """Return the optimizer that the file's `optimizer` makes; None where there is no such function.

    Errors: `UserError` for something else, for one that is built, and for a model that was compiled with one too.
    """
    if spec.optimizer is None:
        return None
    try:
        made = called(spec, "optimizer", spec.model, config)
    except AttributeError as error:
        if error.name != "_unique_id":  # Keras' way to know a variable again
            raise
        raise UserError("optimizer excludes variables from weight decay that a rank of a pipeline has not created yet",
                        "groups that do not need the variables in advance",
                        "give parameter_groups(model), or exclude by var_names") from None
    if not isinstance(made, keras.optimizers.Optimizer):
        raise UserError(f"optimizer gives {_kind_of(made)}", "a keras.optimizers.Optimizer",
                        "return one from optimizer(model, config)")
    if made.built:
        raise UserError(f"the {type(made).__name__} of optimizer is built, for variables outside the run",
                        "an optimizer without state", "return a new one at each call of optimizer(model, config)")
    return made


def settings_of(optimizer: keras.optimizers.Optimizer, left_out: Sequence[str] = ()) -> str:
    """Return an optimizer's settings but those ``left_out``, to compare between ranks; "" where it cannot tell them."""
    try:
        found = optimizer.get_config()
    except NotImplementedError:  # a schedule of the user's
        return ""
    return "".join(f" {key} {value}" for key, value in sorted(found.items())
                   if key not in ("name", *left_out) and isinstance(value, (bool, int, float, str)))


def refuse_both(spec: Any) -> None:
    """Raise `UserError` for a model that keeps its compiled optimizer and whose file gives groups or an optimizer."""
    for part, do in (("optimizer", "remove compile (and set loss.name and metrics), or optimizer"),
                     ("parameter_groups", "set optimizer.name, or call exclude_from_weight_decay before compile")):
        if getattr(spec, part) is not None:
            raise UserError(f"the model was compiled with {type(spec.model.optimizer).__name__}, which it "
                            f"keeps, and its file defines {part}", "one of the two", do)


def exclude(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Leave ``variables`` out of the weight decay of an optimizer without state, unless it leaves out some itself."""
    if variables and not leaves_out(optimizer):
        optimizer.exclude_from_weight_decay(list(variables))


def leaves_out(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an optimizer leaves variables out of its weight decay by itself."""
    return bool(getattr(optimizer, "_exclude_from_weight_decay", None)
                or getattr(optimizer, "_exclude_from_weight_decay_pattern", None))


def checksum(model: keras.Model, variables: Sequence[keras.Variable]) -> str:
    """Return a text for which of the model's variables these are, the same in every process."""
    places = {id(v): i for i, v in enumerate(model.trainable_variables)}
    return f"{zlib.crc32(repr([places.get(id(v)) for v in variables]).encode()):08x}"


def _wrong(got: str) -> UserError:
    return UserError(got, 'a list of groups: {"variables": [variables], "weight_decay": 0}',
                     "correct parameter_groups in the model file")


def _kind_of(thing: Any) -> str:
    return "None" if thing is None else f"{thing!r}"[:40] if isinstance(thing, str) else f"a {type(thing).__name__}"
