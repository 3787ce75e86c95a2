"""The run: the object that the loop drives and callbacks see, which delivers events."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvdtrain.backends.model_spec import Spec
from hvdtrain.checkpoint.run_directory import RunOutput
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.topology import Topology
from hvdtrain.comm.compressors import create
from hvdtrain.comm.wires import Wires
from hvdtrain.config import Config
from hvdtrain.core.events import Event
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import ChangesTransport, Collectives, Control, DataParallel, RunCallback, Schedule
from hvdtrain.core.protocols.run import RunSaver
from hvdtrain.core.protocols.types import Announcement, StepBatch
from hvdtrain.core.records import RecordStream
from hvdtrain.core.terminal import say
from hvdtrain.core.timeline import Timeline, span
from hvdtrain.data.feed import Feed
from hvdtrain.engine.average import Average
from hvdtrain.engine.run_parts import RunPhases, RunSetup, RunState, Services
from hvdtrain.engine.written_state import WrittenState
from hvdtrain.parallel.data_parallel.reducing import UnusedParameters
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.recovery import Recovery

_Listener = tuple[Callable[["Run"], None], str, str]
"""What an event calls, its name in the heartbeat ("": none), and its name where rank 0 calls it alone, else ""."""


def _of(path: str) -> Any:
    """Return a property that reads and sets ``path``, an attribute of one of a run's parts."""
    part, _, name = path.rpartition(".")
    owner = attrgetter(part)
    return property(attrgetter(path), lambda run, value: setattr(owner(run), name, value))


