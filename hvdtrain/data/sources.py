"""Resolve ``data.name`` or a user's object to a `Source`: arrays, sets by name, files, callables, framework datasets.

Owns the `Source` contract, the listing of folders and held-out samples. The backends' adapters convert framework
datasets.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import absolute, in_slot, load_callable, load_slot
from hvdtrain.data.stream import Arrays, Stream
from hvdtrain.planning.batch.sampler import at_least, epoch_order, random_bits

SETS = "hvdtrain.data.sets"
ENDINGS = (".npz", ".npy")
"""Endings of files that ``data.name`` may spell out; the set of that name gets the file as ``path``."""

PATHS = ("root", "cache")  # arguments of sets by name that are paths
_NAMES = ("x", "y", "sample_weight")


@runtime_checkable
class Source(Protocol):
    """Samples that can be fetched by number. Optional attributes: ``classes`` (number or names) and ``fixed``."""

    def __len__(self) -> int:
        """Return the number of samples, the same on every rank."""

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        """Return arrays (n, ...) of the samples ``indices_n`` (int64[n], n >= 1), in that order."""


@runtime_checkable
class EpochSource(Source, Protocol):
    """A source whose samples depend on (a seed, the epoch, their number), never on the rank or the batch."""

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        return self.fetch_in(indices_n, 0)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        """Return arrays (n, ...) of the samples ``indices_n`` as they are in ``epoch``."""


class Unreadable(UserError):
    """An unreadable sample: its ``number`` and its ``place``, such as a path. `fetch` raises the first one."""

    def __init__(self, number: int, place: str, reason: str) -> None:
        super().__init__(f"sample {number} cannot be read: {place}: {reason}", "a sample that can be read",
                         "fix or remove it")
        self.number, self.place, self.reason = number, place, reason

    def __reduce__(self) -> tuple:
        return type(self), (self.number, self.place, self.reason)


def innermost(source: Any) -> Any:
    """Return the source at the bottom of a chain of ``wraps``."""
    while hasattr(source, "wraps"):
        source = source.wraps
    return source


def fetched(source: Source, indices_n: np.ndarray, epoch: int) -> Arrays:
    """Fetch samples of any source; `UserError` unless there is one row for each."""
    found: Any = source.fetch_in(indices_n, epoch) if isinstance(source, EpochSource) else source.fetch(indices_n)
    return checked(found, len(indices_n))


def checked(found: Any, n: int) -> Arrays:
    """Return the result of a fetch of ``n`` samples as a tuple of arrays; `UserError` unless one row each."""
    arrays = (found,) if isinstance(found, np.ndarray) else tuple(found)
    if not arrays or any(np.ndim(array) == 0 or len(array) != n for array in arrays):
        shapes = [np.shape(array) for array in arrays]
        raise UserError(f"fetching {n} samples gave arrays of shapes {shapes}", f"arrays whose first axis is {n}",
                        "fix the dataset's fetch()")
    return arrays


def refuse_strings(values: Any, where: str) -> None:
    """Raise `UserError` where ``values``, an array or a sequence named ``where``, holds strings."""
    first = next(iter(values.flat if isinstance(values, np.ndarray) else values), None)
    if isinstance(first, (str, bytes)):
        text = first.decode(errors="replace") if isinstance(first, bytes) else str(first)
        raise UserError(f"{where} holds strings, such as {text[:20]!r}", "numbers", "turn the text into numbers before "
                        "training: tokenize it, or map Keras' StringLookup or TextVectorization over the data, outside "
                        "the model")


Data = Source | Stream
Adapter = Callable[[Any], "Data | None"]


class ArraySource:
    """Samples along the first axis of x, y and weights; `UserError` for unequal lengths and other elements."""

    rows: Any = None  # the `hvdtrain.data.rows.ColumnNames` of named columns; ``layout``: of nested ones
    layout: Any = None
    fixed = True
    """Whether a sample is the same at every reading, so that ranks that read different ones are refused."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays: Arrays = tuple(np.asarray(array) for array in arrays)
        shapes = [array.shape for array in self.arrays]
        for i, array in enumerate(self.arrays):
            if array.dtype.kind not in "biuf":
                name = _NAMES[i] if i < len(_NAMES) else "more"
                refuse_strings(array, f"data array {i} ({name})")
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
                            "one number of samples in all of them", "check how x and y were made")

    def __len__(self) -> int:
        return len(self.arrays[0])

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        return tuple(array[indices_n] for array in self.arrays)


