"""Steps and evaluation of a model partitioned over ranks: actions of this rank, and its messages."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, cast

from hvdtrain.config import Config
from hvdtrain.core.comparison import Origin
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import (
    Batch,
    Cargo,
    Control,
    Evaluator,
    GradientSink,
    Pair,
    PipelineStage,
    Stage,
    StepGradients,
)
from hvdtrain.core.protocols.types import Lost, StepBatch, first_line
from hvdtrain.core.timeline import idle, span
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.pipeline.messages import BACK, FORTH, MEASURED, MessageLabel, Post
from hvdtrain.parallel.pipeline.partition import Looking, Places
from hvdtrain.parallel.recovery import MemoryGuard, Recovering, Recovery, largest
from hvdtrain.planning.pipeline.orders import BACKWARD, FORWARD, Action, Order, order_of

KINDS = {FORWARD: FORTH, BACKWARD: BACK}

AHEAD = 4
"""Batches of an evaluation that a stage may be ahead of the next one."""


class OverRanks:
    """`hvdtrain.core.protocols.Schedule` of one rank of a model partitioned over ranks.

    A rank out of memory sends messages that say so in place of tensors, and so do its receivers: no rank waits in vain.
    """

    def __init__(self, stage: PipelineStage, layout: Layout, order: Order, post: Post,
                 recovery: Recovery | None = None) -> None:
        recovery = recovery or Recovery(lambda error: False)
        self._order, self._layout, self._recovery = order, layout, recovery
        self._ordered = Ordered(stage, layout, order, post, recovery)
        self._deep = layout.mesh.depth > 1
        inner = self._ordered if self._deep else Accumulate(stage, recovery.guard)
        self._schedule, self._post, self._stage = Recovering(inner, stage, recovery), post, stage

    @property
    def sent_bytes(self) -> int:
        """Bytes of cargo that this rank has sent."""
        return self._post.sent_bytes

    @property
    def idle_s(self) -> float:
        """Seconds in which this rank has waited for other stages of its copy."""
        return self._ordered.idle_s

    @property
    def channel_s(self) -> float:
        """Seconds of ``idle_s`` in which a message was moving."""
        return self._ordered.channel_s

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        return self._schedule.gradients(batch, scale, sink)

    def trial(self, micros: Sequence[Batch]) -> None:
        """Do a step's forwards and backwards and discard them; `Buffers.discard` restores buffers. Errors: `Lost`."""
        if self._deep:
            lost: Lost | None = None
            try:
                self._ordered.passes(micros, 1.0, self._post.step)
            except Lost as error:
                lost = error
            self._post.flush()
            self._stage.rewind()
            self._stage.drop()
            if lost is not None:
                raise lost
        else:
            for micro in micros:
                self._stage.trial(micro)

    def origin(self, batch: StepBatch, scale: float, sink: GradientSink) -> Origin | None:
        """Repeat the step at hand; return the number that is not finite if it began on this rank.

        Entered by all ranks of a copy. Copies exchange nothing; the caller discards buffers.
        """
        stage, own = self._stage, [self._layout.names[block] for block in self._layout.blocks]
        looking = Looking(stage, self._ordered.places)
        stage.rewind()

        def compute() -> str:
            if self._layout.mesh.depth > 1:
                again = Ordered(cast(PipelineStage, looking), self._layout, self._order, self._post, self._recovery)
                again.passes(batch.micros, scale, batch.cursor_before.step)
                self._post.flush()
            else:
                stage.begin()
                for micro in batch.micros:
                    stage.run(micro, scale, False, sink)
            return next(filter(None, map(stage.culprit, batch.micros)), "")

        # A number that is not finite keeps no name where memory lacks.
        name, _ = self._recovery.attempt(compute, out_of_memory=lambda error: isinstance(
            error, Lost) or self._recovery.out_of_memory(error))
        if name is None:
            return None
        return looking.origin(name, f"block {own[0]}" if len(own) == 1 else f"blocks {own[0]} to {own[-1]}")


