"""``benchmarks step``: whole training steps of hvdtrain and of its peers, interleaved, in one run.

Owns the choice of contenders, the rounds and what is told of them (how jobs are launched and take turns: `race`; what
is made of the times: `standings`). Each contender is a job of its own under mpirun, started with the same flags,
environment and threads. Machines are noisy and drift, so all jobs are alive at once and take turns: in each round one
after the other is resumed, steps, and is suspended again; compared are the medians of the ratios within a round. Jobs
that wait take no processor time, not even with a spinning thread.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import floor, peers, race, standings
from benchmarks.jobs import GRACE_S, Job, JobFailed
from benchmarks.peers import Contender
from benchmarks.race import Plan, Race
from benchmarks.workloads import FILES
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import terminal
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

OURS = {"torch": ("hvdtrain", "hvdtrain-null", "hvdtrain-horovod", "hvdtrain-mpi"),
        "tensorflow": ("hvdtrain", "hvdtrain-null", "hvdtrain-horovod")}
MIN_ROUNDS = 7
EQUAL = {True: "yes", False: "no", None: "each has a part"}


def main(argv: list[str]) -> int:
    """Measure, or with --check compare results; 0 if every contender did its part, 1 if one failed."""
    args = _parser().parse(argv)
    plan = _plan(args, os.environ)
    with orderly_signals(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as scratch:
        return _check(args, plan, scratch) if args.check else _measure(args, plan, scratch)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks step",
                            "Time whole training steps of hvdtrain's variants, and with --peers of other "
                            "trainers, on the same model, batch and optimizer (SGD with momentum), in interleaved "
                            "rounds. Not to be started under mpirun: it starts a job for each contender.")
    add = parser.add_argument
    race.add_options(parser, MIN_ROUNDS, 20, "steps before the first round; compression auto has settled after 14",
                     "compute threads of a rank; 0: its share of the cores here")
    add("--np", type=cli.whole("--np", 1, 4096), default=2, metavar="N",
        help="ranks of each job; 1: without mpirun")
    add("--peers", action="store_true", help="measure hvdtrain against all peers of the framework: "
        + "; ".join(f"{f}: {', '.join(peers.peers(f))}" for f in FILES) + " (plain: in 1 process only)")
    add("--contenders", default="", metavar="A,B,...", help="just these: peers, hvdtrain[-COLLECTIVES]"
        "[+COMPRESSION] such as hvdtrain-mpi, hvdtrain+powersgd, hvdtrain+auto; hvdtrain/whole, "
        "hvdtrain/zero1, hvdtrain/zero2: Adam whose state is whole on each rank or divided; hvdtrain/compiled: compile "
        "auto; hvdtrain/remat1, hvdtrain/remat2: all blocks, or every second, recomputed; "
        "hvdtrain.torch: horovod's loop with another import; or plain-each: on each "
        "rank at once a plain loop of its own, without any exchange")
    add("--check", action="store_true", help="do not measure: take the same 3 steps in each contender and compare")
    return parser


# --- what is run -----------------------------------------------------------------------------------------------------

def _plan(args: argparse.Namespace, env: Mapping[str, str]) -> Plan:
    """Check the options against this machine; `UserError` where they do not fit it."""
    return race.plan(args, "step", chosen(args.framework, args.np, args.peers, args.contenders), args.np, env)


def chosen(framework: str, ranks: int, with_peers: bool, explicit: str) -> list[str]:
    """Names of the contenders that the options ask for, each once, in order. Pure."""
    if explicit:
        return race.named(explicit)
    if ranks == 1:
        return ["hvdtrain", "plain"] if with_peers else ["hvdtrain"]
    if not with_peers:
        return list(OURS[framework])
    return ["hvdtrain", "hvdtrain-null", *(name for name in peers.peers(framework) if name != "plain")]


def command(args: argparse.Namespace, plan: Plan, contender: Contender, scratch: str) -> list[str]:
    """Return the whole command line of one contender's job. Pure."""
    words = [*plan.launch[contender.name], *race.worker(args, plan, contender.name, scratch)]
    return [*words, "--check" if args.check else "--links"]


# --- rounds ----------------------------------------------------------------------------------------------------------

def _measure(args: argparse.Namespace, plan: Plan, scratch: str) -> int:
    """Start all, take turns, print and record."""
    session.check(args.jsonl)
    jobs = [(c.name, command(args, plan, c, scratch), {**plan.env, **c.env}) for c in plan.contenders]
    return race.run(lambda _: iter(jobs), partial(_take_turns, args, plan), partial(_tell, args, plan),
                    args.timeout)


