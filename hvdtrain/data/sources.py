"""Where samples come from: arrays, built-in data sets, ``.npz`` files, and what a user's callable returns.

Owns the `Source` contract and the way from a name in the configuration to data. Knows no framework:
adapters, functions of the backends that are passed in, turn framework datasets into a `Source` or a
`Stream`.
"""

from __future__ import annotations

import inspect
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.balance.memory import host_budget_bytes
from hvdtrain.data import text as english
from hvdtrain.data.sampler import at_least, epoch_order, random_bits
from hvdtrain.data.stream import Arrays, Stream
from hvdtrain.data.digits import table
from hvdtrain.errors import UserError, nearest
from hvdtrain.resolve import load_callable

SPLITS = ("train", "test")
_NAMES = ("x", "y", "sample_weight")
_WORK_BYTES = 24
"""Bytes that made-up data take for each number while it is made: its bits and two float64."""
_STREAM = 2**63
"""First of the random streams used here; the sampler's count up from 0."""


@runtime_checkable
class Source(Protocol):
    """Samples that can be fetched by number."""

    def __len__(self) -> int:
        """Number of samples, the same on every rank."""
        ...

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        """Return arrays (n, ...) of the samples ``indices_n`` (int64[n], n >= 1), in that order."""
        ...


Data = Source | Stream
Adapter = Callable[[Any], "Data | None"]


