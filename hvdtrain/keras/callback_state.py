"""State of Keras callbacks in a form that checkpoints store, and back, exactly.

Owns which attributes are state, which types can be stored, and the search for those that changed since training began.
When a state is taken and where it is written is left to `hvdtrain.keras.bridge` and the checkpoint.
"""

from __future__ import annotations

import base64
import collections
import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

Arrays = dict[str, np.ndarray]

TAG = "$"
"""Key of the dictionaries that stand for a value that JSON lacks; its value names the kind."""
INLINE_BYTES = 256
"""Arrays up to this size are written into the JSON text: a file entry each would take more."""
DEEPEST = 32
"""Containers inside of each other; more are taken for a structure that contains itself."""
NOT_STATE = ("params", "model", "_model", "validation_data", "monitor_op")
"""Attributes that Keras sets at the start of each fit."""
WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "BackupAndRestore", "RemoteMonitor", "ProgbarLogger",
           "OrbaxCheckpoint")
"""Keras callbacks, and classes made of them, that run on rank 0 alone; so does any with ``where = "root"``."""


class Unstorable(TypeError):
    """A value of a type that cannot be stored."""


def writes(callback: Any) -> bool:
    """Return whether a Keras callback runs on rank 0 alone."""
    said = getattr(callback, "where", None)
    return said == "root" if said in ("root", "all") else bool(_of_keras(callback) & set(WRITERS))


def _of_keras(callback: Any) -> set[str]:
    """Return the names of Keras' own classes that the callback is made of."""
    return {c.__name__ for c in type(callback).__mro__ if c.__module__.startswith("keras.")}


# --- one value -----------------------------------------------------------------------------------------------------

def encode(value: Any, arrays: Arrays, name: str, depth: int = 0) -> Any:
    """Return ``value`` as JSON; arrays go into ``arrays`` under ``name`` and a counter. `Unstorable`."""
    if value is None or isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if depth > DEEPEST:
        raise Unstorable(f"a {type(value).__name__} that contains itself")
    if type(value) is list:
        return [encode(one, arrays, name, depth + 1) for one in value]
    if type(value) in (tuple, set, frozenset, collections.deque):
        found: dict[str, Any] = {TAG: type(value).__name__,
                                 "items": [encode(one, arrays, name, depth + 1) for one in value]}
        return {**found, "maxlen": value.maxlen} if isinstance(value, collections.deque) else found
    if type(value) in (dict, collections.OrderedDict):
        items = [[encode(one, arrays, name, depth + 1) for one in pair] for pair in value.items()]
        return {TAG: type(value).__name__, "items": items}
    if type(value) is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        array = numpy_of(value)
        return {TAG: "variable" if isinstance(value, keras.Variable) else "tensor",
                "value": _array(array, arrays, name)}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return _array(value, arrays, name)
    raise Unstorable(f"a {type(value).__name__}")


def numpy_of(tensor: Any) -> np.ndarray:
    """Return a copy in host memory of a tensor or a variable of Keras."""
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


def _array(value: Any, arrays: Arrays, name: str) -> dict[str, Any]:
    """Return an array or a scalar of numpy as JSON, of large ones the place in ``arrays``."""
    array = np.ascontiguousarray(value)
    named = array.dtype.kind == "V"  # such as bfloat16, a type that numpy lacks
    found = {TAG: "scalar" if isinstance(value, np.generic) else "array", "shape": list(np.shape(value)),
             "dtype": array.dtype.name if named else array.dtype.str}
    if array.nbytes <= INLINE_BYTES:
        return {**found, "value": base64.b64encode(array.tobytes()).decode()}
    place = f"{name}/{len(arrays)}"
    arrays[place] = array if array.dtype.kind in "biuf" else array.reshape(-1).view(np.uint8)
    return {**found, "place": place}


