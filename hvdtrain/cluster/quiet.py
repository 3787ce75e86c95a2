"""Shorten the imports of frameworks, and keep TensorFlow's start-up lines off the terminal.

No variable silences those lines (absl, oneDNN, cpu_feature_guard). While TensorFlow is imported standard error is a
pipe into a small process that passes on everything else, so that a rank that crashes meanwhile loses no word. Off where
the user asks for TensorFlow's log, and where it was loaded before.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

LINES = "|".join((
    r"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$",
    r"^(?:[IWE]\d{4} |\d{4}-\d\d-\d\d ).*(?:\] oneDNN custom operations are on\.|cpu_feature_guard\.cc:\d+\])",
    r"^To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.$",
))
"""Lines that are left out, as a regular expression over one line."""

WRAPPERS = "keras.wrappers"
"""Imports scikit-learn and SciPy, which take 0.6 s of CPU time of each process that imports Keras."""

LAST_S = 2.0
"""Longest wait for the filter to pass on what it holds; a child of the import's may keep it at work."""

_PASS_ON = """
import os, re, select, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
drop, rest = re.compile(sys.argv[1].encode()), b""
def tell(data):
    while data:
        try:
            data = data[os.write(1, data):]
        except OSError:
            return
while True:
    if rest and not select.select([0], [], [], 0.2)[0]:
        tell(rest)
        rest = b""
    data = os.read(0, 65536)
    if not data:
        break
    *lines, rest = (rest + data).split(b"\\n")
    tell(b"".join(line + b"\\n" for line in lines if not drop.search(line)))
if not drop.search(rest):
    tell(rest)
"""
"""The filter: copies a pipe to its end without `LINES`; an unfinished line after 0.2 s."""


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    """Leave `LINES` out of file descriptor 2 while the body runs; out of nothing where no filter can be started."""
    found = None if _asked_for(os.environ) else _start()
    if found is None:
        yield
        return
    child, own = found
    try:
        yield
    finally:
        _flush()
        os.dup2(own, 2)  # closes the last end of the pipe here, at which the other process ends
        os.close(own)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LAST_S)


def watch_import() -> None:
    """Filter and shorten the first import of TensorFlow in this process; shorten those of PyTorch and Keras."""
    for name, finder in (("tensorflow", _Finder), (WRAPPERS, _FrameworkFinder)):
        if name not in sys.modules and not any(isinstance(one, finder) for one in sys.meta_path):
            sys.meta_path.insert(0, finder())


def _asked_for(env: Any) -> bool:
    return env.get("TF_CPP_MIN_LOG_LEVEL", "") == "0" or env.get("TF_CPP_MAX_VLOG_LEVEL", "0") not in ("", "0")


def _start() -> tuple[subprocess.Popen, int] | None:
    """Put standard error on a pipe: (the process that reads it, a descriptor of what it was), None where impossible."""
    _flush()
    own = -1
    try:
        own = os.dup(2)
        # A session of its own: what ends the job's processes by their group lets it pass on the last words.
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", _PASS_ON, LINES], stdin=subprocess.PIPE, stdout=own,
                                 stderr=subprocess.DEVNULL, start_new_session=True)
    except (OSError, ValueError):
        if own >= 0:
            os.close(own)
        return None
    assert child.stdin is not None
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()
    return child, own


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as Python would, and puts `_Loader` before its loader."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != "tensorflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs a module within `filtered`, once, and steps aside."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        with filtered(), _without_collector():
            self._inner.exec_module(module)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Collect no garbage during an import, and leave the objects there are at its end out of later collections.

    Modules live as long as the process: 0.3 million objects of PyTorch, 0.6 of Keras. Collections of them, with the
    last ones at the end of the process, took a fourth of the CPU time of a short run.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


class _FrameworkFinder(importlib.abc.MetaPathFinder):
    """Finds frameworks as Python would, and has them run as `_RUN` says."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _RUN else None
        if spec is not None and spec.loader is not None:
            run = functools.partial(_RUN[name], spec.loader.exec_module)
            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def _at_once(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    with _without_collector():
        run(module)


def _at_first_use(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run ``module``, which only imports names, as soon as one is asked for. Threads may run it twice."""
    names = vars(module)

    def fill() -> list[str]:
        run(module)
        names.pop("__getattr__", None)
        names.pop("__dir__", None)
        return list(names)

    def get(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what inspect and the import system look for
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        fill()
        return getattr(module, name)

    names.update(__getattr__=get, __dir__=fill)


_RUN = {"torch": _at_once, "keras": _at_once, WRAPPERS: _at_first_use}
