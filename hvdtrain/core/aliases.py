"""Keep the module names of earlier releases importable for one release, each with a DeprecationWarning.

Owns the table of old and new names. Imports the standard library's import machinery only, and no module of the table.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DROPPED_IN = "0.3"
MOVED = {
    "hvdtrain.balance.line": "hvdtrain.planning.linear",
    "hvdtrain.balance.plan": "hvdtrain.planning.batch.plan",
    "hvdtrain.callbacks": "hvdtrain.engine.callbacks",
    "hvdtrain.cluster.launcher": "hvdtrain.core.launcher",
    "hvdtrain.data_parallel": "hvdtrain.parallel.data_parallel",
    "hvdtrain.errors": "hvdtrain.core.errors",
    "hvdtrain.events": "hvdtrain.core.events",
    "hvdtrain.exchange.buckets": "hvdtrain.core.buckets",
    "hvdtrain.exchange.compressors": "hvdtrain.comm.compressors",
    "hvdtrain.exchange.transport": "hvdtrain.comm.reducer.transport",
    "hvdtrain.exchange.weighting": "hvdtrain.data.weighting",
    "hvdtrain.keras.one_cycle": "hvdtrain.backends.keras.one_cycle",
    "hvdtrain.memory_plan.kinds": "hvdtrain.core.units",
    "hvdtrain.protocols": "hvdtrain.core.protocols",
    "hvdtrain.protocols.control": "hvdtrain.core.protocols.transport",
    "hvdtrain.protocols.data_parallel": "hvdtrain.core.protocols.stage",
    "hvdtrain.protocols.model_state": "hvdtrain.core.protocols.model",
    "hvdtrain.protocols.ops": "hvdtrain.core.protocols.tensors",
    "hvdtrain.protocols.params": "hvdtrain.core.protocols.tensors",
    "hvdtrain.protocols.report": "hvdtrain.core.protocols.run",
    "hvdtrain.protocols.state": "hvdtrain.core.protocols.run",
    "hvdtrain.protocols.wire": "hvdtrain.core.protocols.transport",
    "hvdtrain.records.numbers": "hvdtrain.core.records",
    "hvdtrain.sections": "hvdtrain.config.sections",
    "hvdtrain.timeline": "hvdtrain.core.timeline",
    "hvdtrain.trackers": "hvdtrain.reports.trackers",
}
"""Old name -> new name, with all modules below it. hvdtrain.keras.one_cycle is named in saved .keras files."""


def moved_to(name: str) -> str | None:
    """Return the new name of the module ``name``; "" for a package of which only some modules are in `MOVED`."""
    above = name
    while above not in MOVED and "." in above:
        above = above.rpartition(".")[0]
    if above in MOVED:
        return MOVED[above] + name[len(above):]
    return "" if any(old.startswith(f"{name}.") for old in MOVED) else None


class OldNames:
    """A finder and loader for the front of ``sys.meta_path``.

    The front: in a checkout that was updated, folders of old packages may be left with ``__pycache__`` alone, which
    Python would import as empty namespace packages.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        new = moved_to(name) if name.startswith("hvdtrain.") else None
        if new is None:
            return None
        real = None if new else PathFinder.find_spec(name, path)
        if real is not None and real.origin is not None:  # such as hvdtrain.cluster, which is a package still
            return None
        from importlib.util import find_spec

        there = find_spec(new) if new else None
        if new and there is None:
            return None
        # A package's search path is empty: Python's own finder would load its modules a second time, under old names.
        package = there is None or there.submodule_search_locations is not None
        return ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into the place of ``module``. A package stays, and passes on attributes."""
        name = module.__name__
        new = moved_to(name) or ""
        if hasattr(module, "__path__"):
            vars(module)["__getattr__"] = _attributes_of(name, new)
            return
        _warn(name, new)
        sys.modules[name] = import_module(new)


def _attributes_of(name: str, new: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of the old package ``name``."""
    def attribute(wanted: str) -> Any:
        if not new or wanted == "__file__":
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        found = getattr(import_module(new), wanted)
        if not wanted.startswith("__") and name not in _warned:
            _warned.add(name)
            _warn(name, new)
        return found

    return attribute


_warned: set[str] = set()


def _warn(name: str, new: str) -> None:
    """Warn at the line that imports; frames of the import machinery do not count."""
    warnings.warn(f"{name} is now {new}; the old name is removed in release {DROPPED_IN}", DeprecationWarning, 3)
