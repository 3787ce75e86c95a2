"""What a run is made of and where it stands: the object that the loop drives and callbacks see.

Owns state, phase times and the delivery of events. Is built by `hvdtrain.engine.assemble`, driven by
`hvdtrain.engine.loop`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.backends.model_spec import Spec
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.topology import Topology
from hvdtrain.comm.compressors import create
from hvdtrain.config import Config
from hvdtrain.core.cursor import Cursor
from hvdtrain.core.errors import UserError
from hvdtrain.core.events import Event
from hvdtrain.core.group import Group
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Callback, Collectives, Control, DataParallel, Schedule
from hvdtrain.core.protocols.state import RunSaver
from hvdtrain.core.protocols.types import StepBatch, Word
from hvdtrain.core.records.stream import Stream
from hvdtrain.core.terminal import say
from hvdtrain.core.timeline import Timeline, span
from hvdtrain.data.feed import Feed
from hvdtrain.engine.phases import StepPhases
from hvdtrain.engine.written_state import WrittenState
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.parallel.data_parallel.unused import UnusedParameters
from hvdtrain.parallel.parts import Parts
from hvdtrain.parallel.recovery.recovery import Recovery
from hvdtrain.planning.batch.line import Line

if TYPE_CHECKING:
    from hvdtrain.comm.wires import Wires
    from hvdtrain.engine.average import Average, Final


@dataclass
class State:
    """Where the run stands; equal on all ranks but for the two wishes, ``words`` (to tell at the next vote) and
    ``poisoned``: a step in which the copies did not meet was not finite on this rank. ``met``: after the latest step
    the copies of the model are one model, since they met in it and were updated. ``loss``: of the latest step, on an
    asynchronous device of the one before; NaN where that step made no update. ``last_loss``: of the last one that did.
    """

    cursor: Cursor = field(default_factory=Cursor)
    loss: float = math.nan
    last_loss: float = math.nan
    grad_norm: float = math.nan
    samples_per_s: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_at: int = -1
    bad_ranks: list[int] = field(default_factory=list)
    bad_where: dict[int, str] = field(default_factory=dict)
    stop: str = ""
    save_due: bool = False
    wants_stop: str = ""
    wants_save: bool = False
    poisoned: bool = False
    met: bool = True
    words: list[Word] = field(default_factory=list)
    requeue: bool = False
    """Whether the ranks have agreed to save and to end before the last step, for a later run to resume."""
    interrupted: bool = False
    """Whether they have agreed to that because of a SIGINT: the status is 130 then, else 75."""
    told: list[Word] = field(default_factory=list)
    """What the ranks told each other at the latest vote, by rank, while TOLD is emitted; else empty."""


@dataclass
class Run:
    """A run, assembled."""

    config: Config
    control: Control
    group: Group
    topology: Topology
    collectives: Collectives
    spec: Spec
    parts: Parts
    schedule: Schedule
    feed: Feed
    eval_feed: Feed | None
    spelled: Config = field(default_factory=Config)
    """``config`` with a value per rank in place of names of hosts and devices (`hvdtrain.config.placed`)."""
    devices: list[DeviceFacts] = field(default_factory=list)
    """What each rank computes on."""
    mesh: Mesh = field(default_factory=lambda: Mesh.of([1], 0))
    """The copies of the model, each a list of ranks."""
    wires: Wires = field(init=False)
    """What opens other wires."""
    dp: DataParallel = field(init=False)
    """How the copies of the model stay one; `hvdtrain.engine.assemble` sets it when the first sample has gone
    through."""
    starts: bool = False
    """Whether the next step is the first of a fit."""
    watched: bool = False
    """Whether a fit looks before each step for what callbacks have changed of the model, the same on every rank."""
    unused: UnusedParameters = field(init=False)
    """The parameters that no rank has used in the latest step."""
    written: WrittenState = field(default_factory=WrittenState)
    """The buffers that forward passes write to."""
    records: Stream = field(default_factory=Stream)
    """What has happened; on rank 0 reports read it."""
    timeline: Timeline = field(default_factory=Timeline)
    """Where this rank's seconds go, since its process began."""
    solo_lines: list[Line] = field(default_factory=list)
    """How long each rank takes over a micro-batch, where balance knows it."""
    out: Path = Path()
    """The run's directory once `hvdtrain.checkpoint.run_directory.ensure_out` has made it; before that the current
    directory."""
    made: list[Path] = field(default_factory=list)
    """Directories that were made for ``out``, innermost first."""
    average: Average | None = None
    """The moving average of the weights, where the configuration asks for one."""
    final: list[Final] = field(default_factory=list)
    """What has put the final weights in the place of those of training: its ``release`` and ``hold`` exchange them."""
    batch: StepBatch | None = None
    """This rank's part of the step under way, from STEP_START to CHECKPOINT."""
    updated: bool = True
    """Whether the latest step made its update; on an asynchronous device the step before, where the loss decides."""
    pending_updated: bool = True
    """The same of the latest step that computed: on an asynchronous device its loss is still to be read."""
    pending_read: bool = True
    """Whether the step whose loss `local_loss` read last on an asynchronous device made its update."""
    idle: frozenset[str] = frozenset()
    """Keys that have no effect as the run is set up (`hvdtrain.config.unused`)."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """What `hvdtrain.engine.callbacks.ledger` has found so far."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What `hvdtrain.engine.callbacks.memory` has reckoned and measured, by rank."""
    lock: int = -1
    """Descriptor by which rank 0 keeps other jobs out of ``out`` while it trains; -1: none."""
    begun: bool = False
    """Whether a fit has begun to write into ``out``; not while it may still be refused
    (`hvdtrain.checkpoint.run_directory.begin`)."""
    recovery: Recovery = field(default_factory=lambda: Recovery(lambda error: False, shrinks=False))
    """What this rank does when it runs out of memory."""
    shortages: list[dict[str, Any]] = field(default_factory=list)
    """Each time that a rank ran out of memory: ``rank`` and the fields of `hvdtrain.core.protocols.shortage.Shortage`.
    """
    unsaved: UserError | None = None
    """Why the last checkpoint of the latest fit was not written; the final model is written all the same."""
    saver: RunSaver | None = None
    """Saves the run; made with the first save."""
    callbacks: list[Callback[Run]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    state: State = field(default_factory=State)
    phases: StepPhases = field(init=False)
    """The phases of a step, each a context manager."""
    _pending: Any = None
    _read: Any = None
    _joined: bool = False

    def __post_init__(self) -> None:
        self.phases = StepPhases(self.timeline, self.state, self.config.control_timeout_s)

    def emit(self, event: Event) -> None:
        """Tell every callback; root-only ones only on rank 0."""
        method, watched = event.value, self.timeline.watched
        for callback in self.callbacks:
            if callback.where == "all" or self.control.rank == 0:
                name = f"{method} of {type(callback).__name__}" if hasattr(callback, method) else ""
                if name:
                    pulse.at(name, self.state.cursor.step)
                if name and watched:  # else nobody would see it, and there are twenty a step
                    with span(name):
                        callback.on(event, self)
                else:
                    callback.on(event, self)

    def local_loss(self, totals: list[tuple[Any, Any]]) -> tuple[float, float]:
        """This rank's (loss_sum, weight) of the step.

        On an asynchronous device those of the step before, which are there without waiting for the device.
        """
        if self.parts.stage.asynchronous:
            self._read, self.pending_read = self._pending, self.pending_updated
            totals, self._pending = self._pending or [], totals
        return sum(float(loss) for loss, _ in totals), sum(float(weight) for _, weight in totals)

    def unread_loss(self) -> None:
        """Undo `local_loss` of a step that is to be repeated: the step before is to be read then."""
        self._pending = self._read

    def note(self, text: str) -> None:
        """Keep a remark for the summary and the log, and print it on rank 0 now."""
        self.notes.append(text)
        self.record("note", text=text)
        if self.control.rank == 0:
            say(f"note: {text}")

    def record(self, event: str, **values: Any) -> None:
        """Tell the reports of rank 0 what has happened (`hvdtrain.core.records.schema`); enters no collective."""
        if self.control.rank == 0:
            self.records.write(self, event, values)

    def use_compressor(self, name: str) -> None:
        """Exchange gradients by another compressor from the next step on; every rank calls it between two steps."""
        assert isinstance(self.dp, Replicate)
        if name != self.dp.compression:
            self.dp.use(create(name, self.config))
            self.parts.stage.connect(self.dp)

    def rank_state(self) -> dict[str, np.ndarray]:
        """Return this rank's own state: random generators, and what its exchange remembers."""
        return {**self.parts.state.rank_state(), **self.dp.saved()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; return in words what of it did not fit and starts anew, or ""."""
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
        """Ask that all ranks stop; takes effect when the ranks agree, at the next vote."""
        self.state.wants_stop = self.state.wants_stop or reason

    def want_save(self) -> None:
        """Ask for a checkpoint after the next vote."""
        self.state.wants_save = True

    def tell_all(self, topic: str, text: str) -> None:
        """Have every rank hear ``text`` at the next vote, as a `Word` in ``state.told`` when TOLD is emitted."""
        self.state.words.append(Word(self.control.rank, topic, text))

    def hear(self) -> None:
        """Exchange what the ranks have to tell each other; collective, entered where a vote says that one has."""
        own, self.state.words = self.state.words, []
        self.state.told = [word for words in self.control.gather(own) for word in words]

    def hear_last(self) -> None:
        """Tell each other what no vote has told, at the end of a fit; collective."""
        if self.control.agree(bool(self.state.words)):
            self.hear()
            self.emit_told()

    def deliver(self, rows: list[tuple[int, str, str]]) -> None:
        """Emit TOLD for (rank, topic, text) that every rank knows already."""
        self.state.told = [Word(*row) for row in rows]
        self.emit_told()

    def emit_told(self) -> None:
        """Emit TOLD where something was told since the last time."""
        if self.state.told:
            self.emit(Event.TOLD)
            self.state.told = []

    def stopping(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return bool(self.state.stop)

    def settle(self) -> None:
        """Settle outside a step what a vote settles in it: wishes to stop, and what ranks have to tell; collective."""
        n_stop, n_words = self.control.sum(np.array([bool(self.state.wants_stop), bool(self.state.words)], np.float64))
        if n_stop:
            self.state.stop = next(r for r in self.control.gather(self.state.wants_stop) if r)
        if n_words:
            self.hear()
        self.emit_told()
