"""Tells a model that does not fit its data from a model with a bug, by the exception that a framework raised.

Owns that reading of exceptions and the words for the user. Knows names of frameworks' classes, imports none.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np

from hvdtrain.cluster.exit_calls import owner
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError

_FRAMEWORKS = re.compile(r"[/\\](torch|keras|tensorflow|numpy)[/\\]")
_MODULES = {("torch.nn.modules.module", "Module"), ("keras.src.layers.layer", "Layer")}
_NAMES = ("x", "y", "sample_weight")
_PLAIN_BUGS = ("RecursionError", "UnicodeError", "NotImplementedError", "OutOfMemoryError", "ResourceExhaustedError")
_OF_INPUT = ("ValueError", "IndexError", "RuntimeError", "AssertionError", "InvalidArgumentError", "UnimplementedError")

DO = (
    (r"does not require grad", "call requires_grad_() on the tensor by which the model or loss differentiates"),
    (r"label value|device-side assert|out of range|is not in \[0", "number tokens and classes from 0, below the size "
     "of the model's table or output, or build the model with a larger one"),
    (r"indices.*scalar type|expected.*(Long|Int)\b.*Float", "give token and class numbers as integers (int64)"),
    (r"scalar type|dtype|not implemented for|unsigned char|Input type|data type|same type", "convert the data "
     "to the model's compute type, such as float32 for images"),
    (r"argument", "match the arguments of the model's call and the arrays of the data"),
    (r"", "reshape the data, or build the model for the data (model_args, or the model file)"),
)
"""What to do, by the first pattern that the framework's words match."""


ONE_SAMPLE = "with BatchNorm, which computes its statistics over more than one value per channel"


def fixed_batch(model: Any) -> int:
    """Return the number of samples that a Keras model was built for (``batch_shape``); 0: any number."""
    inputs = getattr(model, "inputs", None)
    found = [x.shape[0] for x in inputs if getattr(x, "shape", ())] if isinstance(inputs, (list, tuple)) else []
    return next((n for n in found if isinstance(n, int)), 0)


def one_sample(rank: int, where: str = "", do: str = "") -> UserError:
    """Return the error of ``rank``, whose micro-batch has one sample, in the batches ``where``."""
    return UserError(f"a micro-batch of 1 sample on rank {rank}{where} {ONE_SAMPLE}", "at least 2 samples in each "
                     "micro-batch of every rank", do or "change global_batch, shares, accumulate or micro_batch, or "
                     "use GroupNorm")


@contextlib.contextmanager
def told(model: Any, batch: Sequence[Any], evaluates: bool = False) -> Iterator[None]:
    """Turn a framework's refusal of ``batch``, a tuple of arrays, into a `UserError` with that refusal as its cause.

    ``evaluates``: PyTorch records no gradient within the body. Other errors, such as a NameError, pass through.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        places = list(traceback.walk_tb(error.__traceback__))
        if not _is_misfit(error, *places[-1]):
            raise
        said, (layer, sizes) = reason(error), _layer(model, [frame for frame, _ in places])
        where = ", ".join(filter(None, [f"in {layer}" if layer else "", line_of_the_user(places)]))
        if evaluates and "does not require grad" in said:
            raise UserError(f"the model or a metric computes a gradient in an evaluation, which records none: {said}"
                            + (f" ({where})" if where else ""), "a forward pass that enables "
                            "gradients where needed", "put `with torch.enable_grad():` around that part of the model, "
                            "and call requires_grad_() on the tensor by which it differentiates") from error
        subject = "the model" if layer or _is_of_keras(said) else "the loss or a metric"
        raise UserError(f"{subject} does not take the data, {kinds(batch)}: {said}" + (f" ({where})" if where else ""),
                        _expected(model, layer, sizes, said),
                        next(do for words, do in DO if re.search(words, said))) from error


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory did not suffice, on the host or a device."""
    names = {c.__name__ for c in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"})


def kinds(batch: Sequence[Any]) -> str:
    """Describe arrays: name, dtype, shape with B for the samples, and the range of whole numbers."""
    names = _NAMES if len(batch) <= len(_NAMES) else [f"array {i}" for i in range(len(batch))]
    return ", ".join(f"{name} {_kind(np.asarray(array))}" for name, array in zip(names, batch))


def _kind(array: np.ndarray) -> str:
    shape = ", ".join(["B", *(str(n) for n in array.shape[1:])])
    several = array.dtype.kind in "iu" and array.size > 1 and len(array) > 1
    span = f" of {array.min()} to {array.max()}" if several else ""
    return f"{array.dtype}[{shape}]{span}"


def reason(error: BaseException) -> str:
    """Return the line of an exception that says why, without Keras' frame, colours and TensorFlow's node names."""
    text = re.sub(r"\x1b\[[0-9;]*m|{{.*?}} ?| \[Op:.*", "", str(error))
    text = re.sub(r"(Invalid input shape) for input .*?\. (Expected)", r"\1. \2", text, flags=re.DOTALL)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]
    said = lines[0] if lines else type(error).__name__
    return said.rstrip(".") if len(said) <= 400 else said[:400] + " ..."