class Ordered:
    """`hvdtrain.core.protocols.Schedule` that follows ``order``.

    ``idle_s``: seconds between its actions, receiving and sending. ``channel_s``: those in which a message was moving.
    """

    origin = None

    def __init__(self, stage: PipelineStage, layout: Layout, order: Order, post: Post, recovery: Recovery) -> None:
        self._stage, self._layout, self._order, self._post = stage, layout, order, post
        self._recovery, self.places = recovery, Places(layout)
        self.idle_s = self.channel_s = self._moved_s = 0.0
        self._lost: Lost | None = None

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        """Sum the gradients. Errors: `Lost` if memory lacked on a rank of this copy."""
        stage, micros = self._stage, batch.micros
        totals, waited_s = self.passes(micros, scale, batch.cursor_before.step)
        self.idle_s += waited_s
        self.channel_s += self._moved_s
        if self._recovery.guard is not None and micros:
            self._recovery.guard.ran(largest(batch))
        if micros:
            stage.hand_over(sink)
        else:
            stage.nothing(sink)
        waited_s += stage.waited_s + sink.waited_s
        begin = time.perf_counter()
        with span("messages", "channel"):
            self._post.flush()
        grads = sink.collect()
        return StepGradients(grads, totals, waited_s + time.perf_counter() - begin)

    def passes(self, micros: Sequence[Batch], scale: float, step: int) -> tuple[list[Pair], float]:
        """Do forwards and backwards; return ((loss, weight) by micro-batch on the last rank, waited s). `Lost`."""
        mesh, post, waited_s, totals = self._layout.mesh, self._post, 0.0, []
        self._stage.begin()
        self._lost, self._moved_s = None, 0.0
        post.begin(step)
        actions = self._order(mesh.place, mesh.depth, self.places.own, len(micros))
        due = Counter(lane for action in actions if (lane := self._lane(action)) is not None)
        for lane in due:
            post.expect(*lane)
        for action in actions:
            samples = len(micros[action.micro][0])
            came, idle_s = self._receive(action, samples, due)
            gave = None if self._lost else self._did(action, came, micros[action.micro], scale)
            waited_s += idle_s + self._send(gave, action, samples)
            totals += [gave] if isinstance(gave, tuple) and not isinstance(gave, Cargo) else []
        if self._lost:
            raise self._lost
        return totals, waited_s

    def _did(self, action: Action, came: Cargo | None, micro: Batch, scale: float) -> Cargo | Pair | None:
        """Do one action; return its output for another rank, or loss and weight. Note a shortage of memory."""
        recovery, stage = self._recovery, self._stage

        def compute() -> Cargo | Pair | None:
            with span(action.phase, "compute", samples=len(micro[0])):
                if action.phase == BACKWARD:
                    return stage.backward(action.chunk, action.micro, came)
                if recovery.guard is not None:
                    recovery.guard.check(len(micro[0]))
                if self.places.last(action):
                    return stage.loss(action.chunk, action.micro, came, micro, scale)
                return stage.forward(action.chunk, action.micro, came, micro)

        def caught(error: Exception) -> None:
            self._lost = Lost(first_line(error), not isinstance(error, UserError))
            stage.drop()

        # Other ranks compute on meanwhile.
        return recovery.attempt(compute, caught, lambda error: recovery.shrinks and recovery.answers(error))[0]

    def _lane(self, action: Action) -> tuple[int, int] | None:
        """Return the sender of the input of ``action``, and the kind of message; None without one."""
        number = self.places.before(action)
        return None if number is None else (self.places.rank(number), KINDS[action.phase])

    def _receive(self, action: Action, samples: int, due: Counter[tuple[int, int]]) -> tuple[Cargo | None, float]:
        """Return the input of ``action`` and the seconds that it took; post the receive of the next message."""
        number, lane = self.places.before(action), self._lane(action)
        if number is None or lane is None:
            return None, 0.0
        begin = time.perf_counter()
        source, kind = lane
        with idle(source):
            self._post.wait_begun(source, kind)
        comes = time.perf_counter()
        with span("receive", "channel", source=source):
            came = self._post.receive(source, MessageLabel(kind, number, action.micro, samples))
        due[lane] -= 1
        if due[lane]:
            self._post.expect(source, kind)
        if came is None and not self._lost:
            self._stage.drop()
            self._lost = Lost(f"rank {source} has lost micro-batch {action.micro}", own=False)
        end = time.perf_counter()
        self._moved_s += end - comes
        return came, end - begin

    def _send(self, gave: Cargo | Pair | None, action: Action, samples: int) -> float:
        """Send the output of ``action``; return the seconds that it took."""
        number = self.places.behind(action)
        if number is None:
            return 0.0
        begin = time.perf_counter()
        cargo = gave if isinstance(gave, Cargo) else None
        assert cargo is not None or self._lost, f"{action} has no output to send"
        label = MessageLabel(KINDS[action.phase], self.places.number(action.chunk), action.micro, samples)
        with span("send", "channel", to=self.places.rank(number)):
            self._post.send(cargo, self.places.rank(number), label)
        spent_s = time.perf_counter() - begin
        self._moved_s += spent_s
        return spent_s


