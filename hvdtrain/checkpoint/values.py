"""Convert states of callbacks to JSON and back, exactly: also numpy's numbers and arrays, sets, bytes, any keys.

Owns which types can be stored. What JSON holds by itself stays as it is, so a tuple comes back as a list.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from hvdtrain.checkpoint.manifest import CheckpointError

TAG = "$hvdtrain"
"""Key of the dictionaries that stand for a value that JSON lacks; its value names the kind."""


def encode(value: Any, where: str, key: bool = False) -> Any:
    """Return ``value`` as JSON, a copy. `CheckpointError` names ``where`` a value is that cannot be stored.

    ``key``: it is a key of a dictionary or a member of a set, so that a tuple has to stay one.
    """
    if isinstance(value, np.ndarray) or isinstance(value, np.generic) and value.dtype.kind != "U":
        return _array(value, where)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode(one, f"{where}[{place}]", key) for place, one in enumerate(value)]
        return {TAG: "tuple", "items": items} if key else items
    if isinstance(value, dict):
        if all(type(name) is str for name in value) and TAG not in value:
            return {name: encode(one, f"{where}[{name!r}]") for name, one in value.items()}
        return {TAG: "dict", "items": [[encode(name, f"a key of {where}", True), encode(one, f"{where}[{name!r}]")]
                                       for name, one in value.items()]}
    if isinstance(value, (set, frozenset)):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {TAG: kind, "items": [encode(one, f"a member of {where}", True) for one in sorted(value, key=repr)]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    raise _unstorable(f"a {type(value).__name__}", where)


def decode(value: Any) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {name: decode(one) for name, one in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["value"])
    if kind in ("scalar", "array"):
        array = np.frombuffer(base64.b64decode(value["value"]), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array[()] if kind == "scalar" else array
    items = [decode(one) for one in value["items"]]
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}[kind](items)


def _array(value: Any, where: str) -> dict[str, Any]:
    array = np.ascontiguousarray(value)
    if array.dtype.kind in "OV":
        raise _unstorable(f"an array of {array.dtype}", where)
    return {TAG: "scalar" if isinstance(value, np.generic) else "array", "dtype": array.dtype.str,
            "shape": list(np.shape(value)), "value": base64.b64encode(array.tobytes()).decode()}


def _unstorable(got: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where} is {got}, which a checkpoint cannot store",
                           "numbers, texts, bytes, lists, dictionaries, sets, arrays of numpy",
                           "return one of these from state_dict, such as tensor.cpu().numpy() of a tensor")
