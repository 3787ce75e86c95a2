"""What hands a run's records on to other tools: key ``trackers``, a file each, on rank 0 alone.

Owns the names that the key takes, and what is asked of them before a run starts. A file here has a class of its name
(``Csv`` in csv.py), a `hvdtrain.core.protocols.Tracker` made from the run and what stands after a colon; ``MODULE`` and
``PACKAGE``, the module that it needs and what pip calls that ("" where the standard library will do); ``ARGUMENT``, a
pattern of what may stand after a colon, and ``MEANS``, that in words; ``APART_S``, the least seconds between two steps
that it takes, by what one costs. A file is imported only where its tracker is named, its package only when it has a
record to take.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.protocols import Report, Tracker
from hvdtrain.core.resolve import load_callable
from hvdtrain.reports.beside import CLOSE_S, Beside

if TYPE_CHECKING:
    from hvdtrain.reports import ReportedRun


def choices() -> list[str]:
    """Return the built-in trackers: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check(entries: Sequence[str]) -> None:
    """Raise `UserError` for an entry of ``trackers`` that is not built in nor spelt as a callable, or there twice."""
    for n, text in enumerate(entries):
        name, _, argument = text.partition(":")
        if name in choices():
            takes = _module(name)
            if not re.fullmatch(takes.ARGUMENT, argument):
                raise UserError(f"trackers has {text!r}", f"{name}{takes.MEANS}", "correct trackers")
        elif not argument:
            raise UserError(f"trackers has {text!r}", f"{nearest(text, choices())}, or module:callable",
                            "correct trackers")
        if text in entries[:n]:
            raise UserError(f"trackers has {text!r} twice", "each once", "leave one out")


def check_installed(entries: Sequence[str]) -> None:
    """Raise `UserError` where a tracker's package is not installed here, or a callable of the user's is not there."""
    for text in entries:
        name, _, _ = text.partition(":")
        if name not in choices():
            load_callable(text, "trackers")
            continue
        needs = _module(name)
        if needs.MODULE and not _installed(needs.MODULE):
            raise UserError(f"trackers has {name}, and {needs.PACKAGE} is not installed", f"{needs.PACKAGE} on rank 0",
                            f"run `pip install {needs.PACKAGE}`")


def make(run: ReportedRun) -> list[Report]:
    """Return the trackers that ``run.config`` names, each beside training in a thread of its own."""
    return [_beside(run, text) for text in run.config.trackers]


def kept(path: Path, make: Callable[[], str]) -> str:
    """Return the text of the file ``path``, the id of a tracker's run; made and written where there is none."""
    if not path.exists():
        path.write_text(make(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _beside(run: ReportedRun, text: str) -> Report:
    name, _, argument = text.partition(":")
    if name in choices():
        factory, apart_s = partial(getattr(_module(name), name.title()), run, argument), _module(name).APART_S
    else:
        factory, apart_s = partial(_own, run, text), 0.0
    # The other ranks wait for rank 0 meanwhile, so all trackers together take half of what that may last at most.
    close_s = min(CLOSE_S, run.config.control_timeout_s / (2 * len(run.config.trackers)))
    return Beside(f"tracker {text}", factory, f"{run.config.log_every} step", close_s, apart_s)


def _own(run: ReportedRun, text: str) -> Tracker:
    """A tracker of the user's."""
    made: Any = load_callable(text, "trackers")(run)
    if not (callable(getattr(made, "write", None)) and callable(getattr(made, "close", None))):
        raise TypeError(f"it gave a {type(made).__name__}, not what has write(record) and close()")
    return made  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _installed(module: str) -> bool:
    """Whether ``module`` can be imported; a mere folder of that name, such as W&B leaves, is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
