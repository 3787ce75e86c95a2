"""Start of a process of a job: environment variables, claims of devices, MPI_Init, in the one order that works.

Nothing runs at import; Horovod comes after (`hvdtrain.cluster.horovod`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.cluster.control import MpiControl, ObjectControl, SoloControl, agreed, flush_streams
from hvdtrain.cluster.deadline import deadline, locked_deadline, set_owner
from hvdtrain.cluster.devices import BY_TASK, VISIBLE, count_gpus, overlap, sharing, usable, visible_devices
from hvdtrain.cluster.liveness import causes, pulse, watch
from hvdtrain.cluster.machine import software
from hvdtrain.cluster.machine.usage import cpu_quota
from hvdtrain.cluster.topology import affinity
from hvdtrain.core.errors import EXIT_USER_ERROR, UserError
from hvdtrain.core.launcher import LaunchFacts, torchrun_size
from hvdtrain.core.protocols import Control

YIELD = "OMPI_MCA_mpi_yield_when_idle"
SEND_ONLY = "OMPI_MCA_btl_tcp_flags"

THREADS_PER_RANK = 2
"""Threads of a rank that are busy at once: the one that computes and the one that communicates."""


_started: dict[str, Any] = {}


def start_control(facts: LaunchFacts, timeout_s: float, horovod: Any = None, devices_per_rank: int = 1,
                  claim: bool = True, heartbeat_s: float | None = None) -> Control:
    """Start the control plane that ``facts`` call for, once per process; later calls return the same.

    solo: no MPI is imported. mpi: MPI_Init with THREAD_MULTIPLE. gloo: over ``horovod``, the module that
    `start_horovod` returned. Claims this rank's ``devices_per_rank`` devices; not with ``claim=False``, for scripts
    that pick a device by their local rank themselves. A later call that claims still does, which takes effect where
    nothing has started CUDA yet. ``heartbeat_s``: `hvdtrain.cluster.liveness.watch`'s bound, None: the environment's or
    the default; it begins before MPI does. Raises `UserError` where MPI and the launcher do not fit together, for
    several processes of torchrun, and where a host has too few devices.
    """
    if heartbeat_s is not None or "control" not in _started:
        watch.start(facts, heartbeat_s)
    if "control" in _started:
        _started["control"].timeout_s = timeout_s
    else:
        if claim:  # before MPI, which may start CUDA
            _started["claim"] = Claim.of(facts, os.environ, devices_per_rank)
        _start_control(facts, timeout_s, horovod)
    if claim:
        _settle_claim(facts, devices_per_rank)
    return _started["control"]


def _start_control(facts: LaunchFacts, timeout_s: float, horovod: Any) -> None:
    causes.mark("start")
    causes.leave_done_at_exit()
    notes: list[str] = []
    if facts.kind == "solo":
        if torchrun_size(os.environ) > 1:
            raise UserError(f"{torchrun_size(os.environ)} processes of torchrun, each of which would train alone",
                            "ranks of MPI", "start the job with mpirun -np N python script.py, or hvdtrain launch")
        control: Any = SoloControl()  # which takes ``notes`` too
    elif facts.kind == "mpi":
        notes += [note for note in (yield_when_idle(facts, os.environ), send_only(facts, os.environ)) if note]
        if "PMIX_SECURITY_MODE" in os.environ:  # of Slurm; an Open MPI without munge else prints two lines per rank
            os.environ.setdefault("PMIX_MCA_psec", "native")
        control = _start_mpi(facts, timeout_s)
    else:
        assert horovod is not None, "a gloo job's control plane needs the module that start_horovod returned"
        control = ObjectControl(facts, horovod.broadcast_object, horovod.allgather_object, timeout_s)
    control.notes = notes
    _started["control"] = control
    if control.size > 1:
        set_owner(f"rank {control.rank} on host {control.node}", control.abort)
        pulse.start(control)
        watch.meet(control)


@dataclass
class Claim:
    """Result of claiming devices on this rank: a note for the summary, an error, the entries it owns.

    ``entries``: none where ranks' entries cannot be compared. ``settled``: the ranks have compared them.
    """

    note: str = ""
    error: UserError | None = None
    entries: tuple[str, ...] = ()
    settled: bool = False

    @classmethod
    def of(cls, facts: LaunchFacts, env: MutableMapping[str, str], devices_per_rank: int) -> Claim:
        """Claim, and keep an error until all ranks can be told."""
        try:
            note = claim_device(facts, env, devices_per_rank)
        except UserError as error:
            return cls(error=error)
        alone = facts.kind == "solo" or devices_per_rank == 1 or any(name in env for name in BY_TASK)
        return cls(note, entries=() if alone else tuple(usable(env, count_gpus())))


def _settle_claim(facts: LaunchFacts, devices_per_rank: int) -> None:
    """Report all hosts' notes to rank 0 and raise any rank's error on all ranks, once per process; collective."""
    claim = _started.get("claim")
    if claim is None:
        claim = _started["claim"] = Claim.of(facts, os.environ, devices_per_rank)
    if claim.settled:
        return
    claim.settled, control = True, _started["control"]
    agreed(control, partial(_raise, claim.error), "claiming devices")
    _raise(overlap(control.gather((control.node, claim.entries))))
    control.notes = [*_of_hosts(control, claim.note), *control.notes]


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error


def _of_hosts(control: Control, note: str) -> list[str]:
    """Return the different notes of all hosts, by their lowest rank; collective."""
    notes = dict(reversed([row for row in control.gather((control.node, note)) if row[1]]))
    return [f"host {node}: {text}" for node, text in reversed(notes.items())]


def current_control() -> Control | None:
    """Return the control plane of this process; None before it was started."""
    return _started.get("control")


def exit_control() -> MpiControl | None:
    """Return the control plane for the end of a job, apart from calls that other ranks may be in; MPI only."""
    return _started.get("exit")


def mpi_comm() -> Any:
    """Return a communicator over all ranks for `hvdtrain.comm.collectives.mpi`, apart from the control plane's.

    Starts MPI where the job has one process or runs over Gloo. Collective.
    """
    if "data" not in _started:
        _started["data"] = _import_mpi("a plain python process").COMM_WORLD.Dup()
    return _started["data"]


def has_mpi() -> bool:
    """Return whether MPI carries this job's control plane."""
    return isinstance(_started.get("control"), MpiControl)


