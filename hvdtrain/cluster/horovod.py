"""Horovod: find it, start and stop it after MPI (`hvdtrain.cluster.boot`), and say why it cannot be used."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cluster.boot import prepare_lone_mpi
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse, watch
from hvdtrain.config import ExchangeConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.core.protocols import Control

STALL, STALL_CHECK = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"

NATIVE = {"torch": "mpi_lib_v2*.so", "tensorflow": "mpi_lib*.so"}
"""File of Horovod's native library inside horovod/<framework>/."""

BUILD = "run `python -m hvdtrain build`"


class HorovodUnavailable(Exception):
    """Horovod cannot be used here; ``reason`` says why and names the remedy."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


_running: dict[str, Any] = {}
"""Horovod's module of each framework started here."""


def horovod_libraries(framework: str) -> list[Path] | None:
    """Return Horovod's native libraries for "torch" or "tensorflow", by files alone; None: not installed."""
    found = importlib.util.find_spec("horovod")
    if found is None or not found.submodule_search_locations:
        return None
    return sorted(Path(found.submodule_search_locations[0], framework).glob(NATIVE[framework]))


def horovod_reason(framework: str) -> str | None:
    """Return why Horovod cannot be used with ``framework``; None where it looks usable. Imports nothing."""
    found = horovod_libraries(framework)
    if found is None:
        return f"Horovod is not installed; {BUILD}"
    return None if found else f"Horovod is installed without {framework} support; {BUILD}"


def start_horovod(framework: str, exchange: ExchangeConfig, where: LaunchFacts | Control,
                  over_host: bool = False) -> Any:
    """Import horovod.torch or horovod.tensorflow and initialise it; return the module.

    ``where``: the started control plane (it must be up first: mpi4py asks MPI for threads), or the facts of a gloo job.
    ``over_host``: it will be given tensors in host memory. Raises `HorovodUnavailable` with reason and remedy.
    """
    hvd = _running_horovod(framework, exchange, where)
    if over_host and not (hvd.mpi_enabled() or hvd.gloo_enabled()):
        raise HorovodUnavailable("Horovod was built for GPUs only, without the MPI or Gloo operations "
                                 f"that exchange gradients over host memory; {BUILD}")
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


def _running_horovod(framework: str, exchange: ExchangeConfig, where: LaunchFacts | Control) -> Any:
    if framework in _running and _running[framework].is_initialized():
        return _running[framework]
    reason = horovod_reason(framework)
    if reason is not None:
        raise HorovodUnavailable(reason)
    if isinstance(where, LaunchFacts) and framework not in _running:  # without MPI this is where ranks first meet
        watch.start(where)
    _horovod_env(exchange, os.environ)
    if where.size == 1:
        prepare_lone_mpi(os.environ)
    hvd = load_horovod(framework)
    timeout_s = 600.0 if isinstance(where, LaunchFacts) else where.timeout_s
    pulse.at("Horovod")
    with deadline(timeout_s, "hvd.init"):
        _guarded_init(hvd.init, framework)
    if (hvd.rank(), hvd.size()) != (where.rank, where.size):
        raise HorovodUnavailable(
            f"Horovod sees rank {hvd.rank()} of {hvd.size()} where this is rank {where.rank} of {where.size}: it was "
            f"built for an MPI that differs from this job's; {BUILD}")
    _running[framework] = hvd
    return hvd


def check_built(framework: str, ext_name: str) -> None:
    """Raise `ImportError` with the remedy where Horovod's part for ``framework`` is not built."""
    reason = horovod_reason(framework)
    if reason is not None:
        raise ImportError(f"{ext_name}: {reason}")


def no_elastic() -> UserError:
    """Return the error of every name of ``elastic``."""
    return UserError(
        "hvd.elastic, which hvdtrain excludes: its rendezvous is an HTTP server without authentication that "
        "unpickles requests, so anyone who reaches it runs code on every host (CVE-2024-10190, no fixed release)",
        "checkpoints, and a job that is started again and resumes from the last one",
        "use hvdtrain.Trainer with checkpoint.every_steps and resume: auto, which also continues with another "
        "number of ranks")


def load_horovod(framework: str) -> Any:
    """Import Horovod's module for ``framework`` without starting it. Raises `HorovodUnavailable`."""
    try:
        return importlib.import_module(f"horovod.{framework}")
    except Exception as error:  # ImportError, OSError, and TensorFlow's NotFoundError for a stale ABI
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HorovodUnavailable(f"Horovod's {framework} support does not load ({line}); it was built for another "
                                 f"{framework} or MPI; {BUILD}") from error


def start_again(hvd: Any, process_sets: Sequence[Sequence[int]], dynamic: bool) -> list[Any]:
    """Restart Horovod with sets of ranks among which collectives may run; return its objects for them. Collective.

    It takes them at its start only, or any later one if ``dynamic``, which costs each of its cycles a look at the table
    of sets. One that is down is only started.
    """
    sets = [hvd.ProcessSet(list(ranks)) for ranks in process_sets]
    if hvd.is_initialized():
        hvd.shutdown()
    if dynamic:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(process_sets=sets)
    return sets


def stop_horovod(framework: str, timeout_s: float) -> None:
    """Shut down what `start_horovod` has started, its thread with it; it may be started again. Collective."""
    hvd = _running.pop(framework)
    with deadline(timeout_s, "hvd.shutdown"):
        hvd.shutdown()


def _guarded_init(init: Callable[[], Any], framework: str) -> None:
    try:
        init()
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        raise HorovodUnavailable(f"Horovod does not start with {framework} on {socket.gethostname()}: {error}; "
                                 f"{BUILD}") from error


def _horovod_env(exchange: ExchangeConfig, env: MutableMapping[str, str]) -> None:
    """Set Horovod's own variables where the user asked: MiB to bytes, ms as they are."""
    if exchange.fusion_threshold_mb >= 0:
        env["HOROVOD_FUSION_THRESHOLD"] = str(int(exchange.fusion_threshold_mb * 2**20))
    if exchange.cycle_time_ms >= 0:
        env["HOROVOD_CYCLE_TIME"] = f"{exchange.cycle_time_ms:g}"
    asked = {"HOROVOD_AUTOTUNE": exchange.autotune, "HOROVOD_HIERARCHICAL_ALLREDUCE": exchange.hierarchical}
    env.update({name: "1" for name, on in asked.items() if on})
