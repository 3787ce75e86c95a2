"""Start and end of a job, its process sets and transports, as Horovod's scripts ask for them: `init`, `rank`, ...

Owns the one `World` of this process; `hvdtrain.tensorflow` and `hvdtrain.torch` add what needs their framework. MPI and
Horovod are started by `hvdtrain.cluster.boot`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.exit import install_hooks
from hvdtrain.cluster.liveness import pulse
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.comm.collectives.shared import SharedCollectives, open_shared
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.process_sets import ProcessSet, check_ranks, global_process_set
from hvdtrain.core.protocols import Control

ABSENT = "hvdtrain has not been initialized; use hvd.init()."


class JobFramework(Protocol):
    """The part of a job that needs a framework."""

    name: str

    def check(self) -> None:
        """Raise `UserError` for a mode of the framework that the API does not support."""

    def has_gpu(self) -> bool:
        """Return whether the framework finds a GPU here."""

    def horovod_wire(self, world: World, process_set: ProcessSet, theirs: Any) -> Any:
        """Return the transport of a set over Horovod, whose own object is ``theirs`` (None for all ranks)."""

    def plain_wire(self, mpi: MpiCollectives, process_set: ProcessSet) -> Any:
        """Return the transport of a set over plain MPI."""


@dataclass
class World:
    """This process's place in the job, and its transports; ``hvd``: Horovod's module, None over another transport.

    ``device``: "cpu" where only some ranks have a GPU. ``shared``: the transport over shared memory, if any.
    """

    framework: JobFramework
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
    shared: list[SharedCollectives | None] = field(default_factory=list)


_worlds: list[World] = []


def init(framework: JobFramework, comm: Any, process_sets: Any) -> None:
    """Start the job's control plane and, with several ranks, what carries its collectives; collective.

    ``comm``: None or all ranks; for fewer there are process sets. ``process_sets``: a list of `ProcessSet`, the same
    on every rank, or "dynamic" to allow `add_process_set` later. A second call changes nothing. The device of a rank
    is left to the script, which Horovod's scripts pick by `local_rank`. Errors: `UserError` for what this job cannot
    have, `ValueError` for a set that is given twice, after which `init` may be called with other sets.
    """
    if _worlds and _worlds[0].sets:
        if process_sets:
            raise UserError("init with process_sets in a job that has been initialized", "all sets in the first call",
                            'call hvd.init(process_sets="dynamic") first and hvd.add_process_set later')
        if _worlds[0].framework.name != framework.name:
            raise UserError(f"init of hvdtrain.{framework.name} in a process that has initialized "
                            f"hvdtrain.{_worlds[0].framework.name}", "one framework in a process",
                            "call hvd.shutdown() first, or start a job for each")
        return
    framework.check()
    dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    dynamic = dynamic or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    if not _worlds:
        control, hvd = _start(framework.name)
        _check_comm(comm, control)
        _worlds.append(_world(framework, control, hvd, dynamic))
    global_process_set.mpi_comm = comm if hasattr(comm, "Get_size") else None
    _worlds[0].dynamic = dynamic
    _open(_worlds[0], sets)
    pulse.at("the script, after hvd.init()")


def _start(framework: str) -> tuple[Control, Any]:
    """Return the control plane, and Horovod if there are several ranks and all of them have it."""
    facts, exchange, timeout_s = launch_facts(os.environ), ExchangeConfig(), Config().control_timeout_s
    control = boot.current_control()
    if facts.size > 1:
        horovod.bound_stalls(timeout_s, os.environ)
    try:
        hvd = horovod.start_horovod(framework, exchange, facts) if facts.kind == "gloo" else None
    except horovod.HorovodUnavailable as error:
        raise UserError(error.reason, "a Horovod built here, which horovodrun --gloo needs", horovod.BUILD) from None
    if control is None:
        install_hooks(facts)
        control = boot.start_control(facts, timeout_s, hvd, claim=False)
    if control.size == 1 or hvd is not None:
        return control, hvd
    reason = None
    if not control.agree(horovod.horovod_reason(framework) is not None):
        try:
            hvd = horovod.start_horovod(framework, exchange, control)
        except horovod.HorovodUnavailable as error:
            reason = error.reason
    else:
        reason = horovod.horovod_reason(framework)
    lacking = [r for r in control.gather(reason) if r]
    if not lacking:
        return control, hvd
    if not boot.has_mpi():
        raise UserError(lacking[0], "a Horovod built on every host", horovod.BUILD)
    if control.rank == 0:
        warnings.warn(f"collectives use plain MPI, which is slower: {lacking[0]}", stacklevel=2)
    return control, None


def _over_gloo(control: Control) -> bool:
    return control.size > 1 and not boot.has_mpi()


def _check_comm(comm: Any, control: Control) -> None:
    """Refuse fewer ranks than the job has, which Horovod would leave the others out of."""
    n = 0 if comm is None else comm.Get_size() if hasattr(comm, "Get_size") else len(comm)
    if n not in (0, control.size):
        raise UserError(f"init with a comm of {count(n, 'rank')} in a job of {control.size}", "all ranks",
                        "omit comm, and pass hvd.init process_sets=[hvd.ProcessSet(...)] for collectives among "
                        "some ranks")


def _world(framework: JobFramework, control: Control, hvd: Any, dynamic: bool) -> World:
    """Return this rank's place; collective.

    A script may choose its framework's devices after `init`; TensorFlow allows that until its first operation. Over
    Gloo the control plane is made of such operations, so Horovod is asked there.
    """
    if _over_gloo(control):
        return World(framework, control, hvd, control.local_rank, control.local_size, hvd.cross_rank(),
                     hvd.cross_size(), bool(hvd.is_homogeneous()), "", dynamic)
    rows = control.gather((control.node, control.local_rank, control.local_size, framework.has_gpu()))
    peers = [node for node, local_rank, _, _ in rows if local_rank == control.local_rank]
    mixed = len({row[3] for row in rows}) > 1
    return World(framework, control, hvd, control.local_rank, control.local_size, peers.index(control.node),
                 len(peers), len({row[2] for row in rows}) == 1, "cpu" if mixed else "", dynamic)


def _open(world: World, sets: Sequence[ProcessSet]) -> None:
    """Register the sets and make their transports; collective."""
    control, hvd = world.control, world.hvd
    global_process_set.ranks, global_process_set.here = list(range(control.size)), control.rank
    for one in sets:
        one.ranks = _ranks_of(one)
    own = [one.ranks for one in sets]
    rows_P = [own] if _over_gloo(control) else control.gather(own)  # each may hold the set it is in only
    wanted = list(dict.fromkeys(tuple(rows[i] or ()) for i in range(max(map(len, rows_P))) for rows in rows_P
                                if i < len(rows)))
    for one in sets:
        check_ranks(one, control.size)
    for rows in rows_P:  # every rank checks all lists: a rank that failed alone would leave the others waiting
        for i, ranks in enumerate(rows):
            if ranks == global_process_set.ranks or ranks in rows[:i]:
                raise ValueError(f"process_sets entry number {i} is a duplicate: ranks {ranks}")
    registered: list[Any] = [None] * len(wanted)
    if hvd is not None and (wanted or world.dynamic or not hvd.is_initialized()):
        registered = horovod.start_again(hvd, wanted, world.dynamic)
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
        world.wires[number] = world.framework.horovod_wire(world, process_set, theirs)
        return
    comm, ranks = boot.mpi_comm(), process_set.ranks or []
    comm = comm if number == 0 else comm.Create_group(comm.Get_group().Incl(ranks), tag=number)
    mpi = MpiCollectives(comm, timeout_s=world.control.timeout_s)
    world.wires[number] = world.framework.plain_wire(mpi, process_set)


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

    Errors: `ValueError` before `init`, and for a set that was not registered.
    """
    here = world()
    number = process_set.process_set_id
    if number is None or number not in here.sets:
        raise ValueError(f"{process_set} is not registered; pass it to hvd.init(process_sets=[...])")
    return here.wires.get(number)


