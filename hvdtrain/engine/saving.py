"""Saves of a run, one at a time: each rank copies its state, threads bring it to rank 0, which writes it.

When to save is left to `hvdtrain.engine.callbacks.checkpoint`, the file format to `hvdtrain.checkpoint`.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files, sharded, stream
from hvdtrain.checkpoint.adapters import (
    Holders,
    PartitionedModel,
    RankState,
    Replicated,
    SplitReplicated,
    WithCallbacks,
    ZeroState,
    holders_of,
    part,
    state_key_of,
)
from hvdtrain.checkpoint.frozen import ordered
from hvdtrain.checkpoint.manifest import encode_state
from hvdtrain.checkpoint.run_directory import RunDirectory, checkpoint_written
from hvdtrain.checkpoint.savers import BackgroundSaver, HostCopies, InlineSaver, NoRoom, view
from hvdtrain.checkpoint.sharded import Note
from hvdtrain.checkpoint.store import CheckpointStore
from hvdtrain.checkpoint.stream import FileOrder, StreamedContent, head, local_pieces, n_bytes
from hvdtrain.checkpoint.transfer import arriving, receive_note, receive_shards, send_note, send_shards
from hvdtrain.checkpoint.weights import check_shards
from hvdtrain.cluster.liveness import pulse
from hvdtrain.config import Config, run_length
from hvdtrain.core import __version__
from hvdtrain.core.errors import UserError, WaitTimeout
from hvdtrain.core.protocols import Channel
from hvdtrain.core.protocols.run import Given, Head, Outcome, SaveCost, Saver, Shard, Stateful
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.core.terminal import say
from hvdtrain.core.units import format_bytes
from hvdtrain.engine.average import WithAverage
from hvdtrain.engine.run import Run
from hvdtrain.engine.weight_checks import trainable_names

LONGEST_SLEEP_S = 2e-3
"""How long a thread sleeps at most between two looks for a message: nobody waits for it."""

GRACE_S = 3.0
"""How long a run that ends by an error waits for a save that is under way."""


class Saving:
    """Implements `hvdtrain.core.protocols.run.RunSaver`; ``saver``: writes copied states, else a thread."""

    def __init__(self, run: Run, saver: Saver | None = None) -> None:
        self.spent = SaveCost()
        self.cost_s: float | None = None
        self._run, self._step, self._said = run, -1, False
        self._store = CheckpointStore(RunDirectory(run.out).checkpoints, run.config.checkpoint.keep)
        self._copies = HostCopies(run.control.local_size)
        self._background: Saver = saver or BackgroundSaver()
        self._inline = InlineSaver()
        self._channel: Channel | None = None
        self._opened, self._others_s = False, 0.0
        self._copied_s: dict[int, float] = {}
        self._blocked_s: dict[int, float] = {}
        self._untold: list[Outcome] = []
        self._trainable: set[str] = set()
        self._order: FileOrder | None = None
        self._config: tuple[Config | None, dict[str, Any]] = None, {}

    def begin(self) -> None:
        began = time.perf_counter()
        run, control = self._run, self._run.control
        pulse.at("saving", run.state.cursor.step)
        self.wait()
        self._step = run.state.cursor.step  # not before: a thread at work has a step of its own
        if not self._opened and control.size > 1:
            self._channel = control.channel(LONGEST_SLEEP_S)
        self._trainable = trainable_names(run.parts)  # of now: layers are unfrozen
        self._opened = True
        run.written.sync(run)
        run.call("saving")
        self._copy(began, *given_by(run, held_by(run)))

    def _copy(self, began: float, shared: Given, own: Given) -> None:
        """Copy this rank's shards; a thread does the rest. No collective, unless ranks have no channel."""
        run, rank = self._run, self._run.control.rank
        saver: Saver = self._background
        shards: list[Shard] = []
        meta, error = dict[str, Any](), ""
        meets = run.control.size > 1 and self._channel is None
        gathered = run.config.checkpoint.layout == "gathered"
        trainable = self._trainable if gathered else None  # a rank that writes by itself has one file
        place = view if meets and gathered and rank > 0 else self._copies.place  # it has gone when the run continues
        try:
            self._copies.begin()
            try:
                shards = ordered((shared, own), place, trainable)
            except NoRoom as lack:
                self._copies.forget()
                self._say_no_room(lack)
                saver, shards = self._inline, ordered((shared, own), view, trainable)
            meta = meta_of(run, shared.rest(), self._config_of(run)) if rank == 0 else {}
        except UserError as problem:
            error, shards = self._named(problem), []
        if not gathered:
            sharing = partial(self._share, self._step, shards, meta, error)
            self._start(self._inline if meets else saver, sharing, began)
        elif meets:
            self._meet(saver, shards, meta, error, began)
        else:
            work = self._gather if rank == 0 else self._give
            self._start(saver, partial(work, self._step, shards, meta, error), began)

    def _config_of(self, run: Run) -> dict[str, Any]:
        if self._config[0] is not run.config:  # it seldom changes
            self._config = run.config, json_able(run.config.to_dict())
        return self._config[1]

    def _meet(self, saver: Saver, shards: list[Shard], meta: dict[str, Any], error: str, began: float) -> None:
        """Bring all shards to rank 0 without a channel, which writes them as they come. Collective."""
        control, error = self._run.control, error or self._unfit(shards)
        rows = control.gather((error, [tuple(head(shard)) for shard in ([] if error else shards)]))
        heads_P = [[Head(*row) for row in heads] for _, heads in rows]
        pieces_P = arriving(control, heads_P, shards)
        content: StreamedContent | None = None
        work: Callable[[], None]
        try:
            _fail([text for text, _ in rows if text])
            if sum(n_bytes(one) for heads in heads_P[1:] for one in heads) <= stream.PIECE_BYTES:
                pieces_P[1:] = [iter(list(pieces)) for pieces in pieces_P[1:]]  # so that the run need not wait longer
            else:
                saver = self._inline
            content = StreamedContent(heads_P, pieces_P, meta)
        except UserError as problem:  # every rank's; rank 0 tells it
            work = partial(_fail, [str(problem)] if control.rank == 0 else [])
        else:
            work = partial(self._write, content) if control.rank == 0 else content.drain
        self._start(saver if content else self._inline, work, began)

    def _start(self, saver: Saver, work: Any, began: float) -> None:
        """Hand the work over; the time until then, or to its end where it is inline, is the run's."""
        self.spent.saves += 1
        self._copied_s[self._step] = self.spent.last_blocked_s = time.perf_counter() - began  # the work tells rank 0
        saver.save(self._step, work)
        self.spent.last_blocked_s = self._blocked_s[self._step] = time.perf_counter() - began
        self.spent.blocked_s += self.spent.last_blocked_s

    def _give(self, step: int, shards: list[Shard], meta: dict[str, Any], error: str) -> None:
        """Send this rank's shards to rank 0, or why there are none; with what saving costs here."""
        assert self._channel is not None
        error = error or self._unfit(shards)
        note = {"step": step, "error": error, "blocked_s": self.spent.last_blocked_s,
                "cpu_s": self.spent.last_cpu_s}
        send_shards(self._channel, note, [] if error else shards)

    def _gather(self, step: int, shards: list[Shard], meta: dict[str, Any], error: str) -> None:
        """Write rank 0's shards and the other ranks', as they come; rank 0's part."""
        error = error or self._unfit(shards)
        errors, costs_s = [error] if error else [], [0.0]
        heads_P, pieces_P = [list(map(head, shards))], [local_pieces(shards)]
        for source in range(1, self._run.control.size):
            assert self._channel is not None
            note, heads, pieces = receive_shards(self._channel, source)
            if note["step"] != step:
                raise RuntimeError(f"rank {source} sent its state of step {note['step']} in the save of step {step}")
            errors += [note["error"]] if note["error"] else []
            costs_s.append(note["blocked_s"] + note["cpu_s"])
            heads_P.append(heads)
            pieces_P.append(pieces)
        self._others_s = max(costs_s)
        try:
            _fail(errors)
            content = StreamedContent(heads_P, pieces_P, meta, self._order)
            self._order = content.order
        except UserError:
            for pieces in pieces_P[1:]:  # all of them, also after an error: the next save begins again
                deque(pieces, 0)
            raise
        self._write(content)

    def _unfit(self, shards: list[Shard]) -> str:
        """Return "" or why these shards must not be written."""
        try:
            check_shards(shards, self._trainable)
        except UserError as problem:
            return self._named(problem) if self._run.control.rank else str(problem)
        return ""

    def _named(self, problem: UserError) -> str:
        control = self._run.control
        return f"rank {control.rank} on host {control.node}: {problem}" if control.size > 1 else str(problem)

    def _share(self, step: int, shards: list[Shard], meta: dict[str, Any], error: str) -> None:
        """Write this rank's shards into one checkpoint with the other ranks'. Collective where there is no channel."""
        control, channel = self._run.control, self._channel
        rank, others = control.rank, range(1, control.size)
        order: Note = {}
        if rank == 0:
            order = sharded.order(self._store, step, sharded.needed(shards, control.size), say)
        if channel is None:
            order = control.bcast(order)
        elif rank == 0:
            for other in others:
                send_note(channel, order, other)
        else:
            order = receive_note(channel, 0)
        note = sharded.answer(order, rank, shards, error, self._trainable)
        note["cost_s"] = self.spent.last_blocked_s + self.spent.last_cpu_s
        if channel is None:
            notes = control.gather(note)
        elif rank == 0:
            notes = [note, *(receive_note(channel, other) for other in others)]
        else:
            send_note(channel, note, 0)
        if rank == 0:
            self._others_s = max(one["cost_s"] for one in notes[1:] or [{"cost_s": 0.0}])
            sharded.publish(self._store, order, notes, meta, say)
            checkpoint_written(self._run, self._store.path_of(step))

    def _write(self, content: StreamedContent) -> None:
        try:
            path = self._store.save(content, int(content.meta["cursor"]["step"]), log=say)
        except Exception:
            content.drain()
            raise
        checkpoint_written(self._run, path)

    def _say_no_room(self, lack: NoRoom) -> None:
        if not self._said:
            self._said = True
            self._run.note(f"rank {self._run.control.rank} on host {self._run.control.node}: host memory has no "
                           f"room for a copy of the state (needs {format_bytes(lack.needed_bytes)} "
                           f"and more, {format_bytes(lack.room_bytes)} available), so each save blocks training")

    def settled(self) -> list[Outcome]:
        """Return what was written or given up since the last call, oldest first; rank 0 meets every error."""
        outcomes, self._untold = [*self._untold, *self._settle()], []
        return outcomes

    def latest(self) -> str:
        outcomes = self.settled()
        own = next(outcome for outcome in reversed(outcomes) if outcome.step == self._step)
        self._untold = [outcome for outcome in outcomes if outcome is not own]
        return own.error

    def _settle(self) -> list[Outcome]:
        outcomes = [*self._inline.settled(), *self._background.settled()]
        for outcome in outcomes:
            self.spent.cpu_s += outcome.cpu_s
            self.spent.last_cpu_s, self.spent.last_took_s = outcome.cpu_s, outcome.took_s
            self.spent.longest_s = max(self.spent.longest_s, self.spent.last_blocked_s + outcome.took_s)
            self.spent.written = self.spent.written if outcome.error else outcome.step
            self.cost_s = max(self._others_s, self.spent.last_blocked_s + outcome.cpu_s)
            if self._run.control.rank == 0:  # which meets every error
                _tell(self._run, outcome, self._copied_s.pop(outcome.step, 0.0),
                      self._blocked_s.pop(outcome.step, 0.0), self._store.path_of(outcome.step))
        return outcomes

    def busy(self) -> bool:
        return not self._background.wait(0)

    def wait(self) -> None:
        limit_s = self._run.config.control_timeout_s
        if not self._background.wait(limit_s):
            control = self._run.control
            raise WaitTimeout(f"rank {control.rank} on host {control.node} waited {limit_s:g} s for the save of step "
                              f"{self._step} to end. {pulse.missing()}".rstrip())

    def end(self) -> None:
        self.wait()
        self._background.end()
        self._copies.forget()
        if self._channel is not None:
            self._channel.free()
        self._channel, self._opened = None, False

    def close(self) -> None:
        if not self._background.wait(GRACE_S) and self._channel is not None:
            self._channel.close()
            self._background.wait(1.0)
        self._background.end()
        self._untold = self.settled()  # so that a run that ends by an error has it in its log


