"""Data-parallel strategies, one file for each value of the key ``data_parallel``.

A file offers ``make(setup) -> DataParallel``; it raises `UserError` for settings that it does not support.
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
    """Arguments of a strategy's ``make``. ``group``: ranks with replicas. ``notes``: remarks for the summary, to append
    to.

    ``control``: of all ranks of the job. With a model partitioned over ranks, ``group`` and ``collectives`` are those
    of this rank's last blocks; `wires` has all. ``scene``: input of the memory plan
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
        """Transport of each group that this rank sums buckets with (`Bucket.group`), of a partitioned model."""
        return {replicas.group.name("grad"): replicas.wire for replicas in self.parts.replicas}

    @property
    def ranks_of(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each group that this rank sums buckets with (`Bucket.group`)."""
        groups = [replicas.group for replicas in self.parts.replicas] or [self.group]
        return {group.name("grad"): group.ranks for group in groups}

    @property
    def decides(self) -> Control | None:
        """Control plane that decides about updates of a partitioned model: no rank has all of its gradient."""
        return self.control if self.parts.layout is not None else None


def create(setup: DataParallelSetup) -> DataParallel:
    """Return the strategy that ``config.data_parallel`` names; collective. Errors: `UserError` for an unknown name and
    for settings that do not go together.
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
        raise UserError(f"data_parallel {name} shards the state and has no {' and no '.join(lacking)}",
                        "the members of hvdtrain.core.protocols.DividesState, from which memory is planned",
                        "add them, or set divides_state to False")
    if name in OWN and isinstance(made, Alone) and setup.parts.layout is None:
        made.fuses = True
    return made if name in OWN else cast(DataParallel, completed(made, Undeclared))


class Undeclared:
    """Capabilities of a user's strategy that declares none."""

    divides_state = copies_equal = can_change_transport = overlaps = False
    compressor: Compressor = cast(Compressor, NoCompression())
    buckets: Sequence[Bucket] = ()
    gathers, gathered_s = 0, 0.0

    def remembered_bytes(self) -> int:
        return 0

    def extend(self, specs: Sequence[ParamSpec], first: int) -> None:
        raise UserError("a callback unfroze parameters with a custom data_parallel, which accepts none",
                        "a strategy with extend(specs, first), such as replicate or "
                        "zero", "unfreeze before the run begins")


def _among_replicas(setup: DataParallelSetup) -> DataParallelSetup:
    """Return ``setup`` for ranks with the same blocks; `UserError` for a user's strategy in several groups."""
    if setup.config.data_parallel.name not in OWN and setup.control.agree(len(setup.parts.replicas) > 1):
        raise UserError(f"data_parallel {setup.config.data_parallel.name} with replicas of different depth, "
                        "whose ranks are in several groups", f"replicas of one depth, or {' or '.join(OWN)}",
                        "set pipeline.stages in place of pipeline.depths")
    needs = setup.parts.optimizer.needs_all
    if needs:
        raise UserError(f"{needs} with a pipeline over ranks, where no rank has the whole gradient", "the run's own "
                        "clip_norm, which is taken over all ranks", "set clip_norm instead")
    first = setup.parts.replicas[0]
    return replace(setup, group=first.group, collectives=first.wire)
