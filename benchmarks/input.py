"""``python -m benchmarks input``: how fast pictures and tokens are read and decoded on several numbers of ranks.

Owns the jobs and the tables; the data is made by `benchmarks.input_data`, what a contender does is in
`benchmarks.input_rank`. Each job reads one
epoch untimed and then some that are timed, with the same number of workers a rank and nobody who trains: what is
counted is samples a second of all ranks together, and how often each sample was decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import race
from benchmarks.input_data import CLASSES, FORMATS, made
from benchmarks.jobs import Job, JobFailed
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

CONTENDERS = {"hvdtrain": "PIL", "dataloader": "torch", "tfdata": "tensorflow", "webdataset": "webdataset",
              "datasets": "datasets"}
"""Name -> the package without which it is left out."""

OWN = "hvdtrain"
HEADERS = ("ranks", "reader", "workers a rank", "samples/s", "quartiles", "of the best other", "decodes a sample",
           "CPU us a sample")

Key = tuple[int, str]
"""(ranks, contender)."""


def main(argv: list[str]) -> int:
    """Measure every contender; 0 if every job did its part, 1 if one failed."""
    args = _parser().parse(argv)
    from hvdtrain.core.launcher import launch_facts

    if launch_facts(os.environ).kind != "solo":
        raise UserError("bench input was started under a launcher", "one process: it starts the jobs itself",
                        "run it without mpirun")
    if args.root and args.formats != ["folder"]:
        raise UserError("--root with several formats, or another than folder", "data that is made for each",
                        "leave --root out, or give --formats folder")
    if args.root and not Path(args.root, "train").is_dir():
        raise UserError(f"--root is {args.root!r}, which has no folder train", "a folder with train/CLASS/*.png of one "
                        "size", "correct --root, or leave it out to have pictures made")
    names = [name for name in args.readers if _is_here(name)]
    session.check(args.jsonl)
    failed: dict[str, JobFailed] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        for kind in dict.fromkeys(args.formats):
            some = [name for name in names if name in FORMATS[kind]]
            found = _measured(args, kind, some, scratch, failed) if some else {}
            terminal.show(f"{kind}, {args.rounds} rounds, the median; batch {args.batch} a rank", HEADERS, rows(found),
                          args.markdown)
    return race.report(failed)


def _measured(args: argparse.Namespace, kind: str, names: Sequence[str], scratch: str,
              failed: dict[str, JobFailed]) -> dict[Key, list[dict[str, Any]]]:
    """Return what the jobs of one format reported."""
    found: dict[Key, list[dict[str, Any]]] = {}
    root = args.root or made(kind, Path(scratch, kind), args.samples, args.size)
    for number in range(args.rounds):
        for ranks in dict.fromkeys(args.np):
            for name in race.rotated(names, number):
                about = _job(args, kind, ranks, name, root, os.path.join(scratch, "decodes"), failed)
                if about is not None:
                    found.setdefault((ranks, name), []).append(about)
                    if args.jsonl:
                        session.append(args.jsonl, _record(args, about))
    return found


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks input",
                            "Read pictures and tokens in several formats with hvdtrain, torch's DataLoader, tf.data, "
                            "webdataset and datasets, on several numbers of ranks of this machine. Not to be started "
                            "under mpirun.")
    add, whole = parser.add_argument, cli.whole
    add("--readers", type=cli.some_of("--readers", CONTENDERS), default=list(CONTENDERS), metavar="A,B,...",
        help=f"{', '.join(CONTENDERS)}; all that are installed")
    add("--formats", type=cli.some_of("--formats", FORMATS), default=list(FORMATS), metavar="A,B,...",
        help=f"{', '.join(FORMATS)}; all")
    add("--np", type=lambda text: [whole("--np", 1, 4096)(part) for part in text.split(",")], default=[1, 2, 4],
        metavar="A,B,...", help="numbers of ranks (default 1,2,4)")
    add("--root", default="", metavar="DIR", help="folder with train/CLASS/*.png of one size; empty: one is made")
    add("--samples", type=whole("--samples", CLASSES), default=4000, metavar="N", help="samples that are made")
    add("--size", type=whole("--size", 8, 4096), default=64, metavar="N", help="pictures' height and width")
    add("--batch", type=whole("--batch", 1), default=32, metavar="N", help="samples of a rank and step")
    add("--workers", type=whole("--workers", 0, 64), default=1, metavar="N", help="processes (tf.data: threads) that "
        "decode for each rank; 0: the rank itself")
    add("--epochs", type=whole("--epochs", 1), default=2, metavar="N", help="timed epochs of a job")
    add("--rounds", type=whole("--rounds", 1), default=5, metavar="N", help="jobs of each reader and number of ranks")
    parser.waits(600.0, "longest time of one job, in seconds")
    parser.reports("job")
    return parser


def _is_here(name: str) -> bool:
    """Return whether the contender's package is installed; a note says so where not."""
    if importlib.util.find_spec(CONTENDERS[name]) is not None:
        return True
    if name == OWN:
        raise UserError("pillow is not installed", "it, which reads pictures", "run pip install pillow")
    terminal.note(f"{name} is left out: {CONTENDERS[name]} is not installed")
    return False