class ArraySource:
    """Samples along the first axis of arrays: x, then y, then per-sample weights, as far as there are any.

    Errors: `UserError` for arrays of different lengths, scalars, no array at all, and elements that are not truth
    values, integers or real numbers.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays: Arrays = tuple(np.asarray(array) for array in arrays)
        shapes = [array.shape for array in self.arrays]
        for i, array in enumerate(self.arrays):
            if array.dtype.kind not in "biuf":
                name = _NAMES[i] if i < len(_NAMES) else "more"
                raise UserError(f"data array {i} ({name}) has dtype {array.dtype} and shape {list(array.shape)}",
                                "bool, integer or floating-point elements", "convert the data to plain numeric arrays")
        if not shapes or () in shapes:
            kinds = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.arrays) or "none"
            raise UserError(f"the data arrays are: {kinds}",
                            "at least one array, each with a first axis that counts samples",
                            "convert the data to plain numeric arrays")
        if len({shape[0] for shape in shapes}) > 1:
            counts = ", ".join(f"array {i} {list(shape)}" for i, shape in enumerate(shapes))
            raise UserError(f"the data arrays differ in length: {counts}",
                            "one number of samples in all of them",
                            "check how x and y were made")

    def __len__(self) -> int:
        return len(self.arrays[0])

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        """Return copies of the samples ``indices_n``."""
        return tuple(array[indices_n] for array in self.arrays)


# --- built-in data -----------------------------------------------------------------------------------------

def digits(split: str, test_fraction: float = 0.2, seed: int = 0) -> Source:
    """Return scikit-learn's 1,797 handwritten digits: x float32 (n, 8, 8) in [0, 1], y int64 (n,) of 0 to 9.

    The test split takes ``test_fraction`` of every class, chosen by ``seed``, the same with every library
    version.
    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998, as scikit-learn
    ships it.
    """
    raw = table()
    x, y = (raw[:, :-1].reshape(-1, 8, 8) / 16.0).astype(np.float32), raw[:, -1].astype(np.int64)
    chosen = _split(y, test_fraction, seed) == (split == "test")
    return ArraySource((x[chosen], y[chosen]))


def synthetic(split: str, samples: int = 1024, shape: Sequence[int] = (8, 8), classes: int = 10,
              vocab: int = 0, seed: int = 0) -> Source:
    """Return ``samples`` made-up samples in either split that can be learnt, the same on every machine.

    ``vocab`` 0: x float32 (n, *shape) uniform in [-1, 1), y int64 (n,) the class that a fixed random linear
    map of x ranks first. ``vocab`` > 0: x int64 (n, T) tokens and y int64 (n, T) the tokens that follow, T
    the product of ``shape``; a token's successor is fixed nine times in ten, any token otherwise.
    """
    least_of = {"samples": (samples, 1), "classes": (classes, 2), "vocab": (vocab, 0), "seed": (seed, 0)}
    for name, (value, least) in least_of.items():
        at_least(f"data.args.{name}", value, least)
    extents: list[Any] = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    for extent in extents:
        at_least("data.args.shape (each extent)", extent, 1)
    size = math.prod(extents)
    numbers = 2 * samples * (size + 1) if vocab else samples * (size + classes) + size * classes
    _check_memory(f"{samples} samples of shape {extents} with {vocab or classes} classes", _WORK_BYTES * numbers)
    stream = _STREAM + 1 + SPLITS.index(split)
    if vocab:
        return _bigrams(samples, size, vocab, seed, stream)
    x = (2 * _uniform(samples * size, seed, stream) - 1).astype(np.float32).reshape(samples, size)
    teacher = (2 * _uniform(size * classes, seed, _STREAM) - 1).reshape(size, classes)
    y = (x.astype(np.float64) @ teacher).argmax(axis=1).astype(np.int64)
    return ArraySource((x.reshape(samples, *extents), y))


def _check_memory(what: str, needed_bytes: int) -> None:
    """Raise `UserError` where this host has less memory left; a number of samples may have a digit too many."""
    left_bytes = host_budget_bytes(1)
    if 0 < left_bytes < needed_bytes:
        raise UserError(f"data synthetic of {what} takes {needed_bytes / 2**30:,.1f} GiB while it is made",
                        f"at most the {left_bytes / 2**30:,.1f} GiB that this host has left",
                        "set data.args.samples, or shape, to less")


def text(split: str, context: int = 64, samples: int = 0, test_fraction: float = 0.1, seed: int = 0) -> Source:
    """Return Python's own help texts by character: x int64 (n, context) tokens below 96, y the tokens that follow.

    The test split takes ``test_fraction`` of the sequences, chosen by ``seed``, and either split at most ``samples``
    (0: all) of its own, spread over the text. See `hvdtrain.data.text` for the text and its tokens.
    """
    at_least("data.args.context", context, 1)
    at_least("data.args.samples", samples, 0)
    x, y = english.sequences(english.encode(english.paragraphs()), context)
    if len(x) < 2:
        raise UserError(f"data.args.context is {context}", "one that cuts the text into 2 sequences or more",
                        "set data.args.context: 64")
    chosen = np.flatnonzero(_split(np.zeros(len(x), np.int64), test_fraction, seed) == (split == "test"))
    if 0 < samples < len(chosen):
        chosen = chosen[np.arange(samples) * len(chosen) // samples]
    return ArraySource((x[chosen], y[chosen]))


def npz(path: str, split: str, test_fraction: float = 0.2, seed: int = 0) -> Source:
    """Return the arrays x, y, sample_weight of a ``.npz`` file, or x_test and so on; only x is a must.

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
    test = _by_name(arrays, "test", path)
    if split == "test" and test is not None:
        return ArraySource(test)
    train = _by_name(arrays, "train", path)
    assert train is not None
    whole = ArraySource(train)
    if test is not None:
        return whole
    if len(whole) < 2:
        raise UserError(f"{path} holds {len(whole)} samples and no x_test", "at least 2 to hold one out",
                        "add x_test and y_test")
    chosen = _split(np.zeros(len(whole), np.int64), test_fraction, seed) == (split == "test")
    return ArraySource([array[chosen] for array in train])


def _unreadable(path: str, error: Exception) -> str:
    """Why a ``.npz`` file cannot be read; numpy's own words would advise to unpickle what is no array at all."""
    if isinstance(error, OSError):
        return str(error)
    if not zipfile.is_zipfile(path) and "bare array" not in str(error):
        return "it is not a .npz file" + (", it is empty" if Path(path).stat().st_size == 0 else "")
    if "allow_pickle" in str(error):
        return "it holds Python objects"
    if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError)):
        return f"it is damaged ({error})"
    return str(error)


BUILT_IN: dict[str, Callable[..., Source]] = {"digits": digits, "synthetic": synthetic, "text": text}


# --- from a name to data -----------------------------------------------------------------------------------

