"""The few programs that must be on the machine already; a missing one is named with the package that brings
it.

Owns the list. ``python -m hvdtrain.commands.build_horovod.tools`` is what the Makefile asks before anything is
installed, so this file needs the standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass

MINIMUM_PYTHON = (3, 10)
_PROBE = """\
#include <optional>
static_assert(__cplusplus >= 201703L);
int main() { return *std::optional<int>{0}; }
"""


@dataclass(frozen=True)
class RequiredTool:
    """A needed thing: how to find it, and its package on Debian or Ubuntu and on Fedora or RHEL."""

    name: str
    present: Callable[[], bool]
    debian: str
    fedora: str


def compiler() -> str:
    """The C++ compiler that CMake would take: $CXX, else c++, else g++, else clang++; "" without one."""
    named = os.environ.get("CXX", "").split()
    for name in [*named[:1], "c++", "g++", "clang++"]:
        if shutil.which(name):
            return name
    return ""


def compiles_cpp17() -> bool:
    """Whether that compiler takes C++17, its library included."""
    name = compiler()
    if not name:
        return False
    try:
        done = subprocess.run([name, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], input=_PROBE,
                              text=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _on_path(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


def _has_headers() -> bool:
    return os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))


def _has_venv() -> bool:
    return importlib.util.find_spec("ensurepip") is not None or sys.prefix != sys.base_prefix


def needed() -> tuple[RequiredTool, ...]:
    """Everything that must be there before `make setup`, in the order in which it is asked for."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        RequiredTool("CPython 3.10 or later", lambda: sys.version_info >= MINIMUM_PYTHON, "python3", "python3.11"),
        RequiredTool("Python's venv module", _has_venv, f"{python}-venv", "python3"),
        RequiredTool("Python's C headers", _has_headers, f"{python}-dev", "python3-devel"),
        RequiredTool("a C++17 compiler", compiles_cpp17, "g++", "gcc-c++"),
        RequiredTool("cmake", _on_path("cmake"), "cmake", "cmake"),
        RequiredTool("make", _on_path("make"), "make", "make"),
    )


def missing(tools: tuple[RequiredTool, ...] | None = None) -> str | None:
    """One line that names the first missing thing and its package, or None where all are there."""
    for tool in needed() if tools is None else tools:
        if not tool.present():
            return (f"error: {tool.name} is missing; install the package {tool.debian} (Debian, Ubuntu) "
                    f"or {tool.fedora} (Fedora, RHEL) and try again")
    return None


def main() -> int:
    """Print the line, if there is one; the exit status says whether everything is there.

    ``--wheels``: nothing is to be compiled, so only what installs is asked for.
    """
    line = missing(needed()[:2] if "--wheels" in sys.argv[1:] else None)
    if line:
        print(line, file=sys.stderr)
    return 1 if line else 0


if __name__ == "__main__":
    sys.exit(main())
