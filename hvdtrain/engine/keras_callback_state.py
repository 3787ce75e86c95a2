"""State of Keras callbacks in a form that checkpoints store, and back, exactly.

Owns which attributes are state, which types can be stored, and the search for those that changed since training began.
When a state is taken and where it is written is left to `hvdtrain.engine.keras_bridge` and the checkpoint.
"""

from __future__ import annotations

import base64
import collections
import copy
import functools
import hashlib
import inspect
import json
import math
import random
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
STATELESS = (type, functools.partial, np.ufunc)
"""Types of callables besides functions and methods that hold no state."""
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
"""Random generators, whose state is numbers."""
MUTABLE = (list, dict, collections.OrderedDict, collections.deque, set, np.ndarray, *GENERATORS)
"""Types of which one object may be held in several places, and is one again after a resume."""
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
    return {c.__name__ for c in type(callback).__mro__ if c.__module__.startswith("keras.")}


class ModelObjects:
    """Model, optimizer, layers and variables, which checkpoints hold elsewhere, by a name that each process gives them.

    A callback that refers to one of them gets the reference back, not a copy. ``shared``: objects that are held in
    several places, by id a name. ``made``: by that name what `decode` has made of them.
    """

    def __init__(self, model: Any = None, shared: dict[int, str] | None = None,
                 made: dict[str, Any] | None = None) -> None:
        self.named: dict[str, Any] = {}
        self.shared = {} if shared is None else shared
        self.made = {} if made is None else made
        if isinstance(model, keras.Model):
            optimizer: Any = getattr(model, "optimizer", None)
            groups = {"model": [model], "optimizer": [optimizer], "layer": model._flatten_layers(include_self=False),
                      "weight": model.weights, "variable": model.variables,
                      "slot": getattr(optimizer, "variables", [])}
            self.named = {f"{kind} {i}": one for kind, group in groups.items() for i, one in enumerate(group)}
            self.named |= {f"{name} value": one._value for name, one in self.named.items()
                           if isinstance(one, keras.Variable)}
        self.names = {id(one): name for name, one in reversed(self.named.items()) if one is not None}

    def without(self, value: Any) -> ModelObjects:
        """Return the same for the value of a shared object itself."""
        rest = copy.copy(self)
        rest.shared = {key: name for key, name in self.shared.items() if key != id(value)}
        return rest


def shared_among(callbacks: Sequence[Any]) -> dict[int, str]:
    """Return by id the mutable objects that attributes of ``callbacks`` hold in more than one place, each with a name.

    The name is that of the first place, so that it does not depend on other objects.
    """
    first: dict[int, str] = {}
    several: dict[int, str] = {}

    def visit(value: Any, place: str, depth: int = 0) -> None:
        if value is None or type(value) in (bool, int, float, str):  # such as the losses of all steps
            return
        if type(value) in MUTABLE or is_variable(value) or keras.ops.is_tensor(value):
            if id(value) in first:
                several[id(value)] = first[id(value)]
                return
            first[id(value)] = place
        if depth <= DEEPEST and isinstance(value, (list, tuple, set, frozenset, collections.deque, dict)):
            for i, one in enumerate(value.values() if isinstance(value, dict) else value):
                visit(one, f"{place}/{i}", depth + 1)

    for i, callback in enumerate(callbacks):
        for name, value in attributes(callback):
            visit(value, f"{i}/{name}")
    return several


def _state_of(generator: Any) -> Any:
    """Return the state of a random generator as dictionaries, tuples, numbers and arrays. `Unstorable`."""
    if type(generator) is random.Random:
        return generator.getstate()
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)
    if not hasattr(np.random, state["bit_generator"]):
        raise Unstorable(f"a random generator of the kind {state['bit_generator']}")
    return state


