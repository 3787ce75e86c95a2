"""Start and end of a job, its process sets and transports, as Horovod's scripts ask for them: `init`, `rank`, ...

Owns the one `World` of this process. MPI and Horovod are started by `hvdtrain.cluster.boot`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.exit import install_hooks
from hvdtrain.cluster.liveness import pulse
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.protocols import Control

Average, Sum, Adasum, Min, Max, Product = range(6)
"""Reductions, numbered as Horovod's are."""

ABSENT = "hvdtrain has not been initialized; use hvd.init()."


class ProcessSet:
    """Some ranks of the job, given as numbers or as an mpi4py communicator over them; Horovod's, without Horovod.

    Becomes usable when it is handed to `init` or `add_process_set`; until then ``process_set_id`` is None. The root
    of a broadcast within a set is still counted over all ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            own = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
            if not isinstance(ranks_or_comm, Iterable) or any(not isinstance(r, int) for r in own):
                raise ValueError(f"ProcessSet got {ranks_or_comm!r}; expected a list of rank numbers, or an mpi4py "
                                 "communicator")
            self.ranks = sorted(own)
        self.here = 0

    def size(self) -> int | None:
        """Return the number of ranks in the set; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks or [])

    def rank(self) -> int | None:
        """Return this process's place within the set, None while it is not registered; `ValueError` outside of it."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {self.here} is not part of {self}")
        return (self.ranks or []).index(self.here)

    def included(self) -> bool | None:
        """Return whether this process is in the set; None while that is not known."""
        if self.ranks is None or self.process_set_id is None:
            return None
        return self.here in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks of the job."""
global_process_set.process_set_id = 0


@dataclass
class World:
    """This process's place in the job, and its transports; ``hvd``: Horovod's module, None over another transport.

    ``shared``: the transport over shared memory or None, once it was asked for.
    """

    control: Control
    hvd: Any
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    device: str
    dynamic: bool
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    wires: dict[int, Any] = field(default_factory=dict)
    shared: list[Any] = field(default_factory=list)


