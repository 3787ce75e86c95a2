"""``python -m benchmarks accuracy``: what a compression costs in accuracy at the same number of steps.

Owns the two workloads, the runs (each a job of the real trainer under mpirun, one after the other) and the verdict.
Measures no time: see `benchmarks.step`. What a compression may cost is the workload's ``bar``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.comm.compressors import create, names
from hvdtrain.commands import train
from hvdtrain.commands.bench import session
from hvdtrain.commands.bench.cli import Parser, one_of, some_of, whole
from hvdtrain.commands.verify import completed
from hvdtrain.config import Config, schema
from hvdtrain.core import terminal
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.terminal import say

BASE = "none"
"""What every compression is compared with."""

OURS = ("--out", "--seed", "--compression", "--resume")
"""Options of a run that this bench sets itself."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance")
"""Ends of the names of weights that have no gradient."""


@dataclass(frozen=True)
class Workload:
    """A task: what is trained and which metric counts.

    ``metric``: of the test split, as the run calls it; ``bar``: by how much it may be worse, in points (of 100) for
    an accuracy and in per cent of the base for a loss. ``steps`` 0: as many as the recipe's epochs make. ``special``:
    options of the runs with one compression.
    """

    name: str
    doc: str
    metric: str
    bar: float
    steps: int
    model: str
    options: tuple[str, ...]
    special: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    schedules: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Return the unit of a difference."""
        return "points" if self.metric == "accuracy" else "%"

    def worse(self, value: float, base: float) -> float:
        """By how much ``value`` is worse than ``base``, in `unit`; negative where it is better."""
        difference = base - value if self.metric == "accuracy" else value / base - 1
        return round(100 * difference, 9)  # 0.99 - 0.985 is a little above 0.005


SGD = ("--optimizer.name", "SGD", "--optimizer.args.momentum", "0.9")
"""What topk and powersgd were made for: they send late what they leave out, and Adam makes much of what is late."""

CORRECTED = ("--optimizer.args.momentum", "0", "--exchange.topk_momentum", "0.9")
"""The same momentum, applied before topk chooses."""

WORKLOADS = {w.name: w for w in (
    Workload("digits", "the built-in CNN on scikit-learn's digits, 12 epochs, SGD", "accuracy", 0.5, 0, "cnn",
             (*SGD, "--lr", "0.05"), {"topk": (*CORRECTED, "--exchange.topk_warmup_steps", "80")}),
    Workload("text", "a decoder (2 blocks of width 64) on Python's help texts, 64 characters, SGD", "loss", 1.0, 2400,
             "gpt", (*SGD, "--lr", "0.3", "--model_args.width", "64", "--model_args.depth", "2", "--data.name", "text",
                     "--global_batch", "16", "--schedule.warmup_steps", "100"),
             # 1 % and rank 8 were 1.2 and 1.9 % worse: matrices of 64 columns leave little to leave out.
             {"topk": (*CORRECTED, "--exchange.topk_warmup_steps", "400", "--exchange.topk_ratio", "0.02"),
              "powersgd": ("--exchange.powersgd_rank", "16")},
             # The rate ends at zero: at a constant one the last steps' noise is larger than what is looked for.
             {"torch": ("CosineAnnealingLR", "T_max"), "tensorflow": ("CosineDecay", "decay_steps")}),
)}

MODELS = {"torch": "torch_models", "tensorflow": "tf_models"}


@dataclass(frozen=True)
class Trial:
    """A run: ``value`` of the workload's metric on the test split, ``wire_bytes`` a rank sends in one step.

    ``about``: the run's own record (`hvdtrain.engine.summary.record`).
    """

    compression: str
    seed: int
    value: float
    wire_bytes: int
    about: Mapping[str, Any] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """Run every compression with every seed, print the table; 0 if all are within the bar, 1 if not."""
    args, rest = _parser().parse_known_args(argv)
    extra = _extra(args.extra, args.compression)
    _check(rest)
    workload = WORKLOADS[args.workload]
    names = list(dict.fromkeys([BASE, *args.compression]))
    plan = [(name, seed, train_options(workload, args.framework, args.max_steps, name, seed, [*rest, *extra[name]]))
            for name in names for seed in args.seeds]
    configs = [parsed(options) for _, _, options in plan]  # a mistake is told before the first run
    say(f"{workload.name}: {workload.doc}; {args.framework}, {args.np} ranks, {len(plan)} runs")
    trials = []
    with orderly_signals(), tempfile.TemporaryDirectory(prefix="hvdtrain-accuracy-") as temp:
        for (name, seed, options), config in zip(plan, configs):
            out = Path(temp, f"{name}-{seed}")
            _run(args.np, options, out, args.timeout)
            trials.append(_trial(workload, name, seed, config, args.np, out))
            say(f"  {name}, seed {seed}: test {workload.metric} {trials[-1].value:.4f}")
            if args.jsonl:
                session.append(args.jsonl, _record(workload, trials[-1], args, [*rest, *extra[name]]))
    headers, rows = summary(workload, trials)
    terminal.show(f"{workload.name}, {args.framework}, {args.np} ranks, seeds {', '.join(map(str, args.seeds))}: "
               f"{workload.doc}, {trials[0].about['steps']} steps", headers, rows, markdown=args.markdown)
    return int(any(row[-1] == "no" for row in rows))


def train_options(workload: Workload, framework: str, max_steps: int, compression: str, seed: int,
                  rest: Sequence[str]) -> list[str]:
    """Return the trainer's settings without its output directory. Pure.

    The workload's recipe, what it has for this compression, ``rest`` (the later wins), and what is ours. ``max_steps``
    0: the recipe's own number.
    """
    steps = max_steps or workload.steps
    recipe = ["--model", f"{MODELS[framework]}.{workload.model}:build", *workload.options]
    if steps:
        recipe += ["--max_steps", str(steps), "--epochs", "1000000"]
    if framework in workload.schedules:
        name, length = workload.schedules[framework]
        recipe += ["--schedule.name", name, f"--schedule.args.{length}", str(steps)]
    recipe += workload.special.get(compression, ())
    return [*recipe, *rest, "--compression", compression, "--seed", str(seed),
            *schema.options(schema.quiet(Config))]


def parsed(options: Sequence[str]) -> Config:
    """Return the configuration that a run with these options will have; `UserError` for a mistake in them."""
    config = train.parse(list(options))
    if config is None:
        raise UserError("--print_config among the options", "options of a run", "leave it out")
    return config


def wire_bytes(config: Config, compression: str, params: Sequence[ParamSpec], size: int) -> int:
    """Bytes that one of ``size`` ranks sends in a step, after any warm-up. Pure."""
    buckets = plan_buckets(params, config.exchange.unmeasured_mb)
    compressor = create(compression, config)
    return sum(compressor.wire_bytes(bucket, size) for bucket in buckets)


def summary(workload: Workload, trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Headers, and a row per compression: means over seeds and the verdict on them. Pure."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.compression, []).append(trial)
    scale, digits = (100.0, 2) if workload.unit == "points" else (1.0, 4)
    base, base_bytes = _mean(groups[BASE]), groups[BASE][0].wire_bytes
    metric = f"test {workload.metric}" + (" %" if workload.unit == "points" else "")
    headers = ["compression", metric, "lowest seed", "highest seed", f"worse, {workload.unit}", "bytes a step",
               "less than none", f"within {workload.bar:g} {workload.unit}"]
    rows = []
    for name, group in groups.items():
        values = [trial.value for trial in group]
        worse = workload.worse(_mean(group), base)
        shown = [f"{scale * value:.{digits}f}" for value in (_mean(group), min(values), max(values))]
        verdict = "-" if name == BASE else "yes" if worse <= workload.bar else "no"  # NaN: no
        sent = group[0].wire_bytes
        rows.append([str(group[0].about.get("compression", name)), *shown, "-" if name == BASE else f"{worse:.2f}",
                     f"{sent:,}", f"{base_bytes / sent:.1f}x" if sent else "-", verdict])
    return headers, rows


def _mean(group: Sequence[Trial]) -> float:
    return sum(trial.value for trial in group) / len(group)


def _parser() -> Parser:
    parser = Parser("benchmarks accuracy",
                    "Train with each compression and seed, on several ranks, and compare the test "
                    "accuracy (or loss) with that of uncompressed gradients. Every other option goes to each run "
                    "(--exchange.topk_ratio 0.05, --lr 0.01, ...).")
    known = [name for name in names() if name != "adasum"]  # nor auto, which picks by speed
    parser.add_argument("--workload", type=one_of("--workload", WORKLOADS), default="digits", metavar="NAME",
                        help="; ".join(f"{w.name}: {w.doc}" for w in WORKLOADS.values()))
    parser.add_argument("--framework", type=one_of("--framework", MODELS), default="torch", metavar="NAME",
                        help=" or ".join(MODELS))
    parser.add_argument("--compression", type=some_of("--compression", known), default=",".join(known), metavar="NAMES",
                        help="comma-separated; none is always run")
    parser.add_argument("--for", dest="extra", nargs=2, action="append", default=[], metavar=("NAME", "KEY=VALUE"),
                        help="an option of the runs with this compression alone, such as --for topk lr=0.1")
    parser.add_argument("--seeds", type=_seeds, default="0,1,2", metavar="LIST", help="comma-separated")
    parser.add_argument("--np", type=whole("--np", 2), default=2, metavar="N", help="ranks of each run, on this host")
    parser.add_argument("--max_steps", type=whole("--max_steps", 0), default=0, metavar="N",
                        help="training steps of each run; 0: the workload's own")
    parser.add_argument("--timeout", type=whole("--timeout", 1), default=900, metavar="S", help="seconds of one run")
    parser.reports("run")
    return parser


def _seeds(text: str) -> list[int]:
    one = whole("--seeds", 0)
    return list(dict.fromkeys(one(part) for part in text.split(",")))


def _extra(given: Sequence[Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of single compressions, as words of a command line."""
    found: dict[str, list[str]] = {name: [] for name in (BASE, *names)}
    for name, setting in given:
        key, equals, value = setting.partition("=")
        if name not in found:
            raise UserError(f"--for is about {name!r}", nearest(name, found), "correct --for, or --compression")
        if not key or not equals:
            raise UserError(f"--for {name} is {setting!r}", "KEY=VALUE such as lr=0.1", "correct --for")
        found[name] += [f"--{key}", value]
    for options in found.values():
        _check(options)
    return found


