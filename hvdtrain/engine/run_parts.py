"""The three parts of a run: what it is (`RunSetup`), where it stands (`RunState`), what it uses (`Services`).

`hvdtrain.engine.run.Run` joins them; the order of the phases of a step is left to `hvdtrain.engine.loop`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hvdtrain.backends.model_spec import Spec
from hvdtrain.checkpoint.run_directory import RunOutput
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.topology import Topology
from hvdtrain.comm.wires import Wires
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.events import Event
from hvdtrain.core.mesh import Group, Mesh
from hvdtrain.core.protocols import Collectives, Control, DataParallel, Schedule
from hvdtrain.core.protocols.run import Position, RunSaver
from hvdtrain.core.protocols.types import Announcement, Cursor, StepBatch
from hvdtrain.core.records import RecordStream
from hvdtrain.core.timeline import StepTotals, Timeline, span
from hvdtrain.data.feed import Feed
from hvdtrain.engine.average import Average, Final
from hvdtrain.engine.written_state import WrittenState
from hvdtrain.parallel.data_parallel.reducing import UnusedParameters
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.recovery import Recovery
from hvdtrain.planning.linear import LinearTime


@dataclass
class RunSetup:
    """Identity of a run, fixed by its assembly: settings, ranks, model and data.

    ``spelled``: ``config`` with a value per rank in place of names of hosts and devices (`hvdtrain.config.placed`).
    ``devices``: what each rank computes on. ``mesh``: the replicas of the model, each a list of ranks. ``dp``: how the
    replicas stay one; set when the first sample has gone through. ``average``: the moving average of the weights, where
    the configuration asks for one. ``idle``: keys that have no effect as the run is set up (`hvdtrain.config`).
    ``eval_feeds``: of evaluation sets by name; "": of the run's own evaluation data, the first one.
    """

    config: Config
    group: Group
    topology: Topology
    spec: Spec
    parts: ModelParts
    schedule: Schedule
    feed: Feed
    eval_feeds: dict[str, Feed] = field(default_factory=dict)
    spelled: Config = field(default_factory=Config)
    devices: list[DeviceFacts] = field(default_factory=list)
    mesh: Mesh = field(default_factory=lambda: Mesh.of([1], 0))
    idle: frozenset[str] = frozenset()
    average: Average | None = None
    dp: DataParallel = field(init=False)

    @property
    def eval_unread(self) -> int:
        """Return the samples of all evaluation sets that the last evaluation could not read."""
        return sum(feed.unread for feed in self.eval_feeds.values())


@dataclass
class RankWishes:
    """Wishes of this rank for the next agreement: to stop, to save, and ``words`` to announce to all."""

    stop: str = ""
    save: bool = False
    words: list[Announcement] = field(default_factory=list)


@dataclass
class StepOutcome:
    """Outcome of the latest step, the same on all ranks but for ``poisoned``.

    ``updated``: it made its update; on an asynchronous device the step before, where the loss decides. ``met``: the
    replicas of the model are one model, since they synchronized in it and were updated. ``poisoned``: a step in which
    they did not synchronize was not finite on this rank. ``bad_ranks``: who brought in what was not finite;
    ``bad_where``: in which parameter. ``last_loss``: of the last step that made its update.
    """

    updated: bool = True
    met: bool = True
    poisoned: bool = False
    bad_ranks: list[int] = field(default_factory=list)
    bad_where: dict[int, str] = field(default_factory=dict)
    last_loss: float = math.nan
    pending_updated: bool = True
    """``updated`` of the latest step that computed: on an asynchronous device its loss is still to be read."""
    pending_read: bool = True
    """Whether the step whose loss `local_loss` read last on an asynchronous device made its update."""
    _pending: list[tuple[Any, Any]] = field(default_factory=list)
    _read: list[tuple[Any, Any]] = field(default_factory=list)

    def local_loss(self, totals: list[tuple[Any, Any]], asynchronous: bool) -> tuple[float, float]:
        """Return this rank's (loss_sum, weight), of an asynchronous device the step before, without waiting."""
        if asynchronous:
            self._read, self.pending_read = self._pending, self.pending_updated
            totals, self._pending = self._pending, totals
        return sum(float(loss) for loss, _ in totals), sum(float(weight) for _, weight in totals)

    def unread_loss(self) -> None:
        """Undo `local_loss` of a step that is to be repeated: the step before is to be read then."""
        self._pending = self._read


@dataclass(frozen=True)
class BestEvaluation:
    """A finite evaluation better than all before; ``out``: the run's directory that has its checkpoint."""

    step: int
    metrics: dict[str, float]
    out: str


