"""Entries of the key ``metrics`` that stand for an object or make one: spelling, and the objects themselves.

Owns no metric: backends say which objects they measure and how. Knows their methods, imports no library of metrics.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable

STATES = ("_defaults", "_reductions", "update", "compute", "reset")
"""Attributes of a `torchmetrics.Metric`."""
VARIABLES = ("variables", "update_state", "result", "reset_state")
"""Attributes of a `keras.metrics.Metric`."""
COLLECTION = ("items", "update", "compute", "reset", "compute_groups")
"""Attributes of a `torchmetrics.MetricCollection`."""


def is_object(thing: Any) -> bool:
    """Return whether ``thing`` is a metric with a state, or a collection of some; no class."""
    return not isinstance(thing, type) and any(
        all(hasattr(thing, name) for name in names) for names in (STATES, VARIABLES, COLLECTION))


class MetricObject(str):
    """A metric or callable that a script gives, as the text that records have of it, such as ``<F1Score>``.

    The text names nothing that could be imported: made again by its class alone, the metric might have other arguments.
    """

    metric: Any

    def __new__(cls, metric: Any) -> MetricObject:
        name = getattr(metric, "__name__", type(metric).__name__)
        made = super().__new__(cls, f"<{name}>")
        made.metric = metric
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Become plain text in copies for records and other ranks."""
        return str, (str(self),)


def entries(given: Any) -> Any:
    """Return ``given`` of the key as a list of texts; what cannot be a metric stays as it is, to be refused."""
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    found = [MetricObject(one) if not isinstance(one, str) and (is_object(one) or callable(one)) else one
             for one in items]
    return found if any(isinstance(one, MetricObject) for one in found) else given


def split(text: str) -> list[str]:
    """Return the items of ``text`` between commas, apart from commas in brackets and quotes."""
    items, depth, quote = [""], 0, ""
    for letter in text:
        quote = ("" if letter == quote else quote or letter) if letter in "'\"" else quote
        depth += 0 if quote else (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0 and not quote:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]


def parsed(entry: str) -> tuple[str, dict[str, Any] | None]:
    """Return the name and keyword arguments of an entry such as ``AUC(curve='PR')``; None without brackets."""
    name, bracket, rest = entry.partition("(")
    if not bracket or not entry.endswith(")"):
        return entry, None
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(one.arg for one in call.keywords):
            return name.strip(), {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError):
        pass
    raise UserError(f"metrics has the entry {entry!r}", "keyword arguments that are numbers, texts or lists, such as "
                    "AUC(curve='PR')", "correct metrics, or name a callable of your file that makes the metric")


def short_name(entry: str) -> str:
    """Return the last part of the name of an entry: ``F1Score`` of ``library.classification.F1Score(top_k=2)``."""
    return parsed(entry.strip("<>"))[0].rpartition(":")[2].rpartition(".")[2]


def loaded(entry: str, keys: Callable[[str], Any] | None = None) -> Any:
    """Return the metric object of an entry, or the callable(outputs, targets) that it names.

    ``keys``: returns the class for a name without a module, if it has any. A class, and a callable that needs no
    arguments, is called. Errors: `UserError`.
    """
    if isinstance(entry, MetricObject):
        return entry.metric
    if entry.startswith("<"):
        raise UserError(f"metrics has the entry {entry}, an object that a script gave", "a name that makes the metric",
                        "set metrics, for example to file.py:make of your file, where make() returns the object")
    name, args = parsed(entry)
    found = None if ":" in name or keys is None else keys(name)
    if found is None:
        module, _, attribute = name.rpartition(":" if ":" in name else ".")
        found = load_callable(f"{module}:{attribute}", "metrics")
    if args is None and not isinstance(found, type) and not _makes(found):
        return found
    try:
        made = found(**(args or {}))
    except ImportError as error:
        raise UserError(f"metric {entry} cannot be made: {error}", "the package that it needs, installed",
                        "install it, or correct metrics") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"metric {entry} cannot be made: {error}", "the arguments that it takes",
                        f"correct metrics, for example {short_name(entry)}(NAME=VALUE)") from error
    if not is_object(made):
        raise UserError(f"metric {entry} made a {type(made).__name__}", "a metric object, of torchmetrics or "
                        "keras.metrics", "return one, or name a callable(outputs, targets) -> (sum, weight)")
    return made


def _makes(found: Callable[..., Any]) -> bool:
    """Return whether a callable takes no outputs and targets, so that it makes a metric."""
    if is_object(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return False
    return all(one.default is not one.empty or one.kind is one.VAR_KEYWORD for one in parameters)
