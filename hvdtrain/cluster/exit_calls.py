"""``sys.exit()`` in a callable of the user's (model, data, task, callback): end the job with one message and status 1.

A rank cannot leave a job by itself, since others would wait for it. SystemExit outside of a run keeps its meaning.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from hvdtrain.core import ROOT
from hvdtrain.core.errors import ExitCalled
from hvdtrain.core.launcher import launch_facts

_HERE = str(ROOT) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = ("/site-packages/", "/dist-packages/")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Raise `ExitCalled` where the body raises SystemExit; usable as a decorator.

    A signal handler of the user's that ends a single process still does: that is no part of the run.
    """
    try:
        yield
    except SystemExit as stop:
        stack = [(frame.f_code, line) for frame, line in traceback.walk_tb(stop.__traceback__)]
        if launch_facts(os.environ).kind == "solo" and _handles_signals({code for code, _ in stack}):
            raise
        raise called(stop) from stop


def called(stop: SystemExit) -> ExitCalled:
    """Return the error for ``stop``, which a callable of the user's has raised."""
    stack = [(frame.f_code, line) for frame, line in traceback.walk_tb(stop.__traceback__)]
    return ExitCalled(f"{_caller(stack)} ended the program with {_status(stop.code)} in the middle of a run; "
                      "expected a return or an exception. Remove the sys.exit(), or raise an "
                      "exception with a message")


def _status(code: object) -> str:
    if code is None or isinstance(code, int):
        return f"status {code or 0}"
    return f"status 1 and the message {str(code)!r}"


def _caller(stack: list[tuple[CodeType, int]]) -> str:
    """Name the user's callable in ``stack`` (outermost first), with its file and line."""
    own = stack[1 + max((i for i, (code, _) in enumerate(stack) if code.co_filename.startswith(_HERE)), default=-1):]
    by_user = [at for at in own if owner(at[0].co_filename) == "user"]
    installed = [at for at in own if owner(at[0].co_filename) == "package"]
    code, line = by_user[0] if by_user else (installed or own or stack)[-1]
    path = code.co_filename
    with contextlib.suppress(ValueError):
        path = str(Path(path).relative_to(Path.cwd()))
    return f"{getattr(code, 'co_qualname', code.co_name)} ({path}, line {line})"


def owner(path: str) -> str:
    """Return the owner of a file's code: the "user", an installed "package", or "python"."""
    if any(folder in path for folder in _PACKAGES):
        return "package"
    return "python" if path.startswith((_STDLIB, "<frozen")) else "user"


def _handles_signals(codes: set[CodeType]) -> bool:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(getattr(handler, "__code__", None) in codes for handler in handlers)
