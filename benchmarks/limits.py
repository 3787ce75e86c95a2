"""``benchmarks limits``: runs that end by a time limit or a budget, and how much of it they use.

Each try trains a model on some ranks with a limit of its own, and ends by status 75. The limit counts from the start of
the process to the end of the launcher; after it the newest checkpoint has to be that of the last step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster.exit import EXIT_REQUEUE
from hvdtrain.commands import verify
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import CapturedChild, orderly_signals
from hvdtrain.core.terminal import say

PRICE = 3.6
"""An hour of the host in the inventory: a thousandth of the currency a second."""

LEAST_USED = 0.9
LONGEST_START_S = 120.0

MODELS = {
    "digits": {"torch": ["--model", "torch_models.cnn:build"], "tensorflow": ["--model", "tf_models.cnn:build"]},
    "resnet": {name: ["--model", f"{folder}.resnet:build", "--data.name", "synthetic", "--data.args",
                      '{"samples": 512, "shape": [32, 32, 3]}', "--global_batch", "64"]
               for name, folder in (("torch", "torch_models"), ("tensorflow", "tf_models"))}}
"""Steps of milliseconds with an evaluation every second, and steps of tenths of a second."""

HEADERS = ("try", "framework", "ranks", "model", "by", "start s", "limit s", "ended s", "used %", "step", "status", "")


@dataclass(frozen=True)
class Try:
    """``after_s``: limit after the start-up. ``by``: time_limit or budget."""

    framework: str
    ranks: int
    model: str
    after_s: float
    by: str


def main(argv: list[str]) -> int:
    """Run the tries; 0 where no limit was overrun, each was used to 90 %, and each run was saved."""
    args = _parser().parse(argv)
    session.check(args.jsonl)
    drawn = np.random.default_rng(args.seed)
    kinds = [(framework, ranks, model) for model in args.models for ranks in args.np for framework in args.frameworks]
    tries = [Try(*kinds[n % len(kinds)], float(drawn.uniform(args.least, args.most)),
                 ("time_limit", "budget")[n // len(kinds) % 2]) for n in range(args.tries)]
    starts: dict[tuple[str, int, str], float] = {}
    rows, bad = [], 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-")))
        (scratch / "inventory.yaml").write_text(f"hosts: [{{name: '*', devices: CPU, price_per_hour: {PRICE}}}]\n")
        for kind in dict.fromkeys(kinds[:args.tries]):
            starts[kind] = _start_s(*kind, scratch)
        for n, one in enumerate(tries, 1):
            start_s = starts[one.framework, one.ranks, one.model]
            found = _tried(one, start_s, scratch / f"try-{n}", scratch)
            bad += bool(found["why"])
            rows.append([str(n), one.framework, str(one.ranks), one.model, one.by, f"{start_s:.1f}",
                         f"{found['limit_s']:.1f}", f"{found['ended_s']:.1f}", f"{100 * found['used']:.1f}",
                         str(found["step"]), str(found["status"]), found["why"]])
            say("  ".join(rows[-1]))
            if args.jsonl:
                session.append(args.jsonl, {"bench": "limits", **vars(one), "start_s": start_s, **found,
                                            **session.environment(ranks=one.ranks, framework=one.framework)})
    terminal.show(f"limits: {len(rows) - bad} of {len(rows)} kept and used", HEADERS, rows, args.markdown)
    return int(bad > 0)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks limits", "Train until a time limit or a budget ends the run. Not under mpirun.")
    add = parser.add_argument
    add("--tries", type=cli.whole("--tries", 1), default=20)
    add("--frameworks", type=cli.some_of("--frameworks", ("torch", "tensorflow")), default=["torch", "tensorflow"])
    add("--np", type=_numbers, default=[1, 2], metavar="N,N", help="numbers of ranks")
    add("--models", type=cli.some_of("--models", MODELS), default=["digits", "resnet"])
    add("--least", type=cli.number("--least", 0, 1e5), default=20.0, metavar="S", help="shortest limit after start-up")
    add("--most", type=cli.number("--most", 0, 1e5), default=60.0, metavar="S", help="longest limit after start-up")
    add("--seed", type=cli.whole("--seed", 0), default=0)
    parser.reports("try")
    return parser


def _numbers(text: str) -> list[int]:
    read = cli.whole("--np", 1, 64)
    return [read(part) for part in text.split(",")]


def _command(one: Try, out: Path, more: list[str]) -> list[str]:
    launcher = [*verify.launcher(one.ranks)] if one.ranks > 1 else []
    return [*launcher, sys.executable, "-m", "hvdtrain", "train", *MODELS[one.model][one.framework], "--epochs",
            "1000000", "--threads", "1", "--progress", "off", "--out", str(out), *more]


def _run(words: list[str], bound_s: float) -> tuple[int | None, float, str]:
    """Return (status, None where it did not end; seconds to the end; the last line of its errors) of a command."""
    began = time.perf_counter()
    with CapturedChild(words, dict(os.environ)) as child:
        status = child.process.returncode if child.ends_within(bound_s) else None
        ended_s = time.perf_counter() - began
        return status, ended_s, (child.texts()[1].strip().splitlines() or [""])[-1]


def _start_s(framework: str, ranks: int, model: str, scratch: Path) -> float:
    """Return the seconds from the launch to the first step."""
    one = Try(framework, ranks, model, 0.0, "time_limit")
    out = scratch / f"start-{framework}-{ranks}-{model}"
    before = time.time()
    status, _, error = _run(_command(one, out, ["--max_steps", "2"]), LONGEST_START_S)
    if status:
        raise UserError(f"a run of 2 steps ended with status {status}: {error}", "a run that ends well", "try it alone")
    return max(0.0, next(row["time"] for row in _log(out) if row.get("event") == "start") - before)


def _tried(one: Try, start_s: float, out: Path, scratch: Path) -> dict[str, Any]:
    limit_s = start_s + one.after_s
    more = ["--time_limit", f"{limit_s:.2f}"] if one.by == "time_limit" else [
        "--budget", f"{limit_s * PRICE / 3600:.6f}", "--inventory", str(scratch / "inventory.yaml")]
    status, ended_s, error = _run(_command(one, out, more), limit_s + LONGEST_START_S)
    steps = [int(found[1]) for path in RunDirectory(out).checkpoints.glob("step-*")
             if (found := re.fullmatch(r"step-(\d+)", path.name))]
    last = max((row["step"] for row in _log(out) if isinstance(row.get("step"), int)), default=-1)
    why = []
    if status != EXIT_REQUEUE:
        why.append(f"status {status} ({error})")
    if ended_s > limit_s:
        why.append("overrun")
    if ended_s < LEAST_USED * limit_s:
        why.append("too early")
    if not steps or max(steps) < last:
        why.append("last step not saved")
    return {"limit_s": limit_s, "ended_s": ended_s, "used": ended_s / limit_s, "status": status,
            "step": max(steps, default=0), "why": ", ".join(why)}


def _log(out: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (out / RunDirectory.LOG).read_text().splitlines() if line.endswith("}")]
    return []