def _is_misfit(error: Exception, frame: FrameType, line: int) -> bool:
    """Return whether ``error``, raised at ``line`` of ``frame``, refuses shapes, types or ranges; True in doubt."""
    names = {c.__name__ for c in type(error).__mro__}
    text = str(error)
    if "CUDA error" in text:
        return "device-side assert" in text  # an index out of range
    if "not implemented for" in text and "RuntimeError" in names:
        return True
    if names & set(_PLAIN_BUGS) or "eager" in text:  # what a graph alone can do is told by the first step
        return False
    raised_here = linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise ")
    if raised_here and type(error) is RuntimeError and not _FRAMEWORKS.search(frame.f_code.co_filename):
        return False  # a model's own alarm
    if isinstance(error, IndexError):
        return not re.match(r"list |pop from", text)
    if isinstance(error, TypeError):
        return bool(_FRAMEWORKS.search(frame.f_code.co_filename)) or bool(
            re.search(r"[Tt]ensor|argument|dtype|EagerTensor", text))
    return bool(names & set(_OF_INPUT))


def _layer(model: Any, frames: list[FrameType]) -> tuple[str, str]:
    """Return the innermost layer that was called: class, name and sizes; "" where there is none."""
    for frame in reversed(frames):
        first = frame.f_code.co_varnames[:1]
        own = frame.f_locals.get(*first) if first else None
        if own is None or not _MODULES & {(c.__module__, c.__name__) for c in type(own).__mro__}:
            continue
        if (type(own).__module__ or "").startswith("hvdtrain."):
            continue
        named = getattr(model, "named_modules", None)
        name = next((n for n, m in named() if m is own), "") if named else getattr(own, "name", "")
        sizes = own.extra_repr() if hasattr(own, "extra_repr") else ""
        return f"{type(own).__name__} {name!r}" if name else type(own).__name__, f" ({sizes})" if sizes else ""
    return "", ""


def line_of_the_user(places: list[tuple[FrameType, int]]) -> str:
    """Return file:line of the innermost code of neither a framework nor this project; "" where there is none."""
    for frame, line in reversed(places):
        path = frame.f_code.co_filename
        if owner(path) == "user" and not path.startswith(str(ROOT)):
            return f"{path}:{line}"
    return ""


def _is_of_keras(said: str) -> bool:
    """Return whether Keras' own words name the layer."""
    return bool(re.search(r"layer \"|Layer |Invalid input shape|Inputs? ", said))


def _expected(model: Any, layer: str, sizes: str, said: str) -> str:
    """Return what the model says of its inputs, or which layer refused them; "" where the refusal itself says it."""
    inputs = getattr(model, "inputs", None)
    if isinstance(inputs, (list, tuple)) and inputs and all(hasattr(i, "shape") for i in inputs):
        shapes = [", ".join(["B", *("?" if n is None else str(n) for n in i.shape[1:])]) for i in inputs]
        return "x " + " and ".join(f"{i.dtype}[{shape}]" for i, shape in zip(inputs, shapes))
    if "xpected" in said and not sizes:
        return ""
    return f"what {layer}{sizes} takes" if layer else "matching shapes, types and numbers"
