"""Entry point of each rank of a row: runs the function of the row's name; rank 0 writes its finding.

An exception on any rank ends all of them with a status that is not 0, by hvdtrain's own hooks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = {
    "exchange": ("wires", "staged", "compressors", "horovod", "nccl"),
    "training": ("start", "training", "precision", "batchnorm", "zero", "checkpoint", "split", "command"),
    "memory": ("remat", "oom", "balance", "micro_batch", "readings"),
    "batches": ("uploads",),
    "speed": ("compile_auto", "gpt_100m"),
}
"""The files in jobs/, and the rows that have their functions there."""


def main(name: str, said: Path) -> None:
    """Run the row ``name`` and write what was found to ``said``."""
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(Path(__file__).parent))
    from jobs import kit

    control = kit.begin()
    home = next(file for file, names in FILES.items() if name in names)
    case = getattr(importlib.import_module(f"jobs.{home}"), name)
    try:
        found = {"status": "passed", **case(control)}
    except kit.Skipped as reason:
        found = {"status": "skipped", "detail": str(reason)}
    control.barrier("the end of the row", 60.0)
    if control.rank == 0:
        aside = said.with_suffix(".part")
        aside.write_text(json.dumps(found, default=float), encoding="utf-8")
        os.replace(aside, said)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