@dataclass
class Findings:
    """Results of the run so far, for its summary and report.

    ``ledger``: of `hvdtrain.engine.callbacks.ledger`. ``memory``: estimated and measured bytes by rank, of
    `hvdtrain.engine.callbacks.memory_fit`. ``shortages``: each time that a rank ran out of memory, with ``rank`` and
    the fields of `hvdtrain.core.protocols.types.Shortage`. ``solo_lines``: how long each rank takes over a micro-batch,
    where balance knows it. ``metrics_at``: the step that ``RunState.metrics`` are of. ``unsaved``: why the last
    checkpoint of the latest fit was not written; the final model is written all the same. ``best``: by metric, newest
    first; older ones replace it where its checkpoint is missing. ``weights_at``: the step whose weights are the final
    ones; -1: the last. ``eval_owed``: the run ended for a requeue where an evaluation was due, which is made at the
    resume. ``forecast``: of `hvdtrain.engine.callbacks.forecast`, on rank 0.
    """

    notes: list[str] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    shortages: list[dict[str, Any]] = field(default_factory=list)
    solo_lines: list[LinearTime] = field(default_factory=list)
    metrics_at: int = -1
    unsaved: UserError | None = None
    best: dict[str, list[BestEvaluation]] = field(default_factory=dict)
    weights_at: int = -1
    eval_owed: bool = False
    forecast: dict[str, Any] = field(default_factory=dict)

    def best_steps(self) -> dict[str, list[int]]:
        """Return the steps of ``best`` by metric, whose checkpoints `CheckpointStore` never removes."""
        return {metric: [one.step for one in found] for metric, found in self.best.items() if found}


@dataclass(slots=True)  # so that a name that has moved is no new attribute, which nobody reads
class RunState:
    """State of a run; equal on all ranks but for ``wishes``, and where `StepOutcome` says so.

    ``batch``: this rank's share of the step under way, from STEP_START to CHECKPOINT. ``loss``: of the latest step, on
    an asynchronous device of the one before; NaN where that step made no update. ``requeue``: the ranks have agreed to
    save and to end before the last step, for a later run to resume; ``interrupted``: because of a SIGINT, so that the
    status is 130 and not 75. ``told``: what the ranks announced in the latest agreement, while TOLD is emitted.
    """

    cursor: Cursor = field(default_factory=Cursor)
    batch: StepBatch | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    samples_per_s: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    stop: str = ""
    requeue: bool = False
    interrupted: bool = False
    told: list[Announcement] = field(default_factory=list)
    wishes: RankWishes = field(default_factory=RankWishes)
    outcome: StepOutcome = field(default_factory=StepOutcome)
    findings: Findings = field(default_factory=Findings)
    _save_due: bool = False
    _event: Event | None = None
    """Emitted at this moment (`hvdtrain.engine.run.Run.emit`)."""
    _alone: bool = False
    """Whether the callback that sees it is called on rank 0 alone, where there are others."""

    @property
    def save_due(self) -> bool:
        """Return whether a checkpoint follows this step; where callbacks may set it is in `hvdtrain.core.events`."""
        return self._save_due

    @save_due.setter
    def save_due(self, due: bool) -> None:
        event = self._event
        if not due or self._save_due or event is None:
            self._save_due = due
            return
        if self._alone:
            raise UserError(f"a callback of rank 0 alone set run.state.save_due in {event.value}",
                            "a callback with where = \"all\": the other ranks would not enter that checkpoint",
                            "call run.want_save()")
        if event is Event.TOLD and self.batch is None and not self.stop:
            self.wishes.save = True  # no step whose weights these are: the next agreement decides
        elif event in (Event.STEP_END, Event.TOLD, Event.EVAL_END, Event.EPOCH_END):
            self._save_due = True
        else:
            raise UserError(f"a callback set run.state.save_due in {event.value}", "step_end, eval_end or epoch_end, "
                            "which a checkpoint of the same step follows: later ones hold the weights of another step",
                            "set it there, or call run.want_save()")


@dataclass
class ModelChanges:
    """Flags by which `hvdtrain.engine.model_changes` looks for changes of the model, the same on every rank.

    ``starts``: the next step is the first of a fit. ``watched``: a fit looks before each step.
    """

    starts: bool = False
    watched: bool = False


