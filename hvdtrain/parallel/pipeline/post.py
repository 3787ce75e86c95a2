"""What the ranks of a pipeline send each other: a micro-batch's tensors with a header that says what they are.

Owns the header and what it must say. A receiver knows nothing of the shapes before: they come first, so that they may
differ from one micro-batch to the next. What is not what the receiver expects is an error that names both sides, on
both: who finds it tells the other in place of the next message. In place of tensors a message may say that its
micro-batch is lost, for which memory lacked. `hvdtrain.core.protocols.Carrier` moves the bytes.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.cluster.messages.channel import ALIGNED, ROOM
from hvdtrain.core.protocols import Cargo, Carrier, PendingMessage

FORTH, BACK, MEASURED = 0, 1, 2
"""Kinds of messages: outputs in training, their gradients, outputs in evaluation."""

WORDS = {FORTH: "the outputs", BACK: "the gradients of what came out", MEASURED: "the outputs in evaluation"}


class MessageLabel(NamedTuple):
    """What a message is of: ``chunk`` of the copy gave it for micro-batch ``micro``, which has so many ``samples``."""

    kind: int
    chunk: int
    micro: int
    samples: int

    def words(self, step: int) -> str:
        """Say it."""
        return (f"{WORDS[self.kind]} of chunk {self.chunk} for micro-batch {self.micro} of step {step}, "
                f"of {self.samples} samples")


class Post:
    """Sends and receives `Cargo` between the ranks of a copy over ``carrier``, for step ``step``.

    ``node``: this rank's host. ``room``: messages that may wait for a receiver before the next one waits for room.
    """

    def __init__(self, carrier: Carrier, node: str = "", room: int = ROOM) -> None:
        self._carrier, self._node, self._room = carrier, node, room
        self._coming: dict[tuple[int, int], PendingMessage] = {}
        self._shapes: dict[tuple[int, int], list[list[int]]] = {}
        self.step = 0
        self.sent_bytes = 0

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step = step
        self._shapes.clear()

    def send(self, cargo: Cargo | None, to: int, label: MessageLabel) -> None:
        """Send what ``label`` says, None where it is lost; its memory is the caller's again."""
        arrays = cargo.arrays if cargo is not None else ()
        what: dict[str, Any] = {"step": self.step, "of": label, "node": self._node}
        if cargo is None:
            what["lost"] = True
        else:
            what |= {"tensors": [(a.dtype.str, a.shape) for a in arrays], "dtypes": cargo.dtypes, "form": cargo.form}
            self.sent_bytes += cargo.nbytes
            if label.kind == FORTH:
                self._shapes[label.chunk, label.micro] = _differentiable(cargo)
        self._carrier.put([_spelled(what), *arrays], to, label.kind, self._room)

    def expect(self, source: int, kind: int) -> None:
        """Ask for the next message of ``source``, that it may come while this rank computes."""
        if (source, kind) not in self._coming:
            self._coming[source, kind] = self._carrier.take(source, kind)

    def wait_begun(self, source: int, kind: int) -> None:
        """Wait until ``source`` sends its next message."""
        self.expect(source, kind)
        self._coming[source, kind].wait_begun()

    def receive(self, source: int, label: MessageLabel) -> Cargo | None:
        """Wait for what ``label`` says; None where it is lost. Errors: RuntimeError where something else comes."""
        self.expect(source, label.kind)
        message = self._coming.pop((source, label.kind)).wait()
        what, at = _read(message)
        if "error" in what:
            raise RuntimeError(what["error"])
        sent = MessageLabel(*what["of"])
        if (what["step"], sent) != (self.step, label):
            self._refuse(source, what["node"], sent.words(what["step"]), label)
        if "lost" in what:
            return None
        arrays = []
        for dtype, shape in what["tensors"]:
            array = np.ndarray(tuple(shape), np.dtype(dtype), message, at)
            at += -(-array.nbytes // ALIGNED) * ALIGNED
            arrays.append(array)
        cargo = Cargo(tuple(arrays), tuple(what["dtypes"]), what["form"])
        if label.kind == BACK:
            wanted = self._shapes.pop((label.chunk - 1, label.micro))
            if [list(array.shape) for array in arrays] != wanted:
                shapes = ", ".join(str(list(array.shape)) for array in arrays) or "nothing"
                self._refuse(source, what["node"], f"{sent.words(self.step)}, of shapes {shapes}", label,
                             f", of shapes {', '.join(map(str, wanted)) or 'nothing'}, as it has sent")
        return cargo

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        self._carrier.flush()

    def _refuse(self, source: int, node: str, sent: str, label: MessageLabel, more: str = "") -> NoReturn:
        """Raise the error of a message that is not what was expected; the sender gets it in place of its next one."""
        text = (f"the ranks of a pipeline have come apart: rank {source} on host {node} sent {sent}, where rank "
                f"{self._carrier.rank} on host {self._node} expects {label.words(self.step)}{more}")
        for kind in WORDS:
            self._carrier.put([_spelled({"error": text})], source, kind)
        raise RuntimeError(text)


def _spelled(what: dict[str, Any]) -> np.ndarray:
    """A header: how long it is, int64, then its text."""
    text = json.dumps(what).encode()
    return np.frombuffer(np.int64(len(text)).tobytes() + text, np.uint8)


def _read(message: np.ndarray) -> tuple[dict[str, Any], int]:
    """A message's header, and where its first tensor begins."""
    end = 8 + int(message[:8].view(np.int64)[0])
    what: dict[str, Any] = json.loads(message[8:end].tobytes())
    return what, -(-end // ALIGNED) * ALIGNED


def _differentiable(cargo: Cargo) -> list[list[int]]:
    """Shapes of the tensors whose gradients come back."""
    return [list(array.shape) for array, dtype in zip(cargo.arrays, cargo.dtypes)
            if "float" in dtype or "complex" in dtype]