def _tell(run: Run, outcome: Outcome, copied_s: float, blocked_s: float, path: Path) -> None:
    """Record what came of a save: training stood for ``blocked_s``, to copy the state for ``copied_s`` of it."""
    took_s = max(blocked_s, copied_s + outcome.took_s)  # what was done inline is in both
    run.record("saved", at_step=outcome.step, took_s=round(took_s, 6), blocked_s=round(blocked_s, 6),
               bytes=0 if outcome.error else files.tree_bytes(path), error=outcome.error)


def _fail(errors: list[str]) -> None:
    """Raise the first of ``errors``, if there is one."""
    if errors:
        raise UserError(errors[0].rstrip("."))


def given_by(run: Run, holders: Holders | None) -> tuple[Given, Given]:
    """Return what this rank gives to a checkpoint: of the state of the model and its optimizer, and its own.

    ``holders``: of a partitioned model (`held_by`). Copies that another data_parallel keeps are one model
    only where they meet, their optimizers' state maybe never: parts of several would be no model at all, so the first
    copy gives the whole of its own.
    """
    control, state = run.control, run.parts.state
    shared, own = parts_of(run, holders)
    if run.config.checkpoint.layout == "sharded" and run.dp.copies_equal:
        cut: Given = SplitReplicated(partial(part, rank=control.rank, size=control.size), state.state)
        if holders is not None:
            cut = PartitionedModel(control.rank, holders, state, among=True)
        return _beside(run, ZeroState(cut, state) if run.dp.divides_state else cut), own
    return shared, own


