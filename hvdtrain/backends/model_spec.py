"""A model with what its file says about it: task, weight, named blocks, example.

Owns the reading of ``module:callable``. The framework follows from what the callable returns, never from a flag.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvdtrain import backends
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable, load_module


@dataclass(frozen=True)
class Spec:
    """A model and the optional functions of its file (None where it has none).

    ``task(model, batch) -> (loss_sum, weight)``; ``weight(batch) -> float`` of a numpy batch, needed where the weight
    is not the number of samples; ``metrics(model, batch) -> {name: (sum, weight)}`` beside a task, as is
    ``predict(model, batch) -> outputs``, which without it are ``model(batch[0])``;
    ``blocks(model) -> [(name, block)]``; ``example(B) -> (x_B, y_B)``; ``parameter_groups(model) -> [group]`` and
    ``optimizer(model, config) -> optimizer`` in the framework's own terms; ``buffer_reduction(model) -> {name:
    reduction}`` (`hvdtrain.engine.written_state`), which may also be a method of the model.

    ``columns``: names of the columns of the data that the task reads, where it is known; others are left out.
    ``rows``: how columns of the data are taken by name (`hvdtrain.data.rows.ColumnNames`), in a run.
    ``again()``: builds the model again, to the same initial weights, where a callable built it. ``model`` may be no
    more than an outline without values then (`build_spec`), which `become` replaces.
    """

    name: str
    model: Any
    framework: str
    task: Callable[..., Any] | None = None
    weight: Callable[..., float] | None = None
    metrics: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None
    blocks: Callable[..., Any] | None = None
    example: Callable[..., Any] | None = None
    parameter_groups: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    buffer_reduction: Callable[..., Any] | None = None
    again: Callable[[], Any] | None = None
    rows: Any = None
    columns: Collection[str] = ()

    def become(self, model: Any) -> None:
        """Take ``model`` in place of an outline of it."""
        object.__setattr__(self, "model", model)


_PARTS = ("task", "weight", "metrics", "predict", "blocks", "example", "parameter_groups", "optimizer",
          "buffer_reduction")
PRETRAINED = "hf:"
"""Start of a model's name that is a folder of transformers (`hvdtrain.backends.torch.pretrained`)."""
_PRETRAINED = "hvdtrain.backends.torch.pretrained"


def spec_of(model: Any, name: str = "") -> Spec:
    """Return the spec of a model object; its optional functions are those of the module that defines its class."""
    module = sys.modules.get(type(model).__module__)
    own = type(model).__module__.split(".")[0] not in ("torch", "keras", "tensorflow")
    parts = {p: getattr(module, p, None) for p in _PARTS} if own else {}
    return _spec(name or type(model).__name__, model, parts)


def build_spec(text: str, args: dict[str, Any], prepare: Callable[[], None],
               scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
               outline: Callable[[], Callable[..., Any] | None] = lambda: None) -> Spec:
    """Import ``module:callable``, call it with ``args``, and collect its file's optional functions.

    ``prepare`` sets up and seeds the frameworks that are imported by then; a callable that imports its framework
    itself is called again afterwards, so that its weights come from the seed. ``scope``: entered around each call.
    ``outline``: gives what calls the builder in place of this function and returns a model without values, if
    anything does; it also gets the file's ``block_names() -> [name]`` and ``build_block(name) -> block``, with ``args``
    in them, where the file has both. ``hf:FOLDER``: a folder of transformers.
    """
    name = text
    if text.startswith(PRETRAINED):
        text, args = f"{_PRETRAINED}:build", {"folder": text.removeprefix(PRETRAINED), **args}
    build = load_callable(text, "model")

    def make() -> Any:
        with scope():
            return _call(build, text, args)

    def again() -> Any:
        prepare()
        return make()

    def made() -> Any:
        without_values = outline()
        return make() if without_values is None else without_values(make, *_by_block(find, args))

    # The file that the user named comes first: its callable may be imported from elsewhere, or be a partial.
    homes = [load_module(text.rpartition(":")[0], "model"), sys.modules.get(getattr(build, "__module__", ""))]

    def find(part: str) -> Any:
        return next((f for home in homes if (f := getattr(home, part, None))), None)

    prepare()
    before = _frameworks()
    model = build if _is_model(build) else made()
    if _frameworks() != before and model is not build:
        prepare()
        model = made()
    return _spec(name, model, {part: find(part) for part in _PARTS}, None if model is build else again)


def called(spec: Any, part: str, *given: Any) -> Any:
    """Return what the function ``part`` of the file of ``spec`` gives for ``given``; `UserError` if it takes others."""
    function = getattr(spec, part)
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise UserError(f"{part} of {spec.name} does not take {len(given)} arguments: {error}",
                        f"{part}({', '.join(('model', 'config')[:len(given)])})",
                        f"correct {part}, or rename it if it has another purpose") from None
    except ValueError:  # some callables have no signature
        pass
    return function(*given)


def refuse_groups(spec: Any, where: str, do: str) -> None:
    """Raise `UserError` for a file that gives groups or an optimizer to a model that takes none; ``where``: which."""
    for part in ("parameter_groups", "optimizer"):
        if getattr(spec, part) is not None:
            raise UserError(f"{part} in the file of {where}", "a model of PyTorch's own, or Keras on TensorFlow", do)


def _of_transformers(model: Any) -> dict[str, Any]:
    """Return the functions of a model of transformers or peft, whose forward returns a ModelOutput; {} for others."""
    theirs = any(c.__module__.startswith(("transformers.", "peft.")) for c in type(model).__mro__)
    return importlib.import_module(_PRETRAINED).parts_of(model) if theirs else {}


def _by_block(find: Callable[[str], Any], args: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return a file's functions that build a model block by block, with the builder's arguments; [] without both."""
    found = [find(part) for part in ("block_names", "build_block")]
    return [partial(function, **args) for function in found] if all(map(callable, found)) else []


def _is_model(thing: Any) -> bool:
    """Return whether ``module:name`` names a model itself, ready made; such a thing is callable too."""
    try:
        return bool(backends.framework_of(thing))
    except UserError:
        return False


def _frameworks() -> set[str]:
    return {name for name in ("torch", "tensorflow") if name in sys.modules}


def _call(build: Callable[..., Any], text: str, args: dict[str, Any]) -> Any:
    """Call a user's builder; its complaint about arguments is the user's to fix."""
    try:
        inspect.signature(build).bind(**args)
    except TypeError as error:
        raise UserError(f"model {text} does not take model_args {args}: {error}", "arguments it accepts",
                        "correct model_args") from None
    except ValueError:  # some callables have no signature
        pass
    try:
        return build(**args)
    except ValueError as error:
        if not args:  # then it speaks of something else: the user's own error, with its traceback
            raise
        raise UserError(f"model {text} refused model_args {args}: {error}", do="correct model_args") from error


def _spec(name: str, model: Any, parts: dict[str, Any], again: Callable[[], Any] | None = None) -> Spec:
    framework = backends.framework_of(model)
    usable = {p: f for p, f in parts.items() if callable(f)}
    if "task" not in usable:  # they speak of a task; without one a function of that name is something else
        usable = {p: f for p, f in usable.items() if p not in ("weight", "metrics", "predict")}
        usable = {**_of_transformers(model), **usable}
    return Spec(name, model, framework, **usable, again=again)
