"""Write and read the header of a safetensors file, which holds one group of named arrays.

Values are written from blocks and read when asked for, so that neither needs the whole file in memory. safetensors'
``save`` builds the whole file in memory, misorders a transposed array silently (seen in 0.8.0), and gives no offsets.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the cap that safetensors readers put on a header
BLOCK_BYTES = 1 << 20  # size from which a block is written by itself
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "uint64": "U64", "int32": "I32",
    "uint32": "U32", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
_CODE_OF = {dtype: code for name, code in _CODES.items()
            for dtype in (np.dtype(name).newbyteorder("<"), np.dtype(name).newbyteorder(">"))}
"""Codes by type: numpy composes a type's name at each access, which took a tenth of a small save."""

_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items()} | {
    "BF16": np.dtype("<u2"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1")}
"""Types of an array by safetensors' names; bits, for types that numpy lacks."""


class Spec(NamedTuple):
    """Dtype and shape of an array."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Content(Protocol):
    """State that a checkpoint is written from."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """Return the JSON-able small state."""

    def specs(self) -> Mapping[str, Mapping[str, Spec]]:
        """Return the arrays by group and name. `CheckpointError` for one that no file can hold."""

    def blocks(self, group: str, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the bytes of arrays of ``group``, end to end, little-endian, each block valid until the next."""


@dataclass(frozen=True)
class FileLayout:
    """A file to be written: its header, then the arrays ``names`` end to end."""

    header: bytes
    names: tuple[str, ...]
    size_bytes: int

    def pieces(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the file's bytes in order, small blocks joined, so that a file is written in few calls."""
        small = bytearray(self.header)
        for data in blocks:
            if len(data) >= BLOCK_BYTES or len(small) >= BLOCK_BYTES:
                yield memoryview(small)
                small = bytearray()
            if len(data) >= BLOCK_BYTES:
                yield data
            else:
                small += data
        if small:
            yield memoryview(small)


def layout(specs: Mapping[str, Spec], group: str, codes: Mapping[str, str] | None = None,
           metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Plan the file of ``group``; CheckpointError for a name or a dtype that the file cannot hold exactly.

    ``codes``: dtypes that the file states for these names instead of the arrays': "BF16" for uint16 that holds the bits
    of bfloat16, which numpy lacks. ``metadata``: further texts for the header.
    """
    return _layout(tuple(specs.items()), group, tuple((codes or {}).items()), tuple((metadata or {}).items()))


@lru_cache(maxsize=8)  # the files of a run's saves are the same, but for their values
def _layout(named: tuple[tuple[str, Spec], ...], group: str, coded: tuple[tuple[str, str], ...],
            metadata: tuple[tuple[str, str], ...]) -> FileLayout:
    specs, codes = dict(named), dict(coded)
    for name, spec in named:
        check(name, spec.dtype, group)
    # Widest first keeps every array aligned to its own item size.
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        end = offset + specs[name].n_bytes
        entries[name] = {
            "dtype": codes.get(name, _CODE_OF[specs[name].dtype]),
            "shape": list(specs[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"group {group!r} needs a header of {len(text)} bytes",
                              f"at most {MAX_HEADER_BYTES}", "split the group, or shorten the names")
    return FileLayout(len(text).to_bytes(8, "little") + text, tuple(order), 8 + len(text) + offset)


def read_header(path: Path) -> dict[str, tuple[Spec, int]]:
    """Return (spec, offset) of a file's arrays by name; CheckpointError: no safetensors file. OSError."""
    descriptor = files.open_to_read(path)
    try:
        size = os.fstat(descriptor).st_size
        n = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 0 < n <= min(MAX_HEADER_BYTES, size - 8):
            raise _foreign(path, f"its header has {n} bytes")
        text = os.pread(descriptor, n, 8)
    finally:
        os.close(descriptor)
    try:
        entries = json.loads(text)
        found = {name: _entry(entries[name], 8 + n) for name in sorted(entries) if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _foreign(path, f"{type(error).__name__}: {error}") from None
    for name, (spec, begin) in found.items():
        if begin + spec.n_bytes > size:
            raise _foreign(path, f"{name!r} ends past the end of the file")
    return found


def _entry(entry: dict[str, Any], first: int) -> tuple[Spec, int]:
    """Parse a header's entry of one array, values counted from ``first``; ValueError for an impossible one."""
    (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
        raise ValueError("a shape or an offset that is no whole number of at least 0")
    spec = Spec(_DTYPES[entry["dtype"]], shape)
    if end - begin != spec.n_bytes:
        raise ValueError(f"{end - begin} bytes for {spec.dtype}{list(shape)}")
    return spec, first + begin


def _foreign(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file that can be read ({reason[:200]})",
                           "the arrays of one group", "use another checkpoint")


def portable(name: str, array: np.ndarray, group: str) -> np.ndarray:
    """Return ``array`` little-endian and in C order; CheckpointError where a file cannot hold it exactly."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise CheckpointError(f"{name!r} of group {group!r} is a {type(array).__name__}", "a numpy array",
                              "convert it, for example tensor.detach().cpu().numpy()")
    array = np.asarray(array, order="C")
    check(name, array.dtype, group)
    little = _DTYPES[_CODE_OF[array.dtype]]
    return array if array.dtype == little else array.astype(little)


def check(name: str, dtype: np.dtype, group: str) -> None:
    """Raise CheckpointError for a name or a dtype that a file cannot hold exactly."""
    _check_name(name, group)
    if dtype not in _CODE_OF:
        raise CheckpointError(f"{name!r} of group {group!r} has dtype {dtype}", "one of " + ", ".join(_CODES),
                              "convert it; bfloat16 travels as its bits in uint16")


def _check_name(name: str, group: str) -> None:
    good = isinstance(name, str) and name != "__metadata__"
    if good:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            good = False
    if not good:
        raise CheckpointError(f"tensor name {name!r} in group {group!r}",
                              "text that UTF-8 can encode, other than '__metadata__'", "rename the tensor")