_worlds: list[World] = []


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the job's control plane and, with several ranks, what carries its collectives; collective.

    ``comm``: None or all ranks; for fewer there are process sets. ``process_sets``: a list of `ProcessSet`, the same
    on every rank, or "dynamic" to allow `add_process_set` later. A second call changes nothing. The device of a rank
    is left to the script, which Horovod's scripts pick by `local_rank`. Errors: `UserError` for what this job cannot
    have, `ValueError` for a set that is given twice.
    """
    if _worlds:
        if process_sets:
            raise UserError("init with process_sets in a job that has been initialized", "all sets in the first call",
                            'call hvd.init(process_sets="dynamic") first and hvd.add_process_set later')
        return
    import tensorflow as tf

    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UserError("TensorFlow in graph mode (tf.compat.v1.disable_eager_execution)", "TensorFlow 2's eager mode "
                        "with tf.function", "leave that call out")
    dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    dynamic = dynamic or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    control, hvd = _start()
    _check_comm(comm, control)
    world = _world(control, hvd, dynamic)
    _open(world, sets)
    _worlds.append(world)
    pulse.at("the script, after hvd.init()")


def _start() -> tuple[Control, Any]:
    """Return the control plane, and Horovod if there are several ranks and all of them have it."""
    facts, exchange, timeout_s = launch_facts(os.environ), ExchangeConfig(), Config().control_timeout_s
    control = boot.current_control()
    if facts.size > 1:
        horovod.bound_stalls(timeout_s, os.environ)
    try:
        hvd = horovod.start_horovod("tensorflow", exchange, facts) if facts.kind == "gloo" else None
    except horovod.HorovodUnavailable as error:
        raise UserError(error.reason, "a Horovod built here, which horovodrun --gloo needs", horovod.BUILD) from None
    if control is None:
        install_hooks(facts)
        control = boot.start_control(facts, timeout_s, hvd, claim=False)
    if control.size == 1 or hvd is not None:
        return control, hvd
    reason = None
    if not control.agree(horovod.horovod_reason("tensorflow") is not None):
        try:
            hvd = horovod.start_horovod("tensorflow", exchange, control)
        except horovod.HorovodUnavailable as error:
            reason = error.reason
    else:
        reason = horovod.horovod_reason("tensorflow")
    lacking = [r for r in control.gather(reason) if r]
    if not lacking:
        return control, hvd
    if not boot.has_mpi():
        raise UserError(lacking[0], "a Horovod built on every host", horovod.BUILD)
    if control.rank == 0:
        warnings.warn(f"collectives go over plain MPI, which is slower: {lacking[0]}", stacklevel=2)
    return control, None


def _over_gloo(control: Control) -> bool:
    return control.size > 1 and not boot.has_mpi()


def _check_comm(comm: Any, control: Control) -> None:
    """Refuse fewer ranks than the job has, which Horovod would leave the others out of."""
    n = 0 if comm is None else comm.Get_size() if hasattr(comm, "Get_size") else len(comm)
    if n not in (0, control.size):
        raise UserError(f"init with a comm of {count(n, 'rank')} in a job of {control.size}", "all ranks",
                        "leave comm out, and hand hvd.init process_sets=[hvd.ProcessSet(...)] for collectives among "
                        "some ranks")


def _world(control: Control, hvd: Any, dynamic: bool) -> World:
    """Return this rank's place; collective.

    A script may choose TensorFlow's devices after `init`, and TensorFlow allows that until its first operation. Over
    Gloo the control plane is made of such operations, so Horovod is asked there.
    """
    import tensorflow as tf

    if _over_gloo(control):
        return World(control, hvd, control.local_rank, control.local_size, hvd.cross_rank(), hvd.cross_size(),
                     bool(hvd.is_homogeneous()), "", dynamic)
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    rows = control.gather((control.node, control.local_rank, control.local_size, has_gpu))
    peers = [node for node, local_rank, _, _ in rows if local_rank == control.local_rank]
    mixed = len({row[3] for row in rows}) > 1
    return World(control, hvd, control.local_rank, control.local_size, peers.index(control.node), len(peers),
                 len({row[2] for row in rows}) == 1, "cpu" if mixed else "", dynamic)


def _open(world: World, sets: Sequence[ProcessSet]) -> None:
    """Register the sets and make their transports; collective."""
    control, hvd = world.control, world.hvd
    global_process_set.ranks, global_process_set.here = list(range(control.size)), control.rank
    for one in sets:
        one.ranks = _ranks_of(one)
    own = [one.ranks for one in sets]
    rows_P = [own] if _over_gloo(control) else control.gather(own)  # each may hold the set it is in only
    wanted = list(dict.fromkeys(tuple(ranks or ()) for rows in rows_P for ranks in rows))
    for i, one in enumerate(sets):
        _check_ranks(one, control.size)
        if one.ranks == global_process_set.ranks or one.ranks in [other.ranks for other in sets[:i]]:
            raise ValueError(f"process_sets entry number {i} is a duplicate: {one}")
    registered: list[Any] = [None] * len(wanted)
    if hvd is not None and (wanted or world.dynamic or not hvd.is_initialized()):
        from hvdtrain.backends.tensorflow.collectives import start_again

        registered = start_again(hvd, wanted, world.dynamic)
    _adopt(world, global_process_set, None)
    for i, ranks in enumerate(wanted):
        mine = next((one for one in sets if one.ranks == list(ranks)), None) or ProcessSet(list(ranks))
        mine.process_set_id = i + 1 if registered[i] is None else registered[i].process_set_id
        _adopt(world, mine, registered[i])


def _adopt(world: World, process_set: ProcessSet, theirs: Any) -> None:
    """Give a registered set its transport, on its ranks. Collective over those."""
    number, size = process_set.process_set_id, process_set.size()
    assert number is not None and size is not None
    process_set.here = world.control.rank
    world.sets[number] = process_set
    if size == 1 or not process_set.included():
        return
    if world.hvd is not None:
        from hvdtrain.backends.tensorflow.collectives import HorovodCollectives

        world.wires[number] = HorovodCollectives(world.hvd, world.device, theirs, horovod.stall_bound(os.environ))
        return
    from hvdtrain.comm.collectives.mpi import MpiCollectives
    from hvdtrain.tensorflow.transports import PlainMpi

    comm, ranks = boot.mpi_comm(), process_set.ranks or []
    comm = comm if number == 0 else comm.Create_group(comm.Get_group().Incl(ranks), tag=number)
    world.wires[number] = PlainMpi(MpiCollectives(comm, timeout_s=world.control.timeout_s), ranks)


def _check_ranks(process_set: ProcessSet, size: int) -> None:
    """Raise `UserError` for ranks that the job does not have, or none."""
    ranks = process_set.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= size or len(set(ranks)) < len(ranks):
        from hvdtrain.tensorflow.nodes import WrongValue

        raise WrongValue(f"a process set of ranks {ranks} in a job of {size}", f"different ranks from 0 to {size - 1}",
                         "make it of ranks that the job has, or start more")


def _ranks_of(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a set, read from its communicator if it was made of one."""
    if process_set.ranks is not None:
        return process_set.ranks
    group = process_set.mpi_comm.Get_group()
    return sorted(int(r) for r in group.Translate_ranks(list(range(group.Get_size())), boot.mpi_comm().Get_group()))