class PipelineEvaluator:
    """`hvdtrain.core.protocols.Evaluator` of one rank of a pipeline: batches go through all its stages.

    ``inner``: evaluator of the stage's last chunk. Chunk v of this rank computes batch i when batch i + v depth is
    added, so that ranks with several chunks do not wait for a batch to come back. ``short``: (samples, reason) of a
    batch without memory; the totals are incomplete then, and all ranks of the copy add all data again.
    """

    def __init__(self, inner: Evaluator, stage: PipelineStage, layout: Layout, post: Post,
                 recovery: Recovery | None = None) -> None:
        self._inner, self._stage, self._post, self._places = inner, stage, post, Places(layout)
        self._depth, self._recovery = layout.mesh.depth, recovery or Recovery(lambda error: False)
        self._batches: deque[Batch] = deque()
        self._turn = self._first = 0
        self._lost = False
        self.short: tuple[int, str] | None = None

    def add(self, batch: Batch) -> None:
        """Put one batch through this rank's first chunk, and earlier ones through its others."""
        self._batches.append(batch)
        self._move(self._turn + 1)

    def totals(self) -> dict[str, Any]:
        added = self._turn
        for _ in range((self._places.own - 1) * self._depth if added else 0):
            self._move(added)
        self._post.flush()
        self._turn = self._first = 0
        self._batches.clear()
        self._lost = False
        return self._inner.totals()

    def results(self, totals: dict[str, Any]) -> dict[str, float]:
        return self._inner.results(totals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _move(self, added: int) -> None:
        """Advance all chunks by one batch, of ``added``."""
        for chunk in range(self._places.own):
            micro = self._turn - chunk * self._depth
            if 0 <= micro < added:
                self._through(Action(FORWARD, chunk, micro))
                if chunk == self._places.own - 1:
                    self._batches.popleft()
                    self._first += 1
        self._turn += 1

    def _through(self, action: Action) -> None:
        batch = self._batches[action.micro - self._first]
        number, came = self._places.number(action.chunk), None
        if number:
            came = self._post.receive(self._places.rank(number - 1),
                                      MessageLabel(MEASURED, number - 1, action.micro, len(batch[0])))
            self._lost = self._lost or came is None
        gave = None if self._lost else self._measured(action.chunk, came, batch)
        if not self._places.last(action):
            self._post.send(gave, self._places.rank(number + 1),
                            MessageLabel(MEASURED, number, action.micro, len(batch[0])))

    def _measured(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        gave, why = self._recovery.attempt(lambda: self._stage.evaluate(chunk, came, batch))
        if why:
            self.short, self._lost = (len(batch[0]), why), True
        return gave


def join(parts: ModelParts, control: Control, config: Config, recovery: Recovery) -> OverRanks:
    """Open a pipeline's channel; return the schedule over it, as ``parts`` evaluate. Collective. `UserError`."""
    carrier = control.carrier()
    if carrier is None:
        raise UserError("a pipeline over ranks, without a transport for messages between them", "an MPI "
                        "with MPI_THREAD_MULTIPLE", "start the job with mpirun, or horovodrun --mpi")
    stage, layout = cast(PipelineStage, parts.stage), parts.layout
    assert layout is not None
    recovery.copy = layout.mesh.ranks
    if layout.mesh.depth > 1:
        parts.evaluator = PipelineEvaluator(parts.evaluator, stage, layout, Post(carrier, control.node, AHEAD),
                                            recovery)
    return OverRanks(stage, layout, order_of(config.pipeline.order), Post(carrier, control.node), recovery)


class Accumulate:
    """`hvdtrain.core.protocols.Schedule` of an unpartitioned ``stage``. ``guard``: of memory."""

    origin = None

    def __init__(self, stage: Stage, guard: MemoryGuard | None = None) -> None:
        self.stage, self._guard = stage, guard

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        stage, guard, totals, waited_s = self.stage, self._guard, [], 0.0
        stage.begin()
        for i, micro in enumerate(batch.micros, 1):
            if guard is not None:
                guard.check(len(micro[0]))
            totals.append(stage.run(micro, scale, i == len(batch.micros), sink))
            waited_s += stage.waited_s
            following = batch.micros[i] if i < len(batch.micros) else batch.coming()
            if following:  # backward is queued by now, so that a device has something to do meanwhile
                stage.ahead(following)
            if guard is not None:
                guard.ran(len(micro[0]))
        if not batch.micros:
            stage.nothing(sink)
            waited_s += stage.waited_s
        waited_s += sink.waited_s
        begin = time.perf_counter()
        grads = sink.collect()
        return StepGradients(grads, totals, waited_s + time.perf_counter() - begin)
