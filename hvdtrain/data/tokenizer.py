"""Tokenize text files once, into a ``.npy`` file that all ranks of a host map.

Owns tokenizers (bytes, a user's callable, a tokenizer.json), the file's name and its atomic creation; the lock is
`hvdtrain.data.kept`'s. Enters no collective: ranks wait at the lock.
"""

from __future__ import annotations

import codecs
import hashlib
import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable
from hvdtrain.data.kept import alone, folder_of
from hvdtrain.data.sources import shown
from hvdtrain.planning.batch.sampler import at_least

PIECE = 1 << 20  # bytes that are read at a time, and then the rest of the line; a longer line is cut there
Encode = Callable[[str], Any]


@dataclass(frozen=True)
class Tokenizer:
    """Text to numbers below ``vocab``; ``encode`` None: bytes. ``identity``: changes whenever the numbers may."""

    name: str
    identity: str
    vocab: int
    encode: Encode | None = None
    mask: int = -1

    def numbers(self, path: bytes) -> Iterator[np.ndarray]:
        """Yield int64 tokens of a file, piece by piece; `UserError` for unreadable text and wrong numbers."""
        blocks = _blocks(path)
        if self.encode is None:
            yield from (np.frombuffer(block, np.uint8).astype(np.int64) for block in blocks)
        else:
            yield from (self._checked(self.encode, text, path) for text in _texts(blocks, path))

    def _checked(self, encode: Encode, text: str, path: bytes) -> np.ndarray:
        try:
            given = encode(text)
        except OSError as error:  # of the callable's own files; elsewhere it would be taken for one of the text's
            raise UserError(f"data.args.tokenizer {self.name} failed: {error}", "a list of whole numbers for a text",
                            "fix the tokenizer") from error
        try:
            numbers = np.asarray(given if isinstance(given, np.ndarray) else list(given))
        except (TypeError, ValueError):
            numbers = np.array(None)
        if numbers.ndim != 1 or numbers.size and numbers.dtype.kind not in "iu":
            raise UserError(f"data.args.tokenizer {self.name} gave {type(given).__name__} {str(given)[:60]!r}",
                            "a list of whole numbers for a text", "fix the tokenizer")
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab:
            wrong = numbers.max() if numbers.max() >= self.vocab else numbers.min()
            raise UserError(f"data.args.tokenizer {self.name} gave the number {wrong} in {shown(path)}",
                            f"numbers of 0 to {self.vocab - 1} (vocab {self.vocab})", "set data.args.vocab to one more "
                            "than the largest number, or fix the tokenizer")
        return numbers.astype(np.int64)


def tokenizer_of(given: Any, vocab: int) -> Tokenizer:
    """Return the tokenizer of ``data.args.tokenizer``: bytes, FILE.json, or module:callable."""
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
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    for block in itertools.chain(blocks, (b"",)):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            first = at - len(decoder.getstate()[0])  # less the bytes of a character that is not complete
            raise UserError(f"{shown(path)} is not UTF-8: byte {first + error.start} ({error.reason})", "text in UTF-8",
                            "convert or remove it, or set data.args.tokenizer: bytes") from None
        at += len(block)
        if text:
            yield text


def files_stamp(paths: list[bytes]) -> list[tuple[str, int, int]]:
    """Return (path, size, time) of each file; `UserError` for a missing one."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{shown(path)} cannot be read: {error.strerror}", "a text file",
                            "correct data.args.root, or remove it") from None
        found.append((os.path.realpath(path).hex(), status.st_size, status.st_mtime_ns))
    return found


FOLDER = ".hvdtrain-tokens"
_VERSION = 1  # of how tokens are made and kept
_HEADER = 128


def token_file(paths: list[bytes], tokenizer: Tokenizer, beside: Path, cache: str = "") -> Path:
    """Return the file with the tokens of ``paths``, one after the other, as uint16 or uint32; make it if need be.

    In ``cache``, else in `FOLDER` of the folder ``beside``, or, where that is not writable, in
    $XDG_CACHE_HOME/hvdtrain/tokens. Errors: `UserError` where none of these is writable, where another process takes
    longer than `hvdtrain.data.kept.WAIT_S`, and of `Tokenizer.numbers`.
    """
    stamp = files_stamp(paths)
    key = hashlib.sha256(json.dumps([_VERSION, stamp, tokenizer.identity]).encode()).hexdigest()[:24]
    folder = folder_of(beside, FOLDER, "tokens", cache, f"{key}.npy")
    target = folder / f"{key}.npy"
    if target.exists():
        return target
    try:
        with alone(folder / f"{key}.lock", target.exists, "tokenizing"):
            if not target.exists():
                _write(target, paths, tokenizer)
                if files_stamp(paths) != stamp:
                    target.unlink()
                    raise UserError("the text files changed while they were "
                                    "read", "files that do not change during a run",
                                    "start again when no program writes to them")
    except OSError as error:
        raise UserError(f"the tokens cannot be cached in {folder}: {error.strerror or error}",
                        "a writable folder with free space", "set data.args.cache to one") from None
    return target


def open_tokens(path: str) -> np.ndarray:
    """Map a file of tokens; `UserError` where it is missing or something else."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"it holds {tokens.dtype}{list(tokens.shape)}")
    except (OSError, ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"the tokens in {path} cannot be read: {getattr(error, 'strerror', None) or error}",
                        "the file as a run wrote it", "remove the file; the next run makes it again") from None
    return tokens


def _write(target: Path, paths: list[bytes], tokenizer: Tokenizer) -> None:
    """Write the tokens under another name, then rename."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    with whole_file(target) as draft, draft.open("xb") as file:
        file.write(bytes(_HEADER))
        count = 0
        for path in paths:
            for numbers in tokenizer.numbers(path):
                file.write(numbers.astype(dtype).tobytes())
                count += len(numbers)
        file.seek(0)
        file.write(_header(dtype, count))
        file.flush()
        os.fsync(file.fileno())


def _header(dtype: Any, count: int) -> bytes:
    """Return the first `_HEADER` bytes of a ``.npy`` file, version 1.0 (numpy/lib/format.py)."""
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": (count,)}).encode()
    return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11) + b"\n"
