"""``python -m benchmarks case RECIPE``: one training, as its file has it, on several numbers of ranks.

Owns the table: batch, time of an epoch, memory of a rank, speed-up, part of the time in the exchange, and what ZeRO
saves. Starts a job for each number of ranks and each way (`benchmarks.case_rank`), one at a time, in rounds. Where
there are fewer cores than the largest job has threads, every rank of every job gets the same part of a core, so that a
rank stands for a device of one speed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import race, throttle
from benchmarks.jobs import Job, JobFailed
from benchmarks.throttle import Throttle
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say
from hvdtrain.core.units import MIB

WAYS = {"replicate": ["--data_parallel", "replicate"],
        "zero2": ["--data_parallel.name", "zero", "--data_parallel.stage", "2"]}
HEADERS = ("ranks", "way", "global batch", "samples/s", "epoch min", "memory a rank MiB", "speed-up", "exchange %",
           "ZeRO-2 saves %")
NOTE = "{against}. Exchange: part of the time in which every rank stands in exchanges, ZeRO's of parameters " \
       "included; what is hidden behind computing is not in it"

Key = tuple[int, str]
"""(ranks, way)."""


def main(argv: list[str]) -> int:
    """Measure the recipe; 0 if every job did its part, 1 if one failed."""
    args = _parser().parse(argv)
    from hvdtrain.commands import train

    race.refuse_launcher("case", "number of ranks", os.environ)
    config = train.parse(["--config", args.recipe, *_keys(args)], os.environ)
    assert config is not None
    config.check()
    session.check(args.jsonl)
    jobs = keys(args.np, args.ways)
    if not jobs:
        raise UserError(f"--np {','.join(map(str, args.np))} with --ways {','.join(args.ways)} is no job: one rank has "
                        "nothing to divide", "two ranks at least for zero2", "raise --np, or add replicate to --ways")
    quota, reason = _quota(args)
    found: dict[Key, list[dict[str, Any]]] = {}
    failed: dict[str, JobFailed] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        groups = stack.enter_context(Throttle([quota] * max(args.np), args.threads)) if quota < 1 else None
        for number, (ranks, way) in ((n, key) for n in range(args.rounds) for key in race.rotated(jobs, n)):
            batch = args.batch * ranks or config.global_batch
            words = _words(args, ranks, way, batch, os.path.join(scratch, f"{way}-{ranks}-{number}"))
            for path in groups.paths[:ranks] if groups else ():
                words += ["--cgroup", str(path)]
            about = _job(args, (ranks, way), words, failed)
            if about is not None:
                found.setdefault((ranks, way), []).append(about)
                session.append(args.jsonl, _record(args, way, quota, about)) if args.jsonl else None
            elif not found and any(failure.how.endswith("status 2") for failure in failed.values()):
                break  # the recipe does not fit the first job: the others would say so again
    if reason:
        terminal.note(reason)
    cores = f"{quota:.2f} of {args.threads} core(s)" if quota < 1 else f"{args.threads} core(s)"
    if found:
        terminal.show(f"{args.recipe}: {args.rounds} round(s) of {args.steps} steps, the median; a rank has {cores}",
                   HEADERS, rows(found), args.markdown)
        terminal.note(NOTE.format(against=against(found)))
    return race.report(failed)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks case",
                            "Train RECIPE, a file for --config, for some steps on several numbers of ranks, "
                            "and set side by side what an epoch would take. Not to be started under mpirun.")
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="YAML file, or a built-in recipe such as hvdtrain:cifar100")
    add("--np", type=_numbers, default=[1, 2, 4], metavar="A,B,...", help="numbers of ranks")
    add("--ways", type=cli.some_of("--ways", WAYS), default=list(WAYS), metavar="A,B", help=", ".join(WAYS)
        + "; zero2 is left out for one rank")
    add("--batch", type=cli.whole("--batch", 0), default=0, metavar="N", help="samples of a rank, so that the "
        "global batch grows with the ranks; 0: the recipe's global batch on any number")
    add("--rounds", type=cli.whole("--rounds", 1), default=3, metavar="N", help="jobs of each number and way")
    add("--steps", type=cli.whole("--steps", 1), default=20, metavar="N", help="timed steps of a job")
    add("--warmup", type=cli.whole("--warmup", 1), default=5, metavar="N", help="steps before them")
    add("--threads", type=cli.whole("--threads", 1, 4096), default=1, metavar="N",
        help="compute threads of a rank")
    add("--quota", type=cli.number("--quota", 0, 1), default=None, metavar="Q", help="part of its cores that a "
        "rank has; 1: no limit; else what the largest job leaves each of its ranks")
    add("--key", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration, such as "
        "data.args.root=DIR; may be repeated")
    add("--hosts", default=os.environ.get("TWO_HOSTS_LIST", ""), metavar="A:1,B:1", help="hosts for mpirun")
    add("--mpirun_args", default=os.environ.get("TWO_HOSTS_MPIRUN_ARGS", ""), metavar="WORDS",
        help="more words for mpirun, quoted as for a shell")
    parser.waits(1800.0, "longest time of one job, in seconds")
    parser.reports("job")
    return parser


def _numbers(text: str) -> list[int]:
    """Numbers of ranks: 1,2,4."""
    return [cli.whole("--np", 1, 4096)(part) for part in text.split(",")]


def keys(ranks: Sequence[int], ways: Sequence[str]) -> list[Key]:
    """Each job of a round; one rank has nothing to divide. Pure."""
    return [(n, way) for n in dict.fromkeys(ranks) for way in ways if n > 1 or way == "replicate"]


def _keys(args: argparse.Namespace) -> list[str]:
    """Return the recipe's keys that are set otherwise, as options of train."""
    words: list[str] = []
    for pair in args.key:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise UserError(f"--key is {pair!r}", "KEY=VALUE such as data.args.root=DIR", "correct --key")
        words += [f"--{name}", value]
    return words


