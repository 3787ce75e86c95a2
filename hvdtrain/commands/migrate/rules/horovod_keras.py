"""Scripts of Horovod's Keras and TensorFlow APIs: imports move, if hvdtrain has all names."""

from __future__ import annotations

from hvdtrain.commands.migrate.finding import MigrateOptions, Rewrite
from hvdtrain.commands.migrate.rules import horovod_imports, keras2
from hvdtrain.commands.migrate.scan import Scan, argument

TITLE = "a script of Horovod's Keras or TensorFlow API"
TARGETS = ("hvdtrain.keras",)


def recognise(scan: Scan) -> bool:
    return scan.imports_any("horovod.keras", "horovod.tensorflow", "horovod._keras")


def plan(scan: Scan, options: MigrateOptions) -> Rewrite:
    made = Rewrite()
    line = horovod_imports.move(scan, made)
    if line:
        keras2.rewrite(scan, made)
        _passes(scan, made)
        made.tell(line, "changed", "trains through hvdtrain, with Horovod's names and arguments",
                  "Horovod's own wrappers train a different model on every rank under Keras 3, without an error",
                  "start it as before (horovodrun or mpirun), and compare the first epoch with an old log")
    return made


def _passes(scan: Scan, made: Rewrite) -> None:
    for call in scan.calls("DistributedOptimizer", "PartialDistributedOptimizer"):
        passes = argument(call, "backward_passes_per_step")
        if passes is not None and scan.code(passes.value) != "1":
            made.tell(scan.line(passes), "changed", "the optimizer's iterations counts updates; Horovod counted passes",
                      "so that Adam's bias correction is that of one process with the whole batch",
                      "nothing for learning-rate schedules, whose length stays as under Horovod; divide "
                      "other numbers that are compared with iterations by the number of passes")
