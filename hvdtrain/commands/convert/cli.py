"""``python -m hvdtrain convert``: the options and the table. `hvdtrain.commands.convert.request` converts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.backends.interchange.layers import Model
from hvdtrain.commands.convert.request import TOLERANCE, Request, convert, source_of, target_of
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.terminal import as_text, say

HELP = "see python -m hvdtrain convert --help"
_ARGS = ("model_args", "twin_args")


def main(argv: list[str]) -> int:
    """Convert as ``argv`` says and print the pairs; return 0, or raise `UserError` and make nothing."""
    given, rest = _entries(argv)
    args, unknown = make_parser().parse_known_args(rest)
    if unknown:
        known = [option for action in make_parser()._actions for option in action.option_strings]
        raise UserError(f"there is no option {unknown[0]}", nearest(unknown[0], known), HELP)
    if not args.tolerance >= 0:
        raise UserError(f"--tolerance is {args.tolerance:g}", "a number of 0 or more", "correct --tolerance")
    source, target = source_of(args.source, lambda text: say(f"note: {text}")), target_of(args.target)
    request = Request(source, target, args.model, args.twin, **given, pairs=_pairs(args.pair),
                      flats={name: _numbers("--flatten", text) for name, text in _pairs(args.flatten).items()},
                      input_shape=_numbers("--input_shape", args.input_shape) if args.input_shape else [],
                      tolerance=args.tolerance, check=args.check)
    report = convert(request)
    for line in table(report):
        say(line)
    say(f"made {args.target}")
    if request.with_state:
        say(f"resume with: python -m hvdtrain train --config {args.target}/config.yaml")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options, besides --model_args.NAME and --twin_args.NAME."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain convert", allow_abbrev=False,
        usage="python -m hvdtrain convert SOURCE TARGET [--model M] [--twin M] [--model_args.NAME VALUE ...] ...",
        description="Convert a model between PyTorch and Keras, and a run with its optimizer (SGD, Adam, AdamW) and "
                    "its position in the data, so that it resumes in the other framework with the same results. Both "
                    "models' outputs on the same random input are compared; TARGET is made only if they agree.")
    parser.add_argument("source", metavar="SOURCE", help="a run's directory or checkpoint, or a file of weights: "
                        ".safetensors, .pt or .pth (state_dict), .keras, .weights.h5")
    parser.add_argument("target", metavar="TARGET", help="target in the other framework: a directory becomes "
                        "a run (SOURCE must be one), a file by its ending; must not exist")
    parser.add_argument("--model", default="", help="module:callable that builds SOURCE's model (default: the run's)")
    parser.add_argument("--twin", default="", help="module:callable that builds TARGET's model (default: the file of "
                        "the same name in tf_models or torch_models); gets the model's arguments too. Of either, "
                        "--model_args.NAME VALUE and --twin_args.NAME VALUE set arguments")
    parser.add_argument("--pair", action="append", default=[], metavar="TORCH_LAYER=KERAS_LAYER",
                        help="layers that correspond, where names and order are ambiguous")
    parser.add_argument("--flatten", action="append", default=[], metavar="TORCH_LAYER=C,H,W",
                        help="a Linear before which the PyTorch model flattens C, H, W and the Keras model H, W, C")
    parser.add_argument("--input_shape", default="", metavar="N,N,...",
                        help="shape of one sample of the check, where the model's file has no example(B)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE,
                        help="largest difference of outputs, relative to the largest (default 1e-5)")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare outputs")
    return parser


def table(report: dict[str, Any]) -> list[str]:
    """Return lines: each weight of torch and its Keras twin, how they were matched, the difference, remarks."""
    lines = as_text(("PyTorch", "Keras", "layout, PyTorch -> Keras"), report["rows"]).splitlines()
    lines.append(f"{len(report['rows'])} weights matched {report['how']}, {report['frameworks'][0]} to "
                 f"{report['frameworks'][1]}")
    if "apart" in report:
        lines.append(f"outputs on random input {report['input'][0]} differ by {report['apart']:.1e} of the largest")
        if "apart_by_chance" in report:
            lines.append(f"and with random weights by {report['apart_by_chance']:.1e}")
    else:
        lines.append("outputs were not compared")
    if "optimizer" in report:
        lines.append(f"optimizer {report['optimizer']} with its state, at step {report['step']}")
    return lines + [f"note: {text}" for text in report["notes"]]


def _entries(argv: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return ({"model_args": ..., "twin_args": ...} of --model_args.NAME and --twin_args.NAME, other words)."""
    found: dict[str, dict[str, Any]] = {key: {} for key in _ARGS}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key, _, entry = name.partition(".")
        if not word.startswith("--") or key not in _ARGS or not entry:
            rest.append(word)
            continue
        if not equals:
            if not words:
                raise UserError(f"{word} has no value", "a value", f"write {word} VALUE")
            value = words.pop(0)
        found[key][entry] = recipe.load(value, word)
    return found, rest


def _pairs(given: list[str]) -> dict[str, str]:
    wrong = next((text for text in given if text.count("=") != 1), None)
    if wrong is not None:
        raise UserError(f"{wrong!r} is not a pair", "two names with = between them", HELP)
    return dict(text.split("=") for text in given)


def _numbers(key: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{key} is {text!r}", "whole numbers of 1 or more such as 64,2,2", f"correct {key}")
    return numbers


SAMPLES = 4
APART_BY_CHANCE = 1e-3
"""Largest difference of outputs with random weights, as a part of the largest: right pairs stay well below it in fp32,
wrong ones are far above."""


def random_like(example: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return arrays of ``example``'s shapes and dtypes: floats of its mean and spread, integers drawn from it."""
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
    """Return random input for `SAMPLES`, like ``example``, of ``shape``, or ``inferred``; `UserError` without."""
    if shape:
        return random_like([np.random.default_rng(1).standard_normal((SAMPLES, *shape)).astype(np.float32)])
    if example is not None:
        x = example(SAMPLES)[0]
        return random_like([np.asarray(part) for part in (x if isinstance(x, (list, tuple)) else [x])])
    if inferred:
        drawn = np.random.default_rng(1)
        return random_like([drawn.standard_normal((SAMPLES, *one)).astype(dtype) if np.dtype(dtype).kind == "f"
                            else np.zeros((SAMPLES, *one), dtype) for one, dtype in inferred])
    raise UserError("the model's file has no example(B), so no input is known for the comparison of outputs",
                    "an example, or the shape of one sample", "pass --input_shape 8,8, or --no-check")


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
    """Return the largest difference over the largest output, or infinity; `UserError` for other shapes."""
    shapes = [[a.shape for a in side] for side in (got, want)]
    if shapes[0] != shapes[1]:
        raise UserError(f"the twin's outputs have shapes {shapes[0]}", f"{shapes[1]}, as SOURCE's model gives",
                        "build both twins in the same way (--model_args, --twin_args)")
    # np.max returns NaN where any entry is; max() only where the first is.
    largest = float(np.max([np.abs(a).max(initial=0.0) for a in want], initial=0.0)) or 1.0
    worst = float(np.max([np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0)
                          for a, b in zip(got, want)], initial=0.0))
    return worst / largest if np.isfinite(worst) and np.isfinite(largest) else float("inf")
