"""The random generators of Python and numpy as arrays, so that a run can be resumed bit by bit."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np

_WORDS = 625 * 4
"""Bytes of a Mersenne twister's state: its words and the place among them."""

_latest: tuple[bytes, dict[str, Any]] | None = None
_latest_python: tuple[bytes, tuple[Any, ...]] | None = None


def capture() -> dict[str, np.ndarray]:
    """State of ``random`` and of numpy's global generator."""
    version, words, gauss = random.getstate()
    _, key, pos, has_gauss, cached = np.random.get_state()
    return {
        "python.words": np.array(words, dtype=np.uint32),
        "python.rest": np.array([version, np.nan if gauss is None else gauss], dtype=np.float64),
        "numpy.key": np.asarray(key, dtype=np.uint32),
        "numpy.rest": np.array([pos, has_gauss, cached], dtype=np.float64),
    }


def restore(state: dict[str, np.ndarray]) -> None:
    """Undo `capture`."""
    global _latest
    _latest = None
    version, gauss = state["python.rest"]
    words = tuple(int(w) for w in state["python.words"])
    random.setstate((int(version), words, None if np.isnan(gauss) else float(gauss)))
    pos, has_gauss, cached = state["numpy.rest"]
    np.random.set_state(("MT19937", state["numpy.key"], int(pos), int(has_gauss), float(cached)))


def mark() -> Callable[[], None]:
    """Note where both generators are (in some 3 us, `capture`: 55); the function returned puts them back."""
    own, numpys = _pythons(), _numpys()

    def back() -> None:
        global _latest
        _latest = None  # a normal number that is in store again leaves no trace in the words
        random.setstate(own)
        np.random.set_state(numpys)
    return back


def _pythons() -> tuple[Any, ...]:
    """Return `random.getstate`, whose tuple of 625 numbers is made again only if the generator's memory has changed.

    CPython keeps place and words of the twister behind the head of the object; where they do not lie so, the memory
    differs from the state, and nothing is kept.
    """
    global _latest_python
    generator = random._inst
    if type(generator).__basicsize__ < object.__basicsize__ + _WORDS:
        return random.getstate()
    words = ctypes.string_at(id(generator) + object.__basicsize__, _WORDS)
    if _latest_python is None or _latest_python[0] != words or _latest_python[1][2] != vars(generator)["gauss_next"]:
        state = random.getstate()
        alike = words == np.array([state[1][-1], *state[1][:-1]], np.uint32).tobytes()
        _latest_python = (words, state) if alike else None
        return state
    return _latest_python[1]


def _numpys() -> dict[str, Any]:
    """Return the state of numpy's global generator. Its 624 words are read again only if their memory has changed.

    That tells of every draw, unless the generator has a normal number in store, which leaves no trace when it is taken.
    """
    global _latest
    generator = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937:
        return cast(dict[str, Any], np.random.get_state(legacy=False))
    words = ctypes.string_at(generator.ctypes.state_address, _WORDS)
    if _latest is None or _latest[0] != words or _latest[1]["has_gauss"]:
        _latest = words, cast(dict[str, Any], np.random.get_state(legacy=False))
    return _latest[1]


def seed(seed: int, rank: int) -> None:
    """Give this rank its own streams."""
    random.seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
