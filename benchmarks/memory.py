"""``python -m benchmarks memory``: how much memory a rank holds while it trains: unsharded, under ZeRO, with
blocks recomputed.

Starts a job for each way, since a process that has held much once may never give it all back, and each rank reads the
kernel's account of itself (`benchmarks.memory_rank`). Two numbers are told, both above what the rank held after all
imports and a step of a tiny model; what that took above the import of the framework is in the record. ``RSS``: the most
that was resident, by the kernel's own high-water mark (VmHWM); pages that ranks share count in each of them. ``PSS``:
the most that was seen every few milliseconds, where a page that k processes share counts as 1/k in each: summed over
the ranks of a host it is what they take of it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from typing import Any

from benchmarks.jobs import Job, JobFailed
from benchmarks.workloads import FILES, WORKLOADS
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say
from hvdtrain.core.units import MIB

WAYS = {"replicate": ["--data_parallel", "replicate"],
        "zero1": ["--data_parallel.name", "zero", "--data_parallel.stage", "1"],
        "zero2": ["--data_parallel.name", "zero", "--data_parallel.stage", "2"],
        "remat1": ["--remat", "every:1"], "remat2": ["--remat", "every:2"]}
HEADERS = ("way", "rank", "peak RSS MiB", "bytes a parameter", "peak PSS MiB", "bytes a parameter", "formula",
           "PSS against replicate")


def formula(way: str, ranks: int) -> float:
    """Bytes a parameter in float32 with Adam: parameter, gradient and two moments.

    >>> [formula(way, 4) for way in WAYS]
    [16.0, 10.0, 7.0, 16.0, 16.0]
    """
    return {"zero1": 8 + 8 / ranks, "zero2": 4 + 12 / ranks}.get(way, 16.0)


def main(argv: list[str]) -> int:
    """Measure each way; 0 if every job did its part, 1 if one failed."""
    args = _parser().parse(argv)
    from benchmarks import race

    race.refuse_launcher("memory", "way", os.environ)
    session.check(args.jsonl)
    env = race.environment(args.ranks, args.threads, os.environ)
    prefix = race.launcher(args, args.ranks, env)
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, JobFailed] = {}
    with orderly_signals(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as scratch:
        for way in args.ways:
            words = [*prefix, *_rank(args, way, os.path.join(scratch, way))]
            say(f"$ {shlex.join(words)}")
            job = Job(way, words, env)
            try:
                found[way] = job.wait("done", args.timeout)
            except JobFailed as failure:
                failed[way] = failure
            finally:
                job.end(grace_s=0.0 if way in failed else 20.0)
    terminal.show(f"memory of a rank above that after imports: {args.framework}, {args.workload or 'MLP'}, Adam, "
               f"{args.ranks} ranks",
               HEADERS, _rows(found, args.ranks), args.markdown)
    for way, about in found.items():
        if args.jsonl:
            where = session.environment(ranks=args.ranks, framework=args.framework, threads=args.threads,
                                       wire=about["wire"], seed=0)
            session.append(args.jsonl, {"bench": "memory", "way": way, **about, **where})
    return race.report(failed)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks memory",
                            "Most memory that a rank holds while it trains a perceptron with Adam. Not to be "
                            "started under mpirun: it starts a job for each way.")
    add = parser.add_argument
    add("--framework", type=cli.one_of("--framework", FILES), default="torch")
    add("--ways", type=cli.some_of("--ways", WAYS), default=list(WAYS)[:3], metavar="A,B,...",
        help=", ".join(WAYS))
    add("--ranks", type=cli.whole("--ranks", 1), default=4)
    add("--workload", type=cli.one_of("--workload", ("", *WORKLOADS)), default="",
        help=f"of bench step, in place of the perceptron of --parameters: {', '.join(WORKLOADS)}")
    add("--parameters", type=cli.whole("--parameters", 1000), default=60_000_000, help="of the model, about")
    add("--layer", type=cli.whole("--layer", 100), default=5_000_000, help="most parameters of a layer")
    add("--batch", type=cli.whole("--batch", 0), default=0, help="samples of a rank; 0: 8, or the workload's")
    add("--steps", type=cli.whole("--steps", 1), default=4)
    add("--threads", type=cli.whole("--threads", 0), default=1, help="compute threads of a rank")
    add("--key", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration, such as "
        "collectives=mpi; may be repeated")
    add("--hosts", default="", metavar="A:1,B:1", help="hosts for mpirun")
    add("--mpirun_args", default="", metavar="WORDS", help="more words for mpirun, quoted as for a shell")
    parser.waits(240.0, "for the end of a job")
    parser.reports("way")
    return parser


def _rank(args: argparse.Namespace, way: str, out: str) -> list[str]:
    """Return the command line of one rank, without what launches it. Pure."""
    words = [sys.executable, "-m", "benchmarks.memory_rank", "--framework", args.framework, "--out", out,
             "--workload", args.workload, "--parameters", str(args.parameters), "--layer", str(args.layer),
             "--batch", str(args.batch or (WORKLOADS[args.workload].batch if args.workload else 8)),
             "--steps", str(args.steps), "--threads", str(args.threads), *WAYS[way]]
    for pair in args.key:
        key, _, value = pair.partition("=")
        words += [f"--{key}", value]
    return words


def _rows(found: dict[str, dict[str, Any]], ranks: int) -> list[list[str]]:
    """Return a row for the rank of each way that held the most, by PSS. Pure."""
    rows = []
    whole = max(found["replicate"]["pss_bytes"]) if "replicate" in found else 0
    for way, about in found.items():
        n, pss = about["parameters"], about["pss_bytes"]
        rank = max(range(len(pss)), key=pss.__getitem__)
        rss = about["rss_bytes"][rank]
        less = f"{100 * (pss[rank] / whole - 1):+.0f} %" if whole else ""
        rows.append([way, str(rank), f"{rss / MIB:.0f}", f"{rss / n:.1f}", f"{pss[rank] / MIB:.0f}",
                     f"{pss[rank] / n:.1f}", f"{formula(way, ranks):.1f}", less])
    return rows
