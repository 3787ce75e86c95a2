"""Reads pickles of plain data without unpickling: dicts, lists, tuples, byte strings, whole numbers, arrays of uint8.

Owns the few opcodes that Python 2 wrote such data with (protocol 2), as in the published archives of CIFAR. No opcode
imports or calls anything: a name of a class is compared with the three of numpy that stand for an array.
"""

from __future__ import annotations

import pickletools
from typing import Any, BinaryIO

import numpy as np

MOST = 2_000_000
"""Opcodes that a file may have; those of CIFAR-100 have about 300,000."""

_NUMPY = ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype")


class _Array:
    """Stands for an array or its dtype until all of it has been read."""

    def __init__(self, made_by: str) -> None:
        self.made_by = made_by
        self.value: Any = None


class _Name(str):
    """One of `_NUMPY`."""


def read(file: BinaryIO) -> Any:
    """Return what ``file`` holds; byte strings as bytes, arrays as read-only uint8.

    Errors: ValueError for anything else, also what a pickle could do, and for a damaged file.
    """
    try:
        return _value(_Machine().run(file))
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its opcodes do not fit together ({type(error).__name__})") from None


class _Machine:
    """The stack that the opcodes work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[Any, Any] = {}

    def run(self, file: BinaryIO) -> Any:
        """Work through all opcodes; return what the last one leaves."""
        for count, (opcode, arg, _) in enumerate(pickletools.genops(file)):
            if count >= MOST:
                raise ValueError(f"it has more than {MOST} opcodes")
            name = opcode.name
            if name == "STOP":
                break
            if name in _PUSHED:
                self.stack.append(_PUSHED[name](arg))
            elif name in ("BINPUT", "LONG_BINPUT"):
                self.memo[arg] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[arg])
            elif name == "MARK":
                self.marks.append(len(self.stack))
            elif name in _WORK:
                _WORK[name](self)
            elif name != "PROTO":
                raise ValueError(f"it has the opcode {name}, which is no plain data")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        """Take what was pushed since the last mark."""
        at = self.marks.pop()
        taken = self.stack[at:]
        del self.stack[at:]
        return taken

    def last(self, n: int) -> list[Any]:
        """Take the last ``n``."""
        if len(self.stack) < n:
            raise IndexError
        taken = self.stack[-n:]
        del self.stack[-n:]
        return taken

    def extend(self, items: list[Any]) -> None:
        """Add ``items`` to the list on top."""
        if not isinstance(self.stack[-1], list):
            raise TypeError
        self.stack[-1].extend(items)

    def put(self, items: list[Any]) -> None:
        """Add key, value, key, value, ... to the dict on top."""
        keys = items[::2]
        if not isinstance(self.stack[-1], dict) or len(items) % 2 or not all(isinstance(k, bytes) for k in keys):
            raise TypeError
        self.stack[-1].update(zip(keys, items[1::2]))

    def make(self) -> None:
        """Stand in for a call of what makes an array or a dtype."""
        made_by, args = self.last(2)
        if made_by == _NUMPY[2] and args[0] != b"u1" or made_by == _NUMPY[1] or not isinstance(made_by, _Name):
            raise ValueError("it makes something else than an array of uint8")
        self.stack.append(_Array(made_by))

    def build(self) -> None:
        """Fill the array on top: (version, shape, dtype, column by column?, bytes); a dtype's details are dropped."""
        (state,) = self.last(1)
        array = self.stack[-1]
        if not isinstance(array, _Array):
            raise ValueError("it sets the state of something else than an array")
        if array.made_by == _NUMPY[0]:
            _, shape, dtype, by_columns, data = state
            if not isinstance(dtype, _Array) or dtype.made_by != _NUMPY[2]:
                raise ValueError("it holds an array that is not of uint8")
            stored = np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_columns else "C")
            array.value = np.ascontiguousarray(stored)


def _named(arg: str) -> _Name:
    if arg not in _NUMPY:
        raise ValueError(f"it names {arg.replace(' ', '.')[:80]}, which is no plain data")
    return _Name(arg)


_PUSHED: dict[str, Any] = {
    "EMPTY_DICT": lambda arg: {}, "EMPTY_LIST": lambda arg: [], "EMPTY_TUPLE": lambda arg: (),
    "NONE": lambda arg: None, "NEWTRUE": lambda arg: True, "NEWFALSE": lambda arg: False,
    "BININT": int, "BININT1": int, "BININT2": int, "GLOBAL": _named,
    "SHORT_BINSTRING": lambda arg: arg.encode("latin-1"), "BINSTRING": lambda arg: arg.encode("latin-1"),
}
"""Opcodes that push their argument or a constant."""

_WORK: dict[str, Any] = {
    "TUPLE1": lambda m: m.stack.append(tuple(m.last(1))), "TUPLE2": lambda m: m.stack.append(tuple(m.last(2))),
    "TUPLE3": lambda m: m.stack.append(tuple(m.last(3))), "TUPLE": lambda m: m.stack.append(tuple(m.since_mark())),
    "APPEND": lambda m: m.extend(m.last(1)), "APPENDS": lambda m: m.extend(m.since_mark()),
    "SETITEM": lambda m: m.put(m.last(2)), "SETITEMS": lambda m: m.put(m.since_mark()),
    "REDUCE": _Machine.make, "BUILD": _Machine.build,
}
"""Opcodes that work on the stack."""


def _value(found: Any) -> Any:
    """``found`` with arrays for what stood for them, one level into a dict."""
    if isinstance(found, dict):
        return {key: item.value if isinstance(item, _Array) else item for key, item in found.items()}
    return found