def resolve(name: str, args: Mapping[str, Any], split: str, adapters: Sequence[Adapter] = ()) -> Data | None:
    """Return the data that ``name`` stands for: digits, synthetic, a ``.npz`` file, or ``module:callable``.

    ``args`` are passed by keyword; a callable that takes ``split`` gets it as well. None when there is no
    such split, which only ``test`` may lack. See `interpret` for what a callable may return.
    Errors: `UserError` for an unknown name or argument and for an unusable result.
    """
    assert split in SPLITS
    if "split" in args or name.endswith(".npz") and "path" in args:
        raise UserError(f"data.args holds {'split' if 'split' in args else 'path'!r}",
                        "it to be left to the trainer",
                        "remove it from data.args")
    if name in BUILT_IN:
        return _call(BUILT_IN[name], name, args, split=split)
    if name.endswith(".npz"):
        return _call(npz, "a .npz file", args, path=name, split=split)
    if ":" not in name:
        raise UserError(f"data {name!r} is unknown",
                        nearest(name, [*BUILT_IN, "FILE.npz", "module:callable"]),
                        "name one of these in data.name")
    function = load_callable(name, "data.name")
    takes_split = _takes(function, "split")
    made = _call(function, name, args, **({"split": split} if takes_split else {}))
    return interpret(made, split, adapters, name, whole=not takes_split)


def resolve_splits(name: str, args: Mapping[str, Any], adapters: Sequence[Adapter] = ()) -> tuple[Any, Any]:
    """Return (train, test or None) of what ``name`` stands for; a callable that takes no ``split`` is called once."""
    if ":" in name and not name.endswith(".npz") and "split" not in args:
        function = load_callable(name, "data.name")
        if not _takes(function, "split"):
            made = _call(function, name, args)
            return interpret(made, "train", adapters, name), interpret(made, "test", adapters, name)
    return resolve(name, args, "train", adapters), resolve(name, args, "test", adapters)


def interpret(obj: Any, split: str, adapters: Sequence[Adapter] = (), origin: str = "data",
              whole: bool = True) -> Data | None:
    """Return the `Source` or `Stream` of ``split`` in whatever a user handed over.

    ``obj``: an array, a tuple or list (x, y[, sample_weight]) or a dict of arrays by these names, a
    `Source`, a `Stream`, or anything that one of ``adapters`` takes; or a pair (train, test) of these, or a
    dict with x_test, y_test too. ``whole``: ``obj`` does not depend on ``split``, so unless it is a pair it
    is the train split.
    Errors: `UserError`, naming ``origin``, for anything else.
    """
    if isinstance(obj, Mapping) and "x" in obj:
        arrays = _by_name(obj, split if whole or "x_test" in obj else "train", origin)
        return None if arrays is None else _adapted(arrays, adapters, origin)
    if isinstance(obj, (tuple, list)) and len(obj) == 2 and not any(is_array(part) for part in obj):
        obj, whole = obj[SPLITS.index(split)], False
        return None if obj is None and split == "test" else interpret(obj, split, adapters, origin, whole)
    if split == "test" and (whole or obj is None):
        return None
    return _adapted(obj, adapters, origin)


def _adapted(obj: Any, adapters: Sequence[Adapter], origin: str) -> Data:
    parts = tuple(obj) if isinstance(obj, (tuple, list)) else (obj,)
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return ArraySource(parts)
    if isinstance(obj, (Source, Stream)):
        return obj
    for adapter in adapters:
        found = adapter(obj)
        if found is not None:
            return found
    if parts and all(is_array(part) for part in parts):
        return ArraySource(parts)
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    raise UserError(f"{origin} gave a {kind}",
                    "arrays (x, y[, sample_weight]) or a dict of them, ((x, y), (x_test, y_test)), an object "
                    "with len() and fetch(), one with chunks(), or a dataset of the model's framework",
                    "return one of these")


def is_array(obj: Any) -> bool:
    """Whether ``obj`` is an array, of any library."""
    return hasattr(obj, "__array__") and hasattr(obj, "shape")


def _by_name(arrays: Mapping[str, Any], split: str, origin: str) -> list[Any] | None:
    """Pick x, y, sample_weight of a split in this order; None where the test split has no x."""
    known = [name + suffix for suffix in ("", "_test") for name in _NAMES]
    for name in arrays:
        if name not in known:
            raise UserError(f"{origin} has an array named {name!r}",
                            nearest(name, known),
                            "rename or remove it")
    suffix = "_test" if split == "test" else ""
    found = {part: [name for name in _NAMES if name + part in arrays] for part in ("", "_test")}
    if not found[suffix] and suffix:
        return None
    if "x" not in found[suffix] or found["_test"] and found[""] != found["_test"]:
        raise UserError(f"{origin} has the arrays {', '.join(arrays) or '(none)'}",
                        "x, and the same of y and sample_weight in train and test", "add what is missing")
    return [arrays[name + suffix] for name in found[suffix]]


