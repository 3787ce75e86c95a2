"""A loss of keras.losses by the name that a configuration gives it, unreduced, on any backend of Keras.

Owns which names are known. What a loss makes of shapes that do not fit is in `shapes`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from hvdtrain.backends.keras.shapes import as_shares, guarded, key, of_shares
from hvdtrain.config import Named
from hvdtrain.core.errors import UserError, nearest


def by_name(named: Named) -> Callable[[Any, Any], Any]:
    """Return ``loss(y, outputs)``, one value per element, of a class or function of keras.losses.

    The name in any case, with or without underscores. One of shares of classes takes class numbers too.
    Errors: `UserError` for an unknown name, for one that leaves open which cross entropy, and for arguments that the
    loss does not take.
    """
    name = key(named.name)
    if name in ("crossentropy", "ce"):
        raise UserError(f"loss {named.name!r} leaves open which cross entropy", "its full name",
                        "name binary_crossentropy, categorical_crossentropy or sparse_categorical_crossentropy")
    classes = {n.lower(): c for n, c in vars(keras.losses).items()
               if isinstance(c, type) and issubclass(c, keras.losses.Loss) and c is not keras.losses.Loss}
    functions = {key(n): f for n, f in vars(keras.losses).items()
                 if inspect.isfunction(f) and n not in ("get", "serialize", "deserialize")}
    if name not in {**classes, **functions}:
        with contextlib.suppress(ValueError):  # Keras' short names, such as mse
            functions[name] = keras.losses.get(named.name.lower())
    if name not in {**classes, **functions}:
        raise UserError(f"loss {named.name!r} is not in keras.losses",
                        nearest(named.name, [c.__name__ for c in classes.values()]), "correct loss.name")
    args = without_reduction(named)
    try:
        if name in classes:
            found = guarded(classes[name](**args, reduction=None), named.name)
        else:
            inspect.signature(functions[name]).bind(None, None, **args)
            found = guarded(partial(functions[name], **args), named.name)
    except (TypeError, ValueError) as error:
        raise UserError(f"loss {named.name} refused its args {named.args}: {error}", "keyword arguments it knows",
                        "correct loss.args") from None
    return (lambda y, outputs: found(as_shares(y, outputs), outputs)) if of_shares(name) else found


def without_reduction(named: Named) -> dict[str, Any]:
    """Return the arguments without ``reduction``; `UserError` for one that is no mean over samples."""
    reduction = named.args.get("reduction")
    if reduction not in (None, "mean", "sum_over_batch_size"):
        raise UserError(f"loss {named.name} with reduction {reduction!r}", "reduction mean or sum_over_batch_size",
                        "leave reduction out; for the steps of a sum, multiply lr by global_batch")
    return {name: value for name, value in named.args.items() if name != "reduction"}
