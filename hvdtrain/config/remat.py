"""What the key ``remat`` says of a model's named blocks; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hvdtrain.core.errors import UserError, nearest

WORDS = ("off", "auto")


def wanted(text: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """Return which of the blocks ``names`` the key asks for, in their order; none for off and for auto.

    ``text``: off, auto, every:K (the K-th, 2K-th, ... block; with K = 1 all), names with commas between, or a list of
    names. Errors: `UserError` for blocks that the model does not have, or no blocks at all.
    """
    if text in WORDS:
        return []
    given = [part.strip() for part in text.split(",")] if isinstance(text, str) else list(text)
    every = re.fullmatch(r"every:(\d+)", given[0]) if len(given) == 1 else None
    if not names:
        raise UserError(f"remat is {text!r} and the model has no named blocks",
                        "a Sequential model, or blocks(model) -> [(name, block)] in the model file",
                        "define blocks, or set remat: off")
    if every:
        step = int(every[1])
        if step < 1:
            raise UserError(f"remat is {text!r}", "every:K with K of 1 or more", "set remat: every:1 for all blocks")
        return list(names[step - 1::step])
    for name in given:
        if name not in names:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise UserError(f"remat names {name!r}, which is none of the model's blocks ({shown})",
                            f"{nearest(name, [*names, *WORDS, 'every:2'])}", "correct remat")
    return [name for name in names if name in given]


def check_text(text: str | Sequence[str]) -> None:
    """Raise `UserError` for what no model's blocks can be meant by."""
    empty = not text or not isinstance(text, str) and not all(text)
    if empty or isinstance(text, str) and (text.startswith("every") and not re.fullmatch(r"every:[1-9]\d*", text)):
        raise UserError(f"remat is {text!r}", "off, auto, every:K with K of 1 or more, or names of blocks",
                        "for example remat: every:2")
