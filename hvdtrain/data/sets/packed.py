"""``packed``: token sequences of different lengths, several to a row, for language models that count tokens."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable
from hvdtrain.data.objects import indexed
from hvdtrain.data.sources import ALL, Source, chosen
from hvdtrain.planning.batch.sampler import at_least

IGNORED = -1  # target of a token that does not count, as in the GPT twins


def make(split: str, sequences: str, args: Mapping[str, Any] | None = None, context: int = 128,
         ignored: int = IGNORED, pad: int = 0, test_fraction: float = 0.1, seed: int = 0) -> Source | None:
    """Return the token sequences of ``sequences`` (module:callable, called with ``args``) as rows of ``context``.

    The callable returns an object with len() whose items are sequences of whole numbers, with an attribute ``lengths``
    where reading all of them once takes long. x int64 (n, context) tokens, y int64 (n, context) the tokens that follow
    within the same sequence, ``ignored`` after its end and in padding. ``test_fraction`` of the sequences, chosen by
    ``seed``, is the test split.
    """
    at_least("data.args.context", context, 1)
    found = load_callable(sequences, "data.args.sequences")(**(args or {}))
    if not (isinstance(found, (list, tuple)) or indexed(found)) or not len(found):
        raise UserError(f"{sequences} gave a {type(found).__qualname__} without sequences",
                        "a list of token sequences, or an object with len() and __getitem__", "correct that callable")
    taken = np.arange(len(found))
    if split != ALL:
        taken = np.flatnonzero(chosen(np.zeros(len(found), np.int8), test_fraction, seed, split))
    return PackedSequences(found, taken, context, ignored, pad) if len(taken) else None


class PackedSequences:
    """Sequences ``taken_n`` of ``sequences``, in rows of ``context`` pairs (token, next token).

    Longest first, each goes to the row with the least room that is enough (best fit decreasing); one that is longer
    than a row is cut. A row's weight is its number of targets that are not ``ignored``, so a mean over tokens is exact
    however the rows are filled: rows of a run add up to each sequence's tokens once.
    """

    fixed = True

    def __init__(self, sequences: Any, taken_n: np.ndarray, context: int, ignored: int = IGNORED, pad: int = 0) -> None:
        self._sequences, self._context, self._ignored, self._pad = sequences, context, ignored, pad
        known = getattr(sequences, "lengths", None)
        numbers = taken_n.tolist()
        lengths = [int(known[i]) for i in numbers] if known is not None else [len(self._tokens(i)) for i in numbers]
        pieces = [(number, at, min(context, n - 1 - at)) for number, n in zip(numbers, lengths)
                  for at in range(0, n - 1, context)]
        if not pieces:
            raise UserError("no sequence has two tokens", "sequences of tokens", "correct data.args.sequences")
        self._rows = _best_fit(pieces, context)

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = np.full((len(indices_n), self._context), self._pad, np.int64)
        y = np.full_like(x, self._ignored)
        for row, number in enumerate(indices_n.tolist()):
            to = 0
            for sequence, at, n in self._rows[number]:
                tokens = self._tokens(sequence)[at:at + n + 1]
                if len(tokens) != n + 1:
                    raise UserError(f"sequence {sequence} has another length than before",
                                    "sequences that stay the same",
                                    "correct data.args.sequences, or its attribute lengths")
                x[row, to:to + n], y[row, to:to + n] = tokens[:-1], tokens[1:]
                to += n
        return x, y

    def _tokens(self, number: int) -> np.ndarray:
        tokens = np.asarray(self._sequences[number])
        if tokens.ndim != 1 or tokens.size and tokens.dtype.kind not in "iu":
            raise UserError(f"sequence {number} has the type {tokens.dtype} and the shape {list(tokens.shape)}",
                            "one dimension of whole numbers", "tokenize the text, and return one sequence an item")
        return tokens


def _best_fit(pieces: Sequence[tuple[int, int, int]], context: int) -> list[list[tuple[int, int, int]]]:
    """Divide pieces (sequence, first token, n) into rows of at most ``context``; pure."""
    rows: list[list[tuple[int, int, int]]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # keys of ``with_room``, ascending
    for piece in sorted(pieces, key=lambda piece: -piece[2]):
        n = piece[2]
        at = bisect.bisect_left(rooms, n)
        if at == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, context
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(piece)
        left = room - n
        if left:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    return rows
