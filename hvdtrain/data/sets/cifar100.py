"""``cifar100``: 60,000 colour pictures of 32 x 32 pixels in 100 classes, from the archive as it is published.

Owns the archive's formats and checksums. Fetches nothing over a network, and runs no code of a pickle.
Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.pictures import Normalisation
from hvdtrain.data.sources import Source

HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
PUBLISHED = {"cifar-100-binary": "03b5dce01913d631647c71ecec9e9cb8",
             "cifar-100-python": "eb9058c3a382ffc7106e4002c42a8d85"}
"""MD5 of each archive, by the folder in it."""

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
"""Of the 50,000 training pictures' channels, in [0, 1]."""

_LABELS = {"coarse": 20, "fine": 100}
_RECORD = 2 + 3 * 32 * 32
_FILES = {"cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
          "cifar-100-python": ("train", "test", "meta")}
_MOST_BYTES = 2**28  # of one file in the archive; the largest has 154 MB
MOST_READS = 4_000_000
"""Reads of one pickle, one for each opcode and each argument; a file of CIFAR-100 takes about 600,000."""


class Split(NamedTuple):
    """Pixels uint8 (n, 3072), red, green, blue, and two class numbers uint8 (n,) for each image."""

    pixels: np.ndarray
    coarse: np.ndarray
    fine: np.ndarray


Contents = tuple[dict[str, Split], dict[str, tuple[str, ...]]]
"""The splits, and the names of the classes of each kind."""


def make(split: str, root: str, labels: str = "fine", md5: str = "", normalise: bool = True,
         layout: str = "channels_last") -> Source:
    """Return CIFAR-100 from an archive or an unpacked folder in ``root``: x float32 (n, 32, 32, 3), y int64 (n,).

    ``root``: the folder that has cifar-100-binary.tar.gz, cifar-100-python.tar.gz, or one of them unpacked; or one of
    these itself. ``labels``: fine (100 classes) or coarse (20). ``md5``: the archive's, if not the published one.
    ``normalise``: subtract `MEAN` and divide by `STD`; else x is in [0, 1]. ``layout`` channels_first: (n, 3, 32, 32).
    Errors: `UserError` where there is no archive, another checksum, or something else in it.
    """
    if labels not in _LABELS:
        raise UserError(f"data.args.labels is {labels!r}", "fine (100 classes) or coarse (20)", "correct it")
    if not isinstance(normalise, bool):
        raise UserError(f"data.args.normalise is {normalise!r}", "true or false", "correct it")
    scale = Normalisation.of(MEAN if normalise else None, STD if normalise else None, 3, layout)
    place = _find(root)
    if place.is_dir():
        if md5:
            raise UserError(f"data.args.md5 is given for {place}, which is unpacked", "an archive, which has one",
                            "remove data.args.md5, or give the archive as data.args.root")
        parts, names = _unpacked(str(place))
    else:
        status = place.stat()
        parts, names = _archive(str(place), _checked(md5, place), status.st_size, status.st_mtime_ns)
    part = parts[split]
    return Cifar100(part.pixels, getattr(part, labels), scale, names.get(labels, ()))


class Cifar100:
    """Pictures held as uint8 and converted when fetched. ``classes``: names by number."""

    fixed = True

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, scale: Normalisation, classes: tuple[str, ...]) -> None:
        self.pixels, self.labels, self.scale, self.classes = pixels, labels, scale, classes

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pixels = self.pixels[indices_n].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return self.scale(np.ascontiguousarray(pixels)), self.labels[indices_n].astype(np.int64)


def _find(root: Any) -> Path:
    if not isinstance(root, (str, os.PathLike)) or not str(root):
        raise UserError(f"data.args.root is {root!r}", "the folder of the CIFAR-100 archive", "set data.args.root")
    top = Path(root).expanduser()
    if top.is_file():
        return top
    if any(_complete(top, kind) for kind in _FILES):
        return top
    for kind in _FILES:
        if (top / f"{kind}.tar.gz").is_file():
            return top / f"{kind}.tar.gz"
    for kind in _FILES:
        if _complete(top / kind, kind):
            return top / kind
    raise UserError(f"there is no CIFAR-100 archive in {top}" + ("" if top.is_dir() else ", which does not exist"),
                    " or ".join(f"{kind}.tar.gz" for kind in _FILES),
                    f"download one from {HOME} into the folder of data.args.root; runs never download data")