def _generator(state: Any, held: Any) -> Any:
    """Give ``held`` the state, where it is of the kind, else a new generator."""
    if isinstance(state, tuple):
        plain = held if type(held) is random.Random else random.Random()
        plain.setstate(state)
        return plain
    kind = getattr(np.random, state["bit_generator"])
    same = type(held) in GENERATORS[:2] and _state_of(held)["bit_generator"] == kind.__name__
    if "has_gauss" in state:
        legacy = held if same and type(held) is np.random.RandomState else np.random.RandomState(kind())
        legacy.set_state(state)
        return legacy
    made = held if same and type(held) is np.random.Generator else np.random.Generator(kind())
    made.bit_generator.state = state
    return made


def is_variable(value: Any) -> bool:
    """Return whether ``value`` is a variable of Keras or of its backend: it keeps its identity."""
    if isinstance(value, keras.Variable):
        return True
    return keras.ops.is_tensor(value) and (hasattr(value, "assign") or getattr(value, "requires_grad", False)
                                           and value.is_leaf)


def encode(value: Any, arrays: Arrays, name: str, depth: int = 0, parts: ModelObjects | None = None) -> Any:
    """Return ``value`` as JSON; arrays go into ``arrays`` under ``name`` and a counter. `Unstorable`."""
    if value is None or isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if parts and id(value) in parts.names:
        return {TAG: "part", "value": parts.names[id(value)]}
    if depth > DEEPEST:
        raise Unstorable(f"a {type(value).__name__} that contains itself")
    if parts and id(value) in parts.shared:  # its value in each place: a checkpoint may lack the others
        rest = parts.without(value)
        return {TAG: "shared", "name": parts.shared[id(value)], "value": encode(value, arrays, name, depth, rest)}
    if type(value) in GENERATORS:
        return {TAG: "generator", "value": encode(_state_of(value), arrays, name, depth + 1)}
    if type(value) is list:
        return [encode(one, arrays, name, depth + 1, parts) for one in value]
    if type(value) in (tuple, set, frozenset, collections.deque):
        found: dict[str, Any] = {TAG: type(value).__name__,
                                 "items": [encode(one, arrays, name, depth + 1, parts) for one in value]}
        return {**found, "maxlen": value.maxlen} if isinstance(value, collections.deque) else found
    if type(value) in (dict, collections.OrderedDict):
        items = [[encode(one, arrays, name, depth + 1, parts) for one in pair] for pair in value.items()]
        return {TAG: type(value).__name__, "items": items}
    if type(value) is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        kind = "tensor" if not is_variable(value) else "variable" if isinstance(value, keras.Variable) else "own value"
        return {TAG: kind, "value": _array(numpy_of(value), arrays, name)}
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(value, arrays, name)
    raise Unstorable(f"a {type(value).__name__}")


def numpy_of(tensor: Any) -> np.ndarray:
    """Return a copy in host memory of a tensor or a variable of Keras."""
    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


def _array(value: Any, arrays: Arrays, name: str) -> dict[str, Any]:
    """Return an array or a scalar of numpy as JSON, of large ones the place in ``arrays``."""
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise Unstorable("an array of objects")
    named = array.dtype.kind == "V"  # such as bfloat16, a type that numpy lacks
    found = {TAG: "scalar" if isinstance(value, np.generic) else "array", "shape": list(np.shape(value)),
             "dtype": array.dtype.name if named else array.dtype.str}
    if array.nbytes <= INLINE_BYTES:
        return {**found, "value": base64.b64encode(array.tobytes()).decode()}
    place = f"{name}/{len(arrays)}"
    arrays[place] = array if array.dtype.kind in "biuf" else array.reshape(-1).view(np.uint8)
    return {**found, "place": place}