def mpi_threads() -> bool:
    """Return whether two threads of this process may be in MPI at once. MPI has started."""
    from mpi4py import MPI
    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def claim_device(facts: LaunchFacts, env: MutableMapping[str, str], devices_per_rank: int = 1) -> str:
    """Set CUDA_VISIBLE_DEVICES in ``env`` to this rank's devices; return a note for the summary, "" without a GPU.

    Raises `UserError` where this host has too few for ``devices_per_rank`` of each rank, more than one.
    """
    if facts.kind == "solo":
        return ""
    count = count_gpus()
    shared = sharing(env, count, facts.local_size) if devices_per_rank == 1 else ""
    mine = visible_devices(env, count, facts.local_rank, facts.local_size, devices_per_rank)
    if mine is None:
        return ""
    env[VISIBLE] = mine
    return shared


def should_yield(bound: int, cores: float, local_size: int) -> bool:
    """Return whether the busy threads of a host's ranks outnumber the cores they may use. Pure.

    Open MPI spins while it waits and then starves the framework's own threads: on 2 ranks, 2 cores a small ResNet took
    313 ms a step without yielding, about 215 ms with it.
    """
    return bound < THREADS_PER_RANK or THREADS_PER_RANK * local_size > cores


def yield_when_idle(facts: LaunchFacts, env: MutableMapping[str, str]) -> str:
    """Let Open MPI yield where cores are short; the user's own setting wins. Returns a note for the summary.

    Must come before MPI_Init, which reads it. MPICH has no such setting that helped: with 4 ranks on 2 cores
    MPIR_CVAR_POLLS_BEFORE_YIELD made no difference.
    """
    if YIELD in env or facts.launcher == "MPICH mpiexec":
        return ""
    cores = min(float(os.cpu_count() or 1), cpu_quota())
    if not should_yield(len(affinity()), cores, max(1, facts.local_size)):
        return ""
    env[YIELD] = "1"
    return f"{YIELD}=1 was set: {max(1, facts.local_size)} ranks x {THREADS_PER_RANK} threads on {cores:g} cores"


def send_only(facts: LaunchFacts, env: MutableMapping[str, str]) -> str:
    """Have Open MPI's TCP transport send long messages instead of putting them; the user's own setting wins.

    Two ranks that exchange long messages by "put" reach half of what a full-duplex link carries: over 1 Gbit/s an
    all-reduce of 38 MB took 638 ms, by "send" 321 ms (Open MPI 4.1.8; 5.0.11 likewise). Other transports do not read
    this. Must come before MPI_Init. Returns a note for the summary.
    """
    if SEND_ONLY in env or facts.launcher != "Open MPI mpirun" or not 0 < facts.local_size < facts.size:
        return ""
    env[SEND_ONLY] = "send"
    return f"{SEND_ONLY}=send was set, so that long messages over TCP use both directions of a link"


