"""How the copies of a model stay one model: a file for each way, which the key ``data_parallel`` names.

A file offers ``make(setup) -> DataParallel``, and raises `UserError` there for what its way does not go together with.
Another way is one more file, here or anywhere (``module:callable`` or ``path/file.py:callable`` of such a function).
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.cluster.group import Group
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Config
from hvdtrain.parts import Parts
from hvdtrain.protocols import Collectives, Control, DataParallel, Ops
from hvdtrain.slots import load_slot


@dataclass(frozen=True)
class Setup:
    """What ``make`` gets. ``group``: the ranks that hold copies. ``notes``: remarks for the summary, to be added to."""

    config: Config
    control: Control
    topology: Topology
    group: Group
    collectives: Collectives
    ops: Ops
    parts: Parts
    notes: list[str]


def create(setup: Setup) -> DataParallel:
    """Return the way that ``config.data_parallel`` names, made of ``setup``; collective.

    Errors: `UserError` for a name that is none, and for what does not go together.
    """
    made: DataParallel = load_slot("hvdtrain.data_parallel", setup.config.data_parallel, "data_parallel", "make")(setup)
    return made
