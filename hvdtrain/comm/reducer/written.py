"""Reductions of buffers that forward passes write to: one value for all ranks at the end of a step.

Owns the formula of each reduction and the exchange; `hvdtrain.engine.written_state` owns which buffers have which.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core.errors import UserError

FIRST = "first"
"""Reduction of a buffer that declares none: the value of the lowest rank that had a sample, as in DDP."""

GATHER = re.compile(r"gather(?::(\d+))?")
"""``gather``, and ``gather:1`` for a queue along dimension 1."""

KINDS = {"first": "biufc", "sum": "iufc", "mean": "fc", "max": "biuf", "min": "biuf", "any": "biuf", "gather": "biuf"}
"""Dtypes that each reduction takes, as numpy's kinds."""

NAMES = " | ".join(KINDS)

HEAD_BYTES = 1024
"""Bytes for the dtype and shape of a buffer, as JSON."""


class Entry(Protocol):
    """A buffer on this rank. Arrays are numpy's, float64 for a dtype that numpy lacks.

    ``form``: dtype and shape, as the ranks compare them; "" where this rank lacks the buffer, or has an empty one.
    """

    name: str
    form: str

    def old(self) -> np.ndarray | None:
        """Return the value at the step's begin, which all ranks had; None where it is not known."""

    def own(self) -> np.ndarray:
        """Return a copy of the value of now."""

    def write(self, value: np.ndarray) -> None:
        """Assign ``value``."""


def combine(transport: Transport, entries: Sequence[Entry], reductions: Mapping[str, str], samples: int,
            force: bool = False) -> None:
    """Give each of ``entries`` the value that its reduction makes of the ranks' values; collective.

    ``samples``: those that this rank put through the model since all ranks had the old values. A rank without any has
    no say. A buffer that no rank wrote to is not sent, unless ``force`` is set. Buffers of other shapes on other ranks
    stay as they are, unless a reduction is declared: `UserError` on every rank.
    """
    held = [(entry, entry.old(), entry.own()) for entry in entries]
    row: list[int] = [samples]
    for entry, old, own in held:
        changed = samples > 0 and own.size > 0 and (force or old is None or not _same(old, own))
        row += [zlib.crc32(entry.form.encode()), int(changed)]
    rows_PK = np.array(_gathered(transport, np.array(row, np.int64), "written"))
    samples_P = rows_PK[:, 0]
    for i, one in enumerate(held):
        lacks_P = rows_PK[:, 1 + 2 * i] == 0
        if lacks_P.any() and not lacks_P.all() and not samples_P[lacks_P].any():
            root = int(lacks_P.argmin())
            held[i] = _described(transport, one, root)
            rows_PK[lacks_P, 1 + 2 * i] = rows_PK[root, 1 + 2 * i]
    queues = {module_of(entry.name) for i, (entry, _, _) in enumerate(held) if rows_PK[:, 2 + 2 * i].any()
              and GATHER.fullmatch(reductions.get(entry.name, FIRST))}
    sent = []
    for i, (entry, old, own) in enumerate(held):
        reduction = reductions.get(entry.name, FIRST)
        if (rows_PK[:, 1 + 2 * i] != rows_PK[0, 1 + 2 * i]).any():
            if entry.name in reductions and reduction != FIRST:
                raise UserError(f"buffer {entry.name!r} has other shapes on one rank than on another, and "
                                f"buffer_reduction is {reduction}", "one shape on every rank",
                                "remove it from buffer_reduction if it is only a cache")
        elif rows_PK[:, 2 + 2 * i].any() or GATHER.fullmatch(reduction) and module_of(entry.name) in queues:
            sent.append((entry, reduction, np.zeros_like(own) if old is None else old, own))  # made in this step
        elif old is not None and not _same(old, own):  # by a placeholder's forward, which is no sample
            entry.write(old)
    # A rank that computed on a placeholder has written what is no sample's.
    sent = [(entry, reduction, old, own if samples_P[transport.rank] else old) for entry, reduction, old, own in sent]
    _exchange(transport, sent, [int(n) for n in samples_P])


def _described(transport: Transport, held: tuple[Entry, np.ndarray | None, np.ndarray],
               root: int) -> tuple[Entry, np.ndarray | None, np.ndarray]:
    """Give a rank without the buffer its dtype and shape from rank ``root``; collective."""
    entry, old, own = held
    head_N = np.zeros(HEAD_BYTES, np.uint8)
    text = json.dumps([entry.form, own.dtype.str, own.shape]).encode()
    head_N[:len(text)] = np.frombuffer(text, np.uint8)
    got_N = np.asarray(transport.ops.to_host(transport.broadcast(transport.ops.from_host(head_N),
                                                                 f"written.head.from{root}", root)))
    if entry.form:
        return held
    entry.form, dtype, shape = json.loads(got_N.tobytes().rstrip(b"\0"))
    made = np.zeros(shape, dtype)
    entry.write(made)
    return entry, None, made


