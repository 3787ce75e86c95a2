"""Messages between a pipeline's ranks: a micro-batch's tensors with a header, and a message's time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.cluster.messages.channel import ALIGNED, ROOM
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Cargo, Carrier, Control, PendingMessage
from hvdtrain.planning.linear import Link

FORTH, BACK, MEASURED = 0, 1, 2
"""Kinds of messages: outputs in training, their gradients, outputs in evaluation."""

ROUNDS, WARM = 8, 2
"""Messages there and back of each size that are timed, and messages before, which open the connection."""

WORDS = {FORTH: "the outputs", BACK: "the gradients of outputs", MEASURED: "the outputs in evaluation"}


class MessageLabel(NamedTuple):
    """Content of a message: output or gradient of ``chunk`` for micro-batch ``micro`` of ``samples`` samples."""

    kind: int
    chunk: int
    micro: int
    samples: int

    def words(self, step: int) -> str:
        """Format for an error."""
        return (f"{WORDS[self.kind]} of chunk {self.chunk} for micro-batch {self.micro} of step {step}, "
                f"of {self.samples} samples")


class Post:
    """Sends and receives `Cargo` between the ranks of a copy over ``carrier``, for step ``step``.

    A header before the tensors tells their shapes, which may differ between micro-batches. ``node``: this rank's host.
    ``room``: messages that may wait for a receiver before `send` blocks.
    """

    def __init__(self, carrier: Carrier, node: str = "", room: int = ROOM) -> None:
        self._carrier, self._node, self._room = carrier, node, room
        self._coming: dict[tuple[int, int], PendingMessage] = {}
        self._shapes: dict[tuple[int, int], list[list[int]]] = {}
        self.step = 0
        self.sent_bytes = 0

    def begin(self, step: int) -> None:
        self.step = step
        self._shapes.clear()

    def send(self, cargo: Cargo | None, to: int, label: MessageLabel) -> None:
        """Send the cargo of ``label``, None if its micro-batch is lost; the caller may reuse its memory at once."""
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
        """Post the receive of the next message of ``source``, so that it arrives while this rank computes."""
        if (source, kind) not in self._coming:
            self._coming[source, kind] = self._carrier.take(source, kind)

    def wait_begun(self, source: int, kind: int) -> None:
        """Wait until the next message of ``source`` begins to arrive."""
        self.expect(source, kind)
        self._coming[source, kind].wait_begun()

    def receive(self, source: int, label: MessageLabel) -> Cargo | None:
        """Return the cargo of ``label``, None if it is lost. Errors: RuntimeError for any other message."""
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
        self._carrier.flush()

    def _refuse(self, source: int, node: str, sent: str, label: MessageLabel, more: str = "") -> NoReturn:
        """Raise the error of an unexpected message, and send it to the sender in place of its next message."""
        text = (f"the ranks of a pipeline are out of step: rank {source} on host {node} sent {sent}, where rank "
                f"{self._carrier.rank} on host {self._node} expects {label.words(self.step)}{more}")
        for kind in WORDS:
            self._carrier.put([_spelled({"error": text})], source, kind)
        raise RuntimeError(text)


def _spelled(what: dict[str, Any]) -> np.ndarray:
    """Return a header: its length as int64, then its text."""
    text = json.dumps(what).encode()
    return np.frombuffer(np.int64(len(text)).tobytes() + text, np.uint8)


def _read(message: np.ndarray) -> tuple[dict[str, Any], int]:
    """Return a message's header, and the offset of its first tensor."""
    end = 8 + int(message[:8].view(np.int64)[0])
    what: dict[str, Any] = json.loads(message[8:end].tobytes())
    return what, -(-end // ALIGNED) * ALIGNED


def _differentiable(cargo: Cargo) -> list[list[int]]:
    """Return the shapes of the tensors that get a gradient."""
    return [list(array.shape) for array, dtype in zip(cargo.arrays, cargo.dtypes)
            if "float" in dtype or "complex" in dtype]


def measure_links(control: Control, mesh: Mesh, nbytes: int, hosts: Sequence[str]) -> list[Link]:
    """Return the link between the ranks of each copy: the slowest pair of neighbours of any copy of its kind.

    ``nbytes``: of a micro-batch's tensors at a stage border. ``hosts``: of each rank. Copies within a host are one
    kind, those over several hosts another. Collective.
    """
    carrier = control.carrier()
    if carrier is None:  # the run is refused when it opens its own
        return [Link(0.0, 0.0)] * len(mesh.copies)
    post, own = Post(carrier, control.node), Link(0.0, 0.0)
    ranks = sorted(mesh.ranks)
    try:
        for first in range(mesh.deepest - 1):
            pair = ranks[first:first + 2]
            if len(pair) == 2 and control.rank in pair:
                small_s, large_s = (_there(post, pair, control.rank, size) for size in (64, 64 + nbytes))
                found = Link(small_s, max(0.0, large_s - small_s) / nbytes if nbytes else 0.0)
                own = Link(max(own.alpha_s, found.alpha_s), max(own.beta_s_per_byte, found.beta_s_per_byte))
            control.agree(False)
    finally:
        carrier.free()
    rows = control.gather(own)
    kinds: dict[bool, list[int]] = {}
    for copy, members in enumerate(mesh.copies):
        kinds.setdefault(len({hosts[rank] for rank in members}) > 1, []).append(copy)
    links = [Link(0.0, 0.0)] * len(mesh.copies)
    for copies in kinds.values():
        some = [rows[rank] for copy in copies for rank in mesh.copies[copy]]
        for copy in copies:
            links[copy] = Link(max(link.alpha_s for link in some), max(link.beta_s_per_byte for link in some))
    return links


def _there(post: Post, pair: Sequence[int], rank: int, nbytes: int) -> float:
    """Return the median seconds of a message of ``nbytes`` one way."""
    other, first = (pair[1], True) if rank == pair[0] else (pair[0], False)
    cargo, label = Cargo((np.zeros(nbytes, np.uint8),), ("uint8",)), MessageLabel(MEASURED, 0, 0, 0)
    took_s = []
    for _ in range(WARM + ROUNDS):
        begin = time.perf_counter()
        if first:
            post.send(cargo, other, label)
        post.receive(other, label)
        if not first:
            post.send(cargo, other, label)
        took_s.append((time.perf_counter() - begin) / 2)
    post.flush()
    return statistics.median(took_s[WARM:])
