"""``text_files``: text files as sequences of token numbers, for language models, or masked as BERT's are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, count
from hvdtrain.core.resolve import absolute
from hvdtrain.data.augment.draw import uniform_of
from hvdtrain.data.sources import ALL, Source, chosen, files_in, shown
from hvdtrain.data.tokenizer import open_tokens, token_file, tokenizer_of
from hvdtrain.planning.batch.sampler import at_least

ENDINGS = (".txt", ".text", ".md")
IGNORED = -1  # target of a token that does not count, as in the BERT twins
MASKED, REPLACED = 0.8, 0.9
"""Of the chosen tokens eight in ten are masked, one becomes any other, one stays (J. Devlin et al., "BERT", 2019)."""


def make(split: str, root: str, context: int = 128, tokenizer: str = "bytes", vocab: int = 0, masked: float = 0.0,
         mask_token: int = -1, test: str = "", test_fraction: float = 0.1, seed: int = 0,
         cache: str = "") -> Source | None:
    """Return the text of a file, or of all .txt, .text and .md files in a folder, as sequences of ``context`` tokens.

    x int64 (n, context) tokens and y int64 (n, context) the tokens that follow. ``tokenizer``: bytes (256 tokens), a
    local tokenizer.json, or module:callable (text -> list of numbers below ``vocab``). ``test``: another file or folder
    for testing; else ``test_fraction`` of the sequences, chosen by ``seed``.
    ``masked`` above 0: that fraction of each x is chosen in each epoch, from (``seed``, epoch, sample), and masked with
    ``mask_token`` (-1: the tokenizer's own, or one more than its tokens); y is the original, -1 elsewhere.
    ``cache``: folder for the token numbers. Errors: `UserError`, also of `tokenizer_of` and `token_file`.
    """
    at_least("data.args.context", context, 1)
    at_least("data.args.mask_token", mask_token, -1)
    if isinstance(masked, bool) or not isinstance(masked, (int, float)) or not 0 <= masked < 1:
        raise UserError(f"data.args.masked is {masked!r}", "a fraction from 0 to below 1",
                        "set data.args.masked: 0.15 for a masked language model, or leave it out")
    made = tokenizer_of(tokenizer, vocab)
    whole = test != ""
    if whole and split == ALL:
        return None
    key = "test" if whole and split == "test" else "root"
    paths, beside = _files(test if key == "test" else root, key)
    held = None if whole else (split, test_fraction, seed)
    path = str(token_file(paths, made, beside, cache))
    if not masked:
        return Sequences(path, context, held, made.vocab)
    mask = next(number for number in (mask_token, made.mask, made.vocab) if number >= 0)
    return Masked(path, context, held, made.vocab, float(masked), mask, seed)


def _files(root: Any, key: str) -> tuple[list[bytes], Path]:
    if not isinstance(root, (str, os.PathLike)) or not str(root):
        raise UserError(f"data.args.{key} is {root!r}", "a text file, or a folder of them", f"set data.args.{key}")
    top = absolute(Path(root).expanduser())
    if top.is_file():
        return [os.fsencode(top)], top.parent
    if not top.is_dir():
        raise UserError(f"data.args.{key} is {top}, which does not exist", "a text file, or a folder of them",
                        f"correct data.args.{key}")
    folder = os.fsencode(top)
    names = sorted(files_in(folder, tuple(ending.encode() for ending in ENDINGS)))
    if not names:
        raise UserError(f"the folder {shown(folder)} holds no text", f"files that end in {', '.join(ENDINGS)}",
                        f"set data.args.{key} to one file, or rename them")
    return [os.path.join(folder, name) for name in names], top


class Sequences:
    """Sequences that follow one another in a file of tokens, opened by each process. ``vocab``: number of tokens."""

    fixed = True

    def __init__(self, path: str, context: int, held: tuple[str, float, int] | None, vocab: int) -> None:
        self.vocab, self.context = vocab, context
        self._path, self._held = path, held
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokens", "_chosen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        self._tokens = open_tokens(self._path)
        n = (len(self._tokens) - 1) // self.context
        if n < (1 if self._held is None or self._held[0] == ALL else 2):
            raise UserError(f"the text has {count(len(self._tokens), 'token')}, and data.args.context is "
                            f"{self.context}",
                            "text for at least 2 sequences and one more token", "set data.args.context to less")
        self._chosen = np.arange(n)
        if self._held is not None:
            split, fraction, seed = self._held
            self._chosen = np.flatnonzero(chosen(np.zeros(n, np.int8), fraction, seed, split))

    def __len__(self) -> int:
        return len(self._chosen)

    def _rows(self, indices_n: np.ndarray) -> np.ndarray:
        """Return int64 (n, context + 1): the tokens of each sequence, and the next one."""
        starts_n = self._chosen[indices_n] * self.context
        return self._tokens[starts_n[:, None] + np.arange(self.context + 1)].astype(np.int64)

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows(indices_n)
        return rows[:, :-1].copy(), rows[:, 1:].copy()


class Masked(Sequences):
    """The same sequences with a fraction ``part`` of their tokens, at least one, masked again in each epoch."""

    def __init__(self, path: str, context: int, held: tuple[str, float, int] | None, vocab: int, part: float,
                 mask: int, seed: int) -> None:
        super().__init__(path, context, held, max(vocab, mask + 1))
        self.part, self.mask, self.seed, self._words = part, mask, seed, vocab

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.fetch_in(indices_n, 0)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        x = self._rows(indices_n)[:, :-1].copy()
        T, k = self.context, max(1, round(self.part * self.context))
        uniform = uniform_of(indices_n, self.seed, epoch, "masked tokens")(T + 2 * k)
        at = np.argsort(uniform[:, :T], axis=1, kind="stable")[:, :k]
        what, other = uniform[:, T:T + k], uniform[:, T + k:]
        was = np.take_along_axis(x, at, 1)
        # Never 0, which the BERT twins take for padding and look away from.
        anything = 1 + (other * (self._words - 1)).astype(np.int64)
        becomes = np.where(what < MASKED, self.mask, np.where(what < REPLACED, anything, was))
        y = np.full_like(x, IGNORED)
        np.put_along_axis(y, at, was, 1)
        np.put_along_axis(x, at, becomes, 1)
        return x, y
