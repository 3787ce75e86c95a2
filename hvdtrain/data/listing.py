"""Which files a folder holds, in an order that no file system decides.

Owns the walk through folders and how a path is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from hvdtrain.core.errors import UserError


def shown(path: bytes) -> str:
    """``path`` as text that can be printed."""
    return os.fsdecode(path).encode("utf-8", "replace").decode()


def files_in(folder: bytes, endings: tuple[bytes, ...], below: bytes = b"",
             above: tuple[bytes, ...] = ()) -> Iterator[bytes]:
    """Yield the files in ``folder`` and in folders therein that have one of ``endings`` (any case), in no order.

    As paths from ``folder``. Hidden ones are left out; links are followed, one that leads nowhere is yielded.
    Errors: `UserError` for a folder that cannot be read or that contains itself by a link.
    """
    place = os.path.realpath(folder)
    if place in above:
        raise UserError(f"{shown(folder)} is a link to a folder that it is in", "folders that end", "remove it")
    for entry in entries(folder):
        name = below + entry.name
        if is_(entry.is_dir):
            yield from files_in(entry.path, endings, name + b"/", (*above, place))
        elif entry.name.lower().endswith(endings) and (is_(entry.is_file) or entry.is_symlink()
                                                       and not os.path.exists(entry.path)):
            yield name


def is_(asked: Callable[[], bool]) -> bool:
    """What ``asked``, an entry's ``is_dir`` or ``is_file``, says; no for a link to itself, of which it raises."""
    try:
        return asked()
    except OSError:
        return False


def entries(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    """Yield what is in ``folder`` and not hidden, in no order."""
    try:
        with os.scandir(folder) as found:
            yield from (entry for entry in found if not entry.name.startswith(b"."))
    except OSError as error:
        raise UserError(f"the folder {shown(folder)} cannot be read: {error.strerror}", "a folder that can be",
                        "correct its rights, or data.args.root") from None