def _complete(folder: Path, kind: str) -> bool:
    return all((folder / name).is_file() for name in _FILES[kind][:2])


def _kind(name: str) -> str:
    for kind in PUBLISHED:
        if kind.rpartition("-")[2] in name:
            return kind
    raise UserError(f"the format of {name} is ambiguous", "a name with binary or python in it, as "
                                                          "published", "rename it")


def _checked(md5: Any, archive: Path) -> str:
    if not md5:
        return PUBLISHED[_kind(archive.name)]
    if not isinstance(md5, str) or len(md5) != 32 or set(md5.lower()) - set("0123456789abcdef"):
        raise UserError(f"data.args.md5 is {md5!r}", "32 hexadecimal digits, in quotes in a file", "correct it")
    return md5.lower()


@lru_cache(maxsize=1)  # the two splits of a run come from one reading
def _archive(path: str, md5: str, size: int, mtime_ns: int) -> Contents:
    kind = _kind(Path(path).name)
    with _reading(path), open(path, "rb") as file:
        found = _md5(file)
        if found != md5:
            published = " (the published one)" if md5 == PUBLISHED[kind] else ""
            raise UserError(f"{path} has the MD5 {found}", f"{md5}{published}",
                            f"download it again from {HOME}, or set data.args.md5 to the sum of an archive of your own")
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r|gz") as tar:
            wanted = {f"{kind}/{name}": name for name in _FILES[kind]}
            raw: dict[str, Any] = {}
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if member.size > _MOST_BYTES:
                    raise ValueError(f"{member.name} in it has {member.size} bytes")
                stream = tar.extractfile(member) if name and member.isfile() else None
                if name and stream is not None:
                    raw[name] = _decoded(kind, stream)
        return _contents(kind, raw)


def _unpacked(folder: str) -> Contents:
    kind = next(kind for kind in _FILES if _complete(Path(folder), kind))
    raw = {}
    for name in _FILES[kind]:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with _reading(path), open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                    raise ValueError(f"it has more than {_MOST_BYTES} bytes")
                raw[name] = _decoded(kind, file)
    with _reading(folder):
        return _contents(kind, raw)


def _decoded(kind: str, file: Any) -> Any:
    return read_pickle(file) if kind == "cifar-100-python" else file.read()


def _contents(kind: str, raw: dict[str, Any]) -> Contents:
    lacking = [name for name in _FILES[kind][:2] if name not in raw]
    if lacking:
        raise ValueError(f"it lacks {kind}/{lacking[0]}")
    read = _of_binary if kind == "cifar-100-binary" else _of_python
    parts = {split: read(raw[name]) for split, name in zip(("train", "test"), _FILES[kind])}
    names = {label: tuple(_names(raw, label)) for label in _LABELS}
    for part in parts.values():
        for label, number in _LABELS.items():
            if getattr(part, label).max(initial=0) >= number:
                raise ValueError(f"it has a {label} label of {getattr(part, label).max()}, above {number - 1}")
    return parts, {label: found for label, found in names.items() if found}


def _of_binary(data: bytes) -> Split:
    """Read records of coarse label, fine label, 3072 pixels, a byte each."""
    if not data or len(data) % _RECORD:
        raise ValueError(f"it has a file of {len(data)} bytes, no multiple of {_RECORD}")
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    return Split(records[:, 2:], records[:, 0], records[:, 1])


def _of_python(found: Any) -> Split:
    """Read a dict of coarse_labels, fine_labels and data."""
    pixels = found.get(b"data") if isinstance(found, dict) else None
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _RECORD - 2 or not len(pixels):
        raise ValueError("it has a file without images of 3072 bytes")
    coarse, fine = (found.get(f"{label}_labels".encode()) for label in _LABELS)
    for labels in (coarse, fine):
        if not isinstance(labels, list) or len(labels) != len(pixels) or not all(
                isinstance(label, int) and 0 <= label < 256 for label in labels):
            raise ValueError("it has a file whose labels are not one small number for each image")
    return Split(np.ascontiguousarray(pixels), np.array(coarse, np.uint8), np.array(fine, np.uint8))


