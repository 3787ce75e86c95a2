"""Scripts of hvdtrain: calls of Keras 2 that an import changed by hand has left behind."""

from __future__ import annotations

from hvdtrain.commands.migrate.finding import MigrateOptions, Rewrite
from hvdtrain.commands.migrate.rules import keras2
from hvdtrain.commands.migrate.scan import Scan

TITLE = "a script of hvdtrain already"
TARGETS = ("hvdtrain.keras", "hvdtrain.torch", "trainer")


def recognise(scan: Scan) -> bool:
    return scan.imports_any("hvdtrain")


def plan(scan: Scan, options: MigrateOptions) -> Rewrite:
    made = Rewrite()
    if scan.imports_any("hvdtrain.keras", "hvdtrain.tensorflow"):
        keras2.rewrite(scan, made)
    return made
