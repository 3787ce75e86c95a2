"""``npy``: arrays in ``.npy`` files of one folder, mapped into memory, so that they may be larger than it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, count
from hvdtrain.data.sources import ALL, Source, by_name, chosen
from hvdtrain.data.stream import Arrays

_NAMES = ("x", "y", "sample_weight")
_PARTS = ("", "_train", "_test")


def make(split: str, root: str = "", path: str = "", test_fraction: float = 0.2, seed: int = 0) -> Source | None:
    """Return the arrays x_train.npy, y_train.npy, sample_weight_train.npy in ``root``, or x_test.npy and so on.

    ``path``: x_train.npy itself, or x.npy, in place of ``root``. Of x.npy, y.npy without x_test.npy, ``test_fraction``
    of the samples, chosen by ``seed``, is held out; x_train.npy without x_test.npy leaves no evaluation. Only x is
    required. Errors: `UserError` for files that are missing, damaged, or do not fit one another.
    """
    folder = _folder(root, path)
    files = {name + part: folder / f"{name}{part}.npy" for part in _PARTS for name in _NAMES
             if (folder / f"{name}{part}.npy").is_file()}
    if "x" in files and "x_train" in files:
        raise UserError(f"{folder} holds both x.npy and x_train.npy", "one of them", "rename or remove the other")
    if split == ALL and "x_test" in files:
        return None
    halves = not any(name.endswith(("_train", "_test")) for name in files)
    found = by_name({name.removesuffix("_train"): file for name, file in files.items()}, split if not halves else
                    "train", str(folder))
    return None if found is None else Mapped(found, (split, test_fraction, seed) if halves else None)


def _folder(root: Any, path: Any) -> Path:
    if bool(root) == bool(path) or not isinstance(root or path, (str, os.PathLike)):
        raise UserError(f"data.args.root is {root!r}", "the folder that holds x_train.npy or x.npy",
                        "set data.args.root to its path")
    file = Path(path or root).expanduser()
    if path:
        if file.name not in ("x.npy", "x_train.npy"):
            raise UserError(f"data.name is {path}", "a file x.npy or x_train.npy, with y.npy or y_train.npy in the "
                                                    "same folder",
                            "rename the file")
        if file.is_file():
            return file.parent
    elif any((file / name).is_file() for name in ("x.npy", "x_train.npy")):
        return file
    what = "" if (file.parent if path else file).is_dir() else ", which does not exist"
    raise UserError(f"there is no {file}" if path else f"there is no x_train.npy and no x.npy in {file}{what}",
                    "arrays that numpy.save wrote", "check data.name" if path else "correct data.args.root")


class Mapped:
    """Samples along the first axis of ``.npy`` files, opened by each process that unpickles it.

    ``held``: (split, fraction, seed) of a set that is divided in two, or None. Errors: `UserError` for a file other
    than a ``.npy`` of numbers row by row, files of different lengths, and one that has changed since the start.
    """

    fixed = True

    def __init__(self, files: list[Path], held: tuple[str, float, int] | None) -> None:
        self._files, self._held = [str(file.resolve()) for file in files], held
        self._stamps = [_stamp(file) for file in self._files]
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {"_files": self._files, "_held": self._held, "_stamps": self._stamps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        self._check_unchanged()
        self._arrays = [_mapped(file) for file in self._files]
        n = len(self._arrays[0])
        if len({len(array) for array in self._arrays}) > 1:
            counts = ", ".join(f"{Path(f).name} {list(a.shape)}" for f, a in zip(self._files, self._arrays))
            raise UserError(f"{Path(self._files[0]).parent} has arrays that differ in length: {counts}",
                            "one number of samples in all of them", "check how they were made")
        self._chosen: np.ndarray | None = None
        if self._held is not None:
            split, fraction, seed = self._held
            if n < 2 and split != ALL:
                raise UserError(f"{self._files[0]} holds {count(n, 'sample')}, and there is no x_test.npy",
                                "at least 2 to hold one out", "add x_test.npy and y_test.npy")
            self._chosen = np.flatnonzero(chosen(np.zeros(n, np.int8), fraction, seed, split))

    def _check_unchanged(self) -> None:
        """Raise `UserError` for a changed file; reading one that was truncated would end the process."""
        for file, stamp in zip(self._files, self._stamps):
            if _stamp(file) != stamp:
                raise UserError(f"{file} changed while it was in use", "files that do not change during a run",
                                "start the run again with the current file")

    def __len__(self) -> int:
        return len(self._arrays[0]) if self._chosen is None else len(self._chosen)

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        self._check_unchanged()
        rows = indices_n if self._chosen is None else self._chosen[indices_n]
        return tuple(np.array(array[rows], dtype=array.dtype.newbyteorder("=")) for array in self._arrays)


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", "the file as it was at the start of the run",
                        "put it back") from None
    return status.st_size, status.st_mtime_ns


def _mapped(file: str) -> np.ndarray:
    """Map ``file``; `UserError` for one that is not numbers, row by row."""
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, OverflowError) as error:
        raise UserError(f"{file} cannot be read: {_unreadable(file, error)}", "an array that numpy.save wrote",
                        "write it with numpy.save(path, array)") from None
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise UserError(f"{file} has dtype {array.dtype} and shape {list(array.shape)}",
                        "bool, integer or floating-point elements, with a first axis that counts samples",
                        "convert the data to plain numeric arrays")
    if not array.flags.c_contiguous:
        raise UserError(f"{file} is stored column by column, so that each sample is spread over the whole file",
                        "an array that is stored row by row", "write it with numpy.save(path, np.ascontiguousarray(a))")
    return array


def _unreadable(file: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    with open(file, "rb") as opened:
        if opened.read(6) != b"\x93NUMPY":
            return "it is not a .npy file"
    said = " ".join(str(error).split())
    if "Python objects" in said:
        return "it holds Python objects"
    return "it is truncated" if "mmap length" in said or "EOF" in said else said[:200]