def _take_turns(args: argparse.Namespace, plan: Plan, found: Race) -> None:
    """All rounds, or as many as there is a job for."""
    for number in range(args.rounds):
        for name in race.rotated(list(found.jobs), number):
            try:
                done = race.turn(found.jobs[name], [f"go {args.steps}"], args.timeout)[0]
            except JobFailed as failure:
                race.drop(failure, found)
                continue
            found.times[name].append(1e3 * done["seconds"] / done["steps"])
            found.about[name]["notes"] = done["notes"]
            found.about[name].setdefault("marks", []).append(done.get("marks", {}))
            if args.jsonl:
                session.append(args.jsonl, race.facts(args, "step", plan, found.about[name]) | {
                    "kind": "round", "contender": name, "launch": list(plan.launch[name]), "round": number,
                    "ms": found.times[name][-1]})
        if not found.jobs:
            break
        found.rounds = number + 1
        say(f"round {number + 1}/{args.rounds}: "
            + ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in found.times.items()))


# --- what is told ----------------------------------------------------------------------------------------------------

def _tell(args: argparse.Namespace, plan: Plan, raced: Race) -> None:
    """Table and summary of the complete rounds; the rounds' own records are written already."""
    times = {name: ms[:raced.rounds] for name, ms in raced.times.items()} if raced.rounds else {}
    if not times:
        say("no round was completed")
        return
    found = standings.summarise(times, plan.contenders, args.np)
    notes = {name: race.notes_of(plan, raced.about[name]) for name in times}
    for text in standings.remarks(notes):
        terminal.note(text)
    about = race.whole_job(raced.about, times, args.np)
    ranks, threads = about["ranks"], plan.threads
    of = "" if raced.rounds == args.rounds else f" of {args.rounds}"
    title = (f"{args.workload} in {args.framework}, {about['parameters']:,} parameters, batch {plan.batch} a rank, "
             f"{ranks} rank{'s' if ranks > 1 else ''} of {threads} thread{'s' if threads > 1 else ''}, "
             f"{about['hosts']}; median of {raced.rounds}{of} rounds of {args.steps} steps")
    terminal.show(title, standings.HEADERS, standings.rows(found, raced.about), markdown=args.markdown)
    if plan.left_out:
        terminal.note("left out: " + "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items()))
    least = floor.find(times, plan.contenders, raced.about)
    if least is not None:
        say("\n".join(floor.lines(least, times, plan.contenders)))
    if args.jsonl:
        summary = {name: {**s, "wire": raced.about[name]["wire"], "notes": notes[name]} for name, s in found.items()}
        session.append(args.jsonl, race.facts(args, "step", plan, about) | {
            "kind": "summary", "wire": "", "contenders": summary, "rounds_done": raced.rounds,
            "base": standings.base(times), "left_out": plan.left_out,
            "floor": floor.record(least, times, plan.contenders),
            "missing": [c.name for c in plan.contenders if c.name not in times]})


# --- do they all do the same? ----------------------------------------------------------------------------------------

def _check(args: argparse.Namespace, plan: Plan, scratch: str) -> int:
    """Take the same steps in each contender and compare where they lead; the next job starts while one is awaited."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, JobFailed] = {}
    jobs: list[Job] = []
    try:
        for at, contender in enumerate(plan.contenders):
            for later in plan.contenders[len(jobs):at + 2]:
                jobs.append(Job(later.name, command(args, plan, later, scratch), plan.env))
            try:
                found[contender.name] = jobs[at].wait("checked", args.timeout)
            except JobFailed as failure:
                failed[contender.name] = failure
            finally:
                jobs[at].end(GRACE_S if contender.name in found else 0.0)
    finally:
        for job in jobs:
            job.end()
    wrong = standings.disagreements(found, plan.contenders, args.np)
    rows = [(name, f["wire"], f"{f['loss']:.6f}", f"{f['moved']:.6f}", EQUAL[f["equal"]],
             wrong.get(name, "")) for name, f in found.items()]
    if rows:
        terminal.show("after 3 steps: loss, length of the parameters' way, whether all ranks hold the same bits",
                   ("contender", "wire", "loss", "moved", "ranks equal", "wrong"), rows, markdown=args.markdown)
    return race.report(failed) or int(bool(wrong))
