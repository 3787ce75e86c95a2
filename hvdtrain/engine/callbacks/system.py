"""Record what each rank's process and device hold and do, every `EVERY_S` by rank 0's clock and at the end."""

from __future__ import annotations

import time
from typing import Any

from hvdtrain.engine import machine
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.machine import Reader, environment, host_facts
from hvdtrain.engine.run import Run

EVERY_S = 5.0
"""Seconds between two readings; one takes less than a millisecond, and the ranks two small exchanges."""

TOPIC = "system"


class System(Callback):
    """Makes the records "environment" and "system"."""

    where = "all"

    def __init__(self, clock: Any = time.monotonic) -> None:
        self._clock = clock
        self._reader: Reader | None = None
        self._usage: machine.Usage | None = None
        self._due_at = 0.0

    def fit_start(self, run: Run) -> None:
        """Record where the run runs. Collective."""
        facts_P = run.control.gather(host_facts(run.devices[run.control.rank].kind == "cuda"))
        run.record("environment", **environment(run, facts_P))
        self._reader = Reader(run)
        self._usage = machine.Usage(run, lambda n: run.feed.sample(n, run.state.cursor))
        self._due_at = self._clock() + EVERY_S

    def step_end(self, run: Run) -> None:
        """Ask all ranks for a reading when it is time, on rank 0; leave the first steps out of the utilisation."""
        if self._usage is None:  # steps outside of a fit
            return
        self._usage.step_end(run)
        if run.control.rank == 0 and self._clock() >= self._due_at:
            self._due_at = self._clock() + EVERY_S
            run.tell_all(TOPIC, "")

    def told(self, run: Run) -> None:
        """Read where rank 0 has asked; collective, since every rank hears it at the same vote."""
        if self._reader is not None and any(word.topic == TOPIC for word in run.state.told):
            self._read(run)

    def fit_end(self, run: Run) -> None:
        """Read for the last time; collective."""
        self._read(run, over_all=True)
        self._reader = None

    def _read(self, run: Run, over_all: bool = False) -> None:
        usage = self._usage
        assert self._reader is not None and usage is not None
        own = (self._reader.reading(run), usage.latest(run, over_all), usage.flops, usage.peak_flops, usage.source,
               usage.why)
        ranks, mfu, per_sample, peaks, sources, whys = zip(*run.control.gather(own))
        run.record("system", ranks=list(ranks), mfu=list(mfu), flops=list(per_sample), peak_flops=list(peaks),
                   peak_source=list(sources), flops_unknown=list(whys))
