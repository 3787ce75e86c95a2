"""``python -m hvdtrain evaluate RUN``: the metrics of a run's model on any data, on any number of ranks.

Owns the options and the choice of weights that ``predict`` shares; `hvdtrain.engine.inference` computes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import CheckpointError, files, weights
from hvdtrain.checkpoint.downloads import copied, get_weights
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.checkpoint.snapshot import inspect
from hvdtrain.checkpoint.store import CheckpointStore, best_of
from hvdtrain.checkpoint.tensors import Spec
from hvdtrain.cluster import exit_calls
from hvdtrain.cluster.control import agreed
from hvdtrain.commands import train
from hvdtrain.commands.checkpoints import chosen
from hvdtrain.config import Config, aliases
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import is_url
from hvdtrain.core.terminal import say
from hvdtrain.data.prepare import NEW_DATA
from hvdtrain.data.sources import ALL
from hvdtrain.engine import inference
from hvdtrain.engine.inference import Inference

OPTIONS = "Every other option is one of train, such as --data NAME, --data.args.KEY VALUE, --model or --precision."
START = "Start the command alone, or with mpirun for several ranks. "


def main(argv: list[str]) -> int:
    """Print the metrics, and write them with ``--out``; return 0."""
    args, rest = read_options(parser(), argv)
    if args.out is not None and not args.out.endswith(".json"):
        raise UserError(f"--out is {args.out}", "a file name that ends in .json", "correct --out")
    with exit_calls.told(), copied(args.run, everything=False) as run:
        config = config_of(run, rest, args)
        made = inference.assemble(config, splits=splits_of(run, config, args.split))
        control = made.job.control
        agreed(control, lambda: refuse_existing(args.out) if control.rank == 0 else None, "--out")
        source = loaded(made, run, args)
        metrics, samples = inference.evaluate(made)
        name = args.run if is_url(args.run) else str(run)
        record = {"run": name, **source.record(), "data": config.data.name, "split": made.split, "samples": samples,
                  "ranks": control.size, "metrics": {k: _number(v) for k, v in metrics.items()}}
        if control.rank == 0:
            terminal.show(f"{name}, {source.name}: {samples} samples of {of_split(made, config)}", ("metric", "value"),
                          [[name, f"{value:.6g}" if np.ndim(value) == 0 else str(value)]
                           for name, value in metrics.items()], launched=control.size > 1)
        agreed(control, lambda: _written(record, args.out) if control.rank == 0 and args.out else None, "--out")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hvdtrain evaluate", allow_abbrev=False,
        description="Print the metrics of a run's model, exact over all ranks, and trains nothing. " + START + OPTIONS)
    add_options(made)
    made.add_argument("--out", metavar="FILE.json", help="also write the metrics to this new file")
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    """Add the options that evaluate and predict share."""
    add_run(made)
    made.add_argument("--split", choices=("test", "train", ALL),
                      help="split of the data; all: without holding samples out, of data without a test split of its "
                           "own (default: test for the run's own data, else all; where there is none, the next of all, "
                           "test, train)")
    made.add_argument("--batch", type=int, metavar="N",
                      help="samples of all ranks that are computed together (default: the run's global_batch)")


def add_run(made: argparse.ArgumentParser) -> None:
    """Add the options that name a run and its weights."""
    made.add_argument("run", metavar="RUN", help="the directory, or the URL such as s3://bucket/run, of a finished or "
                                                 "a killed run")
    made.add_argument("--checkpoint", default="latest", metavar="latest|best|STEP",
                      help="latest (default): the final model of a finished run, else the newest complete checkpoint; "
                           "best: the one that checkpoint.keep_best has kept; or the step of a checkpoint")


def read_options(made: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's own options and those of train."""
    if argv and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise UserError(f"{argv[0]} comes before RUN", "the run's directory first", f"write {made.prog.split()[-1]} "
                        "RUN, then the options")
    args, rest = made.parse_known_args(list(argv))
    if args.checkpoint not in ("latest", "best") and not args.checkpoint.isdecimal():
        raise UserError(f"--checkpoint is {args.checkpoint!r}", "latest, best or a step", "correct --checkpoint")
    return args, rest


def config_of(run: Path, rest: Sequence[str], args: argparse.Namespace) -> Config:
    """Return the run's configuration with the options ``rest`` of train; the same on every rank.

    Errors: `UserError` for a directory without a run, and where model or data were objects that a script gave to fit.
    """
    file = run / RunDirectory.CONFIG
    if not file.is_file():
        raise UserError(f"{run} holds no {RunDirectory.CONFIG}", "the directory of a run", "correct RUN")
    batch = [] if args.batch is None else ["--global_batch", str(args.batch)]
    config = train.parse(["--config", str(file), *rest, *batch])
    if config is None:
        raise UserError("an option that prints and stops", "options of a run", "call train with it")
    keys = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    text = str(recorded(run).get("model", ""))
    by_name = ":" in text
    own = config.model == "auto"
    if own and by_name:
        object.__setattr__(config, "model", text)  # the built-in model of the framework that the run has found
    if own and text and not by_name:
        raise UserError(f"the run's model, {text}, was given to fit by a script", "a callable that builds the model",
                        "add --model module:callable, and --data")
    if not (own and by_name) and config.data == Config().data and not {"data", "data.name"} & keys:
        raise UserError("the run's configuration names no data", "the data to read",
                        "add --data NAME; --data digits for the default")
    if config.metrics == Config().metrics and "metrics" not in keys:
        aliases.set_only(config, {field.name for field in fields(Config)} - {"metrics"})  # accuracy, where it suits
    return config


