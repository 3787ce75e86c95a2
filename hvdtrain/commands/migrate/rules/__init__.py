"""Kinds of scripts, by name, in the order they are asked: the first that recognises a script plans its rewrite.

A rule is a module, or one of `torch_kinds.TORCH_RULES`, with ``TITLE`` (in words), ``TARGETS`` (the first is auto's),
``recognise(scan) -> bool`` and ``plan(scan, wish) -> Plan``. A plan is pure: nothing is edited by making it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits
from hvdtrain.commands.migrate.finding import Finding

RULES = ("horovod_keras", "horovod_torch", "accelerate", "ddp", "tf_distribute", "data_parallel", "hvdtrain",
         "keras_fit")
"""Horovod's first, since a script of Horovod's may mention others; ``hvdtrain`` is one that was moved already."""

TARGETS = ("auto", "hvdtrain.keras", "trainer")


@dataclass(frozen=True)
class Wish:
    """What the user asked for. ``ranks``: how many processes the old script was started as."""

    target: str = "auto"
    ranks: int = 1


@dataclass
class Plan:
    """``edits``: none where it could not be done whole. ``snippet``: code to go on from by hand, "" if none."""

    edits: Edits = field(default_factory=Edits)
    findings: list[Finding] = field(default_factory=list)
    snippet: str = ""

    def tell(self, line: int, kind: Any, what: str, why: str, do: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(line, kind, what, why, do))


@dataclass(frozen=True)
class Word:
    """Something that has another form now. ``edit``: plans that form; None where a person has to choose one.

    ``what``, ``do`` and ``why``: as in `Finding`.
    """

    node: cst.CSTNode
    what: str
    do: str
    edit: Callable[[Edits], None] | None = None
    why: str = "Keras 3 ends with an error there"


def rule(name: str) -> Any:
    """The rule of this name."""
    from hvdtrain.commands.migrate.rules.torch_kinds import TORCH_RULES

    assert name in RULES
    return TORCH_RULES.get(name) or import_module(f"{__name__}.{name}")


def recognised(scan: Any) -> str:
    """Name of the first rule that recognises a script; "" if none does."""
    return next((name for name in RULES if rule(name).recognise(scan)), "")
