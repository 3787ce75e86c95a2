"""``python -m hvdtrain convert``: the options and the table. `hvdtrain.commands.convert.request` converts."""

from __future__ import annotations

import argparse
from typing import Any

from hvdtrain.commands.convert import Request, convert, source_of, target_of
from hvdtrain.commands.convert.request import TOLERANCE
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.table import as_text
from hvdtrain.core.terminal import say

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
    parser.add_argument("target", metavar="TARGET", help="the same of the other framework: a directory becomes a run "
                        "(SOURCE must be one), a file by its ending; must not exist")
    parser.add_argument("--model", default="", help="module:callable that builds SOURCE's model (default: the run's)")
    parser.add_argument("--twin", default="", help="module:callable that builds TARGET's model (default: the file of "
                        "the same name in tf_models or torch_models); gets the model's arguments too. Of either, "
                        "--model_args.NAME VALUE and --twin_args.NAME VALUE set arguments")
    parser.add_argument("--pair", action="append", default=[], metavar="TORCH_LAYER=KERAS_LAYER",
                        help="layers that belong together where names and order leave it open")
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
    """Return ({"model_args": ..., "twin_args": ...} of --model_args.NAME VALUE and --twin_args.NAME VALUE, other
    words).
    """
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
                raise UserError(f"{word} has no value", "one after it", f"write {word} VALUE")
            value = words.pop(0)
        found[key][entry] = recipe.load(value, word)
    return found, rest


def _pairs(given: list[str]) -> dict[str, str]:
    wrong = next((text for text in given if text.count("=") != 1), None)
    if wrong is not None:
        raise UserError(f"{wrong!r} is no pair", "two names with = between them", HELP)
    return dict(text.split("=") for text in given)


def _numbers(key: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{key} is {text!r}", "whole numbers of 1 or more such as 64,2,2", f"correct {key}")
    return numbers
