"""Encode and decode ``manifest.json``: a checkpoint's files, sizes and hashes, and the run's small state, as JSON.

Pure functions over bytes. The last key holds the SHA-256 of the bytes before it, so that no changed byte passes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError

MANIFEST_NAME = "manifest.json"
FORMAT = "hvdtrain-checkpoint"
VERSION, SHARDED = 1, 2
"""Versions of the format: files that hold whole tensors, and files that hold shards of them."""

MAX_MANIFEST_BYTES = 64 * 2**20  # above this size a manifest is neither written nor read
_SEAL = "manifest_sha256"
_END = b"\n}\n"
_leaf = json.JSONEncoder().encode
_quoted = json.encoder.encode_basestring_ascii
_KEYS = {VERSION: ("format", "version", "step", "files", "dtypes", "meta", _SEAL),
         SHARDED: ("format", "version", "step", "files", "shards", "dtypes", "meta", _SEAL)}
_GROUP = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_FILE = re.compile(r"([a-z0-9][a-z0-9_-]{0,63})\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class CheckpointError(UserError):
    """A checkpoint that cannot be used or written as asked."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hexadecimal SHA-256 of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of one checkpoint: ``files`` by name, and the JSON-able ``meta``.

    ``shards``: empty where each file holds the whole tensors of a group; else for each file the entries of its flat
    arrays, by their names there, "GROUP/NAME": the place of the first element in the tensor, and the tensor's shape.
    """

    step: int
    files: dict[str, FileEntry]
    meta: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


def file_name(group: str) -> str:
    """Return the name of the file that holds ``group``; CheckpointError if it could lie outside the directory."""
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise CheckpointError(f"checkpoint group name {group!r}",
                              "1 to 64 of a-z, 0-9, '_' and '-', the first a letter or a digit",
                              "rename the group, for example 'model' or 'rank-0000'")
    return f"{group}.safetensors"


def group_name(file: str) -> str | None:
    """Return the group in a file of this name; None for another file."""
    match = _FILE.fullmatch(file)
    return match.group(1) if match else None


def encode_meta(meta: dict[str, Any]) -> bytes:
    """Encode ``meta`` as it stands in a manifest; CheckpointError where JSON would change it."""
    _check_plain(meta, "meta")
    return _spell(meta, "\n ").encode("ascii")


def encode(manifest: Manifest, meta: bytes = b"") -> bytes:
    """Encode a manifest as ``manifest.json``; ``meta``: its `encode_meta`, if known. Errors: CheckpointError."""
    meta = meta or encode_meta(manifest.meta)
    document = {
        "format": FORMAT,
        "version": SHARDED if manifest.shards else VERSION,
        "step": manifest.step,
        "files": {
            name: {"bytes": entry.size_bytes, "sha256": entry.sha256}
            for name, entry in manifest.files.items()
        },
        **({"shards": manifest.shards} if manifest.shards else {}),
        "dtypes": {},  # unused, and part of the format
        "meta": {},
    }
    text = _text(document).removesuffix(b"{}" + _END) + meta + _END
    data = _sealed(text, hashlib.sha256(text).hexdigest())
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"a manifest of {len(data)} bytes",
                              f"at most {MAX_MANIFEST_BYTES} bytes of meta and file list",
                              "move large state out of meta into an array of a group")
    return data


def decode(data: bytes, where: str) -> Manifest:
    """Decode the bytes of the ``manifest.json`` at ``where``; CheckpointError describes a fault."""
    document = _parse(data, where)
    if document.get("format") != FORMAT:
        raise foreign(f"{where} has format {_short(document.get('format'))}", f"format {FORMAT!r}")
    if type(document.get("version")) is not int or document["version"] not in _KEYS:
        raise CheckpointError(f"{where} has format version {_short(document.get('version'))}",
                              f"version {VERSION} or {SHARDED}, which this hvdtrain reads",
                              "load it with the hvdtrain release that wrote it")
    keys = _KEYS[document["version"]]
    if tuple(document) != keys:
        raise damaged(f"{where} has the keys {_short(list(document))}", f"the keys {list(keys)}")
    seal = document.pop(_SEAL)
    if not _intact(data):
        digest = hashlib.sha256(_text(document)).hexdigest()
        if seal != digest:
            raise damaged(f"{where} was changed: it hashes to {digest}", f"{_short(seal)} as noted in it")
        raise damaged(f"{where} was reformatted", "the bytes that hvdtrain wrote")
    _check_shape(document, where)
    files = {name: FileEntry(entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()}
    return Manifest(document["step"], files, document["meta"], document.get("shards", {}))


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise foreign(f"{where} is larger than {MAX_MANIFEST_BYTES} bytes", "a manifest")
    if not data.strip(b"\0 \r\n\t"):
        raise damaged(f"{where} is {'empty' if not data else 'blank or filled with zeros'}", "a JSON object")
    try:
        document = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise damaged(f"{where} is truncated or not JSON ({_short(reason)})", "a JSON object") from None
    if not isinstance(document, dict):
        raise foreign(f"{where} holds a JSON {type(document).__name__}", "a JSON object")
    return document


def _check_shape(document: dict[str, Any], where: str) -> None:
    """Refuse a well-hashed manifest whose values are not of the format (a foreign or faulty writer)."""
    good = _is_count(document["step"]) and isinstance(document["meta"], dict)
    good = good and isinstance(document["files"], dict) and document["dtypes"] == {}
    if not good:
        raise foreign(f"{where} has values of the wrong type", "step, files, dtypes and meta")
    for name, entry in document["files"].items():
        if group_name(name) is None:
            raise foreign(f"{where} lists a file called {_short(name)}", "plain names of group files")
        fine = isinstance(entry, dict) and tuple(entry) == ("bytes", "sha256") and _is_count(entry["bytes"])
        if not (fine and isinstance(entry["sha256"], str) and _SHA256.fullmatch(entry["sha256"])):
            raise foreign(f"{where} lists {name} as {_short(entry)}", "its size in bytes and its SHA-256")
    _check_shards(document, where)


def _check_shards(document: dict[str, Any], where: str) -> None:
    shards = document.get("shards")
    if document["version"] == VERSION:
        return
    if not isinstance(shards, dict) or list(shards) != list(document["files"]) or not shards:
        raise foreign(f"{where} lists shards of files that it does not list", "the same files")
    for name, entries in shards.items():
        if not isinstance(entries, dict):
            raise foreign(f"{where} lists the shards of {name} as {_short(entries)}", "offsets and shapes by name")
        for key, entry in entries.items():
            fine = isinstance(entry, list) and len(entry) == 2 and _is_count(entry[0]) and isinstance(entry[1], list)
            if not (fine and all(_is_count(n) for n in entry[1]) and _GROUP.fullmatch(key.partition("/")[0])):
                raise foreign(f"{where} lists the shard {_short(key)} as {_short(entry)}",
                               "a name GROUP/NAME with an offset and a shape")


def _check_plain(value: Any, path: str) -> None:
    """Refuse values that JSON cannot hold or would silently change, such as a number used as a key."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _check_plain(item, f"{path}[{place}]")
        return
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is a {type(value).__name__}",
                              "None, bool, int, float, str, list or dict",
                              "put arrays into a group of tensors and convert other objects")
    for key, item in value.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path} has the key {key!r} of type {type(key).__name__}",
                                  "text keys, since JSON has no others",
                                  "use str(key), or a list of pairs")
        _check_plain(item, f"{path}.{key}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _text(document: dict[str, Any]) -> bytes:
    """Encode in the one valid way: ASCII, keys in the order given; NaN and infinities as Python's json writes them."""
    return _spell(document, "\n").encode("ascii") + b"\n"


def _spell(value: Any, line: str) -> str:
    """Return what ``json.dumps(value, indent=1)`` does, in a third of its time; ``line``: the line end and indent."""
    kind = type(value)
    if kind is str:  # of most leaves, at a third of the encoder's time
        return _quoted(value)
    if kind is int:
        return repr(value)
    if not value or not isinstance(value, (dict, list, tuple)):
        return _leaf(value)
    items: list[str] = []  # filled by loops: a generator would take a second frame of the stack at each level
    deeper = line + " "
    if isinstance(value, dict):
        for key, item in value.items():
            items.append(f"{deeper}{_quoted(key)}: {_spell(item, deeper)}")
        return f"{{{','.join(items)}{line}}}"
    for item in value:
        items.append(deeper + _spell(item, deeper))
    return f"[{','.join(items)}{line}]"


def _sealed(text: bytes, digest: str) -> bytes:
    """Append the seal as the last key, without encoding the document again."""
    assert text.endswith(_END)
    return text[:-len(_END)] + f',\n "{_SEAL}": "{digest}"'.encode("ascii") + _END


def _intact(data: bytes) -> bool:
    """Return whether the seal at the end is that of the bytes before it."""
    end = _sealed(_END, "0" * 64)
    text = data[:-len(end)] + _END
    return data == _sealed(text, hashlib.sha256(text).hexdigest())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 120 else text[:117] + "..."
    return repr(text) if isinstance(value, str) else text


def damaged(got: str, expected: str) -> CheckpointError:
    return CheckpointError(got, expected, "use another checkpoint: this one is damaged")


def foreign(got: str, expected: str) -> CheckpointError:
    return CheckpointError(got, expected, "give a checkpoint directory that hvdtrain wrote")


TAG = "$hvdtrain"  # key of the dictionaries that stand for a value that JSON lacks; its value names the kind


def encode_state(value: Any, where: str, key: bool = False) -> Any:
    """Return a callback's state as JSON, also numpy's numbers and arrays, sets, bytes and any keys.

    `CheckpointError` names ``where`` a value cannot be stored. ``key``: it is a key or a member of a set: keep tuples.
    """
    if isinstance(value, np.ndarray) or isinstance(value, np.generic) and value.dtype.kind != "U":
        return _array(value, where)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode_state(one, f"{where}[{place}]", key) for place, one in enumerate(value)]
        return {TAG: "tuple", "items": items} if key else items
    if isinstance(value, dict):
        if all(type(name) is str for name in value) and TAG not in value:
            return {name: encode_state(one, f"{where}[{name!r}]") for name, one in value.items()}
        pairs = [[encode_state(name, f"a key of {where}", True), encode_state(one, f"{where}[{name!r}]")]
                 for name, one in value.items()]
        return {TAG: "dict", "items": pairs}
    if isinstance(value, (set, frozenset)):
        kind = "set" if isinstance(value, set) else "frozenset"
        members = sorted(value, key=repr)
        return {TAG: kind, "items": [encode_state(one, f"a member of {where}", True) for one in members]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    raise _unstorable(f"a {type(value).__name__}", where)


def decode_state(value: Any) -> Any:
    if isinstance(value, list):
        return [decode_state(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {name: decode_state(one) for name, one in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["value"])
    if kind in ("scalar", "array"):
        array = np.frombuffer(base64.b64decode(value["value"]), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array[()] if kind == "scalar" else array
    items = [decode_state(one) for one in value["items"]]
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
