"""Turn the values of a file's columns (pictures, arrays, numbers, lists) into the arrays of a batch.

Owns which column is x or y, and types and shapes. `hvdtrain.data.pictures` decodes pictures; the formats in
`hvdtrain.data.sets` read values.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.data.pictures import Normalisation, Picture, channels_of, checked_size, parsed, stacked
from hvdtrain.data.rows import INPUTS, TARGETS
from hvdtrain.data.sources import Unreadable, refuse_strings

PARTS = ("x", "y", "weight")
KEYS = ("dtype", "y_dtype")
"""Arguments that set the types of x and y."""
PICTURES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm")
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"P5", b"P6", b"P4", b"P1", b"P2", b"P3")
"""First bytes of pictures but WebP's, which are RIFF....WEBP."""
_NPY = b"\x93NUMPY"


class Damage(Exception):
    """A sample that cannot be read, with the reason."""


def columns_of(names: Sequence[str], x: str, y: str, weight: str, where: str) -> tuple[str, ...]:
    """Return the columns of x, y and, where given, the sample weight among ``names``.

    Without ``x`` and ``y`` those named like x and y, a picture before other columns, else the first two. ``where``: the
    file that has them. Errors: `UserError` for an unknown name.
    """
    for key, name in (("x", x), ("y", y), ("weight", weight)):
        if name and name not in names and not _within(name, names):
            raise UserError(f"data.args.{key} is {name!r}, and {where} has the columns {', '.join(names) or '(none)'}",
                            nearest(name, names) if names else "a column of the file", f"correct data.args.{key}")
    names = [name for name in names if name != weight]
    used = {part for name in (x, y) for part in (_parts(name) if name not in names else [name])}
    rest = [name for name in names if name not in used]
    x = x or next((name for known in (INPUTS, PICTURES) for name in rest if name.lower() in known), "")
    rest = [name for name in rest if name != x]
    y = y or next((name for name in rest if name in TARGETS or name == "cls"), "")
    x = x or next((name for name in rest if name != y), "")
    y = y or next((name for name in rest if name != x), "")
    if not x:
        raise UserError(f"{where} has no column for x", "one or two columns", "check data.args.files and data.args.x")
    if weight and not y:
        raise UserError(f"data.args.weight is {weight!r}, and {where} has no column for y", "one, which it weights",
                        "set data.args.y")
    found = tuple(name for name in (x, y, weight) if name)
    twice = next((name for name in found if names.count(name) > 1), "")
    if twice:
        raise UserError(f"{where} has several columns {twice}", "one of each name", "rename them")
    return found


def _within(name: str, names: Sequence[str]) -> bool:
    """Return whether ``name`` asks for one of several endings (``jpg;png``) or for a value in JSON (``json.label``)."""
    return any(part in names for part in _parts(name))


def _parts(name: str) -> list[str]:
    return [*name.split(";"), name.partition(".")[0]]