def resolve(name: str, args: Mapping[str, Any], split: str, adapters: Sequence[Adapter] = ()) -> Data | None:
    """Return the data that ``name`` stands for: a set by its name, a file by its ending, or ``module:callable``.

    ``args`` are passed by keyword; a callable that takes ``split`` gets it as well. None when there is no such split,
    which only ``test`` and ``all`` may lack. `interpret` says what a callable may return.
    Errors: `UserError` for an unknown name or argument and for an unusable result.
    """
    assert split in (*SPLITS, ALL)
    ending = _ending(name)
    if "split" in args or ending and "path" in args:
        raise UserError(f"data.args holds {'split' if 'split' in args else 'path'!r}",
                        "arguments that the trainer does not set itself", "remove it from data.args")
    if ending:
        return _call(load_slot(SETS, ending[1:], "data.name", "make"), f"a {ending} file", args, path=_path(name),
                     split=split)
    if ":" not in name:
        known = in_slot(SETS, "make")
        if name not in known:
            raise UserError(f"data {name!r} is unknown",
                            nearest(name, [*known, *(f"FILE{e}" for e in ENDINGS), "module:callable"]),
                            "name one of these in data.name")
        args = {key: _path(value) if key in PATHS else value for key, value in args.items()}
        make = load_slot(SETS, name, "data.name", "make")
        return _call(make, name, args, split=split) if split != ALL or _takes(make, "test_fraction") else None
    function = load_callable(name, "data.name")
    takes_split = _takes(function, "split")
    if split == ALL and takes_split:
        return None
    made = _call(function, name, args, **({"split": split} if takes_split else {}))
    if split == ALL:
        return undivided(made, adapters, name)
    return interpret(made, split, adapters, name, whole=not takes_split)


def resolve_splits(name: str, args: Mapping[str, Any], adapters: Sequence[Adapter] = ()) -> tuple[Any, Any]:
    """Return (train, test or None) of ``name``; a callable that takes no ``split`` is called once."""
    if ":" in name and not _ending(name) and "split" not in args:
        function = load_callable(name, "data.name")
        if not _takes(function, "split"):
            made = _call(function, name, args)
            return interpret(made, "train", adapters, name), interpret(made, "test", adapters, name)
    return resolve(name, args, "train", adapters), resolve(name, args, "test", adapters)


def undivided(obj: Any, adapters: Sequence[Adapter] = (), origin: str = "data") -> Data | None:
    """Return all of a user's object; None for a pair (train, test), whose test split is its own."""
    return interpret(obj, "train", adapters, origin) if interpret(obj, "test", adapters, origin) is None else None


def interpret(obj: Any, split: str, adapters: Sequence[Adapter] = (), origin: str = "data",
              whole: bool = True) -> Data | None:
    """Return the `Source` or `Stream` of ``split`` in a user's object.

    ``obj``: an array, a tuple or list (x, y[, sample_weight]) or a dict of arrays by these names, a `Source`, a
    `Stream`, or anything that one of ``adapters`` takes; or a pair (train, test) of these, a dict with x_test,
    y_test too, or a ``datasets.DatasetDict``, whose test split is "validation", else "test". ``whole``: ``obj`` does
    not depend on ``split``, so unless it is a pair it is the train split. Errors: `UserError`, naming ``origin``, for
    anything else.
    """
    if isinstance(obj, Mapping) and type(obj).__module__.startswith("datasets.") and "train" in obj:  # a DatasetDict
        obj = obj["train"], obj.get("validation", obj.get("test"))
    if isinstance(obj, Mapping) and "x" in obj:
        arrays = by_name(obj, split if whole or "x_test" in obj else "train", origin)
        return None if arrays is None else _adapted(arrays, adapters, origin)
    if isinstance(obj, (tuple, list)) and len(obj) == 2 and not any(is_array(part) for part in obj):
        obj, whole = obj[SPLITS.index(split)], False
        return None if obj is None and split == "test" else interpret(obj, split, adapters, origin, whole)
    if split == "test" and (whole or obj is None):
        return None
    return _adapted(obj, adapters, origin)


def _path(given: Any) -> Any:
    """Return a path as an absolute one, since files may be read later; anything else and ``~`` unchanged."""
    return str(absolute(given)) if isinstance(given, str) and given and not given.startswith("~") else given


def _ending(name: str) -> str:
    return next((ending for ending in ENDINGS if name.endswith(ending)), "")


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
    for part in (obj, *parts):
        if isinstance(part, (list, tuple)):
            refuse_strings(part, origin)
    named = obj.items() if isinstance(obj, Mapping) else zip(_NAMES, parts if len(parts) <= len(_NAMES) else ())
    lists = [name for name, part in named if isinstance(part, list)]
    if lists:
        raise UserError(f"{origin} has the columns {', '.join(map(repr, lists))} as Python lists", "arrays",
                        "convert them to arrays, such as numpy.asarray(column, numpy.float32)")
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    raise UserError(f"{origin} gave a {kind}",
                    "arrays (x, y[, sample_weight]) or a dict of them, ((x, y), (x_test, y_test)), an object with "
                    "len() and __getitem__, or with fetch(), one with chunks(), or a dataset of the model's framework",
                    "return one of these")


def is_array(obj: Any) -> bool:
    """Return whether ``obj`` is an array of any library."""
    return hasattr(obj, "__array__") and hasattr(obj, "shape")


