"""Programs that a build needs, each with its package. The Makefile runs this file: standard library only."""

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
    """``debian``, ``fedora``: the package on Debian or Ubuntu, on Fedora or RHEL."""

    name: str
    present: Callable[[], bool]
    debian: str
    fedora: str


def compiler() -> str:
    """Return the C++ compiler that CMake would take: $CXX, else c++, else g++, else clang++; "" without one."""
    named = os.environ.get("CXX", "").split()
    for name in [*named[:1], "c++", "g++", "clang++"]:
        if shutil.which(name):
            return name
    return ""


def compiles_cpp17() -> bool:
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
    """Return the tools in the order in which they are looked for."""
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
    """Return a line that names the first missing tool and its package, or None."""
    for tool in needed() if tools is None else tools:
        if not tool.present():
            return (f"error: {tool.name} is missing; install the package {tool.debian} (Debian, Ubuntu) "
                    f"or {tool.fedora} (Fedora, RHEL) and try again")
    return None


def main() -> int:
    """Print the line of the missing tool and return 1, if there is one; with ``--wheels`` Python and venv alone."""
    line = missing(needed()[:2] if "--wheels" in sys.argv[1:] else None)
    if line:
        print(line, file=sys.stderr)
    return 1 if line else 0


if __name__ == "__main__":
    sys.exit(main())
