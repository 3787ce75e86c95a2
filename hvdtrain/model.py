"""A model with what its file says about it: task, weight, named blocks, example.

Owns the reading of ``module:callable``. The framework follows from what the callable returns, never from a flag.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hvdtrain import backends
from hvdtrain.errors import UserError
from hvdtrain.resolve import load_callable, load_module


@dataclass(frozen=True)
class Spec:
    """A model and the optional functions of its file (None where it has none).

    ``task(model, batch) -> (loss_sum, weight)``; ``weight(batch) -> float`` of a numpy batch, needed where the weight
    is not the number of samples; ``metrics(model, batch) -> {name: (sum, weight)}`` beside a task;
    ``blocks(model) -> [(name, block)]``; ``example(B) -> (x_B, y_B)``.
    """

    name: str
    model: Any
    framework: str
    task: Callable[..., Any] | None = None
    weight: Callable[..., float] | None = None
    metrics: Callable[..., Any] | None = None
    blocks: Callable[..., Any] | None = None
    example: Callable[..., Any] | None = None


_PARTS = ("task", "weight", "metrics", "blocks", "example")


def spec_of(model: Any, name: str = "") -> Spec:
    """The spec of a model object; its optional functions are those of the module that defines its class."""
    module = sys.modules.get(type(model).__module__)
    own = type(model).__module__.split(".")[0] not in ("torch", "keras", "tensorflow")
    parts = {p: getattr(module, p, None) for p in _PARTS} if own else {}
    return _spec(name or type(model).__name__, model, parts)


def build_spec(text: str, args: dict[str, Any], prepare: Callable[[], None],
               scope: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Spec:
    """Import ``module:callable``, call it with ``args``, and collect its file's optional functions.

    ``prepare`` sets up and seeds the frameworks that are imported by then; a callable that imports its framework
    itself is called once more afterwards, so that its weights come from the seed. ``scope``: entered around each call.
    """
    build = load_callable(text, "model")
    prepare()
    before = _frameworks()
    with scope():
        model = build if _is_model(build) else _call(build, text, args)
    if _frameworks() != before and model is not build:
        prepare()
        with scope():
            model = _call(build, text, args)
    # The file that the user named comes first: its callable may be imported from elsewhere, or be a partial.
    homes = [load_module(text.rpartition(":")[0], "model"), sys.modules.get(getattr(build, "__module__", ""))]
    return _spec(text, model, {p: next((f for h in homes if (f := getattr(h, p, None))), None) for p in _PARTS})


def _is_model(thing: Any) -> bool:
    """Whether ``module:name`` names a model itself, ready made; such a thing is callable too."""
    try:
        return bool(backends.framework_of(thing))
    except UserError:
        return False


def _frameworks() -> set[str]:
    return {name for name in ("torch", "tensorflow") if name in sys.modules}


def _call(build: Callable[..., Any], text: str, args: dict[str, Any]) -> Any:
    """Call a user's builder; its complaint about arguments is the user's to mend."""
    try:
        inspect.signature(build).bind(**args)
    except TypeError as error:
        raise UserError(f"model {text} does not take model_args {args}: {error}", "arguments it takes",
                        "correct model_args") from None
    except ValueError:  # some callables have no signature
        pass
    try:
        return build(**args)
    except ValueError as error:
        if not args:  # then it speaks of something else: the user's own error, with its traceback
            raise
        raise UserError(f"model {text} refused model_args {args}: {error}", do="correct model_args") from error


def _spec(name: str, model: Any, parts: dict[str, Any]) -> Spec:
    framework = backends.framework_of(model)
    usable = {p: f for p, f in parts.items() if callable(f)}
    if "task" not in usable:  # they speak of a task; without one a function of that name is something else
        usable = {p: f for p, f in usable.items() if p not in ("weight", "metrics")}
    return Spec(name, model, framework, **usable)