def decode(value: Any, arrays: Arrays) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return [decode(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value[TAG]
    if kind in ("scalar", "array"):
        dtype = np.dtype(value["dtype"])
        raw = arrays[value["place"]].tobytes() if "place" in value else base64.b64decode(value["value"])
        array = np.frombuffer(raw, dtype).reshape(value["shape"]).copy()
        return array[()] if kind == "scalar" else array
    simple: dict[str, Callable[[], Any]] = {
        "float": lambda: float(value["value"]), "bytes": lambda: base64.b64decode(value["value"]),
        "variable": lambda: decode(value["value"], arrays),
        "tensor": lambda: keras.ops.convert_to_tensor(decode(value["value"], arrays))}
    if kind in simple:
        return simple[kind]()
    items = [decode(one, arrays) for one in value["items"]]
    if kind == "deque":
        return collections.deque(items, value["maxlen"])
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict,
            "OrderedDict": collections.OrderedDict}[kind](items)


# --- one callback --------------------------------------------------------------------------------------------------

def attributes(callback: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that may be state: no functions, no parts of the model."""
    bases = _of_keras(callback)
    left_out = {*NOT_STATE, *(("min_delta",) if "MonitorCallback" in bases else ()),  # Keras turns its sign
                *(("history", "epoch") if "History" in bases else ())}  # of the epochs of one process
    own_files = type(callback).__module__.startswith("keras.") and writes(callback)
    for name, value in vars(callback).items():
        if name in left_out or callable(value) and not isinstance(value, keras.metrics.Metric):
            continue
        if own_files and name.startswith("_") and (isinstance(value, bool) or not isinstance(value, (int, float))):
            continue  # whether files, traces and the like are open in this process
        yield name, value


def take(callback: Any, arrays: Arrays, prefix: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a callback's attributes as JSON, and why others cannot be stored; arrays go into ``arrays``."""
    found, unstorable = {}, {}
    for name, value in attributes(callback):
        own: Arrays = {}
        try:
            found[name] = encode(value, own, f"{prefix}/{name}")
            arrays.update(own)
        except Unstorable as problem:
            unstorable[name] = str(problem)
    return found, unstorable


def put(callback: Any, state: dict[str, Any], arrays: Arrays) -> None:
    """Undo `take`."""
    for name, value in state.items():
        decoded, held = decode(value, arrays), vars(callback).get(name)
        if isinstance(held, keras.Variable):
            held.assign(decoded)
        else:
            vars(callback)[name] = decoded


def _digest(value: Any, arrays: Arrays) -> bytes:
    """Return a digest of what `encode` made of an attribute."""
    found = hashlib.blake2b(json.dumps(value).encode(), digest_size=16)
    for array in _arrays_of(value, arrays):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.digest()


def _arrays_of(value: Any, arrays: Arrays) -> Iterator[np.ndarray]:
    if isinstance(value, dict) and "place" in value:
        yield arrays[value["place"]]
    for one in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _arrays_of(one, arrays)


# --- all of them ---------------------------------------------------------------------------------------------------

class CallbackStates:
    """Finds what callbacks have changed since training began; ``note``: prints what cannot be stored, once each."""

    def __init__(self, callbacks: Sequence[Any], note: Callable[[str], None]) -> None:
        self._callbacks, self._note = list(callbacks), note
        self._at_begin: list[dict[str, bytes]] = [{} for _ in self._callbacks]
        self._noted: set[tuple[int, str]] = set()

    def begin(self) -> None:
        """Remember what the callbacks begin with, and name the attributes that cannot be stored."""
        for i, callback in enumerate(self._callbacks):
            arrays: Arrays = {}
            state, unstorable = take(callback, arrays, str(i))
            self._at_begin[i] = {name: _digest(value, arrays) for name, value in state.items()}
            self._name(i, unstorable)

    def changed(self) -> tuple[list[list[Any]], Arrays]:
        """Return [class name, changed attributes] of each callback, and the arrays among them."""
        every, kept = [], {}
        for i, (callback, before) in enumerate(zip(self._callbacks, self._at_begin)):
            arrays: Arrays = {}
            state, unstorable = take(callback, arrays, str(i))
            self._name(i, unstorable)
            own = {name: value for name, value in state.items() if before.get(name) != _digest(value, arrays)}
            kept.update({n: a for n, a in arrays.items() if n.split("/")[1] in own})
            every.append([type(callback).__name__, own])
        return every, kept

    def restore(self, states: Sequence[Sequence[Any]], arrays: Arrays) -> None:
        """Undo `changed`: the nth callback of a class gets the state of the nth of that class."""
        left: dict[str, list[dict[str, Any]]] = {}
        for name, state in states:
            left.setdefault(name, []).append(state)
        for callback in self._callbacks:
            if states_of := left.get(type(callback).__name__):
                put(callback, states_of.pop(0), arrays)

    def copies(self) -> tuple[list[list[Any]], Arrays]:
        """Return all attributes that can be stored, as they are now, for `restore`."""
        arrays: Arrays = {}
        states = [[type(c).__name__, take(c, arrays, str(i))[0]] for i, c in enumerate(self._callbacks)]
        return states, copy.deepcopy(arrays)

    def _name(self, i: int, unstorable: dict[str, str]) -> None:
        callback = self._callbacks[i]
        new = {name: why for name, why in unstorable.items() if (i, name) not in self._noted}
        self._noted |= {(i, name) for name in new}
        if new and not type(callback).__module__.startswith("keras."):
            words = ", ".join(f"{name} ({why})" for name, why in new.items())
            self._note(f"checkpoints do not hold these attributes of the Keras callback {type(callback).__name__}: "
                       f"{words}. A resumed run has them as on_train_begin leaves them; checkpoints hold numbers, "
                       "text, lists, dictionaries, sets, arrays and tensors")