def _exchange(transport: Transport, sent: Sequence[tuple[Entry, str, np.ndarray, np.ndarray]],
              samples_P: list[int]) -> None:
    firsts = [(entry, own) for entry, reduction, _, own in sent if reduction == FIRST]
    if firsts:
        root = next(rank for rank, n in enumerate(samples_P) if n)
        bits_N = _packed([own for _, own in firsts])
        got_N = transport.broadcast(transport.ops.from_host(bits_N), f"written.first.from{root}", root)
        for (entry, own), value in zip(firsts, _unpacked(np.asarray(transport.ops.to_host(got_N)),
                                                         [own for _, own in firsts])):
            if not _same(own, value):
                entry.write(value)
    others = [one for one in sent if one[1] != FIRST]
    if others:
        all_PN = _gathered(transport, _packed([own for _, _, _, own in others]), "written.all")
        by_rank = [_unpacked(bits_N, [own for _, _, _, own in others]) for bits_N in all_PN]
        queues = [(entry.name, reduction, old, [values[i] for values in by_rank])
                  for i, (entry, reduction, old, _) in enumerate(others)]
        made = {**{name: reduced(reduction, old, own_P, samples_P) for name, reduction, old, own_P in queues
                   if not GATHER.fullmatch(reduction)},
                **gathered([one for one in queues if GATHER.fullmatch(one[1])], samples_P)}
        for entry, _, _, own in others:
            if not _same(own, made[entry.name]):
                entry.write(made[entry.name])


def reduced(reduction: str, old: np.ndarray, own_P: Sequence[np.ndarray], samples_P: Sequence[int]) -> np.ndarray:
    """Return what ``reduction`` makes of the ranks' values; ``old``: the value that all had before. Pure.

    ``sum``: old + sum(own - old). ``mean``: old + sum(n (own - old)) / sum(n), with n the rank's samples.
    """
    taking = [(own, n) for own, n in zip(own_P, samples_P) if n]
    owns = [own for own, _ in taking]
    if reduction == FIRST:
        return owns[0]
    if reduction in ("max", "min"):
        return np.asarray((np.maximum if reduction == "max" else np.minimum).reduce(owns), old.dtype)
    if reduction == "any":
        return np.asarray(np.logical_or.reduce([own != 0 for own in owns]), old.dtype)
    wide: Any = {"f": np.float64, "c": np.complex128}.get(old.dtype.kind, np.int64)
    before = old.astype(wide)
    with np.errstate(all="ignore"):
        apart = [np.where(own == old, wide(0), own.astype(wide) - before) for own in owns]  # equal infinities: 0
        if reduction == "sum":
            return np.asarray(before + sum(apart), old.dtype)
        return np.asarray(before + sum(n * x for x, (_, n) in zip(apart, taking)) / sum(n for _, n in taking),
                          old.dtype)


def module_of(name: str) -> str:
    """Return the module (PyTorch) or layer (Keras) that has the buffer ``name``."""
    return re.split(r"[./](?=[^./]*$)", name)[0] if re.search(r"[./]", name) else ""


def is_position(array: np.ndarray) -> bool:
    """Return whether a buffer that is gathered is the position in its module's queue: one whole number."""
    return array.size == 1 and array.dtype.kind in "iu"