class Cells:
    """Convert values to arrays as `hvdtrain.data.formats.FileOptions` say, in the order of `PARTS`.

    The first sample sets type and shape of each column (`learn`); others must have the same.
    """

    def __init__(self, size: Any, channels: int, mean: Any, std: Any, layout: str, shape: Any, dtype: str,
                 y_dtype: str = "") -> None:
        self.scale = Normalisation.of(mean, std, channels_of(channels), layout)
        self._size, self._channels = checked_size(size), channels
        self._shape, self._dtypes = _shape(shape), (_dtype("dtype", dtype), _dtype("y_dtype", y_dtype), None)
        self._kinds: list[tuple[np.dtype, tuple[int, ...], bool]] = []

    def learn(self, values: Sequence[Any]) -> None:
        """Take type and shape of each column from a sample. `Damage`: it cannot be decoded."""
        self._kinds = [(array.dtype, array.shape, picture) for array, picture in self._arrays(values)]

    def batch(self, rows: Sequence[Sequence[Picture]]) -> tuple[np.ndarray, ...]:
        """Return the columns (n, ...) of ``rows`` that `sample` has made."""
        return tuple(self.scale(stacked(column, self._channels)) if picture else np.stack(column)
                     for column, (_, _, picture) in zip(zip(*rows), self._kinds))

    @property
    def pictures(self) -> bool:
        """Return whether x is a picture."""
        return bool(self._kinds) and self._kinds[0][2]

    def sample(self, values: Sequence[Any], place: Callable[[], str]) -> list[Picture]:
        """Return the columns of one sample for `batch`. `Damage`: it cannot be decoded; `UserError`: other types or
        shapes.
        """
        arrays = list[Picture]()
        for i, ((array, picture), (dtype, shape, wanted)) in enumerate(zip(self._arrays(values), self._kinds)):
            if dtype.kind == "f" and isinstance(array, np.ndarray) and array.dtype.kind in "iu":
                array = array.astype(dtype)  # 1 in a column that begins with 1.5, as JSON writes it
            if (array.dtype, array.shape, picture) != (dtype, shape, wanted):
                kinds = [f"{'a picture' if p else t} {list(s)}" for t, s, p in ((array.dtype, array.shape, picture),
                                                                               (dtype, shape, wanted))]
                do = "set data.args.size, which scales and crops pictures, such as 224" if picture and wanted else (
                    f"set data.args.{KEYS[i]}: float32" if i < len(KEYS) and array.shape == shape else
                    "pad, crop or cast them")
                raise UserError(f"{place()}: {PARTS[i]} is {kinds[0]}, in the first sample {kinds[1]}",
                                "one type and shape in each column", do)
            arrays.append(array)
        return arrays

    def _arrays(self, values: Sequence[Any]) -> list[tuple[Picture, bool]]:
        found = [self._array(value, PARTS[i], i == 0, self._dtypes[i]) for i, value in enumerate(values)]
        if len(found) == len(PARTS):
            found[-1] = np.asarray(found[-1][0], np.float32), False
        return found

    def _array(self, value: Any, name: str, is_x: bool, dtype: np.dtype | None) -> tuple[Picture, bool]:
        """Return one value as an array, of ``dtype`` if given, and whether it is a picture."""
        if isinstance(value, dict) and "bytes" in value:  # an image of `datasets`
            value = value["bytes"]
        if value is None:
            raise Damage(f"{name} is missing")
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = bytes(value)
            if _is_picture(value) and not dtype:
                if not is_x:
                    raise UserError(f"column {name} holds pictures", "numbers or .npy arrays",
                                    f"store masks as .npy, or name another column in data.args.{name}")
                return self._decoded(value), True
            array = _of_bytes(value, name, is_x, dtype)
        else:
            refuse_strings([value] if not isinstance(value, (list, np.ndarray)) else value, f"column {name}")
            array = _numbers(value, name)
        if dtype is not None:
            array = _cast(array, dtype, name)
        if is_x and self._shape:
            if array.size != np.prod(self._shape):
                raise Damage(f"{name} has {array.size} elements, not the {list(self._shape)} of data.args.shape")
            array = array.reshape(self._shape)
        return array, False

    def _decoded(self, value: bytes) -> Picture:
        try:
            return parsed(io.BytesIO(value), 0, self._size, self._channels)
        except Unreadable as error:
            raise Damage(error.reason) from None


def _of_bytes(value: bytes, name: str, is_x: bool, dtype: np.dtype | None) -> np.ndarray:
    if value.startswith(_NPY):
        try:
            return plain(np.load(io.BytesIO(value), allow_pickle=False))
        except Exception as error:  # numpy parses the header as Python: SyntaxError, TokenError and others
            raise Damage(f"{name} is a damaged .npy: {' '.join(str(error).split())[:200]}") from None
    if dtype is None:
        raise UserError(f"column {name} holds {len(value)} bytes, which begin with {value[:8]!r}",
                        "a picture, a .npy, or numbers of a known type", "set data.args.dtype, such as uint8, and "
                        "data.args.shape" if is_x else "set data.args.y_dtype, such as uint8, or name another column "
                        "in data.args.y")
    if len(value) % dtype.itemsize:
        raise Damage(f"{name} has {len(value)} bytes, no multiple of the {dtype.itemsize} of {dtype}")
    return np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype)


def _is_picture(value: bytes) -> bool:
    return value.startswith(_STARTS) or value[:4] == b"RIFF" and value[8:12] == b"WEBP"


def plain(array: np.ndarray) -> np.ndarray:
    """Return floats as float32 and whole numbers as int64, but bytes (uint8) as they are, and native."""
    if array.dtype.kind not in "biuf":
        raise Damage(f"it holds {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise Damage(f"it holds {array.max()}, and whole numbers become int64")
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    kept = array.dtype.kind == "b" or array.dtype == np.uint8 and array.ndim
    return array if kept else array.astype(np.int64, copy=False)


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NaN, which no whole number equals
        cast = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, array):
        key = KEYS[PARTS.index(name)]
        raise Damage(f"{name} holds {array[cast != array].flat[0]}, which is no {dtype} of data.args.{key}")
    return cast


def _numbers(value: Any, name: str) -> np.ndarray:
    try:
        return plain(np.asarray(value))
    except ValueError:
        raise UserError(f"column {name} holds lists of different lengths", "one length", "pad them") from None


def _shape(shape: Any) -> tuple[int, ...]:
    sides = list(shape) if isinstance(shape, (list, tuple)) else [shape] if shape else []
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise UserError(f"data.args.shape is {shape!r}", "a list of whole numbers above 0, such as [28, 28]",
                        "correct data.args.shape")
    return tuple(sides)


def _dtype(key: str, dtype: Any) -> np.dtype | None:
    if not dtype:
        return None
    try:
        made = np.dtype(dtype)
    except TypeError:
        made = np.dtype(object)
    if made.kind not in "biuf":
        raise UserError(f"data.args.{key} is {dtype!r}", "a type of numbers, such as float32 or uint8",
                        f"correct data.args.{key}")
    return made
