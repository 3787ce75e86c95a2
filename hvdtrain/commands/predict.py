"""``python -m hvdtrain predict RUN --out FILE``: the outputs of a run's model for each sample, as a file.

Owns the formats of the file. `hvdtrain.engine.inference` computes, `hvdtrain.commands.evaluate` has the weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.downloads import copied
from hvdtrain.cluster import exit_calls
from hvdtrain.cluster.control import agreed
from hvdtrain.commands.evaluate import (
    OPTIONS,
    START,
    add_options,
    config_of,
    loaded,
    of_split,
    read_options,
    refuse_existing,
    splits_of,
)
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import not_installed
from hvdtrain.core.terminal import say
from hvdtrain.engine import inference
from hvdtrain.engine.inference import Outputs, check_alike

ROW_GROUP = 8192
"""Samples of a row group of Parquet, about: readers skip and parallelize by groups."""


def main(argv: list[str]) -> int:
    """Write the file; return 0."""
    args, rest = read_options(parser(), argv)
    check_format(args.out)
    with exit_calls.told(), copied(args.run, everything=False) as run:
        config = config_of(run, rest, args)
        made = inference.assemble(config, splits=splits_of(run, config, args.split), labels=False)
        control = made.job.control
        agreed(control, lambda: refuse_existing(args.out) if control.rank == 0 else None, "--out")
        source = loaded(made, run, args)
        target = agreed(control, lambda: OutputFile(args.out) if control.rank == 0 else None, "--out")
        try:
            samples = inference.predict(control, made.parts, made.feed, made.recovery,
                                        target.write if target else lambda outputs: None)
            agreed(control, target.finish if target else lambda: None, "--out")
        finally:
            if target is not None:
                target.discard()
        if control.rank == 0:
            say(f"wrote the outputs of {source.name} for {samples} samples of {of_split(made, config)} to {args.out}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hvdtrain predict", allow_abbrev=False,
        description="Write the outputs of a run's model for each sample, in the order of the data, on any number of "
                    "ranks. " + START + OPTIONS)
    add_options(made)
    made.add_argument("--out", required=True, metavar="FILE",
                      help="new file: .npz (one array for each output), .jsonl (one line for each sample) or .parquet "
                           "(needs pyarrow)")
    return made


def check_format(out: str) -> None:
    """Raise `UserError` for a file of another format, and for Parquet without pyarrow."""
    if Path(out).suffix not in FORMATS:
        raise UserError(f"--out is {out}", f"a file name that ends in {', '.join(FORMATS)}", "correct --out")
    if Path(out).suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise not_installed(f"--out {out}", "pyarrow", "parquet")


class Format(Protocol):
    """Writes outputs into the file ``path``."""

    def __init__(self, path: Path) -> None: ...

    def write(self, outputs: Outputs) -> None: ...

    def close(self) -> None: ...


class OutputFile:
    """The file ``out``, written aside and renamed when it is complete. Errors: `UserError`."""

    def __init__(self, out: str) -> None:
        self._path = Path(os.path.abspath(out))
        self._temp: Path | None = None
        self._format: Format | None = None
        self._guarded(self._open)

    def write(self, outputs: Outputs) -> None:
        assert self._format is not None
        self._guarded(lambda: self._format.write(outputs))  # type: ignore[union-attr]

    def finish(self) -> None:
        self._guarded(self._finish)

    def discard(self) -> None:
        """Remove what has been written, unless `finish` has renamed it."""
        if self._temp is not None:
            files.remove_quietly(self._temp)
            self._temp = None

    def _open(self) -> None:
        files.make_directories(self._path.parent)
        self._temp = files.make_temp(self._path.parent)
        self._format = FORMATS[self._path.suffix](self._temp / self._path.name)

    def _finish(self) -> None:
        assert self._format is not None and self._temp is not None
        self._format.close()
        files.fsync(self._temp / self._path.name)
        os.rename(self._temp / self._path.name, self._path)
        files.fsync_directory(self._path.parent)
        self.discard()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error}", "a writable place with room",
                            "choose another --out") from None
        except (TypeError, ValueError, NotImplementedError) as error:  # of json and pyarrow
            raise UserError(f"the outputs cannot be written as {self._path.suffix}: {error}", "types and shapes that "
                            "the format has", "write a .npz file") from None


class JsonLines:
    """Write one object for each sample: outputs by name, as numbers or nested lists."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", encoding="utf-8")

    def write(self, outputs: Outputs) -> None:
        names = list(outputs)
        for row in zip(*(array.tolist() for array in outputs.values())):
            self._file.write(json.dumps(dict(zip(names, row))) + "\n")

    def close(self) -> None:
        self._file.close()


class Npz:
    """Write one array for each output; parts lie beside ``path`` first, since an archive takes one member at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, tuple[np.ndarray, BinaryIO]] = {}
        self._samples = 0

    def write(self, outputs: Outputs) -> None:
        for name, array in outputs.items():
            if name not in self._parts:
                self._parts[name] = array[:0], open(self._path.with_name(f"{len(self._parts)}.part"), "w+b")
            like, file = self._parts[name]
            check_alike(name, array, like)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._samples += len(array)

    def close(self) -> None:
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED) as archive:
            for name, (like, part) in self._parts.items():
                with part, archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_2_0(member, {
                        "descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False,
                        "shape": (self._samples, *like.shape[1:])})
                    part.seek(0)
                    shutil.copyfileobj(part, member, 1 << 20)
                os.unlink(part.name)


class Parquet:
    """Write one column for each output; rows of an array are lists of fixed size, nested for more dimensions."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[Outputs] = []
        self._first: Outputs = {}
        self._writer: Any = None

    def write(self, outputs: Outputs) -> None:
        self._first = self._first or {name: array[:0] for name, array in outputs.items()}
        for name, array in outputs.items():
            check_alike(name, array, self._first[name])
        self._kept.append(outputs)
        if sum(map(_rows, self._kept)) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow
        import pyarrow.parquet

        if not self._kept:
            return
        columns = {name: _column(pyarrow, np.concatenate([one[name] for one in self._kept])) for name in self._first}
        table = pyarrow.table(columns)
        self._kept = []
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(str(self._path), table.schema)
        self._writer.write_table(table)


def _rows(outputs: Outputs) -> int:
    return len(next(iter(outputs.values())))


def _column(pyarrow: Any, array: np.ndarray) -> Any:
    column = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column


FORMATS: dict[str, type[Format]] = {".npz": Npz, ".jsonl": JsonLines, ".parquet": Parquet}
"""Classes of formats, by the ending of the file."""
