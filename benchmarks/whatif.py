"""``benchmarks whatif``: what a run estimates of a step without one of its ranks, held against a run without that rank.

Owns the two jobs and the comparison. Both train the same global batch at the same speeds, are alive at once and take
turns (`race`); the forecast is asked of the whole one in each round, right after its turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from dataclasses import replace
from typing import Any

from benchmarks import mixed, race
from benchmarks.jobs import JobFailed
from benchmarks.mixed import Course
from benchmarks.race import Plan, Race
from benchmarks.throttle import Throttle
from benchmarks.workloads import WORKLOADS
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

WHOLE, LESS = "all ranks", "without"
TARGET = 5.0
"""Percent by which a forecast may be off."""

HEADERS = ("round", "ms a step", "reckoned without", "ms without", "off by %", "reckoned gain %", "gain %")


def main(argv: list[str]) -> int:
    """Measure; 0 where the median forecast is within `TARGET`, 1 where it is not or a job failed."""
    args = _parser().parse(argv)
    course = mixed.course_of(args)[0]
    gone = args.without if args.without is not None else course.speeds.index(min(course.speeds))
    plan = _plan(args, course, gone)
    session.check(args.jsonl)
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        left = [speed for rank, speed in enumerate(course.speeds) if rank != gone]
        if not course.emulate and min(course.speeds) < 1:
            course.groups = stack.enter_context(Throttle([*course.speeds, *left], plan.threads))
        return _measure(args, plan, course, gone, scratch)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks whatif",
                            "Ask a run how long a step would take without one of its ranks, and time a run "
                            "without that rank, interleaved. Not to be started under mpirun.")
    race.add_options(parser, 7, 30, "steps before the first round", "compute threads of a rank; 0: its share of the "
                     "cores here")
    parser.set_defaults(workload="resnet", threads=1, steps=30)
    add = parser.add_argument
    add("--speeds", type=mixed.speeds_of_ranks, default=(0.4, 0.4, 0.4, 0.2), metavar="S0,S1,...",
        help="speed of each rank, as part of its threads' cores; 1: not slowed. Together no more than there are cores")
    add("--without", type=cli.whole("--without", 0), default=None, metavar="R",
        help="the rank that is left out; else the slowest")
    add("--balance", type=cli.one_of("--balance", ("off", "static", "auto")), default="off", metavar="WAY",
        help="how the batch is divided: off (equal), static or auto")
    add("--emulate", action="store_true", help="do not slow ranks by control groups: they wait instead (emulate_speed)")
    parser.set_defaults(move=0, equal=False, rebalance=[])
    return parser


def _plan(args: argparse.Namespace, course: Course, gone: int) -> Plan:
    """Return the settings of the whole job; `UserError` where its batch or its ranks cannot be divided."""
    ranks = len(course.speeds)
    if gone >= ranks:
        raise UserError(f"--without is {gone}", f"a rank from 0 to {ranks - 1}", "correct --without")
    if not args.batch:
        args.batch = -(-WORKLOADS[args.workload].batch // (ranks - 1)) * (ranks - 1)
    if args.batch * ranks % (ranks - 1):
        raise UserError(f"--batch {args.batch} for {ranks} ranks", f"a batch that {ranks - 1} ranks can share equally",
                        f"for example --batch {-(-args.batch // (ranks - 1)) * (ranks - 1)}")
    return race.plan(args, "whatif", [_contender(args)], ranks, os.environ)


def _contender(args: argparse.Namespace) -> str:
    return "hvdtrain" if args.balance == "off" else f"hvdtrain@{args.balance}"


def commands(args: argparse.Namespace, plan: Plan, course: Course, gone: int, scratch: str) -> dict[str, list[str]]:
    """Return the command line of each of the two jobs. Pure."""
    ranks, contender = len(course.speeds), _contender(args)
    left = [rank for rank in range(ranks) if rank != gone]
    paths = course.groups.paths if course.groups else []
    less = replace(plan, batch=plan.batch * ranks // (ranks - 1))
    launch = {WHOLE: plan.launch[contender], LESS: race.launcher(args, ranks - 1, plan.env)}
    found = {}
    for name, its, kept, groups in ((WHOLE, plan, range(ranks), paths[:ranks]), (LESS, less, left, paths[ranks:])):
        words = [*launch[name], *race.worker(args, its, contender, os.path.join(scratch, name.split()[0]))]
        for rank in kept if course.emulate else ():
            words += ["--emulate_speed", str(course.speeds[rank])]
        for path in groups:
            words += ["--cgroup", str(path)]
        found[name] = words
    return found


def _measure(args: argparse.Namespace, plan: Plan, course: Course, gone: int, scratch: str) -> int:
    """Start both, take turns, print and record; every job is ended however this is left."""
    found, rows = Race(), []
    try:
        for name, words in commands(args, plan, course, gone, scratch).items():
            race.start(found, name, words, plan.env, args.timeout)
        for number in range(args.rounds if len(found.jobs) == 2 else 0):
            try:
                rows.append(_round(args, found, gone, number))
            except JobFailed as failure:
                race.drop(failure, found)
                break
            say(f"round {number + 1}/{args.rounds}: " + ", ".join(f"{v:.1f}" for v in rows[-1].values()))
    finally:
        race.end_all(found.jobs.values())
    race.report(found.failed)
    return int(bool(found.failed) or not rows or not _told(args, plan, course, gone, found, rows))


def _round(args: argparse.Namespace, found: Race, gone: int, number: int) -> dict[str, float]:
    """Run one turn of each job; return it with the forecast of the whole one, in milliseconds a step."""
    ms: dict[str, float] = {}
    reckoned: dict[str, Any] = {}
    for name in race.rotated([WHOLE, LESS], number):
        orders = [f"go {args.steps} {args.settle}"]
        done = race.turn(found.jobs[name], orders, args.timeout)[0]
        ms[name] = 1e3 * done["seconds"] / done["steps"]
        if name == WHOLE:
            found.jobs[name].resume()
            reckoned = found.jobs[name].ask("whatif", "whatif", args.timeout)
            found.jobs[name].suspend()
    without_s = reckoned.get("without_s", [None] * (gone + 1))[gone]
    if without_s is None:
        raise JobFailed(WHOLE, f"cannot tell of a step without rank {gone}", [])
    # Against the time that this round has taken: what the run estimates from are its latest steps, of some rounds.
    reckoned_ms = ms[WHOLE] * without_s / reckoned["step_s"]
    return {"ms": ms[WHOLE], "reckoned": reckoned_ms, "without": ms[LESS],
            "off": 100 * (reckoned_ms / ms[LESS] - 1), "reckoned_gain": 100 * (reckoned["step_s"] / without_s - 1),
            "gain": 100 * (ms[WHOLE] / ms[LESS] - 1)}


def _told(args: argparse.Namespace, plan: Plan, course: Course, gone: int, found: Race,
          rows: list[dict[str, float]]) -> bool:
    """Print and record the rounds and their medians; whether the forecast holds."""
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    shown = [[str(at + 1), *_shown(row)] for at, row in enumerate(rows)] + [["median", *_shown(middle)]]
    about, speeds = found.about[WHOLE], ",".join(f"{speed:g}" for speed in course.speeds)
    terminal.show(f"{args.workload} in {args.framework} without rank {gone}, ranks of speed {speeds} "
               f"({mixed.how(course)}), balance {args.balance}, global batch {plan.batch * len(course.speeds)}, "
               f"{about['wire']}, {len(rows)} rounds of {args.steps} steps", HEADERS, shown, markdown=args.markdown)
    holds = abs(middle["off"]) <= TARGET
    terminal.note(f"the forecast is off by {middle['off']:+.1f} % of the step that was measured"
               + ("" if holds else f", more than {TARGET:g} %"))
    if args.jsonl:
        session.append(args.jsonl, race.facts(args, "whatif", plan, about) | {
            "kind": "summary", "speeds": list(course.speeds), "slowed": mixed.how(course), "gone": gone,
            "balance": args.balance, "rounds_done": len(rows), "each": rows, "median": middle, "wire": about["wire"]})
    return holds


def _shown(row: dict[str, float]) -> list[str]:
    return [f"{row[key]:.2f}" for key in ("ms", "reckoned", "without")] + [
        f"{row[key]:+.1f}" for key in ("off", "reckoned_gain", "gain")]
