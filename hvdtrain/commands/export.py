"""``python -m hvdtrain export RUN --format F --out PATH``: a run's model for serving, without hvdtrain.

Owns the list of formats and what lies at PATH. Writers are the backends', `hvdtrain.commands.evaluate` has the weights.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.backends.exporting import SAMPLES, Exportable
from hvdtrain.backends.misfit import fixed_batch
from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.downloads import copied
from hvdtrain.cluster import exit_calls
from hvdtrain.commands.evaluate import add_run, config_of, loaded, read_options, refuse_existing, splits_of
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.terminal import say
from hvdtrain.engine import inference

ON_ONE_DEVICE = ("--precision", "fp32", "--model_parallel", "1")
"""Options of train under which a model computes in the types of its weights, on one device."""


@dataclass(frozen=True)
class ExportFormat:
    """Format of an exported model. ``ending``: of the file's name, "" for a directory.

    ``writers``: by framework, ``module:function`` in `hvdtrain.backends`; the function gets an `Exportable` and the
    path to write, and returns what was verified as one line. It raises `UserError`, or OSError.
    """

    words: str
    ending: str
    writers: Mapping[str, str]


FORMATS = {
    "onnx": ExportFormat("an ONNX file", ".onnx", {"torch": "torch.export:onnx", "tensorflow": "keras.export:onnx"}),
    "torch": ExportFormat("a program for torch.export.load", ".pt2", {"torch": "torch.export:program"}),
    "saved_model": ExportFormat("a SavedModel directory", "", {"tensorflow": "keras.export:saved_model"}),
    "keras": ExportFormat("a file for keras.models.load_model", ".keras",
                    {"torch": "torch.export:keras_file", "tensorflow": "keras.export:keras_file"}),
    "pretrained": ExportFormat("a folder for from_pretrained", "", {"torch": "torch.save_pretrained:pretrained"}),
    "merged": ExportFormat("a folder for from_pretrained, adapters merged", "",
                           {"torch": "torch.save_pretrained:merged"}),
}
"""Formats by their names on the command line; another format is one more line and its function."""


def main(argv: list[str]) -> int:
    """Write the exported model; return 0."""
    args, rest = read_options(parser(), argv)
    format_, out = FORMATS[args.format], Path(os.path.abspath(args.out))
    if not out.name.endswith(format_.ending):
        raise UserError(f"--out is {args.out}", f"a name that ends in {format_.ending} for --format {args.format}",
                        "correct --out")
    refuse_existing(args.out)
    facts = launch_facts(os.environ)
    if facts.size != 1:
        raise UserError(f"export as a job of {facts.launcher}", "one process", "start the command alone")
    with exit_calls.told(), copied(args.run, everything=False) as run:
        config = config_of(run, [*rest, *ON_ONE_DEVICE], args)
        made = inference.assemble(config, splits=splits_of(run, config, None), labels=False)
        source = loaded(made, run, args)
        spec = made.job.spec
        if spec.framework not in format_.writers:
            own = ", ".join(name for name, one in FORMATS.items() if spec.framework in one.writers)
            raise UserError(f"--format {args.format} of a model of {spec.framework}", f"one of {own}",
                            "choose another --format")
        subject = Exportable(spec, made.parts, made.feed.sample(fixed_batch(spec.model) or SAMPLES), args.opset)
        write = _writer(format_.writers[spec.framework])
        said = _published(out, lambda place: write(subject, place))
        say(f"wrote {source.name} as {format_.words} to {args.out}; {said}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hvdtrain export", allow_abbrev=False,
        description="Write a run's model for serving, and compare the outputs of what was written with the model's. "
                    "Start the command alone. Every other option is one of train, such as --data NAME or --model.")
    add_run(made)
    made.add_argument("--format", required=True, choices=list(FORMATS),
                      help="; ".join(f"{name}: {one.words}" for name, one in FORMATS.items()))
    made.add_argument("--out", required=True, metavar="PATH", help="new file or directory")
    made.add_argument("--opset", type=int, default=0, metavar="N",
                      help="version of ONNX's operators (default: the exporter's)")
    made.set_defaults(batch=None)
    return made


def _writer(text: str) -> Callable[[Exportable, Path], str]:
    home, _, name = text.partition(":")
    return getattr(importlib.import_module(f"hvdtrain.backends.{home}"), name)


def _published(out: Path, write: Callable[[Path], str]) -> str:
    """Call ``write`` with a path aside, then rename what it made, ``out`` last; `UserError` leaves nothing."""
    try:
        files.make_directories(out.parent)
        temp = files.make_temp(out.parent)
        try:
            said = write(temp / out.name)
            made = sorted(temp.iterdir(), key=lambda path: path.name == out.name)
            for path in (path for path in temp.rglob("*") if path.is_file()):
                files.fsync(path)
            for path in made:
                refuse_existing(str(out.parent / path.name))
            for path in made:
                os.rename(path, out.parent / path.name)
            files.fsync_directory(out.parent)
        finally:
            files.remove_quietly(temp)
    except OSError as error:
        raise UserError(f"{out} could not be written: {error}", "a writable place with room",
                        "choose another --out") from None
    return said