def _check(options: Sequence[str]) -> None:
    """Refuse what this bench sets itself."""
    for word in options:
        if word.partition("=")[0] in OURS:
            raise UserError(f"{word} is set by the bench", "other options of train", f"leave out {word}; there are "
                            "--seeds and --compression")


def _run(ranks: int, options: Sequence[str], out: Path, timeout_s: float) -> None:
    """Run a job; its output is shown only if it fails."""
    completed(f"the run {out.name}", ranks, options, out, timeout_s, "--timeout and --max_steps bound it")


def _trial(workload: Workload, name: str, seed: int, config: Config, ranks: int, out: Path) -> Trial:
    """Read the result of a completed run from its directory."""
    about = RunDirectory(out).completed or {}
    value = about["metrics"].get(workload.metric)
    if workload.metric not in about["metrics"]:
        raise UserError(f"the run has no test {workload.metric}, only {', '.join(about['metrics']) or 'nothing'}",
                        f"the workload's own model and data, which have a test {workload.metric}",
                        "leave out --model, --data.name and --metrics")
    sent = wire_bytes(config, name, _params(out / "model" / "model.safetensors"), ranks)
    return Trial(name, seed, float("nan") if value is None else float(value), sent, about)


def _params(path: Path) -> list[ParamSpec]:
    """Return the trained tensors of an exported model; all of them are float32 here."""
    from safetensors import safe_open

    with safe_open(str(path), "numpy") as file:
        return [ParamSpec(name, tuple(file.get_slice(name).get_shape()), "float32")
                for name in file.keys() if not name.endswith(STATISTICS)]


def _record(workload: Workload, trial: Trial, args: argparse.Namespace, options: Sequence[str]) -> dict[str, Any]:
    about = trial.about
    facts = session.environment(hosts=about["hosts"], ranks=about["ranks"], wire=about["wire"], seed=trial.seed,
                               framework=about["framework"])
    return {"bench": "accuracy", **facts, "workload": workload.name, "model": about["model"],
            "compression": trial.compression, "compressor": about.get("compression", trial.compression),
            "options": list(options), "steps": about["steps"], "metric": workload.metric, "value": trial.value,
            "train_loss": about["loss"], "wire_bytes": trial.wire_bytes}