def _check_srun(facts: LaunchFacts, env: MutableMapping[str, str]) -> None:
    """Raise `UserError` for Open MPI under srun without PMIx, before MPI_Init aborts with 40 lines a rank.

    Ends ranks other than 0 without a message: without MPI they cannot agree on one.
    """
    if facts.launcher != "srun" or "PMIX_RANK" in env:
        return
    MPI = _import_mpi(facts.launcher, init=False)
    if "Open MPI" not in MPI.Get_library_version():
        return
    if facts.rank > 0:
        causes.leave("user", "srun without PMIx")
        flush_streams()
        time.sleep(2.0)  # srun may end all ranks at the first bad exit, which must not silence rank 0
        os._exit(EXIT_USER_ERROR)
    given = "--mpi=pmi2" if "PMI_RANK" in env else "no --mpi=pmix"
    raise UserError(f"srun with {given}, and mpi4py uses Open MPI, which starts by PMIx only", "srun --mpi=pmix",
                    "add --mpi=pmix (srun --mpi=list shows what this Slurm has), or start the job with "
                    "hvdtrain launch, or with mpirun inside the allocation")


def _import_mpi(launcher: str, init: bool = True) -> Any:
    prepare_lone_mpi(os.environ)
    try:
        import mpi4py
        mpi4py.rc.thread_level = "multiple"
        if not init:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = True  # at exit, where MPI starts after the import
        _bind_now()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"mpi4py cannot be used under {launcher}: {error}", "mpi4py and an MPI library that it finds",
                        'run pip install "hvdtrain[mpi]", or load the module of an MPI') from None
    if init and not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _bind_now() -> None:
    """Have mpi4py load the MPI library with all its symbols bound at once.

    Its wheels bind lazily. TensorFlow, loaded later, exports an hwloc of its own to the whole process; Open MPI's first
    call to hwloc after that, in MPI_Finalize, then lands in TensorFlow's and crashes (signal 11, exit status 139).
    """
    try:
        from mpi4py import _mpiabi
    except ImportError:
        return  # linked to its MPI library, which Python loads bound
    if getattr(_mpiabi, "LIBMPI_MODE", 0) is None:
        _mpiabi.LIBMPI_MODE = os.RTLD_NOW | os.RTLD_LOCAL


def prepare_lone_mpi(env: MutableMapping[str, str], prefix: str = sys.prefix) -> None:
    """Let MPI start in a process that mpirun did not start: tell Open MPI's wheel where it is installed.

    mpirun tells its ranks by itself. Without it MPI_Init of a lone process does not find its daemon and aborts.
    """
    launched = any(name in env for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    wheel = any(Path(prefix, "bin", name).exists() for name in ("orted", "prted"))
    if wheel and not launched:
        env.setdefault("OPAL_PREFIX", prefix)


def _start_mpi(facts: LaunchFacts, timeout_s: float) -> MpiControl:
    pulse.at("MPI")
    with locked_deadline(timeout_s, f"MPI_Init under {facts.launcher}"):
        _check_srun(facts, os.environ)
        MPI = _import_mpi(facts.launcher)
    world = MPI.COMM_WORLD
    if facts.size and world.Get_size() != facts.size:
        raise UserError(_mismatch(facts, world.Get_size(), MPI.Get_library_version()),
                        "the launcher of the MPI library that mpi4py uses",
                        "start the job with the mpirun that belongs to this library, or reinstall mpi4py for the other "
                        "one (under srun, try --mpi=pmix or --mpi=pmi2)")
    with deadline(timeout_s, "duplicating MPI's world communicator"):
        comm, last = world.Dup(), world.Dup()
        shared = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.Get_rank())
        local_rank, local_size = shared.Get_rank(), shared.Get_size()
        shared.Free()
    _started["exit"] = MpiControl(last, timeout_s, local_rank, local_size)
    return MpiControl(comm, timeout_s, local_rank, local_size)


def _mismatch(facts: LaunchFacts, size: int, library: str) -> str:
    first = software.first_line(library)
    return (f"{facts.launcher} started {facts.size} processes, but mpi4py's MPI library ({first}) sees {size}: "
            "they belong to different MPIs")
