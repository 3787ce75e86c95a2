"""Shared by the writers of exported models: a model with a sample of its data, and the comparison of outputs.

Each backend's ``export.py`` has the writers, which `hvdtrain.commands.export` lists by format.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.backends.misfit import line_of_the_user, reason
from hvdtrain.backends.model_spec import Spec
from hvdtrain.core.comparison import largest_difference
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts

SAMPLES = 5
"""Samples of the data that a model is traced with: a number that is rarely the size of another dimension."""

TOLERANCE = 1e-3
"""Largest difference of right outputs, of the largest output: other kernels sum float32 in another order, which changes
the outputs of networks of some hundred layers by about 1e-5. Wrong weights or modes change them by more than 1e-2."""

Outputs = dict[str, np.ndarray]

REFUSALS = (
    (r"data-dependent|DataDependent|Could not guard|torch\.cond", "the model branches on the values of its inputs",
     "use torch.where or torch.cond in place of an if on values"),
    (r"specialized|[Cc]onstraints? violated|ConstraintViolation|marked .* as dynamic",
     "the model fixes the number of samples",
     "take this number from x.shape[0] in forward, without len(), int(), a loop over samples or an if on it"),
    (r"", "the model cannot be traced", "change that part of the model's forward"),
)
"""Pattern of an exporter's words, what it means, and what to do; the first that matches."""


@dataclass(frozen=True)
class Exportable:
    """A model with a run's weights and `SAMPLES` for an `Evaluator`. ``opset``: ONNX's; 0: the exporter's own."""

    spec: Spec
    parts: ModelParts
    batch: Batch
    opset: int = 0


def refused(error: Exception, exporter: str) -> UserError:
    """Return the error of a model that ``exporter`` cannot trace, with the place in the user's code."""
    words = f"{type(error).__name__}: {error}"
    meaning, do = next((meaning, do) for pattern, meaning, do in REFUSALS if re.search(pattern, words))
    place = line_of_the_user(list(traceback.walk_tb(error.__traceback__)))
    where = f" ({place})" if place else ""
    found = re.search(r"specialized it to be a constant \(\d+\)", words)
    said = found[0] if found else reason(error)
    return UserError(f"{meaning}, which {exporter} refuses: {said}{where}", "a forward pass that is the same "
                     "graph for all inputs", do)


def verified(got: Outputs, want: Outputs, reader: str) -> float:
    """Return the largest difference of outputs, as a share of the largest output; ``reader``: of the export.

    Errors: `UserError` where the exported model does not compute what the model does.
    """
    if {name: array.shape for name, array in got.items()} != {name: array.shape for name, array in want.items()}:
        raise UserError(f"the exported model gives {_shapes(got)} in {reader}", f"{_shapes(want)}, as the model",
                        "report this model to hvdtrain; nothing was written")
    wide = [{name: array.astype(np.float64) for name, array in side.items()} for side in (want, got)]
    apart = {name for name in want if not np.array_equal(wide[0][name], wide[1][name], equal_nan=True)}
    difference, name = largest_difference(*({name: side[name] for name in apart} for side in wide))
    if difference > TOLERANCE:
        raise UserError(f"output {name} of the exported model differs by {difference:.1e} of the largest value in "
                        f"{reader}", f"at most {TOLERANCE:.0e}", "choose another --format or "
                        "--opset; nothing was written")
    return difference


def verdict(reader: str, samples: list[int], difference: float) -> str:
    """Return the line that tells what was verified."""
    batches = " and of ".join(count(n, "sample") for n in samples)
    return f"verified with {reader}: outputs of {batches} differ by at most {difference:.1e} of the largest"


def _shapes(outputs: Outputs) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items()) or "no outputs"


def wide(array: Any) -> np.ndarray:
    """Return an output on the host, 16-bit floats as float32."""
    found = np.asarray(array)
    return found.astype(np.float32) if found.dtype.itemsize == 2 and found.dtype.kind not in "iu" else found
