"""Augment pictures while they are read: a file for each augmentation, and `Augmented`, the source that applies them.

A file has ``check(value)`` and ``apply(x, value, uniform)``, from pictures (n, H, W, C) of any number type to the same;
a user's ``module:callable`` is such an ``apply``. `hvdtrain.data.augment.draw` has the random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import in_slot, load_callable, load_slot
from hvdtrain.data.augment import mixup
from hvdtrain.data.augment.draw import uniform_of
from hvdtrain.data.sources import EpochSource, Source, Unreadable
from hvdtrain.data.stream import Arrays

ORDER = ("crop", "flip", "cutout")
"""The augmentations of files in the order in which they are applied; others of the folder follow, then the user's own
as they are written, and mixup last."""

CHANNELS = (1, 3, 4)


def check(spec: Mapping[str, Any]) -> None:
    """Raise `UserError` for an unknown augmentation, and for a value that it does not take."""
    files = in_slot(__name__, "apply")
    for name, value in spec.items():
        if ":" in name:
            continue
        if name != "mixup" and name not in files:
            raise UserError(f"data.augment names {name!r}", f"{nearest(name, [*files, 'mixup'])}, or module:callable",
                            "correct data.augment")
        (mixup.check if name == "mixup" else load_slot(__name__, name, "data.augment", "check"))(value)


def mixes(spec: Mapping[str, Any]) -> bool:
    """Return whether targets become shares of classes."""
    return bool(mixup.alpha_of(spec.get("mixup", 0)))


def steps_of(spec: Mapping[str, Any]) -> list[tuple[str, Callable[..., np.ndarray], Any]]:
    """Return (name of its random numbers, function, value) of all but mixup, in order, without those of value 0."""
    files = [*ORDER, *(name for name in in_slot(__name__, "apply") if name not in ORDER)]
    own = [name for name in spec if ":" in name]
    steps = [(name, load_slot(__name__, name, "data.augment", "apply"), spec[name]) for name in files if spec.get(name)]
    return steps + [(f"own {name.rpartition(':')[2]}", load_callable(name, "data.augment"), spec[name])
                    for name in own]


class Augmented(EpochSource):
    """Pictures of ``source`` changed by ``spec`` (``data.augment``): an `hvdtrain.data.sources.EpochSource`.

    x is (n, H, W) or (n, H, W, C) of floats or whole numbers and keeps its type. With mixup y becomes float32 (n, C).
    Errors: `UserError` for a stream, for data that holds no pictures, and from mixup for data without classes.
    """

    def __init__(self, source: Source, spec: Mapping[str, Any], seed: int) -> None:
        if not isinstance(source, Source):
            raise UserError("data.augment with data that can only be read in order (a stream)",
                            "samples that can be fetched by number, since random numbers go by those",
                            "augment within the stream, or leave data.augment out")
        if getattr(source, "layout", None) is not None:
            raise UserError("data.augment with inputs or targets in several parts",
                            "one array of pictures, and one of targets",
                            "leave data.augment out, or augment in the data's own callable")
        check(spec)
        self.wraps, self.spec, self.seed = source, dict(spec), seed
        self._classes = mixup.classes_of(spec["mixup"], source) if mixes(spec) else 0
        self._steps = steps_of(spec)

    def __reduce__(self) -> tuple:
        return type(self), (self.wraps, self.spec, self.seed)

    def __len__(self) -> int:
        return len(self.wraps)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        own = self._changed(indices_n, epoch)
        if not mixes(self.spec):
            return own
        if len(own) != 2:
            raise UserError(f"data.augment.mixup: a sample has {len(own)} arrays", "(x, y), a picture and its class",
                            "leave mixup out")
        partners_n = mixup.partners(indices_n, len(self), self.seed, epoch)
        try:
            other = self._changed(partners_n, epoch)
        except Unreadable as error:  # those who asked know the samples that they asked for
            asked = int(indices_n[np.flatnonzero(partners_n == error.number)[0]])
            reason = f"{error.reason} (sample {error.number}, its partner of mixup)"
            raise Unreadable(asked, error.place, reason) from None
        weights_n = mixup.weights(indices_n, mixup.alpha_of(self.spec["mixup"]), self.seed, epoch)
        (x, y), (other_x, other_y) = own, other
        y, other_y = (mixup.shares(np.asarray(each), self._classes) for each in (y, other_y))
        return mixup.mix(x, other_x, weights_n), mixup.mix(y, other_y, weights_n)

    def _changed(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        """Return the samples after all augmentations but mixup."""
        source = self.wraps
        fetched: Any = (source.fetch_in(indices_n, epoch) if isinstance(source, EpochSource)
                        else source.fetch(indices_n))
        x, *rest = (fetched,) if isinstance(fetched, np.ndarray) else tuple(fetched)
        x = np.asarray(x)
        refuse_others(x, rest)
        pictures = x if x.ndim == 4 else x[..., None]
        for name, function, value in self._steps:
            changed = np.asarray(function(pictures, value, uniform_of(indices_n, self.seed, epoch, name)))
            if changed.shape != pictures.shape or changed.dtype != pictures.dtype:
                raise UserError(f"data.augment: {name} gave {changed.dtype} of shape {list(changed.shape)} for "
                                f"{pictures.dtype} of {list(pictures.shape)}", "the same type and shape",
                                "correct that function")
            pictures = changed
        return pictures.reshape(x.shape), *rest


def refuse_others(x: np.ndarray, rest: list[Any]) -> None:
    """Raise `UserError` unless ``x`` holds pictures with their channels last, and no target is a picture too."""
    kind = f"{x.dtype} of shape {list(x.shape)}"
    if x.ndim not in (3, 4) or x.dtype.kind not in "iuf":
        raise UserError(f"data.augment: x is {kind}", "pictures (n, height, width) or (n, height, width, channels)",
                        "leave data.augment out")
    if x.ndim == 4 and x.shape[1] in CHANNELS and x.shape[3] not in CHANNELS:
        raise UserError(f"data.augment: x is {kind}, with its channels first", "(n, height, width, channels)",
                        "transpose the pictures in the data, and in the model if it needs them so")
    if rest and np.ndim(rest[0]) > 2:
        raise UserError(f"data.augment: targets of shape {list(np.shape(rest[0]))} would not follow their pictures",
                        "targets of one or two dimensions", "augment in the data's own callable")