def check_names(arrays: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for an array named other than x, y and sample_weight, and for a weight without y."""
    known = [name + suffix for suffix in ("", "_test") for name in _NAMES]
    for name in arrays:
        if name not in known:
            raise UserError(f"{origin} has an array named {name!r}", nearest(name, known),
                            "rename or remove it")
    for end in ("", "_test"):
        if "sample_weight" + end in arrays and "y" + end not in arrays:
            raise UserError(f"{origin} has sample_weight{end} without y{end}", f"y{end}, which it weights",
                            "add or rename an array")


def by_name(arrays: Mapping[str, Any], split: str, origin: str) -> list[Any] | None:
    """Pick x, y, sample_weight of a split in this order; None where the test split has no x."""
    check_names(arrays, origin)
    suffix = "_test" if split == "test" else ""
    found = {part: [name for name in _NAMES if name + part in arrays] for part in ("", "_test")}
    if not found[suffix] and suffix:
        return None
    if "x" not in found[suffix] or found["_test"] and found[""] != found["_test"]:
        raise UserError(f"{origin} has the arrays {', '.join(arrays) or '(none)'}",
                        "x, and the same of y and sample_weight in train and test", "add what is missing")
    return [arrays[name + suffix] for name in found[suffix]]


def _takes(function: Callable, name: str) -> bool:
    try:
        params = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        return False
    return name in params or any(p.kind is p.VAR_KEYWORD for p in params.values())


def _call(function: Callable, name: str, args: Mapping[str, Any], **ours: Any) -> Any:
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
            raise UserError(f"{name} takes no argument {arg!r}", nearest(arg, free) if free else "no arguments",
                            "correct data.args")
    for choice in choices:
        if choice not in kwargs and params[choice].default is inspect.Parameter.empty:
            raise UserError(f"{name} needs the argument {choice!r}", "it in data.args",
                            f"set data.args.{choice}")
    return _within_memory(function, name, kwargs)


def _within_memory(function: Callable, name: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(**kwargs)
    except MemoryError as error:
        said = f": {error}" if str(error) else ""
        raise UserError(f"data {name} does not fit into this host's memory{said}", "data that fits",
                        "correct data.args, or return an object with len() and fetch(), or a stream") from error


def shown(path: bytes) -> str:
    """Return a path as printable text."""
    return os.fsdecode(path).encode("utf-8", "replace").decode()


def files_in(folder: bytes, endings: tuple[bytes, ...], below: bytes = b"",
             above: tuple[bytes, ...] = ()) -> Iterator[bytes]:
    """Yield the files in ``folder`` and in folders therein that have one of ``endings`` (any case), in no order.

    As paths from ``folder``. Hidden ones are left out; links are followed, a broken one is yielded.
    Errors: `UserError` for a folder that cannot be read or that contains itself by a link.
    """
    place = os.path.realpath(folder)
    if place in above:
        raise UserError(f"{shown(folder)} is a link to one of its parent folders", "folders without loops", "remove it")
    for entry in entries(folder):
        name = below + entry.name
        if is_(entry.is_dir):
            yield from files_in(entry.path, endings, name + b"/", (*above, place))
        elif entry.name.lower().endswith(endings) and (is_(entry.is_file) or entry.is_symlink()
                                                       and not os.path.exists(entry.path)):
            yield name


def is_(asked: Callable[[], bool]) -> bool:
    """Call an entry's ``is_dir`` or ``is_file``; False for a link to itself, which raises."""
    try:
        return asked()
    except OSError:
        return False


def entries(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    """Yield the entries of ``folder`` that are not hidden, in no order."""
    try:
        with os.scandir(folder) as found:
            yield from (entry for entry in found if not entry.name.startswith(b"."))
    except OSError as error:
        raise UserError(f"the folder {shown(folder)} cannot be read: {error.strerror}", "a folder that can be",
                        "correct its permissions, or data.args.root") from None


SPLITS = ("train", "test")
ALL = "all"
"""Split of a set by name that holds samples out (argument ``test_fraction``): all samples; None if it has a test split
of its own."""
STREAM = 2**63  # first of the random streams used here


def uniform(n: int, seed: int, stream: int) -> np.ndarray:
    """Return float64[n] in [0, 1) of the 53 upper random bits."""
    return (random_bits(n, seed, stream) >> np.uint64(11)) * 2.0**-53


def chosen(labels_n: np.ndarray, test_fraction: float, seed: int, split: str) -> np.ndarray:
    """Return bool[n], True for the samples of ``split`` by `held_out`."""
    is_test = held_out(labels_n, test_fraction, seed)
    return np.ones(len(is_test), bool) if split == ALL else is_test == (split == "test")


def held_out(labels_n: np.ndarray, test_fraction: float, seed: int) -> np.ndarray:
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
        is_test[members[epoch_order(len(members), seed, STREAM + rank, shuffle=True)[:count]]] = True
    return is_test
