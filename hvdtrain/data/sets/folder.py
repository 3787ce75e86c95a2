"""``folder``: pictures in DIR/train/CLASS/, and in DIR/test/CLASS/ if there is one.

Owns which files there are, in which order, of which class. `hvdtrain.data.pictures` decodes them.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.pictures import ENDINGS, Normalisation, channels_of, checked_size, first_size, parsed, stacked
from hvdtrain.data.sources import Source, entries, files_in, is_, shown

_ENDINGS = tuple(ending.encode() for ending in ENDINGS)
_TRIED = 100  # pictures that are tried for the size of all, should the first ones be unreadable


def make(split: str, root: str, size: Any = 0, layout: str = "channels_last", channels: int = 3, mean: Any = None,
         std: Any = None, test: str = "test") -> Source | None:
    """Return the pictures ``root``/train/CLASS/*.png (jpg, jpeg, webp, bmp), or of ``root``/``test``, None without one.

    x float32 (n, H, W, C) in [0, 1], or (pixel - ``mean``) / ``std`` (numbers, or one for each channel), with
    ``layout`` channels_first (n, C, H, W); y int64 (n,), the class's place among the sorted names. ``size`` N or
    [H, W]: scale pictures and crop the middle; without it all must have one size. ``channels``: 3, or 1 for grey.
    Errors: `UserError` for folders that are missing, without pictures, or whose classes differ.
    """
    scale = Normalisation.of(mean, std, channels_of(channels), layout)
    wanted = checked_size(size)
    top = _folder(root)
    train = os.path.join(top, b"train")
    if not os.path.isdir(train):
        raise UserError(f"{shown(top)} has no folder train", _beside(top),
                        "put the images into DIR/train/CLASS/, and DIR as data.args.root")
    if not isinstance(test, str) or not test:
        raise UserError(f"data.args.test is {test!r}", "the name of a folder in data.args.root", "correct it")
    classes = _classes(train)
    if split == "train":
        return Pictures(train, classes, scale, wanted, channels, full=True)
    folder = os.path.join(top, os.fsencode(test))
    if not os.path.isdir(folder):
        if test != "test":
            raise UserError(f"{shown(top)} has no folder {test}", _beside(top), "correct data.args.test")
        return None
    _check_alike(train, classes, folder, _classes(folder))
    return Pictures(folder, classes, scale, wanted, channels, full=False)


class Pictures:
    """The pictures of the class folders in ``folder``, ordered by class and path, both bytewise.

    ``size`` (H, W): see `hvdtrain.data.pictures.decode`; None: that of the first. ``full``: every class needs a
    picture. Errors: `UserError` for classes without pictures; `Unreadable` when none can be read.
    """

    fixed = True

    def __init__(self, folder: bytes, classes: list[bytes], scale: Normalisation, size: tuple[int, int] | None,
                 channels: int, full: bool) -> None:
        self.classes = tuple(shown(name) for name in classes)
        self.scale, self.channels, self.resized = scale, channels, size is not None
        self._folder, self._class_names = folder, tuple(classes)
        text, lengths, counts = bytearray(), [np.zeros(1, np.int64)], [0]
        for name in classes:
            found = sorted(files_in(os.path.join(folder, name), _ENDINGS))
            if full and not found:
                raise UserError(f"the folder {shown(os.path.join(folder, name))} holds no image",
                                f"files that end in {', '.join(ENDINGS)}", "add some, or remove the folder")
            lengths.append(np.fromiter(map(len, found), np.int64, len(found)))
            counts.append(len(found))
            text += b"".join(found)
        self._paths, self._ends = bytes(text), np.cumsum(np.concatenate(lengths))
        self._starts = np.cumsum(counts)[:-1]
        if not len(self):
            raise UserError(f"the folder {shown(folder)} holds no image", f"files that end in {', '.join(ENDINGS)}",
                            "add some, or remove the folder")
        self.size, self._model = (size, b"") if size else first_size(map(self.path, range(min(_TRIED, len(self)))))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def path(self, number: int) -> bytes:
        """Return the file of a sample."""
        return self._path(number, int(self.labels(np.array([number]))[0]))

    def _path(self, number: int, label: int) -> bytes:
        low, high = self._ends[number:number + 2].tolist()
        return b"/".join((self._folder, self._class_names[label], self._paths[low:high]))

    def labels(self, indices_n: np.ndarray) -> np.ndarray:
        """Return the class numbers int64[n] of samples without reading their files."""
        return np.searchsorted(self._starts, indices_n, side="right").astype(np.int64) - 1

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        labels_n = self.labels(np.asarray(indices_n))
        wanted, pictures = self.size if self.resized else None, []
        for number, label in zip(np.asarray(indices_n).tolist(), labels_n.tolist()):
            path = self._path(number, label)
            picture = parsed(path, number, wanted, self.channels)
            if picture.shape[:2] != self.size:
                raise UserError(f"{shown(path)} has {_times(picture.shape)} pixels and {shown(self._model)} "
                                f"{_times(self.size)} (height x width)", "images of one size",
                                "set data.args.size, which scales and crops them, such as 224")
            pictures.append(picture)
        return self.scale(stacked(pictures, self.channels)), labels_n


def _times(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} x {shape[1]}"


def _folder(root: Any) -> bytes:
    if not isinstance(root, (str, os.PathLike)) or not str(root):
        raise UserError(f"data.args.root is {root!r}", "a folder that holds train/CLASS/*.png",
                        "set data.args.root to its path")
    top = os.fsencode(os.path.expanduser(root))
    if not os.path.isdir(top):
        what = "is a file" if os.path.exists(top) else "does not exist"
        raise UserError(f"data.args.root is {shown(top)}, which {what}", "a folder that holds train/CLASS/*.png",
                        "correct data.args.root")
    return top


def _beside(top: bytes) -> str:
    """Describe what was expected in ``top`` and the folders that are there."""
    names = sorted(shown(entry.name) for entry in islice(entries(top), 1000) if is_(entry.is_dir))
    more = ", ..." if len(names) > 5 else ""
    return "train/CLASS/*.png in it" + (f", where there are {', '.join(names[:5])}{more}" if names else "")


def _classes(folder: bytes) -> list[bytes]:
    names = sorted(entry.name for entry in entries(folder) if is_(entry.is_dir))
    if not names:
        loose = any(entry.name.lower().endswith(_ENDINGS) for entry in entries(folder))
        raise UserError(f"{shown(folder)} has no folders" + (", but images without a class" if loose else ""),
                        "one folder for each class, named after it", "move the images into them")
    return names


def _check_alike(train: bytes, classes: list[bytes], folder: bytes, tested: list[bytes]) -> None:
    """Raise `UserError` where the two folders have different classes: numbers would not mean the same."""
    for names, others, where in ((classes, tested, folder), (tested, classes, train)):
        lacking = [shown(name) for name in names if name not in set(others)]
        if lacking:
            more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            raise UserError(f"{shown(where)} lacks the class folders {', '.join(lacking[:5])}{more}",
                            "the same classes in both", "add them (a test folder may be empty), or remove the others")