def _job(args: argparse.Namespace, kind: str, ranks: int, name: str, root: str, decodes: str,
         failed: dict[str, JobFailed]) -> dict[str, Any] | None:
    """Run one job to its end; what it told, or None where it failed."""
    title = f"{name}, {kind} on {ranks}"
    if title in failed:
        return None
    env = race.environment(ranks, 1, os.environ)
    words = [*race.launcher(argparse.Namespace(mpirun_args="", hosts=""), ranks, env), sys.executable, "-m",
             "benchmarks.input_rank", "--format", kind, "--reader", name, "--root", root, "--batch",
             str(args.batch), "--workers", str(args.workers), "--epochs", str(args.epochs), "--decodes", decodes]
    say(f"$ {shlex.join(words)}")
    job = Job(title, words, env)
    try:
        return job.wait("done", args.timeout)
    except JobFailed as failure:
        failed[title] = failure
        return None
    finally:
        job.end(grace_s=0.0 if title in failed else 20.0)
        Path(decodes).unlink(missing_ok=True)


def _record(args: argparse.Namespace, about: Mapping[str, Any]) -> dict[str, Any]:
    where = session.environment(ranks=about["ranks"], framework=about["framework"], threads=1, seed=0)
    return {"bench": "input", "workers": args.workers, "batch": args.batch, **where, **about}


def rows(found: Mapping[Key, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Return a row for each number of ranks and reader: samples a second (median, quartiles), decodes, and CPU time of
    the ranks without their workers. Pure.
    """
    rates = {key: [about["samples"] * about["epochs"] / about["seconds"] for about in told]
             for key, told in found.items()}
    made = []
    for ranks, name in sorted(found, key=lambda key: (key[0], list(CONTENDERS).index(key[1]))):
        each, told = rates[ranks, name], found[ranks, name]
        others = [statistics.median(r) for (n, other), r in rates.items() if n == ranks and other != OWN]
        ratio = f"{statistics.median(each) / max(others):.2f}" if name == OWN and others else "-"
        low, high = np.percentile(each, [25, 75])
        decodes = statistics.median(about["decodes"] / about["samples"] / about["epochs"] for about in told)
        cpu_s = statistics.median(about["cpu_seconds"] / about["samples"] / about["epochs"] for about in told)
        made.append([str(ranks), name, str(told[0]["workers"]), f"{statistics.median(each):.0f}",
                     f"{low:.0f} to {high:.0f}", ratio, f"{decodes:.4f}".rstrip("0").rstrip("."),
                     f"{1e6 * cpu_s:.0f}"])
    return made
