"""``benchmarks mixed``: heterogeneous ranks, and the scaling efficiency of each trainer.

Owns who runs at which speed, and when speeds change ranks (how ranks are slowed: `throttle`; how jobs are launched and
take turns: `race`; what is made of the times: `parts`). Beside the contenders there is a plain loop alone for each
speed, a solo job, timed in the same rounds: what a contender could reach is what its ranks reach alone, added up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import parts, peers, race, standings, throttle
from benchmarks.jobs import JobFailed
from benchmarks.parts import Measured
from benchmarks.race import Plan, Race
from benchmarks.throttle import Throttle
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

CONTENDERS = {"torch": ("hvdtrain", "hvdtrain@static", "hvdtrain@auto", "ddp", "horovod", "horovod-tuned"),
              "tensorflow": ("hvdtrain", "hvdtrain@static", "hvdtrain@auto", "horovod", "horovod-tuned", "mwms")}
MOVED = ("hvdtrain@static", "hvdtrain@auto")
EQUAL = ("hvdtrain", "hvdtrain@auto")


@dataclass
class Course:
    """The speeds and what follows from them.

    ``groups``: where the ranks, then the solo jobs, are throttled; None where nobody is. ``emulate``: hvdtrain's ranks
    slow themselves. ``samples``, ``moved``: as in `parts.Measured`, by contender.
    """

    speeds: tuple[float, ...]
    emulate: bool = False
    groups: Throttle | None = None
    samples: dict[str, list[list[int]]] = field(default_factory=dict)
    moved: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def alone(self) -> tuple[float, ...]:
        """Speeds of the solo jobs: each once."""
        return (1.0,) if self.emulate else tuple(dict.fromkeys(self.speeds))

    def set(self, speeds: tuple[float, ...]) -> None:
        """Give the ranks these speeds, at once."""
        for rank, speed in enumerate(speeds if self.groups else ()):
            assert self.groups is not None
            self.groups.set(rank, speed)


def main(argv: list[str]) -> int:
    """Measure; 0 if every contender did its part, 1 if one failed."""
    args = _parser().parse(argv)
    course, refused = course_of(args)
    plan = _plan(args, course, refused, os.environ)
    session.check(args.jsonl)
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        if not course.emulate and min(course.speeds) < 1:
            course.groups = stack.enter_context(Throttle([*course.speeds, *course.alone], plan.threads))
        return _measure(args, plan, course, scratch)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks mixed",
                            "Train on heterogeneous ranks: time hvdtrain's ways to share the work and other "
                            "trainers' equal batches, as parts of what the ranks reach alone, in interleaved rounds. "
                            "Not to be started under mpirun: it starts a job for each contender.")
    race.add_options(parser, 7, 30, "steps before the first round, the settling of balance auto among them",
                     "compute threads of a rank; 0: its share of the cores here")
    parser.set_defaults(workload="resnet", threads=1, steps=10)
    add = parser.add_argument
    add("--speeds", type=speeds_of_ranks, default=(1.0, 0.4), metavar="S0,S1,...",
        help="speed of each rank, as part of its threads' cores; 1: not slowed. One job has as many ranks")
    add("--contenders", default="", metavar="A,B,...", help="peers, or hvdtrain[-COLLECTIVES][+COMPRESSION][@BALANCE]; "
        "else " + "; ".join(f"{f}: {', '.join(names)}" for f, names in CONTENDERS.items()))
    add("--move", type=cli.whole("--move", 0), default=0, metavar="N",
        help="in each round give the ranks each other's speeds, in reversed order, and time N steps after that, in "
             f"windows of {parts.WINDOW}; as many untimed ones precede the next round")
    add("--equal", action="store_true", help="as many ranks, none slowed: what balance auto costs there")
    add("--emulate", action="store_true", help="do not slow ranks by control groups: hvdtrain's ranks wait instead "
        "(emulate_speed), peers are left out")
    add("--rebalance", action="append", default=[], metavar="KEY=VALUE",
        help="a key of hvdtrain's rebalance, such as every_steps=4; may be repeated")
    return parser


def speeds_of_ranks(text: str) -> tuple[float, ...]:
    """Return a type: the speeds of two ranks or more."""
    one = cli.number("--speeds", 0, 1)
    speeds = tuple(one(part) for part in text.split(","))
    if len(speeds) < 2:
        raise UserError(f"--speeds is {text!r}", "a speed for each of two ranks or more", "for example --speeds 1,0.4")
    return speeds


# --- what is run -----------------------------------------------------------------------------------------------------

def course_of(args: argparse.Namespace) -> tuple[Course, str]:
    """Return (speeds, why ranks cannot be throttled here or ""); `UserError` for options that exclude each other."""
    speeds = (1.0,) * len(args.speeds) if args.equal else args.speeds
    if 0 < args.move < parts.WINDOW:
        raise UserError(f"--move is {args.move}", f"{parts.WINDOW} steps or more, or 0", "correct --move")
    if args.move and len(set(speeds)) == 1:
        raise UserError("--move with equal speeds", "ranks that can change speeds", "correct --speeds")
    if min(speeds) == 1:
        return Course(speeds), ""
    reason = "--emulate was given" if args.emulate else throttle.available()
    if reason and args.move:
        raise UserError(f"--move where ranks cannot be throttled: {reason}", "cpu control groups, which can be changed",
                        "run it as root, without --emulate")
    return Course(speeds, emulate=bool(reason)), reason


def _plan(args: argparse.Namespace, course: Course, refused: str, env: Mapping[str, str]) -> Plan:
    """Return the contenders; with emulated speeds hvdtrain alone, and a note for each of the others."""
    names = race.named(args.contenders) or list(EQUAL if args.equal else MOVED if args.move
                                                else CONTENDERS[args.framework])
    found = [peers.contender(name, args.framework) for name in names]
    if any(contender.alone for contender in found):
        raise UserError("a contender of one process", "contenders of several ranks: solo speeds are measured anyway",
                        "correct --contenders")
    left_out = {c.name: f"its ranks cannot be slowed: {refused}" for c in found if c.peer and course.emulate}
    for name, reason in left_out.items():
        terminal.note(f"{name} is left out: {reason}")
    plan = race.plan(args, "mixed", [name for name in names if name not in left_out], len(course.speeds), env)
    plan.left_out.update(left_out)
    return plan


def command(args: argparse.Namespace, plan: Plan, course: Course, contender: str, scratch: str) -> list[str]:
    """Return the whole command line of one contender's job. Pure."""
    words = [*plan.launch[contender], *race.worker(args, plan, contender, scratch)]
    for key in args.rebalance:
        words += ["--rebalance", key]
    for speed in course.speeds if course.emulate else ():
        words += ["--emulate_speed", str(speed)]
    for path in course.groups.paths[:len(course.speeds)] if course.groups else ():
        words += ["--cgroup", str(path)]
    return words


