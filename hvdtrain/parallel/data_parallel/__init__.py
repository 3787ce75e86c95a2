"""How the copies of a model stay one model: a file for each way, which the key ``data_parallel`` names.

A file offers ``make(setup) -> DataParallel``, and raises `UserError` there for what its way does not go together with.
Another way is one more file, here or anywhere (``module:callable`` or ``path/file.py:callable`` of such a function).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hvdtrain.cluster.topology import Topology
from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Compressor, Control, DataParallel, Ops, ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.resolve import completed, load_slot
from hvdtrain.parallel.data_parallel.alone import Alone
from hvdtrain.parallel.parts import ModelParts

OWN = ("replicate", "zero")
"""The ways of this package."""


@dataclass(frozen=True)
class DataParallelSetup:
    """What ``make`` gets. ``group``: the ranks that hold copies. ``notes``: remarks for the summary, to be added to.

    ``control``: of all ranks of the job. Of a model that is cut over ranks ``group`` and ``collectives`` are those of
    the last blocks of this rank; `wires` has all of them. ``scene``: what the memory plan looks at
    (`hvdtrain.engine.memory_survey.Scene`).
    """

    config: Config
    control: Control
    topology: Topology
    group: Group
    collectives: Collectives
    ops: Ops
    parts: ModelParts
    notes: list[str]
    scene: Any = None

    @property
    def wires(self) -> dict[str, Collectives]:
        """The wire of each group that this rank sums buckets with (`Bucket.group`), of a model cut over ranks."""
        return {replicas.group.name("grad"): replicas.wire for replicas in self.parts.replicas}

    @property
    def ranks_of(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each group that this rank sums buckets with (`Bucket.group`)."""
        groups = [replicas.group for replicas in self.parts.replicas] or [self.group]
        return {group.name("grad"): group.ranks for group in groups}

    @property
    def decides(self) -> Control | None:
        """Who knows whether an update is made, of a model cut over ranks: no rank has all of its gradient."""
        return self.control if self.parts.layout is not None else None


def create(setup: DataParallelSetup) -> DataParallel:
    """Return the way that ``config.data_parallel`` names, made of ``setup``; collective.

    Errors: `UserError` for a name that is none, and for what does not go together.
    """
    name, compression = setup.config.data_parallel.name, setup.config.compression
    if compression == "auto" and name != "replicate":
        raise UserError(f"compression auto with data_parallel {name}", "replicate, whose compressor it changes",
                        "name a compression, or leave data_parallel out")
    if setup.parts.layout is not None:
        setup = _among_replicas(setup)
    made: DataParallel = load_slot(__name__, name, "data_parallel", "make")(setup)
    if not hasattr(made, "update"):
        raise UserError(f"data_parallel {name} returned a {type(made).__name__}", "a DataParallel, such as "
                        "hvdtrain.parallel.data_parallel.replicate.Replicate", "return one from its callable")
    try:
        inspect.signature(made.update).bind(0, [], frozenset())
    except TypeError:
        raise UserError(f"data_parallel {name}, whose update takes no unused parameters",
                        "update(step, grads, unused), where unused are the parameters without a gradient",
                        "add the argument and hand it to Optimizer.step") from None
    lacking = [each for each in ("stage", "sizes_BP") if not hasattr(made, each)]
    if lacking and hasattr(made, "divides_state") and made.divides_state:
        raise UserError(f"data_parallel {name} divides the state and has no {' and no '.join(lacking)}",
                        "the members of hvdtrain.core.protocols.DividesState, from which memory is planned",
                        "add them, or set divides_state to False")
    if name in OWN and isinstance(made, Alone) and setup.parts.layout is None:
        made.fuses = True
    return made if name in OWN else cast(DataParallel, completed(made, Undeclared))


class Undeclared:
    """Capabilities of a way of a user's own that declares none: nobody relies on what it does not say."""

    divides_state = copies_equal = can_change_transport = overlaps = False
    compressor: Compressor = cast(Compressor, NoCompression())
    buckets: Sequence[Bucket] = ()
    gathers, gathered_s = 0, 0.0

    def remembered_bytes(self) -> int:
        """0."""
        return 0

    def extend(self, specs: Sequence[ParamSpec], first: int) -> None:
        """Raise `UserError`."""
        raise UserError("a callback unfroze parameters under a data_parallel of one's own, which takes in none",
                        "a way with extend(specs, first), such as replicate or zero", "unfreeze before the run begins")


def _among_replicas(setup: DataParallelSetup) -> DataParallelSetup:
    """``setup`` for the ranks that hold the same part of a model which is cut over ranks.

    Errors: `UserError` for a way of a user's own where this rank is in several groups on some rank.
    """
    if setup.config.data_parallel.name not in OWN and setup.control.agree(len(setup.parts.replicas) > 1):
        raise UserError(f"data_parallel {setup.config.data_parallel.name} with copies of unlike depth, whose ranks are "
                        "in several groups", f"copies of one depth, or {' or '.join(OWN)}",
                        "set pipeline.stages in place of pipeline.depths")
    needs = setup.parts.optimizer.needs_all
    if needs:
        raise UserError(f"{needs} with a pipeline over ranks, none of which has the whole gradient", "the run's own "
                        "clip_norm, which is taken over all ranks", "set clip_norm in its place")
    first = setup.parts.replicas[0]
    return replace(setup, group=first.group, collectives=first.wire)
