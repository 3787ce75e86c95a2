"""Import the Python parts of torchvision from ``PREFIX/zoo``, where `make setup` found no wheel for PyTorch on CPUs.

Owns the import hook and the declaration of operators; installs nothing, and never replaces an installed torchvision.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType

PACKAGE = "torchvision"
OPERATORS = ("nms", "qnms")
"""Compiled operators that torchvision describes to PyTorch while it is imported, whether or not they are there."""


def use() -> None:
    """Have later imports of torchvision find its Python parts where no torchvision is installed; cheap when repeated.

    For user code that `hvdtrain` loads. A script of its own calls this before it imports timm or torchvision.
    """
    if not any(isinstance(finder, Finder) for finder in sys.meta_path) and os.path.isfile(_init_file()):
        sys.meta_path.append(Finder())  # last: asked only for what no other finder has


def notes() -> list[str]:
    """Return a line about what is missing where this process has imported the Python parts."""
    spec = getattr(sys.modules.get(PACKAGE), "__spec__", None)
    if spec is None or not isinstance(spec.loader, PartsLoader):
        return []
    return [f"torchvision: Python parts in {os.path.join(sys.prefix, 'zoo')}, without compiled operators (nms, "
            "roi_align, deform_conv2d) and decoders of images and video"]


class Finder(MetaPathFinder):
    """Find torchvision in ``PREFIX/zoo``; its submodules follow from the package's path."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if name != PACKAGE:
            return None
        file = _init_file()
        return spec_from_file_location(name, file, loader=PartsLoader(name, file),
                                       submodule_search_locations=[os.path.dirname(file)])


class PartsLoader(SourceFileLoader):
    """Declare the missing operators before torchvision's own code runs."""

    def exec_module(self, module: ModuleType) -> None:
        torch = importlib.import_module("torch")
        for operator in OPERATORS:
            with contextlib.suppress(RuntimeError):  # declared before, by an import that failed or by the user
                torch.library.define(f"{PACKAGE}::{operator}",
                                     "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        super().exec_module(module)


def _init_file() -> str:
    return os.path.join(sys.prefix, "zoo", PACKAGE, "__init__.py")