def solo_command(args: argparse.Namespace, plan: Plan, course: Course, at: int, scratch: str) -> list[str]:
    """Return the whole command line of the solo job of speed number ``at``. Pure."""
    words = race.worker(args, plan, "plain", scratch)
    return [*words, "--cgroup", str(course.groups.paths[len(course.speeds) + at])] if course.groups else words


# --- rounds ----------------------------------------------------------------------------------------------------------

def _measure(args: argparse.Namespace, plan: Plan, course: Course, scratch: str) -> int:
    """Start all, take turns, print and record."""
    jobs = [(parts.solo(speed), solo_command(args, plan, course, at, scratch), plan.env)
            for at, speed in enumerate(course.alone)]
    jobs += [(c.name, command(args, plan, course, c.name, scratch), {**plan.env, **c.env}) for c in plan.contenders]
    return race.run(lambda _: iter(jobs), partial(_take_turns, args, plan, course), partial(_tell, args, plan, course),
                    args.timeout)


def _take_turns(args: argparse.Namespace, plan: Plan, course: Course, found: Race) -> None:
    """All rounds, or as many as there is a contender for."""
    for number in range(args.rounds):
        for name in race.rotated(list(found.jobs), number):
            try:
                _turn(args, course, found, name, first=number == 0)
            except JobFailed as failure:
                race.drop(failure, found)
        if not any(contender.name in found.jobs for contender in plan.contenders):
            break
        found.rounds = number + 1
        measured = _measured(plan, course, found)
        said = ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in measured.times.items())
        say(f"round {number + 1}/{args.rounds}: {said}")
        _record_round(args, plan, course, found, measured)


