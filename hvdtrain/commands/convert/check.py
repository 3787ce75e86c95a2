"""Comparison of twins on random input and random weights. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.backends.interchange.layers import Model
from hvdtrain.core.errors import UserError

SAMPLES = 4
APART_BY_CHANCE = 1e-3
"""Largest difference of outputs with random weights, as a part of the largest: right pairs stay well below it in fp32,
wrong ones are far above."""


def random_like(example: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return arrays of the shapes and dtypes of ``example``: floats of its mean and spread, integers drawn from its
    own.
    """
    draw = np.random.default_rng(0)
    out = []
    for array in example:
        if array.dtype.kind == "f":
            spread = float(array.std()) or 1.0
            out.append((float(array.mean()) + spread * draw.standard_normal(array.shape)).astype(array.dtype))
        else:
            out.append(draw.choice(array.reshape(-1), array.shape).astype(array.dtype))
    return out


def inputs(example: Callable[..., Any] | None, shape: Sequence[int], inferred: Sequence[tuple[tuple[int, ...], str]],
           ) -> list[np.ndarray]:
    """Return random input for `SAMPLES` samples: like the file's ``example``, of the user's ``shape``, or ``inferred``.

    Errors: `UserError` where there is none of these.
    """
    if shape:
        return random_like([np.random.default_rng(1).standard_normal((SAMPLES, *shape)).astype(np.float32)])
    if example is not None:
        x = example(SAMPLES)[0]
        return random_like([np.asarray(part) for part in (x if isinstance(x, (list, tuple)) else [x])])
    if inferred:
        drawn = np.random.default_rng(1)
        return random_like([drawn.standard_normal((SAMPLES, *one)).astype(dtype) if np.dtype(dtype).kind == "f"
                            else np.zeros((SAMPLES, *one), dtype) for one, dtype in inferred])
    raise UserError("the model's file has no example(B), so that no input is known to compare outputs on",
                    "an example, or the shape of one sample", "say --input_shape 8,8, or --no-check")


def random_weights(model: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays like those of ``model`` with other values, none 0.

    As spread as they are, or 1 over the root of the inputs where they are all equal; variances from 0.5 to 1.5. Other
    dtypes stay.
    """
    draw = np.random.default_rng(0)
    known = model.weights()
    out = dict(arrays)
    for name in sorted(arrays):
        array, weight = arrays[name], known.get(name)
        bits = weight is not None and weight.dtype == "bfloat16" and array.dtype.itemsize == 2
        if weight is None or array.dtype.kind != "f" and not bits:
            continue
        if name.endswith(("var", "variance")):
            values = draw.uniform(0.5, 1.5, array.shape)
        else:
            spread = 0.0 if bits else float(np.std(array.astype(np.float64)))
            if not (np.isfinite(spread) and spread > 1e-6):
                spread = max(1, min(array.shape) if array.ndim > 1 else 4) ** -0.5
            values = spread * draw.standard_normal(array.shape)
        out[name] = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(
            array.dtype) if bits else values.astype(array.dtype)
    return out


def apart(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Return the largest difference of outputs over the largest output; infinite where one is not finite.

    Errors: `UserError` where the numbers of outputs or their shapes differ.
    """
    shapes = [[a.shape for a in side] for side in (got, want)]
    if shapes[0] != shapes[1]:
        raise UserError(f"the twin's outputs have shapes {shapes[0]}", f"{shapes[1]}, as SOURCE's model gives",
                        "build both twins alike (--model_args, --twin_args)")
    largest = max((float(np.abs(a).max(initial=0.0)) for a in want), default=0.0) or 1.0
    worst = max((float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
                 for a, b in zip(got, want)), default=0.0)
    return worst / largest if np.isfinite(worst) and np.isfinite(largest) else float("inf")
