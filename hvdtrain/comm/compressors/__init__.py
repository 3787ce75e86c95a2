"""How a flat bucket is summed over ranks: a file for each way, named by the key ``compression``.

A file offers ``make(exchange) -> Compressor``; ``exchange`` is that section of the configuration. Another way is one
more file, here or anywhere (``module:callable`` or ``path/file.py:callable`` of such a function). What others know
of a compressor (its label, whether `auto` may choose it, ...) stands on its class: see `base.Stateless`.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.comm.compressors.base import Stateless
from hvdtrain.config import Config, Exchange
from hvdtrain.core.protocols import Compressor
from hvdtrain.core.slots import in_slot, load_slot


def names() -> tuple[str, ...]:
    """Return the names of the built-in ones."""
    return in_slot(__name__, "make")


def fact(compressor: Compressor, name: str) -> Any:
    """Return the attribute ``name`` of ``compressor``, or `Stateless`'s where a user's own class leaves it out."""
    return getattr(compressor, name, getattr(Stateless, name))


def choices() -> tuple[str, ...]:
    """Return the built-in names that ``compression`` takes: those that `auto` tries in its order, then the others."""
    made = [load_slot(__name__, name, "compression", "make")(Exchange()) for name in names()]
    ordered = sorted(made, key=lambda one: fact(one, "auto_order") or len(made) + 1)
    return tuple(one.name for one in ordered if not fact(one, "own_key"))


def create(name: str, config: Config) -> Compressor:
    """Return the compressor ``name`` with the settings of ``config.exchange``; `UserError` for a name that is none."""
    made: Compressor = load_slot(__name__, name, "compression", "make")(config.exchange)
    return made