@dataclass
class Services:
    """Services of a run: the planes that connect ranks, records and times, and the parts of the loop that keep state.

    ``wires``: what opens other transports. ``records``: what has happened; on rank 0 reports read them. ``timeline``:
    where this rank's seconds go, since its process began. ``phases``: of a step, each a context manager. ``recovery``:
    what this rank does when it runs out of memory. ``unused``: the parameters that no rank used in the latest step.
    ``written``: the buffers that forward passes write to. ``saver``: saves the run; made with the first save.
    ``changes``: of the model by callbacks. ``final``: what has put the final weights in the place of those of training.
    """

    control: Control
    collectives: Collectives
    directory: RunOutput = field(default_factory=RunOutput)
    records: RecordStream = field(default_factory=RecordStream)
    timeline: Timeline = field(default_factory=Timeline)
    recovery: Recovery = field(default_factory=lambda: Recovery(lambda error: False, shrinks=False))
    written: WrittenState = field(default_factory=WrittenState)
    changes: ModelChanges = field(default_factory=ModelChanges)
    final: list[Final] = field(default_factory=list)
    saver: RunSaver | None = None
    wires: Wires = field(init=False)
    unused: UnusedParameters = field(init=False)
    phases: RunPhases = field(init=False)


class StepPhase(span):
    """Phase of a step; ``begin_s`` and ``end_s`` of its latest body are by `time.perf_counter`.

    ``beat``: its name in the heartbeat; the watchdog times those of `pulse.COMPUTING`. ``cause``: in the time
    breakdown. ``at``: whose step the heartbeat publishes, None where the step before stays published. ``totals``: what
    its seconds are added to, under its name. ``bounded``: what the body waits for, at most ``bound_s``.
    """

    __slots__ = ("begin_s", "end_s", "_beat", "_at", "_totals", "_bound", "_bounded")

    def __init__(self, name: str, cause: str, beat: str, at: Position | None = None, totals: StepTotals | None = None,
                 bounded: str = "", bound_s: float = 0.0) -> None:
        super().__init__(name, cause)
        self.begin_s = self.end_s = 0.0
        self._beat, self._at, self._totals, self._bounded = beat, at, totals, bounded
        self._bound = deadline(bound_s, bounded) if bounded else None

    def __enter__(self) -> StepPhase:
        at, bound = self._at, self._bound
        step = None if at is None else at.cursor.step
        self.begin_s = perf_counter()
        pulse.at(self._beat, step)
        if bound is not None:
            bound.what = f"{self._bounded} of step {step}"
            bound.__enter__()
        span.__enter__(self)  # super() takes longer, in each phase of each step
        return self

    def __exit__(self, *error: object) -> None:
        span.__exit__(self)
        if self._bound is not None:
            self._bound.__exit__()
        self.end_s = perf_counter()
        if self._totals is not None:
            self._totals.add(self.name, self.end_s - self.begin_s)


class RunPhases:
    """Every phase of a run, in the order of a step; `finish` or `lose` adds a step to the timeline's totals."""

    def __init__(self, timeline: Timeline, state: Position, bound_s: float) -> None:
        self._totals = totals = timeline.totals
        self.data = StepPhase("data", "input", "data", totals=totals)
        # The bound covers backward too: a transport inside TensorFlow's graph waits for the other ranks in there.
        self.gradients = StepPhase("gradients", "compute", "backward and exchange", state,
                                   bounded="backward and gradient exchange", bound_s=bound_s)
        self.vote = StepPhase("vote", "compute", "vote")  # looks at the gradient, and waits for a device's loss
        self.update = StepPhase("update", "update", "update", totals=totals)
        self.checkpoint = StepPhase("checkpoint", "checkpoint", "checkpoint", state)
        self.evaluation = StepPhase("evaluation", "evaluation", "evaluation", state)

    def finish(self, batch: StepBatch, waited_s: float, device_s: float | None) -> None:
        """Count a step. ``waited_s``: for other ranks; ``device_s``: of computing, where the host cannot tell."""
        totals, begin_s, voted_s = self._totals, self.gradients.begin_s, self.vote.end_s
        updated_s = max(voted_s, self.update.end_s)  # a step without an update leaves the end of the one before
        compute_s = self.gradients.end_s - begin_s - waited_s if device_s is None else min(device_s, voted_s - begin_s)
        totals.add("compute", compute_s)
        totals.add("wait", voted_s - begin_s - compute_s)
        totals.step(updated_s - begin_s, batch.n_global, batch.n_local, len(batch.micros))

    def lose(self) -> None:
        """Count a step that is to be repeated."""
        self._totals.lose(perf_counter() - self.gradients.begin_s)