def splits_of(run: Path, config: Config, split: str | None) -> Sequence[str]:
    """Return the splits of the data to try, in order."""
    if split is not None:
        return (split,)
    before = train.parse(["--config", str(run / RunDirectory.CONFIG)], env={})
    same = before is not None and (before.data.name, before.data.args) == (config.data.name, config.data.args)
    return inference.SPLITS if same else NEW_DATA


def of_split(made: Inference, config: Config) -> str:
    """Return the data that was read as text."""
    return f"{config.data.name}, split {made.split}"


def recorded(run: Path) -> Mapping[str, Any]:
    """Return model and framework as the run has recorded them; {} without a record. Verifies nothing."""
    done = RunDirectory(run).completed
    if done:
        return done
    try:
        stored = CheckpointStore(RunDirectory(run).checkpoints, 1).list()
        return inspect(stored[-1].path).meta if stored else {}
    except CheckpointError:
        return {}


@dataclass(frozen=True)
class RunWeights:
    """Weights of a run: ``name`` of the checkpoint or file, and ``step``, -1 if unknown."""

    name: str
    step: int
    framework: str
    read: Callable[[Mapping[str, Spec]], Mapping[str, np.ndarray]]

    def record(self) -> dict[str, Any]:
        return {"weights": self.name, "step": self.step}


def source_of(run: Path, which: str, url: str = "") -> RunWeights:
    """Return the weights that ``--checkpoint`` means. Rank 0 only. Errors: `UserError` where there are none.

    ``url``: where ``run`` has been copied from, and the weights are downloaded from.
    """
    directory = RunDirectory(run)
    done, final = directory.completed, directory.path / directory.MODEL / weights.FILE
    if which == "best":
        which = str(best_step(directory.checkpoints))
    if is_url(url):
        get_weights(url, run, None if which == "latest" else int(which), f"{directory.MODEL}/{weights.FILE}")
    if which == "latest" and done is not None and final.is_file():
        framework, step = str(done.get("framework", "")), int(done.get("weights_at", done.get("steps", -1)))
        return RunWeights(f"{directory.MODEL}/{weights.FILE}", step, framework,
                          lambda own: weights.read(final, own, framework))
    if not directory.checkpoints.is_dir():
        raise UserError(f"{run} holds neither a final model nor checkpoints", "the directory of a run with weights",
                        "correct RUN, or train with --checkpoint.every_steps")
    path, content = chosen(directory.checkpoints, None if which == "latest" else int(which))
    return RunWeights(path.name, int(content.meta["cursor"]["step"]), str(content.meta["framework"]),
                  lambda own: weights.arrays(content))


def best_step(root: Path) -> int:
    """Return the step of the best checkpoint under ``root``, as the newest one names it. Errors: `UserError`."""
    stored = CheckpointStore(root, 1).list()
    found = best_of(inspect(stored[-1].path).meta, {one.step for one in stored}) if stored else {}
    if not found:
        raise UserError(f"{root.parent} keeps no best checkpoint", "a run that keeps its best checkpoint",
                        "name a step, which python -m hvdtrain checkpoints lists, or leave out --checkpoint")
    if len(found) > 1:
        each = ", ".join(f"step {step} by {' and '.join(metrics)}" for step, metrics in found.items())
        raise UserError(f"--checkpoint best means several checkpoints: {each}", "one of them",
                        "name its step with --checkpoint")
    return next(iter(found))


def loaded(made: Inference, run: Path, args: argparse.Namespace) -> RunWeights:
    """Load the weights on every rank; return their source, on every rank but for its arrays. Collective."""
    control, spec = made.job.control, made.job.spec
    found: list[RunWeights] = []

    def on_root() -> None:
        if control.rank == 0:
            found.append(source_of(run, args.checkpoint, args.run))
            if found[0].framework != spec.framework:
                raise UserError(f"the run's model is one of {found[0].framework}", f"a model of {spec.framework}, as "
                                f"{spec.name} is", "correct --model, or set KERAS_BACKEND as the run had it")

    def read(own: Mapping[str, Spec]) -> Mapping[str, np.ndarray]:
        try:
            return found[0].read(own)
        except OSError as error:
            raise UserError(f"the weights cannot be read: {error}", "readable files", "check RUN") from None

    agreed(control, on_root, "weights")
    name, step = control.bcast((found[0].name, found[0].step) if found else None)
    inference.load(made, read)
    return RunWeights(name, step, spec.framework, read)


def refuse_existing(out: str | None) -> None:
    """Raise `UserError` for a file that exists, which nothing overwrites."""
    if out and os.path.lexists(out):
        raise UserError(f"{out} exists already", "a new name, so that nothing is overwritten", "choose another --out")


def _number(value: Any) -> Any:
    if np.ndim(value):
        return np.asarray(value).tolist()
    return float(value) if math.isfinite(float(value)) else None


def _written(record: Mapping[str, Any], out: str) -> None:
    try:
        with files.replacing(Path(os.path.abspath(out))) as place:
            place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the metrics could not be written: {error}", "a writable file", "correct --out") from None
    say(f"wrote {out}")