def _turn(args: argparse.Namespace, course: Course, found: Race, name: str, first: bool) -> None:
    """Run one turn of a job; where speeds are to change, a contender's second half is after the change."""
    moves = args.move and name not in map(parts.solo, course.alone)
    if moves:
        course.set(course.speeds)
    untimed = args.settle + (args.move if moves and not first else 0)
    done = race.turn(found.jobs[name], [f"go {args.steps} {untimed}"], args.timeout)[0]
    if moves:
        course.set(course.speeds[::-1])
        after = race.turn(found.jobs[name], [f"go {args.move} 0"], args.timeout)[0]
        course.moved.setdefault(name, []).append(after["step_s"])
    found.times[name].append(1e3 * done["seconds"] / done["steps"])
    course.samples.setdefault(name, []).append(done["samples"])
    found.about[name]["notes"] = done["notes"]


def _measured(plan: Plan, course: Course, found: Race) -> Measured:
    """Return the complete rounds of those that are still there."""
    n = found.rounds
    times = {name: ms[:n] for name, ms in found.times.items()} if n else {}
    return Measured(course.speeds, plan.batch, times, {name: course.samples[name][:n] for name in times},
                    {name: steps[:n] for name, steps in course.moved.items() if name in times}, course.emulate)


# --- what is told ----------------------------------------------------------------------------------------------------

def _record_round(args: argparse.Namespace, plan: Plan, course: Course, found: Race, measured: Measured) -> None:
    """Return a record of each job's last turn."""
    for name in measured.times if args.jsonl else ():
        percents = measured.percents(name) if name in measured.contenders else None
        moved = measured.moved.get(name)
        session.append(args.jsonl, _facts(args, plan, course, found.about[name]) | {
            "kind": "round", "contender": name, "launch": list(plan.launch.get(name, ())),
            "round": found.rounds - 1, "ms": measured.times[name][-1], "samples_per_s": measured.rates(name)[-1],
            "percent": percents and percents[-1], "samples": measured.samples[name][-1],
            "moved_step_s": moved and moved[-1]})


def _tell(args: argparse.Namespace, plan: Plan, course: Course, raced: Race) -> None:
    """Tables and summary of the complete rounds; the rounds' own records are written already."""
    measured = _measured(plan, course, raced)
    if not measured.contenders:
        say("no round was completed")
        return
    found = parts.summary(measured)
    notes = {name: race.notes_of(plan, raced.about[name]) for name in measured.times}
    for text in standings.remarks({name: notes[name] for name in measured.contenders}):
        terminal.note(text)
    about = race.whole_job(raced.about, measured.times, len(course.speeds))
    speeds = ",".join(f"{speed:g}" for speed in course.speeds)
    title = (f"{args.workload} in {args.framework}, {about['parameters']:,} parameters, global batch "
             f"{plan.batch * len(course.speeds)}, ranks of speed {speeds} ({how(course)}), {plan.threads} "
             f"thread{'s' if plan.threads > 1 else ''} each, {about['hosts']}; median of {raced.rounds} rounds of "
             f"{args.steps} steps")
    terminal.show(title, parts.HEADERS, parts.rows(found, {n: raced.about[n]["wire"] for n in measured.times}),
               markdown=args.markdown)
    if measured.solo_sums() is None:
        terminal.note("a single-rank throughput is missing, so there is no sum of them")
    changed = parts.change_rows(found)
    if changed:
        terminal.show(f"% of solo sum in the steps after the ranks took each other's speeds ({speeds} reversed)",
                   parts.change_headers(found), changed, markdown=args.markdown)
    if plan.left_out:
        terminal.note("left out: " + "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items()))
    if args.jsonl:
        own = {name: {**s, "wire": raced.about[name]["wire"], "notes": notes[name]} for name, s in found.items()}
        session.append(args.jsonl, _facts(args, plan, course, about) | {
            "kind": "summary", "wire": "", "contenders": own, "rounds_done": raced.rounds, "left_out": plan.left_out,
            "missing": [c.name for c in plan.contenders if c.name not in measured.times]})


def how(course: Course) -> str:
    """By what ranks are slowed, in words."""
    return "by waiting" if course.emulate else "by control groups" if course.groups else "not slowed"


def _facts(args: argparse.Namespace, plan: Plan, course: Course, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a record."""
    return race.facts(args, "mixed", plan, about) | {
        "speeds": list(course.speeds), "slowed": how(course), "move": args.move, "rebalance": args.rebalance}
