"""Compressors: a file for each way to sum a flat bucket over ranks, named by the key ``compression``.

A file offers ``make(exchange) -> Compressor``; ``exchange`` is that section of the configuration. A further one is a
file here or anywhere (``module:callable`` or ``path/file.py:callable``); facts of a compressor stand on its class, see
`base.Stateless`.
"""

from __future__ import annotations

from hvdtrain.comm.compressors.base import Stateless
from hvdtrain.config import Config
from hvdtrain.core.protocols import Compressor
from hvdtrain.core.resolve import completed, give, in_slot, load_slot

INHERITED = ("scatter", "in_place", "same_bits", "approximates")
"""Members that hold for the ``exchange`` of the same class alone."""


def names() -> tuple[str, ...]:
    """Return the names of the built-in ones."""
    return in_slot(__name__, "make")


def choices() -> tuple[str, ...]:
    """Return the built-in names that ``compression`` takes: those that `auto` tries in its order, then the others."""
    config = Config()
    made = [create(name, config) for name in names()]
    ordered = sorted(made, key=lambda one: one.auto_order or len(made) + 1)
    return tuple(one.name for one in ordered if not one.own_key)


def create(name: str, config: Config) -> Compressor:
    """Return the compressor ``name`` with the settings of ``config.exchange``; `UserError` for a name that is none."""
    made: Compressor = completed(load_slot(__name__, name, "compression", "make")(config.exchange), Stateless)
    _check_inherited(made)
    return made


def _check_inherited(made: Compressor) -> None:
    """Take from a class of a user's own what it inherits of a compressor whose ``exchange`` it has replaced.

    Its ``scatter`` would sum otherwise than its ``exchange``, and its facts are another's.
    """
    kinds = type(made).__mro__
    place = {name: next((i for i, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
             for name in ("exchange", *INHERITED)}
    for name in INHERITED:
        if name not in vars(made) and place["exchange"] < place[name] < kinds.index(object):
            value = vars(Stateless)[name]
            give(made, name, value)
