"""``FILE.npz``: arrays that numpy.savez wrote."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.data.sources import ALL, ArraySource, Source, by_name, chosen


def make(path: str, split: str, test_fraction: float = 0.2, seed: int = 0) -> Source | None:
    """Return the arrays x, y, sample_weight of a ``.npz`` file, or x_test and so on; only x is required.

    Without x_test, ``test_fraction`` of the samples, chosen by ``seed``, is held out. Nothing is unpickled.
    Errors: `UserError` for a file that is missing, unreadable, not a ``.npz``, or lacks x.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one bare array")
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        beside = Path(path).parent.glob("*.npz")
        raise UserError(f"no file {path}",
                        nearest(path, (str(found) for found in beside)) if Path(path).parent.is_dir()
                        else "an existing .npz file",
                        "check data.name") from None
    except (OSError, ValueError, AttributeError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile,
            zlib.error) as error:
        raise UserError(f"{path} cannot be read: {_unreadable(path, error)}", "a .npz file of plain arrays",
                        "write it with numpy.savez(path, x=..., y=...)") from None
    test = by_name(arrays, "test", path)
    if split == "test" and test is not None:
        return ArraySource(test)
    train = by_name(arrays, "train", path)
    assert train is not None
    whole = ArraySource(train)
    if test is not None:
        return whole if split != ALL else None
    if split != ALL and len(whole) < 2:
        raise UserError(f"{path} holds {count(len(whole), 'sample')} and no x_test", "at least 2 to hold one out",
                        "add x_test and y_test")
    taken = chosen(np.zeros(len(whole), np.int64), test_fraction, seed, split)
    return ArraySource([array[taken] for array in train])


def _unreadable(path: str, error: Exception) -> str:
    """Describe the damage; numpy's own message would advise to unpickle."""
    if isinstance(error, OSError):
        return str(error)
    if not zipfile.is_zipfile(path) and "bare array" not in str(error):
        return "it is not a .npz file" + (", it is empty" if Path(path).stat().st_size == 0 else "")
    if "allow_pickle" in str(error):
        return "it holds Python objects"
    if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError)):
        return f"it is damaged ({error})"
    return str(error)