class Run:
    """A run in three parts: what it is (``setup``), where it stands (``state``), what it uses (``services``).

    Callbacks, trackers and reports read the names below; each is an attribute of a part.
    """

    config: Config = _of("setup.config")
    spelled: Config = _of("setup.spelled")
    spec: Spec = _of("setup.spec")
    topology: Topology = _of("setup.topology")
    devices: list[DeviceFacts] = _of("setup.devices")
    mesh: Mesh = _of("setup.mesh")
    parts: ModelParts = _of("setup.parts")
    schedule: Schedule = _of("setup.schedule")
    feed: Feed = _of("setup.feed")
    eval_feeds: dict[str, Feed] = _of("setup.eval_feeds")
    eval_feed = property(lambda run: run.eval_feeds.get(""))
    average: Average | None = _of("setup.average")
    dp: DataParallel = _of("setup.dp")
    control: Control = _of("services.control")
    collectives: Collectives = _of("services.collectives")
    wires: Wires = _of("services.wires")
    directory: RunOutput = _of("services.directory")
    out: Path = _of("services.directory.out")
    begun: bool = _of("services.directory.begun")
    records: RecordStream = _of("services.records")
    timeline: Timeline = _of("services.timeline")
    phases: RunPhases = _of("services.phases")
    recovery: Recovery = _of("services.recovery")
    written: WrittenState = _of("services.written")
    unused: UnusedParameters = _of("services.unused")
    saver: RunSaver | None = _of("services.saver")
    batch: StepBatch | None = _of("state.batch")
    updated: bool = _of("state.outcome.updated")
    notes: list[str] = _of("state.findings.notes")
    ledger: dict[str, Any] = _of("state.findings.ledger")
    memory: dict[str, Any] = _of("state.findings.memory")
    shortages: list[dict[str, Any]] = _of("state.findings.shortages")

    def __init__(self, setup: RunSetup, services: Services, state: RunState | None = None) -> None:
        self.setup, self.services, self.state = setup, services, RunState() if state is None else state
        self.callbacks: list[RunCallback[Run]] = []
        self._heard: dict[Event, tuple[list[RunCallback[Run]], list[_Listener]]] = {}
        self._joined = False
        services.phases = RunPhases(services.timeline, self.state, setup.config.control_timeout_s)

    def emit(self, event: Event) -> None:
        """Call every callback, one with ``where`` "root" on rank 0 only; contracts: `hvdtrain.core.events`."""
        listeners, state, timeline = self._listeners(event), self.state, self.services.timeline
        if not listeners:
            return
        outer, root_alone, outer_alone = state._event, state._alone, timeline.alone
        state._event, watched, step = event, timeline.watched, state.cursor.step
        try:
            for call, name, alone in listeners:
                state._alone, timeline.alone = bool(alone), alone
                if name:
                    pulse.at(name, step)
                if name and watched:  # else nobody would see it, and there are twenty a step
                    with span(name):
                        call(self)
                else:
                    call(self)
        finally:
            state._event, state._alone, timeline.alone = outer, root_alone, outer_alone

    def call(self, method: str) -> None:
        """Call ``method`` of every callback that has one, outside of events; of "root" on rank 0, where it enters no
        exchange either."""
        timeline, control = self.services.timeline, self.services.control
        outer = timeline.alone
        for callback in self.callbacks:
            everywhere = callback.where == "all"
            if not (everywhere or control.rank == 0) or not hasattr(callback, method):
                continue
            timeline.alone = "" if everywhere or control.size == 1 else f"{method} of {type(callback).__name__}"
            try:
                getattr(callback, method)(self)
            finally:
                timeline.alone = outer

    def _listeners(self, event: Event) -> list[_Listener]:
        """Return what to call at ``event`` here, kept until the list of callbacks changes: most see few events."""
        known = self._heard.get(event)
        if known is not None and len(known[0]) == len(self.callbacks) and all(map(is_, known[0], self.callbacks)):
            return known[1]
        method, control, found = event.value, self.services.control, list[_Listener]()
        for one in self.callbacks:
            everywhere = one.where == "all"
            if not (everywhere or control.rank == 0) or not one.hears(event):
                continue
            name = f"{method} of {type(one).__name__}" if hasattr(one, method) else ""
            alone = "" if everywhere or control.size == 1 else name or type(one).__name__
            found.append((one.listener(event), name, alone))
            if name and one.doing:
                pulse.doing[name] = one.doing
        self._heard[event] = (list(self.callbacks), found)
        return found

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.record("note", text=text)
        if self.control.rank == 0:
            say(f"note: {text}")

    def record(self, event: str, **values: Any) -> None:
        """Tell the reports of rank 0 what has happened (`hvdtrain.core.records`); enters no collective."""
        if self.control.rank == 0:
            self.records.write(self, event, values)

    def use_compressor(self, name: str) -> None:
        """Exchange gradients by another compressor from the next step on; every rank calls it between two steps."""
        if name != self.dp.compression:
            cast(ChangesTransport, self.dp).use(create(name, self.config))
            self.parts.stage.connect(self.dp)

    def rank_state(self) -> dict[str, np.ndarray]:
        """Return this rank's own state: random generators, and what its exchange remembers."""
        return {**self.parts.state.rank_state(), **self.dp.saved()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; return as text what of it did not fit and starts again, or ""."""
        self.parts.state.load_rank(own)
        return self.dp.restore(own)

    def join(self) -> None:
        """Take the model for training or evaluation, where it is not the run's already."""
        if not self._joined:
            self.parts.install()
            self.parts.stage.connect(self.dp)
            self._joined = True

    def leave(self) -> None:
        """Give the model back as its user made it: no hooks, no joint statistics, its own compute types."""
        self.parts.stage.disconnect()
        self.parts.remove()
        self._joined = False

    def want_stop(self, reason: str) -> None:
        """Ask that all ranks stop; takes effect at the next agreement."""
        self.state.wishes.stop = self.state.wishes.stop or reason

    def want_save(self) -> None:
        """Ask for a checkpoint after the next agreement."""
        self.state.wishes.save = True

    def tell_all(self, topic: str, text: str) -> None:
        """Announce ``text`` to all at the next agreement: an `Announcement` in ``state.told`` at the event TOLD."""
        self.state.wishes.words.append(Announcement(self.control.rank, topic, text))

    def hear(self) -> None:
        """Exchange what the ranks have to tell each other; collective, entered where an agreement says that one has."""
        own, self.state.wishes.words = self.state.wishes.words, []
        self.state.told = [word for words in self.control.gather(own) for word in words]

    def hear_last(self) -> None:
        """Tell each other what no agreement has told, at the end of a fit; collective."""
        if self.control.agree(bool(self.state.wishes.words)):
            self.hear()
            self.emit_told()

    def deliver(self, rows: list[tuple[int, str, str]]) -> None:
        """Emit TOLD for (rank, topic, text) that every rank knows already."""
        self.state.told = [Announcement(*row) for row in rows]
        self.emit_told()

    def emit_told(self) -> None:
        """Emit TOLD where something was told since the last time."""
        if self.state.told:
            self.emit(Event.TOLD)
            self.state.told = []

    def stopping(self) -> bool:
        """Return whether the ranks have agreed to stop."""
        return bool(self.state.stop)

    def settle(self) -> None:
        """Decide outside of a step on wishes to stop, and exchange announcements; collective."""
        wishes = self.state.wishes
        n_stop, n_words = self.control.sum(np.array([bool(wishes.stop), bool(wishes.words)], np.float64))
        if n_stop:
            self.state.stop = next(r for r in self.control.gather(wishes.stop) if r)
        if n_words:
            self.hear()
        self.emit_told()