def _quota(args: argparse.Namespace) -> tuple[float, str]:
    """(part of its cores that each rank gets, a note on it or "")."""
    from hvdtrain.cluster.topology import affinity

    most, cores = max(args.np) * args.threads, len(affinity())
    if args.hosts or args.quota is not None and args.quota >= 1:
        return 1.0, ""
    quota = args.quota if args.quota is not None else min(1.0, int(90 * cores / most) / 100)
    if quota >= 1:
        return 1.0, ""
    if quota < 0.01:
        raise UserError(f"{most} threads of {max(args.np)} ranks share {cores} cores", "a hundredth of a core at least "
                        "for each rank", "lower --np, or give --quota 1 for no limit")
    lacks = throttle.available()
    if lacks:
        return 1.0, f"no quota: {lacks}; {most} threads share {cores} cores in the largest job, so that its speed-up " \
                    "says nothing of devices"
    return quota, ""


def _words(args: argparse.Namespace, ranks: int, way: str, batch: int, out: str) -> list[str]:
    """Return the command line of one job, without its control groups."""
    env = race.environment(ranks, args.threads, os.environ)
    return [*race.launcher(args, ranks, env), sys.executable, "-m", "benchmarks.case_rank",
            "--steps", str(args.steps), "--warmup", str(args.warmup), "--config", args.recipe, *_keys(args),
            "--global_batch", str(batch), "--threads", str(args.threads), "--out", out, *WAYS[way]]


def _job(args: argparse.Namespace, key: Key, words: list[str], failed: dict[str, JobFailed]) -> dict[str, Any] | None:
    """Run one job to its end; what it told, or None where it failed."""
    name = f"{key[1]} on {key[0]}"
    if name in failed:
        return None
    say(f"$ {shlex.join(words)}")
    job = Job(name, words, race.environment(key[0], args.threads, os.environ))
    try:
        return job.wait("done", args.timeout)
    except JobFailed as failure:
        failed[name] = failure
        return None
    finally:
        job.end(grace_s=0.0 if name in failed else 20.0)


def _record(args: argparse.Namespace, way: str, quota: float, about: Mapping[str, Any]) -> dict[str, Any]:
    where = session.environment(about["hosts"], about["ranks"], about["wire"], about["seed"], args.threads,
                               about["framework"])
    return {"bench": "case", "recipe": args.recipe, "way": way, "quota": quota, **where, **about}


def rows(found: Mapping[Key, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Return a row for each number of ranks and way, medians over the rounds. Pure.

    Speed-up: samples a second against replicate on the fewest ranks; without any replicate there is none. What ZeRO
    saves: of the memory of the rank that holds most, against replicate on as many ranks.
    """
    base = _base(found)

    def median(key: Key, value: Any) -> float | None:
        numbers = [value(about) for about in found.get(key, ()) if value(about) is not None]
        return statistics.median(numbers) if numbers else None

    def rate(about: Mapping[str, Any]) -> float:
        return float(about["samples"] / about["seconds"])

    def memory(about: Mapping[str, Any]) -> float | None:
        return max(about["peak_bytes"]) or None if about["peak_bytes"] else None

    base_speed = median(base, rate) if base else None
    made = []
    for key in sorted(found):
        ranks, way = key
        about = found[key][0]
        speed, held = median(key, rate), median(key, memory)
        whole = median((ranks, "replicate"), memory)
        assert speed
        exchange = median(key, lambda a: a["exchange_percent"])
        saves = 100 * (1 - held / whole) if way != "replicate" and held and whole else None
        made.append([str(ranks), way, str(about["global_batch"]), f"{speed:.1f}",
                     f"{about['epoch_samples'] / speed / 60:.3g}" if about["epoch_samples"] else "-",
                     f"{held / MIB:.0f}" if held else "-", f"{speed / base_speed:.2f}" if base_speed else "-",
                     "-" if exchange is None else f"{exchange:.1f}", "-" if saves is None else f"{round(saves)}"])
    return made


def against(found: Mapping[Key, Any]) -> str:
    """Say what the speed-up is measured against. Pure."""
    base = _base(found)
    return f"Speed-up: samples/s against replicate on {base[0]} rank(s)" if base else "No speed-up without replicate"


def _base(found: Mapping[Key, Any]) -> Key | None:
    return next((key for key in sorted(found) if key[1] == "replicate"), None)
