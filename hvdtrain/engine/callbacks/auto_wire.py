"""`collectives: auto`: measure the transports, use the best, check the choice, and watch whether the link changes.

Rules and text are left to `hvdtrain.planning.transport_choice`, the transports to `hvdtrain.comm.wires`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hvdtrain.cluster.deadline import deadline
from hvdtrain.comm import sweep, transport_sweep
from hvdtrain.config import run_length
from hvdtrain.core.protocols import ChangesTransport
from hvdtrain.core.terminal import say
from hvdtrain.engine.callbacks.auto_compression import WARM_STEPS, WINDOW_STEPS, AutoCompression, OtherWire, StepWatch
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run
from hvdtrain.planning import transport_choice
from hvdtrain.planning.compressor_choice import Baseline
from hvdtrain.planning.simulator import short_of_cores
from hvdtrain.planning.transport_choice import TransportCost, WireChoice

BUDGET_S, LEAST_S = 2.0, 0.3
"""For opening the transports and measuring them; what is left for measuring at least."""

OTHERS_S = 1.0
"""For measuring what compressors need over the transports that are not in use."""

LOOK_STEPS = 50
"""Steps between two looks at the wait, once all is settled."""

MOST_TIMES = 3
"""A run decides again at most so often because a link has changed."""


class AutoWire(Callback):
    """Runs on all ranks; decisions are rank 0's, made between two steps, and every one is a note of the run.

    ``choice``: the transport in use. ``settled``: nothing more is measured, unless the link changes. ``compression``:
    what chooses a compressor in the same run. It begins on the transport that is best without one, and then
    chooses transport and compressor together; a transport that was taken with a compressor is checked with it.
    """

    where = "all"
    before = ("AutoCompression",)  # which compares compressors over the transports that it opens
    state_key = "AutoWire"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.wires is not None and run.wires.names)

    def __init__(self) -> None:
        self.choice, self.settled, self._ruled = "", False, False
        self._world = ""
        self._compression: AutoCompression | None = None
        self._rows: list[TransportCost] = []
        self._in_graph: dict[str, bool] = {}
        self._decision: WireChoice | None = None
        self._base: Baseline | None = None
        self._watch = StepWatch(WARM_STEPS)
        self._windows: list[tuple[float, float]] = []
        self._times = 0

    def join(self, compression: AutoCompression) -> None:
        """Choose together with ``compression``, which compares its compressors over the other transports too."""
        self._compression, compression.others = compression, self.others

    def fit_start(self, run: Run) -> None:
        """Choose; a run that continues in the world it was decided for keeps its choice."""
        why = self._by_rule(run)
        if not why and self.settled and self._world == _world(run):
            self._begin(run)
            return
        self.settled, self._world, self._base = False, _world(run), None
        self.choice = run.collectives.name
        if why:
            self._ruled = True
            self._settle(run, transport_choice.by_rule(run.wires.names, why).reason, "rule")
            self._times = MOST_TIMES
        else:
            self._decide(run)

    def _by_rule(self, run: Run) -> str:
        """Return why nothing is measured, as text, or "". Pure."""
        updates = run_length.updates(run.spelled, run.feed.steps_per_epoch)
        left = updates - run.state.cursor.step
        if len(run.wires.names) == 1:
            return str(run.wires.why)
        if not run.dp.can_change_transport or run.parts.layout is not None:
            return f"{run.wires.why}; data_parallel {run.config.data_parallel.name} keeps its first transport"
        if updates and left < transport_choice.LEAST_UPDATES:
            return f"{run.wires.why}; not measured in a run of {left} updates"
        return ""

    def restored(self, run: Run) -> None:
        if not self.settled or self._world != _world(run) or run.collectives.name == self.choice:
            return
        lacking = run.wires.use(run, self.choice)
        if lacking:
            self.settled = False
            run.note(f"collectives auto: {self.choice}, as decided before, is not available: {lacking}")
        else:
            run.note(f"collectives auto: {self.choice}, as decided before")

    def step_end(self, run: Run) -> None:
        if self._compression is not None and not self._compression.settled:
            self._begin(run)  # these steps are of several compressors
            self._base = None
        elif self.settled:
            self._look(run)
        elif self._compression is not None and self._compression.choice != "none":
            self.choice = run.collectives.name
            self._settle(run, f"{self.choice}, with compression {self._compression.choice}", "checked")
        elif self._compression is not None and self.choice != run.collectives.name:
            self.choice = run.collectives.name
            self._settle(run, f"{self.choice}, as decided with compression", "checked")
        elif self._watch.full(run):
            self._check(run, self._watch.measured(run))

    def fit_end(self, run: Run) -> None:
        if not self.settled:
            run.note(f"collectives auto: the run was too short to check {self.choice}")

    def _decide(self, run: Run) -> None:
        begin, control, wires = time.perf_counter(), run.control, run.wires
        share = 1.0 if run.config.compression == "auto" else run.dp.compressor.bytes_share
        nbytes = sum(b.nbytes for b in run.dp.buckets) * share
        with deadline(run.config.control_timeout_s, "the sweep of collectives auto"):
            found = {name: wires.get(name) for name in wires.names}
            left_out = {**wires.left_out, **{name: why for name, (wire, why) in found.items() if wire is None}}
            opened_s = max(control.gather(time.perf_counter() - begin))
            measured = transport_sweep.measure({name: wire for name, (wire, _) in found.items() if wire is not None},
                                          cast(ChangesTransport, run.dp).ops, control, nbytes,
                                          max(LEAST_S, BUDGET_S - opened_s))
        self._in_graph = {name: wire.in_graph for name, (wire, _) in found.items() if wire is not None}
        threads = max(control.gather(run.topology.cores_of(control.rank) if not run.config.threads
                                     else run.config.threads))
        short = short_of_cores([(len(h.ranks), h.cores) for h in run.topology.hosts], threads)
        self._rows = transport_choice.estimate(measured, nbytes, short)
        self._decision = control.bcast(transport_choice.decide(self._rows))
        self._take(run, self._decision.name)
        for name in wires.names:
            if name != self.choice:
                wires.give_back(name)
        if control.rank == 0 and run.config.progress != "off":
            say(transport_choice.table(self._rows, left_out, self.choice, nbytes))
        run.note(f"collectives auto: {self._decision.reason}")
        run.record("wire", stage="decided", choice=self.choice, reason=self._decision.reason, bytes=int(nbytes),
                   rows=[asdict(row) for row in self._rows], measured=[asdict(m) for m in measured], refused=left_out,
                   short=short, sweep_s=time.perf_counter() - begin, hosts=_hosts(run))
        self._base, self._watch = None, StepWatch(WARM_STEPS)
        self._watch.begin(run)

    def others(self, run: Run, kinds: Sequence[str]) -> dict[str, OtherWire]:
        """Measure the wires that are not in use for ``kinds`` of calls; collective. Those that training can change to.

        Not a transport in TensorFlow's graph in place of one outside of it, nor the other way round: of that a sweep
        says little, since the graphs are others.
        """
        found: dict[str, OtherWire] = {}
        names = [] if self.settled and self._times >= MOST_TIMES else run.wires.names
        for name in names:
            if name == run.collectives.name:
                continue
            wire, _ = run.wires.get(name)
            if wire is not None and wire.in_graph == run.collectives.in_graph:
                ops = cast(ChangesTransport, run.dp).ops
                found[name] = sweep.measure_links(wire, ops, run.control, kinds, OTHERS_S / len(names)), wire.overlaps
            run.wires.give_back(name)
        return found

    def _check(self, run: Run, measured: Baseline) -> None:
        """Keep the choice where its steps wait as estimated; else try the next best, and keep the better of the two."""
        assert self._decision is not None
        if self._base is not None:
            first = self._decision.name
            best, reason = run.control.bcast(transport_choice.better(first, self._base.step_s, self.choice,
                                                                     measured.step_s))
            base = self._base if best == first else measured
            self._take(run, best)
            self._settle(run, reason, "checked", base)
            return
        easy = [name for name, in_graph in self._in_graph.items() if in_graph == run.collectives.in_graph]
        other = run.control.bcast(transport_choice.doubt(self._rows, self._decision, measured.step_s, measured.wait_s,
                                                         easy))
        wait = f"steps of {1e3 * measured.step_s:.4g} ms wait {1e3 * measured.wait_s:.4g} ms"
        if other is None:
            self._settle(run, f"{self.choice} stays: {wait}", "checked", measured)
            return
        self._base, (name, why) = measured, other
        run.record("wire", stage="tried", choice=name, reason=f"{name} for {WARM_STEPS + WINDOW_STEPS} steps: {why}",
                   **asdict(measured))
        lacking = self._take(run, name)
        if lacking:
            self._settle(run, f"{self.choice} stays: {wait}, and {name} is not available: {lacking}", "checked",
                         measured)
            return
        self._watch = StepWatch(WARM_STEPS)
        self._watch.begin(run)

    def _take(self, run: Run, name: str) -> str:
        lacking = "" if name == run.collectives.name else str(run.wires.use(run, name))
        self.choice = run.collectives.name
        return lacking

    def _settle(self, run: Run, reason: str, stage: str, base: Baseline | None = None) -> None:
        self.settled = True
        values = {} if base is None else asdict(base)
        run.record("wire", stage=stage, choice=self.choice, reason=reason, refused=run.wires.left_out,
                   hosts=_hosts(run), **values)
        if stage != "rule" or len(run.topology.hosts) > 1:
            run.note(f"collectives auto: {reason}")
        self._base = base
        self._begin(run)

    def _begin(self, run: Run) -> None:
        self._windows, self._watch = [], StepWatch(0 if self.settled else WARM_STEPS)
        self._watch.begin(run)

    def _look(self, run: Run) -> None:
        """Every `LOOK_STEPS` steps compare the wait with what it was; decide again where it is another one for good."""
        if self._times >= MOST_TIMES:
            return
        self._watch.count(run)
        if run.state.cursor.step % LOOK_STEPS:
            return
        window = self._watch.measured(run)
        self._watch = StepWatch(0)
        self._watch.begin(run)
        if self._base is None:
            self._base = window
            return
        self._windows = [*self._windows, (window.step_s, window.wait_s)][-3:]
        if not transport_choice.changed((self._base.step_s, self._base.wait_s),
                                        self._windows):  # the same on every rank
            return
        self._times += 1
        waits = statistics.median(wait for _, wait in self._windows)
        reason = (f"steps wait {1e3 * waits:.4g} ms since {3 * LOOK_STEPS} steps, before "
                  f"{1e3 * self._base.wait_s:.4g}: the link has changed, and the choice is made again")
        run.record("wire", stage="changed", choice=self.choice, reason=reason, step_s=window.step_s, wait_s=waits)
        run.note(f"collectives auto: {reason}")
        self.settled = False
        self._decide(run)
        if self._compression is not None:
            self._compression.anew(run)

    def state_dict(self) -> dict[str, Any]:
        # What the rule has chosen is not settled: a longer run measures.
        return {"choice": self.choice, "settled": self.settled and not self._ruled, "world": self._world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.choice, self.settled, self._world = state["choice"], state["settled"], state["world"]


def _world(run: Run) -> str:
    return f"{run.control.size} ranks, {run.topology.describe()}, {'/'.join(run.wires.names)}"


def _hosts(run: Run) -> list[dict[str, Any]]:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None
    here = run.topology.host_of(run.control.rank).node
    return [{"node": h.node, "ranks": len(h.ranks), "cores": h.cores, "numa": nodes if h.node == here else None}
            for h in run.topology.hosts]