def shared_wire(process_set: ProcessSet, able: bool) -> SharedCollectives | None:
    """Return the shared-memory transport of ``process_set``'s dense gradients, or None; ``able``: here. Collective."""
    here = world()
    if process_set.process_set_id != 0:
        return None
    if not here.shared:
        here.shared.append(open_shared(here.control, able))
    return here.shared[0]


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

    ``process_set``: a `ProcessSet`, or a list of ranks. Errors: `ValueError` where sets are not dynamic, or exist.
    """
    here = world()
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if here.hvd is not None and not here.dynamic:
        raise ValueError('adding a process set after hvd.init needs hvd.init(process_sets="dynamic"), or '
                         "HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment")
    one.ranks = _ranks_of(one)
    check_ranks(one, here.control.size)
    if any(other.ranks == one.ranks for other in here.sets.values()):
        raise ValueError(f"a process set of the same ranks already exists: {one}")
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


def horovod_of(framework: str) -> Any:
    """Return Horovod's module, loaded where no job has started it yet; None where it is not built."""
    if is_initialized() and world().hvd is not None:
        return world().hvd
    if horovod.horovod_reason(framework) is not None:
        return None
    try:
        return horovod.load_horovod(framework)
    except horovod.HorovodUnavailable:  # one that was built for another framework is as good as none
        return None


def answer(framework: str, name: str, doc: str, kind: type = bool) -> Callable[[], Any]:
    """Return Horovod's function ``name``, whose answer is 0 or False where Horovod is not built."""
    def ask() -> Any:
        hvd = horovod_of(framework)
        return kind() if hvd is None else kind(getattr(hvd, name)())
    ask.__name__, ask.__doc__ = name, doc
    return ask


def mpi_enabled(framework: str) -> bool:
    """Return whether MPI carries this job: Horovod's over MPI, or plain MPI."""
    if is_initialized() and world().hvd is None:
        return boot.has_mpi()
    hvd = horovod_of(framework)
    return hvd is not None and bool(hvd.mpi_enabled())


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI; `ValueError` before `init` and in a job over Gloo."""
    if size() == 1:
        return True
    if not boot.has_mpi():
        raise ValueError("this job does not use MPI")
    return boot.mpi_threads()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Have Horovod record what its collectives do in ``file_path``; only a warning where Horovod carries nothing."""
    hvd = world().hvd
    if hvd is None:
        warnings.warn("no timeline: collectives do not use Horovod here", stacklevel=2)
        return
    hvd.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close what `start_timeline` opened."""
    hvd = world().hvd
    if hvd is not None:
        hvd.stop_timeline()