def parts_of(run: Run, holders: Holders | None) -> tuple[Stateful, Stateful]:
    """Return the state of the model and its optimizer, and this rank's own."""
    state, rank = run.parts.state, run.control.rank
    own = RankState(rank, run.rank_state, run.load_rank)
    if holders is not None:
        held = PartitionedModel(rank, holders, state, among=False)
        return _beside(run, ZeroState(held, state, holders.mine) if run.dp.divides_state else held), own
    whole = Replicated(rank, state.state, state.load)
    return _beside(run, ZeroState(whole, state) if run.dp.divides_state else whole), own


def _beside(run: Run, shared: Any) -> Any:
    """``shared`` with the averages of the weights and the arrays of callbacks beside it, where the run has such."""
    shared = shared if run.average is None else WithAverage(shared, run.average)
    callbacks = [c for c in run.callbacks if hasattr(c, "arrays")]
    return WithCallbacks(shared, run.control.rank, callbacks) if callbacks else shared


def held_by(run: Run) -> Holders | None:
    """Return which rank has what of a partitioned model, None of a whole one. Collective."""
    if run.parts.layout is None:
        return None
    return holders_of(run.control, run.parts.state, [spec.name for spec in run.parts.params.specs])


def meta_of(run: Run, rest: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's small state at this very step, JSON-able; nothing that the run does later changes it."""
    sharded = {"layout": "sharded"} if run.config.checkpoint.layout == "sharded" else {}
    return {
        "hvdtrain": __version__, "framework": run.spec.framework, "model": run.spec.name,
        "world_size": run.control.size, "cursor": run.state.cursor.to_dict(), "step_rest": copy.deepcopy(dict(rest)),
        "config": config, "schedule": schedule_of(run, run.state.cursor),
        "samples": run.feed.samples, **run.feed.walk.shards.saved(run.state.cursor),
        "callbacks": callback_states(run), **sharded, **_cut_of(run),
        "best": run.state.findings.best_steps(),
    }


def callback_states(run: Run) -> list[list[Any]]:
    """Return (`state_key`, state as JSON) of each callback. `CheckpointError` for a state of another type."""
    return [[name, encode_state(c.state_dict(), f"callback {name}: state_dict()")]
            for c in run.callbacks for name in [state_key_of(c)]]


def schedule_of(run: Run, at: Cursor) -> dict[str, Any]:
    """Return the schedule with the arguments that follow from the run, and the run's length, at ``at``; JSON-able."""
    config, given = run.spelled, (run.feed.steps_per_epoch, at, run.feed.steps_left(at))
    own = run_length.own_of(run.parts.optimizer.own_schedule(), run_length.updates(config, *given), config.epochs)
    return json_able(run_length.kept(config.schedule, run_length.length(config, *given), own))


def _cut_of(run: Run) -> dict[str, Any]:
    """Return where the model was partitioned over ranks; nothing of a whole one."""
    layout = run.parts.layout
    if layout is None:
        return {}
    return {"pipeline": {"copies": [list(copy) for copy in layout.mesh.copies], "blocks": list(layout.names),
                         "starts": [list(starts) for starts in layout.starts],
                         "devices": [device.name for device in run.devices]}}


def json_able(value: Any) -> Any:
    """Return ``value`` with the repr in place of what JSON cannot hold, such as an object in a free-form ``args``."""
    if isinstance(value, dict):
        return {str(k): json_able(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_able(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