def decode(value: Any, arrays: Arrays, parts: ModelObjects | None = None, held: Any = None) -> Any:
    """Undo `encode`; the callback's own variables in ``held``, the value of now, and their containers are kept."""
    parts = parts or ModelObjects()
    if isinstance(value, list):
        return _filled(held, _members(value, arrays, parts, held if type(held) is list else ()), parts)
    if not isinstance(value, dict):
        return value
    kind = value[TAG]
    if kind == "part":
        return parts.named.get(value["value"], held)
    if kind == "shared":
        if value["name"] not in parts.made:
            parts.made[value["name"]] = decode(value["value"], arrays, parts, held)
        return parts.made[value["name"]]
    if kind == "generator":
        return _generator(decode(value["value"], arrays), held)
    if kind in ("variable", "own value"):
        return _variable(decode(value["value"], arrays), held, kind, parts)
    if kind in ("scalar", "array"):
        dtype = np.dtype(value["dtype"])
        raw = arrays[value["place"]].tobytes() if "place" in value else base64.b64decode(value["value"])
        array = np.frombuffer(raw, dtype).reshape(value["shape"]).copy()
        return array[()] if kind == "scalar" else array
    simple: dict[str, Callable[[], Any]] = {
        "float": lambda: float(value["value"]), "bytes": lambda: base64.b64decode(value["value"]),
        "tensor": lambda: keras.ops.convert_to_tensor(decode(value["value"], arrays))}
    if kind in simple:
        return simple[kind]()
    same_kind = held is not None and type(held).__name__ == kind
    if kind in ("dict", "OrderedDict"):
        now = held if same_kind else {}
        keys = [decode(key, arrays, parts) for key, _ in value["items"]]
        found = [decode(one, arrays, parts, now.get(key)) for key, (_, one) in zip(keys, value["items"])]
        return _filled(held, (dict if kind == "dict" else collections.OrderedDict)(zip(keys, found)), parts)
    items = _members(value["items"], arrays, parts, held if same_kind and kind in ("tuple", "deque") else ())
    if kind == "deque":
        return _filled(held, collections.deque(items, value["maxlen"]), parts)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def _members(values: list[Any], arrays: Arrays, parts: ModelObjects, held: Sequence[Any]) -> list[Any]:
    """Decode the members of a sequence, each with the one that ``held`` has in its place."""
    now = [*held, *[None] * len(values)]
    return [decode(one, arrays, parts, before) for one, before in zip(values, now)]


def _filled(held: Any, found: Any, parts: ModelObjects) -> Any:
    """Return ``held`` with the members of ``found`` if it holds variables of the callback, else ``found``."""
    if type(held) is not type(found):
        return found
    if not any(is_variable(one) and id(one) not in parts.names
               for one in (held.values() if isinstance(held, dict) else held)):
        return found
    held.clear()
    (held.update if isinstance(held, dict) else held.extend)(found)
    return held


def _variable(array: np.ndarray, held: Any, kind: str, parts: ModelObjects) -> Any:
    """Assign to the variable ``held``, unless it is the model's; return a new one where there is none of the shape."""
    if id(held) in parts.names:
        return held
    if is_variable(held) and numpy_of(held).shape == np.shape(array):
        tensor = keras.ops.convert_to_tensor(array, dtype=keras.backend.standardize_dtype(held.dtype))
        (held.assign if hasattr(held, "assign") else held.data.copy_)(tensor)
        return held
    dtype = keras.backend.standardize_dtype(array.dtype)
    made = keras.Variable(array, dtype=dtype, trainable=keras.backend.is_float_dtype(dtype))
    return made if kind == "variable" else made.value