def gathered(buffers: Sequence[tuple[str, str, np.ndarray, Sequence[np.ndarray]]],
             samples_P: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the queues, and the positions in them, with the rows of all ranks; by name. Pure.

    ``buffers``: (name, ``gather`` or ``gather:1``, old value, the ranks' values). The rows that a rank wrote go one
    rank after the other to the first of them, and on from row 0 behind the last row. The step of the module's position
    tells which rows these are; without a position, the rows that changed in any queue of as many rows do. A position
    is old + sum of the ranks' steps, modulo the queue's rows where it was less than these.
    Errors: `UserError` where rows are no queue's: all of them changed, or ranks began at different rows.
    """
    made = {}
    for module in dict.fromkeys(module_of(name) for name, *_ in buffers):
        own = [one for one in buffers if module_of(one[0]) == module]
        queues = [(name, int((GATHER.fullmatch(how) or [0, 0])[1] or 0), old, own_P) for name, how, old, own_P in own
                  if not is_position(old)]
        moves = [(old, own_P) for _, _, old, own_P in own if is_position(old)]
        for rows in dict.fromkeys(old.shape[axis] for _, axis, old, _ in queues):
            alike = [(name, np.moveaxis(old, axis, 0), [np.moveaxis(x, axis, 0) for x in own_P], axis)
                     for name, axis, old, own_P in queues if old.shape[axis] == rows]
            spans = [_span(alike, rank, rows, moves) if n else (0, 0) for rank, n in enumerate(samples_P)]
            for name, old_K, own_PK, axis in alike:
                made[name] = np.ascontiguousarray(np.moveaxis(_laid(old_K, own_PK, spans), 0, axis))
        rows = next((old.shape[axis] for _, axis, old, _ in queues), 0)
        for name, _, old, own_P in own:
            if is_position(old):
                made[name] = _moved(old, [x for x, n in zip(own_P, samples_P) if n], rows)
    return made


def _moved(old: np.ndarray, owns: Sequence[np.ndarray], rows: int) -> np.ndarray:
    before, values = int(old.reshape(-1)[0]), [int(own.reshape(-1)[0]) for own in owns]
    if rows and before < rows and max(values) < rows:
        after = (before + sum((value - before) % rows for value in values)) % rows
    else:
        after = before + sum(value - before for value in values)
    return np.full(old.shape, after, old.dtype)


def _span(alike: Sequence[tuple[str, np.ndarray, list[np.ndarray], int]], rank: int, rows: int,
          moves: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]]) -> tuple[int, int]:
    """Return (first row that ``rank`` wrote, how many from there on), on a ring of ``rows``.

    ``moves``: the module's positions, old and by rank; the rows are those of a step that covers what changed.
    """
    changed_K = np.zeros(rows, bool)
    for _, old_K, own_PK, _ in alike:
        changed_K |= (_bits(old_K) != _bits(own_PK[rank])).any(1)
    at = np.flatnonzero(changed_K)
    for old, own_P in moves:
        first = int(old.reshape(-1)[0])
        n = (int(own_P[rank].reshape(-1)[0]) - first) % rows
        if ((at - first) % rows < n).all():  # a row that was given the value it had does not show
            return first % rows, n
    if at.size == 0:
        return 0, 0
    name = alike[0][0]
    if moves and at.size < rows:
        raise UserError(f"rank {rank} changed rows {at[:8].tolist()} of the queue {name!r} of {rows} rows, beyond "
                        "the step of its position", "a position that each row written moves by 1, from that row on, "
                        "and fewer rows a step than the queue has", "correct the position, or do not gather the queue")
    if at.size == rows:
        raise UserError(f"a step wrote all {rows} rows of the queue {name!r} on rank {rank}, so its first "
                        "row is not known", "a queue longer than a rank's rows of a step",
                        "make the queue longer, or write gather:1 if its entries are columns")
    gaps = np.diff(np.append(at, at[0] + rows))
    widest = int(gaps.argmax())
    return int(at[(widest + 1) % at.size]), rows - int(gaps[widest]) + 1


def _laid(old_K: np.ndarray, own_PK: Sequence[np.ndarray], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    queue_K, rows = old_K.copy(), len(old_K)
    wrote = [(rank, first, n) for rank, (first, n) in enumerate(spans) if n]
    at = wrote[0][1] if wrote else 0
    for rank, first, n in wrote:
        if first != wrote[0][1]:
            raise UserError(f"rank {wrote[0][0]} wrote to a queue from row {wrote[0][1]} on and rank {rank} from row "
                            f"{first} on", "one first row on all ranks, for buffer_reduction gather",
                            "choose another reduction, if rows are not written in order")
        queue_K[(at + np.arange(n)) % rows] = own_PK[rank][(first + np.arange(n)) % rows]
        at += n
    return queue_K


def _bits(x_K: np.ndarray) -> np.ndarray:
    """Return the bytes of each row, uint8 (K, n), so that a NaN equals itself."""
    return np.ascontiguousarray(x_K).reshape(len(x_K), -1).view(np.uint8)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.array_equal(_packed([a]), _packed([b])))


def _gathered(transport: Transport, x_N: np.ndarray, name: str) -> np.ndarray:
    return np.asarray(transport.ops.to_host(transport.allgather(transport.ops.from_host(x_N), name))).reshape(
        transport.size, -1)


def _packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays])


def _unpacked(bits_N: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    ends = np.cumsum([x.nbytes for x in like])[:-1]
    return [np.frombuffer(part.tobytes(), x.dtype).reshape(x.shape)
            for part, x in zip(np.split(bits_N.reshape(-1), ends), like)]
