"""How long a message takes between the stages of a copy: measured before a model is cut, with messages of its size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Cargo, Control
from hvdtrain.parallel.pipeline.post import MEASURED, MessageLabel, Post

ROUNDS, WARM = 8, 2
"""Messages there and back of each size; the first ones open the way."""


class MessageTime(NamedTuple):
    """Seconds of a message, and of each of its bytes."""

    latency_s: float
    byte_s: float


def measured(control: Control, mesh: Mesh, nbytes: int, hosts: Sequence[str]) -> list[MessageTime]:
    """Return the link between the ranks of each copy; collective.

    ``nbytes``: of a micro-batch's tensors at a cut. ``hosts``: of each rank. Copies within a host count as alike, and
    so do those over several: of each kind the slowest pair of neighbours is taken.
    """
    carrier = control.carrier()
    if carrier is None:  # the run is refused when it opens its own
        return [MessageTime(0.0, 0.0)] * len(mesh.copies)
    post, own = Post(carrier, control.node), MessageTime(0.0, 0.0)
    ranks = sorted(mesh.ranks)
    try:
        for first in range(mesh.deepest - 1):
            pair = ranks[first:first + 2]
            if len(pair) == 2 and control.rank in pair:
                small_s, large_s = (_there(post, pair, control.rank, size) for size in (64, 64 + nbytes))
                found = MessageTime(small_s, max(0.0, large_s - small_s) / nbytes if nbytes else 0.0)
                own = MessageTime(max(own.latency_s, found.latency_s), max(own.byte_s, found.byte_s))
            control.agree(False)
    finally:
        carrier.free()
    rows = control.gather(own)
    kinds: dict[bool, list[int]] = {}
    for copy, members in enumerate(mesh.copies):
        kinds.setdefault(len({hosts[rank] for rank in members}) > 1, []).append(copy)
    links = [MessageTime(0.0, 0.0)] * len(mesh.copies)
    for copies in kinds.values():
        some = [rows[rank] for copy in copies for rank in mesh.copies[copy]]
        for copy in copies:
            links[copy] = MessageTime(max(link.latency_s for link in some), max(link.byte_s for link in some))
    return links


def _there(post: Post, pair: Sequence[int], rank: int, nbytes: int) -> float:
    """Median seconds of a message of ``nbytes`` one way."""
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