def attributes(callback: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that may be state: no functions, no classes."""
    bases = _of_keras(callback)
    left_out = {*NOT_STATE, *(("min_delta",) if "MonitorCallback" in bases else ()),  # Keras turns its sign
                *(("history", "epoch") if "History" in bases else ())}  # of the epochs of one process
    own_files = type(callback).__module__.startswith("keras.") and writes(callback)
    for name, value in vars(callback).items():
        if name in left_out or inspect.isroutine(value) or isinstance(value, STATELESS):
            continue
        if own_files and name.startswith("_") and (isinstance(value, bool) or not isinstance(value, (int, float))):
            continue  # whether files, traces and the like are open in this process
        yield name, value


def take(callback: Any, arrays: Arrays, prefix: str, shared: dict[int, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a callback's attributes as JSON, with ``arrays``, and why others cannot be stored."""
    found, unstorable = {}, {}
    parts = ModelObjects(getattr(callback, "model", None), shared)
    for name, value in attributes(callback):
        own: Arrays = {}
        try:
            found[name] = encode(value, own, f"{prefix}/{name}", parts=parts)
            arrays.update(own)
        except Unstorable as problem:
            unstorable[name] = str(problem)
    return found, unstorable


def put(callback: Any, state: dict[str, Any], arrays: Arrays, made: dict[str, Any]) -> None:
    """Undo `take`; ``made``: what it has made so far of objects that callbacks share."""
    parts = ModelObjects(getattr(callback, "model", None), made=made)
    for name, value in state.items():
        vars(callback)[name] = decode(value, arrays, parts, vars(callback).get(name))


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


class CallbackStates:
    """Finds what callbacks have changed since training began; ``note``: prints what cannot be stored, once each."""

    def __init__(self, callbacks: Sequence[Any], note: Callable[[str], None]) -> None:
        self._callbacks, self._note = list(callbacks), note
        self._at_begin: list[list[dict[str, bytes]]] = [[] for _ in self._callbacks]
        self._noted: set[tuple[int, str]] = set()

    def begin(self) -> None:
        """Remember what the callbacks have before ``on_train_begin``."""
        self._at_begin = [[] for _ in self._callbacks]
        self._remember()

    def begun(self) -> None:
        """Remember what they have after it, and name the attributes that cannot be stored."""
        for i, unstorable in enumerate(self._remember()):
            self._name(i, unstorable)

    def _remember(self) -> list[dict[str, str]]:
        found, shared = [], shared_among(self._callbacks)
        for i, callback in enumerate(self._callbacks):
            arrays: Arrays = {}
            state, unstorable = take(callback, arrays, str(i), shared)
            self._at_begin[i].append({name: _digest(value, arrays) for name, value in state.items()})
            found.append(unstorable)
        return found

    def changed(self) -> tuple[list[list[Any]], Arrays]:
        """Return [class name, attributes that an event has changed] of each callback, and the arrays among them."""
        every, kept, shared = [], {}, shared_among(self._callbacks)
        for i, (callback, before) in enumerate(zip(self._callbacks, self._at_begin)):
            arrays: Arrays = {}
            state, unstorable = take(callback, arrays, str(i), shared)
            self._name(i, unstorable)
            own = {name: value for name, value in state.items()
                   if {then.get(name) for then in before} != {_digest(value, arrays)}}
            kept.update({n: a for n, a in arrays.items() if n.split("/")[1] in own})
            every.append([type(callback).__name__, own])
        return every, kept

    def restore(self, states: Sequence[Sequence[Any]], arrays: Arrays) -> None:
        """Undo `changed`: the nth callback of a class gets the state of the nth of that class."""
        left: dict[str, list[dict[str, Any]]] = {}
        made: dict[str, Any] = {}
        for name, state in states:
            left.setdefault(name, []).append(state)
        for callback in self._callbacks:
            if states_of := left.get(type(callback).__name__):
                put(callback, states_of.pop(0), arrays, made)

    def copies(self) -> tuple[list[list[Any]], Arrays]:
        """Return all attributes that can be stored, as they are now, for `restore`."""
        arrays: Arrays = {}
        shared = shared_among(self._callbacks)
        states = [[type(c).__name__, take(c, arrays, str(i), shared)[0]] for i, c in enumerate(self._callbacks)]
        return states, copy.deepcopy(arrays)

    def _name(self, i: int, unstorable: dict[str, str]) -> None:
        callback = self._callbacks[i]
        new = {name: why for name, why in unstorable.items() if (i, name) not in self._noted}
        self._noted |= {(i, name) for name in new}
        if new and not type(callback).__module__.startswith("keras."):
            words = ", ".join(f"{name} ({why})" for name, why in new.items())
            self._note(f"checkpoints do not hold these attributes of the Keras callback {type(callback).__name__}: "
                       f"{words}. A resumed run has them as on_train_begin leaves them; checkpoints hold numbers, "
                       "text, lists, dictionaries, sets, arrays, tensors and random generators")
