"""Says in words what a rank is at: the phases that `hvdtrain.cluster.liveness.pulse` publishes, as a person reads them.
Pure."""

from __future__ import annotations

import re

STEP = ("backward and exchange", "vote", "update")
INPUT = "data"

_PHASES = {
    "start": "starting",
    "claiming devices": "starting",
    "MPI": "starting MPI",
    "Horovod": "starting Horovod",
    "model": "loading the framework and making the model",
    "data": "reading the data",
    "split": "cutting the model over devices",
    "transforms": "preparing the model",
    "first sample": "trying a first sample",
    "exchange": "preparing the exchange of gradients",
    "remat": "choosing blocks to recompute",
    "resume": "looking for a checkpoint",
    "restore": "restoring a checkpoint",
    "probe": "measuring each rank's speed",
    "memory": "measuring memory",
    "evaluation": "evaluating",
    "saving": "saving a checkpoint",
    "export": "writing the final model",
    "the completion record": "writing the final record",
    "out": "making the run's directory",
}
_EVENTS = re.compile(r"([a-z_]+) of (\w+)")
_CALLBACKS = {
    "Balance": "measuring each rank's speed",
    "AutoCompile": "timing ways to compile the model",
    "AutoCompression": "measuring compressors",
    "MemoryFit": "fitting the micro-batch into memory",
    "Memory": "measuring memory",
    "Checkpoint": "saving a checkpoint",
    "Divergence": "comparing the ranks' weights",
    "Audit": "computing a micro-batch on another rank",
    "Ledger": "counting samples",
}


def of(phase: str, step: int, first: bool) -> str:
    """Return what a rank does in ``phase``, during or after ``step`` (-1: none yet); ``first``: of those it makes."""
    if phase in STEP:
        return "first step" if first else f"step {step + 1}"
    if phase == INPUT and step >= 0:
        return "waiting for the first batch" if first else "waiting for the next batch"
    found = _EVENTS.fullmatch(phase)
    if found is None:
        return _PHASES.get(phase, phase)
    event, callback = found.groups()
    return _CALLBACKS.get(callback, f"{event.replace('_', ' ')} of {callback}")
