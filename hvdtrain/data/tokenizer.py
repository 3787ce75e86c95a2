"""What turns text files into token numbers: bytes, a callable of the user's, or a local tokenizer.json.

Owns the reading of files in pieces and the checks of what a tokenizer gives. Keeps nothing: that is
`hvdtrain.data.tokens`.
"""

from __future__ import annotations

import codecs
import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable
from hvdtrain.data.listing import shown
from hvdtrain.planning.batch.sampler import at_least

PIECE = 1 << 20
"""Bytes that are read at a time, and then the rest of the line; a longer line is cut there."""

Encode = Callable[[str], Any]


@dataclass(frozen=True)
class Tokenizer:
    """Numbers below ``vocab`` for text; ``encode`` None: its bytes.

    ``identity``: what changes whenever it may give other numbers. ``mask``: its own number for a masked token, or -1.
    """

    name: str
    identity: str
    vocab: int
    encode: Encode | None = None
    mask: int = -1

    def numbers(self, path: bytes) -> Iterator[np.ndarray]:
        """Yield the tokens int64[any] of a file, piece by piece; a piece ends with a line.

        Errors: `UserError` for a file that cannot be read or is not UTF-8, and for a tokenizer that gives anything but
        numbers below ``vocab``.
        """
        blocks = _blocks(path)
        if self.encode is None:
            yield from (np.frombuffer(block, np.uint8).astype(np.int64) for block in blocks)
        else:
            yield from (self._checked(self.encode, text, path) for text in _texts(blocks, path))

    def _checked(self, encode: Encode, text: str, path: bytes) -> np.ndarray:
        """The numbers of one piece."""
        try:
            given = encode(text)
        except OSError as error:  # of the callable's own files; elsewhere it would be taken for one of the text's
            raise UserError(f"data.args.tokenizer {self.name} failed: {error}", "a list of whole numbers for a text",
                            "mend the tokenizer") from error
        try:
            numbers = np.asarray(given if isinstance(given, np.ndarray) else list(given))
        except (TypeError, ValueError):
            numbers = np.array(None)
        if numbers.ndim != 1 or numbers.size and numbers.dtype.kind not in "iu":
            raise UserError(f"data.args.tokenizer {self.name} gave {type(given).__name__} {str(given)[:60]!r}",
                            "a list of whole numbers for a text", "mend the tokenizer")
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab:
            wrong = numbers.max() if numbers.max() >= self.vocab else numbers.min()
            raise UserError(f"data.args.tokenizer {self.name} gave the number {wrong} in {shown(path)}",
                            f"numbers of 0 to {self.vocab - 1} (vocab {self.vocab})", "set data.args.vocab to one more "
                            "than the largest number, or mend the tokenizer")
        return numbers.astype(np.int64)


def tokenizer_of(given: Any, vocab: int) -> Tokenizer:
    """Return what ``data.args.tokenizer`` stands for: bytes, FILE.json, or module:callable.

    A callable takes a text and returns a list of numbers below ``vocab``, or its own attribute ``vocab``.
    Errors: `UserError` for anything else.
    """
    at_least("data.args.vocab", vocab, 0)
    if not isinstance(given, str) or given != "bytes" and not given.endswith(".json") and ":" not in given:
        raise UserError(f"data.args.tokenizer is {given!r}", "bytes, a file that ends in .json, or module:callable",
                        "correct data.args.tokenizer")
    if given == "bytes":
        made = Tokenizer("bytes", "bytes", 256)
    elif given.endswith(".json"):
        made = _of_json(Path(given).expanduser())
    else:
        made = _of_callable(given, vocab)
    if vocab not in (0, made.vocab):
        raise UserError(f"data.args.vocab is {vocab}", f"the {made.vocab} of tokenizer {given}",
                        "remove data.args.vocab")
    return made


def _of_callable(name: str, vocab: int) -> Tokenizer:
    """A user's own."""
    function = load_callable(name, "data.args.tokenizer")
    size = vocab or getattr(function, "vocab", 0)
    if not isinstance(size, int) or not 0 < size <= 2**32:
        raise UserError(f"the number of different tokens of {name} is not known", "a whole number",
                        "set data.args.vocab, or give the callable an attribute vocab")
    try:
        source = inspect.getsourcefile(inspect.unwrap(function)) or ""
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    except (OSError, TypeError):
        digest = ""
    return Tokenizer(name, f"{name} {digest} {size}", size, function)


def _of_json(path: Path) -> Tokenizer:
    """A tokenizer.json as Hugging Face's library writes it, read from this machine."""
    if not path.is_file():
        raise UserError(f"data.args.tokenizer is {path}, which is no file", "a tokenizer.json", "correct it")
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{path} needs the package tokenizers, which cannot be imported: {error}", "it installed",
                        "run pip install tokenizers, or set data.args.tokenizer: bytes") from None
    try:
        found = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain exceptions
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}", "a tokenizer.json",
                        "correct data.args.tokenizer") from None
    numbers = found.get_vocab(with_added_tokens=True)
    mask = next((number for number in map(found.token_to_id, ("[MASK]", "<mask>")) if number is not None), -1)
    return Tokenizer(str(path), hashlib.sha256(path.read_bytes()).hexdigest(), max(numbers.values(), default=0) + 1,
                     lambda text: found.encode(text, add_special_tokens=False).ids, mask)


def _blocks(path: bytes) -> Iterator[bytes]:
    """Yield a file in pieces of about `PIECE` bytes that end with a line."""
    try:
        with open(path, "rb") as file:
            while block := file.read(PIECE):
                yield block if block.endswith(b"\n") else block + file.readline(PIECE)
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read: {error.strerror or error}", "a text file",
                        "correct data.args.root, or remove it") from None


def _texts(blocks: Iterator[bytes], path: bytes) -> Iterator[str]:
    """Yield the text of a file that comes in ``blocks``."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    for block in itertools.chain(blocks, (b"",)):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(f"{shown(path)} is not UTF-8: byte {at - len(_held(decoder)) + error.start} "
                            f"({error.reason})", "text in UTF-8",
                            "convert or remove it, or set data.args.tokenizer: bytes") from None
        at += len(block)
        if text:
            yield text


def _held(decoder: codecs.IncrementalDecoder) -> bytes:
    """What the decoder has of a character that is not complete."""
    return bytes(decoder.getstate()[0])


def files_stamp(paths: list[bytes]) -> list[tuple[str, int, int]]:
    """Return (path, size, time) of each file; `UserError` for one that is not there."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{shown(path)} cannot be read: {error.strerror}", "a text file",
                            "correct data.args.root, or remove it") from None
        found.append((os.path.realpath(path).hex(), status.st_size, status.st_mtime_ns))
    return found
