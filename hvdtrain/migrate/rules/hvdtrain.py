"""A script that uses hvdtrain already: nothing to rewrite. Asked before plain Keras, whose ``fit`` it may call."""

from __future__ import annotations

from typing import Any

from hvdtrain.migrate.rules import Plan
from hvdtrain.migrate.scan import Scan

TITLE = "a script of hvdtrain already"
TARGETS = ("hvdtrain.keras", "trainer")


def recognise(scan: Scan) -> bool:
    """Whether hvdtrain is imported."""
    return scan.imports_any("hvdtrain")


def plan(scan: Scan, wish: Any) -> Plan:
    """Nothing."""
    return Plan()