def world() -> World:
    """Return this process's `World`; `ValueError` before `init`."""
    if not _worlds:
        raise ValueError(ABSENT)
    return _worlds[0]


def wire(process_set: ProcessSet = global_process_set) -> Any:
    """Return the transport of ``process_set``; None for this rank alone, and for a set of other ranks only.

    Errors: `ValueError` before `init`, and for a set that was not registered; `UserError` while a graph of
    TensorFlow 1 is built.
    """
    here = world()
    _refuse_sessions()
    number = process_set.process_set_id
    if number is None or number not in here.sets:
        raise ValueError(f"{process_set} is not registered; hand it to hvd.init(process_sets=[...])")
    return here.wires.get(number)


def shared_wire(process_set: ProcessSet) -> Any:
    """Return the transport of dense gradients of ``process_set`` in shared memory, or None. Collective."""
    here = world()
    if process_set.process_set_id != 0:
        return None
    if not here.shared:
        from hvdtrain.tensorflow.transports import open_shared

        here.shared.append(open_shared(here.control))
    return here.shared[0]


def _refuse_sessions() -> None:
    """Raise `UserError` in a `tf.Graph` that is no function's: its nodes run in a session, in an order of its own."""
    import tensorflow as tf

    if not tf.executing_eagerly() and not tf.inside_function():
        from hvdtrain.tensorflow.nodes import WrongMode

        raise WrongMode("a collective in a tf.Graph (tf.Graph().as_default(), or a session of TensorFlow 1)",
                        "eager TensorFlow 2, or a tf.function",
                        "call it outside of that graph, or write the graph as a tf.function")


def shutdown() -> None:
    """Stop Horovod, if it was started; the control plane stays up until the process ends."""
    if _worlds:
        last = _worlds.pop()
        for one in last.sets.values():
            if one is not global_process_set:
                one.process_set_id = None
        for shared in filter(None, last.shared):
            shared.leave()
        if last.hvd is not None:
            last.hvd.shutdown()


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not since."""
    return bool(_worlds)


def rank() -> int:
    """Return this process's number in the job, from 0."""
    return world().control.rank


def size() -> int:
    """Return the number of processes in the job."""
    return world().control.size


def local_rank() -> int:
    """Return this process's number on its host, from 0."""
    return world().local_rank


def local_size() -> int:
    """Return the number of the job's processes on this host."""
    return world().local_size


def cross_rank() -> int:
    """Return this host's number among those that have a process with this `local_rank`."""
    return world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this `local_rank`."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    return world().homogeneous


def add_process_set(process_set: Any) -> ProcessSet:
    """Register another set after `init(process_sets="dynamic")`, and return it; collective over all ranks.

    ``process_set``: a `ProcessSet`, or a list of ranks. Errors: `ValueError` where sets are not dynamic, and for a set
    that exists.
    """
    here = world()
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if here.hvd is not None and not here.dynamic:
        raise ValueError('adding a process set after hvd.init needs hvd.init(process_sets="dynamic"), or '
                         "HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment")
    one.ranks = _ranks_of(one)
    _check_ranks(one, here.control.size)
    if any(other.ranks == one.ranks for other in here.sets.values()):
        raise ValueError(f"there is a process set of the same ranks already: {one}")
    theirs = here.hvd.add_process_set(list(one.ranks)) if here.hvd is not None else None
    one.process_set_id = max(here.sets) + 1 if theirs is None else theirs.process_set_id
    _adopt(here, one, theirs)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set, and return whether there was one to forget; collective over all ranks."""
    here, number = world(), process_set.process_set_id
    if not number or number not in here.sets:
        return False
    if here.hvd is not None and not here.dynamic:
        raise ValueError('removing a process set needs hvd.init(process_sets="dynamic")')
    if here.hvd is not None:
        theirs = here.hvd.ProcessSet(process_set.ranks)
        theirs.process_set_id = number
        here.hvd.remove_process_set(theirs)
    del here.sets[number]
    here.wires.pop(number, None)
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each registered set by its number."""
    return {number: list(one.ranks or []) for number, one in sorted(world().sets.items())}