def _names(raw: dict[str, Any], label: str) -> Iterator[str]:
    if "meta" in raw and isinstance(raw["meta"], dict):
        found = raw["meta"].get(f"{label}_label_names".encode(), [])
        yield from (name.decode("utf-8", "replace") for name in found if isinstance(name, bytes))
    if f"{label}_label_names.txt" in raw:
        yield from raw[f"{label}_label_names.txt"].decode("utf-8", "replace").split()


def _md5(file: BinaryIO) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    while block := file.read(io.DEFAULT_BUFFER_SIZE * 128):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise a `UserError` that names ``path`` for whatever is wrong with it."""
    try:
        yield
    except (OSError, EOFError, ValueError, TypeError, tarfile.TarError, zlib.error) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read: {said}", "CIFAR-100 as it is published",
                        f"download it again from {HOME}") from None


class _Dtype:
    """The dtype uint8; flags and state that a pickle gives besides are dropped."""

    def __init__(self, code: Any, *flags: Any) -> None:
        if code != b"u1":
            raise ValueError("it creates something other than an array of uint8")

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """A uint8 array, filled without numpy's own ``__setstate__``, which trusts the sizes in a pickle."""

    value: np.ndarray | None = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, data = state
        if not isinstance(dtype, _Dtype):
            raise ValueError("it holds an array that is not of uint8")
        # A view: a pickle may build any number of arrays of one text.
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_columns else "C")


_CLASSES = {("numpy.core.multiarray", "_reconstruct"): _Array, ("numpy", "dtype"): _Dtype, ("numpy", "ndarray"): None}
"""What a pickle of plain data may name. ndarray itself is only ever an argument of ``_reconstruct``."""

_OPCODES = (
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_DICT,
    pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.SHORT_BINSTRING,
    pickle.BINSTRING, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.TUPLE, pickle.TUPLE1,
    pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD)
"""Those that Python 2 wrote plain data with, besides SETITEM and SETITEMS."""


def _with_bytes_keys(opcode: bytes, first: int) -> Callable[[Any], None]:
    """Return the handler of SETITEM or SETITEMS for keys of bytes: the hash of a nested tuple may never end."""
    plain: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode[0]]

    def handler(unpickler: Any) -> None:
        if not all(isinstance(key, bytes) for key in unpickler.stack[first::2]):
            raise TypeError("a key that is not a string")
        plain(unpickler)

    return handler


class _CountedFile:
    """A file that refuses more than `MOST_READS` reads: an opcode of one byte may take a hundred of memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.readline, self._read, self._reads = file.readline, file.read, 0

    def read(self, n: int) -> bytes:
        self._reads += 1
        if self._reads > MOST_READS:
            raise ValueError(f"it takes more than {MOST_READS} reads")
        return self._read(n)


class _PlainUnpickler(pickle._Unpickler):
    """Unpickle data alone. In Python, since the unpickler in C allocates whatever memo number a file makes up."""

    dispatch = {**{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},
                pickle.SETITEM[0]: _with_bytes_keys(pickle.SETITEM, -2),
                pickle.SETITEMS[0]: _with_bytes_keys(pickle.SETITEMS, 0)}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise ValueError(f"it names {module[:40]}.{name[:40]}, which is not plain data")
        return _CLASSES[module, name]


def read_pickle(file: BinaryIO) -> Any:
    """Return a pickle's plain data, strings as bytes, arrays as uint8; ValueError for anything else."""
    try:
        found = _PlainUnpickler(_CountedFile(file), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds data that is not plain ({type(error).__name__}: {error})") from None
    if isinstance(found, dict):
        return {key: item.value if isinstance(item, _Array) else item for key, item in found.items()}
    return found
