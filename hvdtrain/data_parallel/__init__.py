"""How the copies of a model stay one model: a file for each way, which the key ``data_parallel`` names.

A file offers ``make(setup) -> DataParallel``, and raises `UserError` there for what its way does not go together with.
Another way is one more file, here or anywhere (``module:callable`` or ``path/file.py:callable`` of such a function).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.group import Group
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Config
from hvdtrain.data_parallel.alone import Alone
from hvdtrain.errors import UserError
from hvdtrain.parts import Parts
from hvdtrain.protocols import Collectives, Control, DataParallel, Ops
from hvdtrain.slots import load_slot


@dataclass(frozen=True)
class Setup:
    """What ``make`` gets. ``group``: the ranks that hold copies. ``notes``: remarks for the summary, to be added to.

    ``scene``: what the memory plan looks at (`hvdtrain.memory_plan.survey.Scene`).
    """

    config: Config
    control: Control
    topology: Topology
    group: Group
    collectives: Collectives
    ops: Ops
    parts: Parts
    notes: list[str]
    scene: Any = None


def create(setup: Setup) -> DataParallel:
    """Return the way that ``config.data_parallel`` names, made of ``setup``; collective.

    Errors: `UserError` for a name that is none, and for what does not go together.
    """
    name, compression = setup.config.data_parallel.name, setup.config.compression
    if compression == "auto" and name != "replicate":
        raise UserError(f"compression auto with data_parallel {name}", "replicate, whose compressor it changes",
                        "name a compression, or leave data_parallel out")
    made: DataParallel = load_slot("hvdtrain.data_parallel", name, "data_parallel", "make")(setup)
    if not hasattr(made, "update"):
        raise UserError(f"data_parallel {name} returned a {type(made).__name__}", "a DataParallel, such as "
                        "hvdtrain.data_parallel.replicate.Replicate", "return one from its callable")
    if name in ("replicate", "zero") and isinstance(made, Alone):
        made.fuses = True
    return made