def fields(batch: Any) -> list[Any]:
    """Return the parts of a sample or batch that a framework's dataset gave, in order.

    Those of a tuple or list, or the one there is. Of a dict: x, y and sample_weight if it has an x, else all
    values in its own order. Errors: `UserError` for other names beside x.
    """
    if isinstance(batch, (tuple, list)):
        return list(batch)
    if not isinstance(batch, Mapping):
        return [batch]
    if "x" not in batch:
        return list(batch.values())
    for name in batch:
        if name not in _NAMES:
            raise UserError(f"a sample has a part named {name!r}",
                            nearest(name, _NAMES),
                            "rename or remove it")
    return [batch[name] for name in _NAMES if name in batch]


def _takes(function: Callable, name: str) -> bool:
    try:
        params = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        return False
    return name in params or any(p.kind is p.VAR_KEYWORD for p in params.values())


def _call(function: Callable, name: str, args: Mapping[str, Any], **ours: Any) -> Any:
    """Call with the user's ``args`` and ``ours``; an argument that does not fit is named to the user."""
    kwargs = {**args, **ours}
    try:
        params = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return _within_memory(function, name, kwargs)
    choices = [p.name for p in params.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in params.values())
    free = [choice for choice in choices if choice not in ours]
    for arg in kwargs:
        if arg not in choices and not open_ended:
            raise UserError(f"{name} takes no argument {arg!r}",
                            nearest(arg, free) if free else "no arguments",
                            "correct data.args")
    for choice in choices:
        if choice not in kwargs and params[choice].default is inspect.Parameter.empty:
            raise UserError(f"{name} needs the argument {choice!r}",
                            "it in data.args",
                            f"set data.args.{choice}")
    return _within_memory(function, name, kwargs)


def _within_memory(function: Callable, name: str, kwargs: Mapping[str, Any]) -> Any:
    """Call; memory that does not suffice is the user's to mend."""
    try:
        return function(**kwargs)
    except MemoryError as error:
        said = f": {error}" if str(error) else ""
        raise UserError(f"data {name} does not fit into this host's memory{said}", "less at a time",
                        "correct data.args, or return an object with len() and fetch(), or a stream") from error


# --- deterministic numbers ---------------------------------------------------------------------------------

def _uniform(n: int, seed: int, stream: int) -> np.ndarray:
    """Return float64[n] in [0, 1) of the 53 upper random bits."""
    return (random_bits(n, seed, stream) >> np.uint64(11)) * 2.0**-53


def _bigrams(samples: int, length: int, vocab: int, seed: int, stream: int) -> Source:
    successor = epoch_order(vocab, seed, _STREAM, shuffle=True)
    noise = _uniform(2 * samples * (length + 1), seed, stream).reshape(2, samples, length + 1)
    anything = (noise[0] * vocab).astype(np.int64)
    tokens = anything.copy()
    for t in range(1, length + 1):
        tokens[:, t] = np.where(noise[1, :, t] < 0.1, anything[:, t], successor[tokens[:, t - 1]])
    return ArraySource((tokens[:, :-1], tokens[:, 1:]))


def _split(labels_n: np.ndarray, test_fraction: float, seed: int) -> np.ndarray:
    """Return bool[n], True for the test samples: of every label the fraction, rounded, but never all."""
    at_least("data.args.seed", seed, 0)
    if not isinstance(test_fraction, (int, float)) or not 0 < test_fraction < 1:
        raise UserError(f"data.args.test_fraction is {test_fraction!r}", "a number above 0 and below 1",
                        "set data.args.test_fraction: 0.2")
    is_test = np.zeros(len(labels_n), bool)
    for rank, label in enumerate(np.unique(labels_n)):
        members = np.flatnonzero(labels_n == label)
        count = int(len(members) * test_fraction + 0.5)
        if len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        is_test[members[epoch_order(len(members), seed, _STREAM + rank, shuffle=True)[:count]]] = True
    return is_test
