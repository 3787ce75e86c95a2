"""Augment pictures while they are read: a file for each augmentation, and `Augmented`, the source that applies them.

A file has ``check(value)`` and ``apply(x, value, uniform)``, from pictures (n, H, W, C) of any number type to the same;
a user's ``module:callable`` is such an ``apply``, or a transform of a library (`hvdtrain.data.augment.library`).
`hvdtrain.data.augment.draw` has the random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import in_slot, load_callable, load_slot
from hvdtrain.data.augment import mixup
from hvdtrain.data.augment.draw import uniform_of
from hvdtrain.data.augment.library import transform_of
from hvdtrain.data.pictures import LAYOUTS, Normalisation
from hvdtrain.data.sources import EpochSource, Source, Unreadable, innermost
from hvdtrain.data.stream import Arrays

ORDER = ("resized_crop", "crop", "flip", "color_jitter", "cutout")
"""The augmentations of files in the order in which they are applied; others of the folder follow, then the user's own
as they are written, and mixup last."""

CHANNELS = (1, 3, 4)
LAYOUT = "layout"
"""Entry of ``data.augment`` that is no augmentation: one of `LAYOUTS`."""
UNNORMALISED = ("color_jitter",)
"""Augmentations of files that take pixels in [0, 1], before mean and std of a set by name; so do libraries' transforms.
"""


def check(spec: Mapping[str, Any]) -> None:
    """Raise `UserError` for an unknown augmentation, and for a value that it does not take."""
    files = in_slot(__name__, "apply")
    for name, value in spec.items():
        if name == LAYOUT and value not in LAYOUTS:
            raise UserError(f"data.augment.layout is {value!r}", nearest(str(value), LAYOUTS), "correct it")
        if ":" in name or name == LAYOUT:
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
    for name in own:
        if spec[name] is not False:
            found = load_callable(name, "data.augment")
            function = transform_of(found, spec[name], name) or found
            steps.append((f"own {name.rpartition(':')[2]}", function, spec[name]))
    return steps


class Augmented(EpochSource):
    """Pictures of ``source`` changed by ``spec`` (``data.augment``): an `hvdtrain.data.sources.EpochSource`.

    x is (n, H, W) or (n, H, W, C) of floats or whole numbers and keeps its type; (n, C, H, W) where ``layout``, or
    that of ``spec``, is channels_first. With mixup y becomes float32 (n, C). ``draws``: whether a transform takes
    numbers from generators of the process.
    Errors: `UserError` for a stream, for data that holds no pictures, and from mixup for data without classes.
    """

    def __init__(self, source: Source, spec: Mapping[str, Any], seed: int, layout: str = "") -> None:
        if not isinstance(source, Source):
            raise UserError("data.augment with data that can only be read in order (a stream)",
                            "samples that can be fetched by index, which seeds their random numbers",
                            "augment within the stream, or leave data.augment out")
        if getattr(source, "layout", None) is not None:
            raise UserError("data.augment with several arrays of inputs or targets",
                            "one array of images, and one of targets",
                            "leave data.augment out, or augment in the data's own callable")
        check(spec)
        self.wraps, self.spec, self.seed = source, dict(spec), seed
        self.layout_of_x = _one_layout(source, spec.get(LAYOUT, ""), layout)
        scale = getattr(innermost(source), "scale", None)
        self._scale = scale if isinstance(scale, Normalisation) else None
        self._classes = mixup.classes_of(spec["mixup"], source) if mixes(spec) else 0
        self._steps = steps_of(spec)
        self.draws = any(getattr(function, "draws", False) for _, function, _ in self._steps)

    def __reduce__(self) -> tuple:
        return type(self), (self.wraps, self.spec, self.seed, self.layout_of_x)

    def __len__(self) -> int:
        return len(self.wraps)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        own = self._changed(indices_n, epoch)
        if not mixes(self.spec):
            return own
        if len(own) != 2:
            raise UserError(f"data.augment.mixup: a sample has {len(own)} arrays", "(x, y), an image and its class",
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
        first = self.layout_of_x == "channels_first" and x.ndim == 4
        pictures = x.transpose(0, 2, 3, 1) if first else x if x.ndim == 4 else x[..., None]
        refuse_others(x, rest, pictures, "channels_first" if first else "channels_last")
        for name, function, value in self._steps:
            bare = self._scale if name in UNNORMALISED or hasattr(function, "draws") else None
            changed = pictures if bare is None else bare.undone(pictures)
            changed = np.asarray(function(changed, value, uniform_of(indices_n, self.seed, epoch, name)))
            changed = changed if bare is None else bare.again(changed)
            if changed.shape != pictures.shape or changed.dtype != pictures.dtype:
                raise UserError(f"data.augment: {name} gave {changed.dtype} of shape {list(changed.shape)} for "
                                f"{pictures.dtype} of {list(pictures.shape)}", "the same type and shape",
                                "correct that function")
            pictures = changed
        return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2) if first else pictures).reshape(x.shape), *rest


def _one_layout(source: Source, *declared: str) -> str:
    """Return the layout that the source and ``declared`` agree on; `UserError` for different ones."""
    known = [each for each in (getattr(getattr(innermost(source), "scale", None), "layout", ""), *declared) if each]
    if len(set(known)) > 1:
        raise UserError(f"the layout of the images is declared as {' and '.join(sorted(set(known)))}", "one layout",
                        "correct data.augment.layout or data.args.layout")
    return known[0] if known else LAYOUTS[0]


def refuse_others(x: np.ndarray, rest: list[Any], pictures: np.ndarray, layout: str) -> None:
    """Raise `UserError` unless ``x`` holds ``pictures`` in ``layout``, and no target is a picture too."""
    kind = f"{x.dtype} of shape {list(x.shape)}"
    if x.ndim not in (3, 4) or x.dtype.kind not in "iuf":
        raise UserError(f"data.augment: x is {kind}", "images (n, height, width) or (n, height, width, channels)",
                        "leave data.augment out")
    if x.ndim == 4 and pictures.shape[3] not in CHANNELS and {x.shape[1], x.shape[3]} & set(CHANNELS):
        other = next(each for each in LAYOUTS if each != layout)
        raise UserError(f"data.augment: x is {kind}, with its {other.replace('_', ' ')}", f"images in {layout}",
                        f"set data.augment.layout: {other}")
    if rest and np.ndim(rest[0]) > 2:
        raise UserError(f"data.augment: targets of shape {list(np.shape(rest[0]))} would not be augmented "
                        "with their images",
                        "targets of one or two dimensions", "augment in the data's own callable")
