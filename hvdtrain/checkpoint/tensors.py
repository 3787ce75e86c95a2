"""One group of named arrays as one safetensors file.

Owns the layout of a file to be written, array by array, so that saving needs no second copy of the state;
reading is the safetensors library's own. Neither writes nor verifies: ``files`` and ``snapshot`` do.

Not left to ``safetensors.numpy.save``, which builds the whole file in memory and takes the bytes of a
transposed array in the wrong order without a word (seen in 0.8.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint.manifest import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The cap that safetensors readers put on a header."""

PIECE_BYTES = 1 << 20
"""Size from which an array is written by itself."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "uint64": "U64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Layout:
    """A file to be written: its header, then ``arrays`` end to end, each little-endian."""

    header: bytes
    arrays: tuple[np.ndarray, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(array.nbytes for array in self.arrays)

    def pieces(self) -> Iterator[memoryview]:
        """The file's bytes in order; small arrays come together, as one copy, so that a file is written in few calls.

        A large one is copied, for its turn, only if not C-contiguous.
        """
        small = bytearray(self.header)
        for array in self.arrays:
            data = array.reshape(-1).view(np.uint8).data
            if len(data) >= PIECE_BYTES or len(small) >= PIECE_BYTES:
                yield memoryview(small)
                small = bytearray()
            if len(data) >= PIECE_BYTES:
                yield data
            else:
                small += data
        if small:
            yield memoryview(small)


def layout(tensors: Mapping[str, np.ndarray], group: str, codes: Mapping[str, str] | None = None) -> Layout:
    """Plan the file of ``group``; CheckpointError for a name or a dtype that the file cannot hold exactly.

    ``codes``: the dtype that the file states for the arrays of these names, of the same size as theirs: bfloat16, which
    numpy lacks, as the "BF16" that an array of uint16 holds the bits of.
    """
    codes = codes or {}
    ready = {name: _portable(name, array, group) for name, array in tensors.items()}
    # Widest first keeps every array aligned to its own item size.
    order = sorted(ready, key=lambda name: (-ready[name].itemsize, name))
    entries, offset = {}, 0
    for name in order:
        array = ready[name]
        end = offset + array.nbytes
        entries[name] = {
            "dtype": codes.get(name, _CODES[array.dtype.name]),
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            got=f"group {group!r} needs a header of {len(text)} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
            do="split the group, or shorten the names",
        )
    return Layout(len(text).to_bytes(8, "little") + text, tuple(ready[name] for name in order))


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Load every array of a file, ordered by name; CheckpointError where it is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            got=f"{path} is not a safetensors file that can be read ({error})",
            expected="the arrays of one group",
            do="use another checkpoint",
        ) from None


def _portable(name: str, array: np.ndarray, group: str) -> np.ndarray:
    _check_name(name, group)
    if not isinstance(array, (np.ndarray, np.generic)):
        raise CheckpointError(
            got=f"{name!r} of group {group!r} is a {type(array).__name__}",
            expected="a numpy array",
            do="convert it, for example tensor.detach().cpu().numpy()",
        )
    array = np.asarray(array)
    if array.dtype.name not in _CODES:
        raise CheckpointError(
            got=f"{name!r} of group {group!r} has dtype {array.dtype}",
            expected="one of " + ", ".join(_CODES),
            do="convert it; bfloat16 travels as its bits in uint16",
        )
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _check_name(name: str, group: str) -> None:
    good = isinstance(name, str) and name != "__metadata__"
    if good:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            good = False
    if not good:
        raise CheckpointError(
            got=f"tensor name {name!r} in group {group!r}",
            expected="text that UTF-8 can hold, other than '__metadata__'",
            do="rename the tensor",
        )
