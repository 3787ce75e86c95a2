"""A script that uses hvdtrain already: words of Keras 2 at most. Asked before plain Keras, as it may call ``fit``."""

from __future__ import annotations


from hvdtrain.commands.migrate.finding import MigrateOptions, Rewrite
from hvdtrain.commands.migrate.rules import keras2
from hvdtrain.commands.migrate.scan import Scan

TITLE = "a script of hvdtrain already"
TARGETS = ("hvdtrain.keras", "trainer")


def recognise(scan: Scan) -> bool:
    """Whether hvdtrain is imported."""
    return scan.imports_any("hvdtrain")


def plan(scan: Scan, options: MigrateOptions) -> Rewrite:
    """What an import that was changed by hand has left behind."""
    made = Rewrite()
    if scan.imports_any("hvdtrain.keras", "hvdtrain.tensorflow"):
        keras2.rewrite(scan, made)
    return made
