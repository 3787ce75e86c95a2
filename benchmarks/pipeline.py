"""``benchmarks pipeline``: a model cut over ranks, against PyTorch's own pipeline cut the same, all under one quota.

Owns who takes part, the quota, and that a peer gets our cut (how jobs are launched and take turns: `race`; how ranks
are slowed: `throttle`; what is made of the times: `stages`). Each rank of each job has the same part of a core, so that
ranks which wait for each other do not hide it in somebody else's processor time. Where ranks are on several hosts, jobs
of whole copies run beside the pipelines, and a sentence says which of the two to take.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks import estimates, race, stages, standings, throttle
from benchmarks.jobs import GRACE_S, Job, JobFailed
from benchmarks.peers import Contender
from benchmarks.race import Plan, Race
from benchmarks.throttle import Throttle
from benchmarks.workloads import WORKLOADS
from hvdtrain.commands.bench import cli, session
from hvdtrain.config import FOR_EACH
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

CONTENDERS = {"torch": ("hvdtrain/pipeline", "pipelining"), "tensorflow": ("hvdtrain/pipeline",)}
ON_HOSTS = {"torch": ("hvdtrain-mpi/pipeline", "pipelining", "hvdtrain-mpi", "ddp"),
            "tensorflow": ("hvdtrain-mpi/pipeline", "hvdtrain-mpi")}
"""Where a core is rationed, waits must sleep: so MPI between hosts, not Horovod, whose thread spins."""

BATCHES = {"resnet": 384, "gpt12": 48}
"""Samples of a rank where not the workload's own: a step of some seconds under the usual quota, whose forwards and
backwards last many periods of it each. In a shorter one a rank makes up, when its turn comes, for what it waited."""

QUOTA = 0.45
ALONE = "one process"
LINK_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass
class Course:
    """Measurements besides the times of `Race`.

    ``quota``: of a core, for each rank; 1: no limit. ``unlimited``: why there is none, where one was asked for.
    ``spent``: of each contender by round and rank. ``pipelines``: how each job that cuts has cut.
    """

    ranks: int
    quota: float
    unlimited: str = ""
    groups: Throttle | None = None
    spent: dict[str, list[list[dict[str, float]]]] = field(default_factory=dict)
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """Measure, or with --check compare results; 0 if every contender did its part, 1 if one failed."""
    args = _parser().parse(argv)
    course = course_of(args)
    plan = _plan(args, os.environ)
    session.check(args.jsonl)
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        if course.quota < 1:
            course.groups = stack.enter_context(Throttle([course.quota] * args.np, plan.threads))
        return (_check if args.check else _measure)(args, plan, course, scratch)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks pipeline", "Time steps of a model that is cut over ranks, hvdtrain's and "
                            "torch.distributed.pipelining's with the same cut, order and micro-batches, each rank "
                            "under the same quota, in interleaved rounds; and hold the stages' idle shares against "
                            "what was predicted. Not to be started under mpirun: it starts a job for each contender.")
    race.add_options(parser, 5, 3, "steps before the first round", "compute threads of a rank")
    parser.set_defaults(workload="gpt12", threads=1, steps=2, settle=1, timeout=120.0)
    add = parser.add_argument
    add("--np", type=cli.whole("--np", 2, 64), default=2, metavar="N", help="stages, and ranks of each job")
    add("--order", type=cli.one_of("--order", ("1f1b", "gpipe", "interleaved")), default="1f1b", metavar="NAME",
        help="1f1b, gpipe or interleaved")
    add("--micro_batches", type=cli.whole("--micro_batches", 0), default=0, metavar="N",
        help=f"parts of the global batch; 0: {FOR_EACH} for each stage")
    add("--chunks", type=cli.whole("--chunks", 2, 64), default=2, metavar="N",
        help="runs of blocks on each rank, where interleaved")
    add("--cut", default="", metavar="A,B,...", help="blocks that the second and further chunks begin with; empty: as "
        "hvdtrain finds it, and for all others the same")
    add("--quota", type=cli.number("--quota", 0, 1), default=QUOTA, metavar="Q",
        help="part of a core that each rank of each job has; 1: no limit")
    add("--contenders", default="", metavar="A,B,...", help="hvdtrain[-COLLECTIVES]/pipeline, pipelining (of PyTorch), "
        "or jobs of whole copies: hvdtrain-mpi, ddp; else "
        + "; ".join(f"{f}: {', '.join(names)}" for f, names in CONTENDERS.items())
        + f", on several hosts {', '.join(ON_HOSTS['torch'])}")
    add("--link", type=link, default=os.environ.get("TWO_HOSTS_RATE", "none"), metavar="RATE", help="what a host's "
        "link carries, such as 1gbit: for the sentence that says whether to take a pipeline or whole copies")
    add("--within", type=cli.number("--within", 0, 1e6), default=330.0, metavar="S",
        help="begin no round that would end after so many seconds")
    add("--check", action="store_true", help="do not measure: take the same 3 steps in each contender and in one "
        "process, and compare")
    return parser


def link(text: str) -> float:
    """Return a type: bytes a second of a rate such as 1gbit; 0 of none."""
    number, unit = text[:-4], text[-4:-3]
    if text == "none":
        return 0.0
    if not text.endswith("bit") or unit not in LINK_UNITS or not number.isdigit() or not int(number):
        raise UserError(f"--link is {text!r}", "a rate such as 1gbit or 100mbit, or none", "correct --link")
    return int(number) * LINK_UNITS[unit] / 8


# --- what is run -----------------------------------------------------------------------------------------------------

def course_of(args: argparse.Namespace) -> Course:
    """Return the quota; `UserError` where the options do not fit each other or this machine."""
    from hvdtrain.cluster.topology import affinity

    args.batch = args.batch or BATCHES.get(args.workload, WORKLOADS[args.workload].batch)
    micros = args.micro_batches = args.micro_batches or FOR_EACH * args.np
    if args.batch * args.np % micros:
        raise UserError(f"a batch of {args.batch} for each of {args.np} ranks in {micros} micro-batches",
                        "equal micro-batches, which peers need", "correct --batch or --micro_batches")
    cores = len(affinity())
    if args.quota < 1 and args.np * args.quota * max(1, args.threads) > cores:
        raise UserError(f"{args.np} ranks of {args.quota:g} core on {cores} cores", "cores for all of them, else the "
                        "quota is none", f"--quota {int(100 * cores / args.np / max(1, args.threads)) / 100:g}")
    reason = throttle.available() if args.quota < 1 else ""
    if reason:
        terminal.note(f"no quota: {reason}")
    return Course(args.np, 1.0 if reason else args.quota, reason)


def chosen(args: argparse.Namespace) -> list[str]:
    """Names of the contenders that the options ask for, each once, those of ours that cut first. Pure."""
    usual = (ON_HOSTS if "," in args.hosts else CONTENDERS)[args.framework]
    names = race.named(args.contenders) or list(usual)
    return sorted(names, key=lambda name: not name.endswith("/pipeline"))


def _plan(args: argparse.Namespace, env: Mapping[str, str]) -> Plan:
    plan = race.plan(args, "pipeline", chosen(args), args.np, env)
    if any(contender.alone for contender in plan.contenders):
        raise UserError("a contender of one process", "contenders of several ranks", "correct --contenders")
    return plan


def command(args: argparse.Namespace, plan: Plan, course: Course, contender: Contender, scratch: str) -> list[str]:
    """Return the command line of a contender's job: partitioned as our first job, or as the options say."""
    words = [*plan.launch[contender.name], *race.worker(args, plan, contender.name, scratch)]
    if contender.cuts:
        first = next(iter(course.pipelines.values()), {})
        cut = ",".join(first.get("cut", ())) or args.cut
        places = ",".join(map(str, first.get("places", ())))
        words += ["--order", args.order, "--micro_batches", str(args.micro_batches)]
        words += ["--chunks", str(args.chunks)] if args.order == "interleaved" else []
        words += (["--cut", cut] if cut else []) + (["--places", places] if places else [])
    for path in course.groups.paths if course.groups else ():
        words += ["--cgroup", str(path)]
    return [*words, "--check"] if args.check else words


# --- rounds ----------------------------------------------------------------------------------------------------------

def _measure(args: argparse.Namespace, plan: Plan, course: Course, scratch: str) -> int:
    """Start all, take turns, print and record."""
    ends_at = time.monotonic() + args.within

    def jobs(found: Race) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        for c in plan.contenders:
            yield c.name, command(args, plan, course, c, scratch), {**plan.env, **c.env}
            _take_down(course, c.name, found.about.get(c.name, {}))

    return race.run(jobs, partial(_take_turns, args, plan, course, ends_at), partial(_tell, args, plan, course),
                    args.timeout)


def _take_down(course: Course, name: str, about: Mapping[str, Any]) -> None:
    """Return the partition of one of our jobs, which the later ones get."""
    if about.get("pipeline"):
        course.pipelines[name] = about["pipeline"]
        blocks = about["pipeline"]["blocks"]
        say(f"{name} is cut into " + ", ".join(f"{part[0]} to {part[-1]}" for part in blocks))


def _take_turns(args: argparse.Namespace, plan: Plan, course: Course, ends_at: float, found: Race) -> None:
    """All rounds, or as many as there is time and a job for."""
    for number in range(args.rounds):
        began = time.monotonic()
        for name in race.rotated(list(found.jobs), number):
            try:
                done = race.turn(found.jobs[name], [f"go {args.steps}"], args.timeout)[0]
            except JobFailed as failure:
                race.drop(failure, found)
                continue
            found.times[name].append(1e3 * done["seconds"] / done["steps"])
            course.spent.setdefault(name, []).append(done["spent"])
            found.about[name]["notes"] = done["notes"]
            if args.jsonl:
                session.append(args.jsonl, _facts(args, plan, course, found.about[name]) | {
                    "kind": "round", "contender": name, "launch": list(plan.launch[name]), "round": number,
                    "ms": found.times[name][-1], "spent": done["spent"]})
        if not found.jobs:
            break
        found.rounds = number + 1
        say(f"round {number + 1}/{args.rounds}: "
            + ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in found.times.items()))
        if 2 * time.monotonic() - began > ends_at and found.rounds < args.rounds:
            terminal.note(f"no more rounds: --within {args.within:g} s")
            break


# --- the report ------------------------------------------------------------------------------------------------------

def _tell(args: argparse.Namespace, plan: Plan, course: Course, raced: Race) -> None:
    """Tables, the sentence and a summary of the complete rounds; the rounds' own records are written already."""
    n = raced.rounds
    times = {name: ms[:n] for name, ms in raced.times.items()} if n else {}
    if not times:
        say("no round was completed")
        return
    spent = {name: course.spent[name][:n] for name in times}
    own = next((name for name in times if name in course.pipelines), "")
    found = stages.summary(times, own, spent, args.steps)
    notes = {name: race.notes_of(plan, raced.about[name]) for name in times}
    for text in standings.remarks(notes):
        terminal.note(text)
    about = race.whole_job(raced.about, times, args.np)
    title = (f"{args.workload} in {args.framework}, {about['parameters']:,} parameters, {args.np} stages, "
             f"{args.order}, global batch {plan.batch * args.np} in {args.micro_batches} micro-batches, {how(course)}, "
             f"{about['hosts']}; median of {n} rounds of {args.steps} steps")
    terminal.show(title, stages.HEADERS, stages.rows(found, {name: raced.about[name]["wire"] for name in times}),
               markdown=args.markdown)
    each = stages.stages(spent[own], args.steps, course.pipelines[own]) if own else []
    if own:
        rows = stages.stage_rows(each, course.quota)
        terminal.show(f"stages of {own}", stages.STAGE_HEADERS, rows, markdown=args.markdown)
        for text in stages.reached(found, "pipelining", each, course.quota):
            terminal.note(text)
    work = _work(args, course, spent, own, about) if own and args.link else None
    if work is not None:
        terminal.note(f"reckoned: {estimates.sentence(work)}")
        _compare(plan, found)
    if args.jsonl:
        session.append(args.jsonl, _facts(args, plan, course, about) | {
            "kind": "summary", "wire": "", "rounds_done": n, "left_out": plan.left_out, "stages": each,
            "contenders": {name: {**s, "wire": raced.about[name]["wire"], "notes": notes[name]}
                           for name, s in found.items()},
            "idle_by_processor": stages.share_by_processor(each, course.quota) if own else None,
            "reckoned": estimates.sentence(work) if work else "", "pipelines": course.pipelines,
            "missing": [c.name for c in plan.contenders if c.name not in times]})


def _work(args: argparse.Namespace, course: Course, spent: Mapping[str, Any], own: str,
          about: Mapping[str, Any]) -> estimates.StepWork:
    return stages.work(spent[own], args.steps, course.pipelines[own], args.micro_batches, about["parameters"],
                       args.link)


def _compare(plan: Plan, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print which of ours was the faster, where both took part."""
    ours = {c.cuts: c.name for c in reversed(plan.contenders) if not c.peer and c.name in found}
    if len(ours) == 2:
        cut, whole = (found[ours[cuts]]["median_ms"] for cuts in (True, False))
        faster = estimates.PIPELINE if cut < whole else estimates.DATA_PARALLEL
        terminal.note(f"measured: {faster}: {cut:.0f} ms a step cut over the ranks, {whole:.0f} ms with whole copies")


def how(course: Course) -> str:
    """Describe the blocks of each rank."""
    return f"{course.quota:g} of a core for each rank" if course.groups else "no quota"


def _facts(args: argparse.Namespace, plan: Plan, course: Course, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a record."""
    return race.facts(args, "pipeline", plan, about) | {
        "order": args.order, "micro_batches": args.micro_batches, "quota": course.quota, "slowed": how(course),
        "link_bytes_s": args.link, "pipeline": about.get("pipeline")}


# --- do they all do the same? ----------------------------------------------------------------------------------------

def _check(args: argparse.Namespace, plan: Plan, course: Course, scratch: str) -> int:
    """Take the same steps in each contender and in one process, one job after the other, and compare."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, JobFailed] = {}
    alone = replace(plan, batch=plan.batch * args.np)
    for contender in (None, *plan.contenders):
        name = contender.name if contender else ALONE
        job = Job(name, command(args, plan, course, contender, scratch) if contender
                  else [*race.worker(args, alone, "plain", scratch), "--check"], plan.env)
        try:
            found[name] = job.wait("checked", args.timeout)
            _take_down(course, name, found[name])
        except JobFailed as failure:
            failed[name] = failure
        finally:
            job.end(GRACE_S if name in found else 0.0)
    wrong = unlike(found)
    rows = [(name, f["wire"], f"{f['loss']:.6f}", f"{f['moved']:.6f}", wrong.get(name, ""))
            for name, f in found.items()]
    if rows:
        terminal.show("after 3 steps: loss, length of the parameters' way",
                   ("contender", "wire", "loss", "moved", "wrong"), rows, markdown=args.markdown)
    return race.report(failed) or int(bool(wrong))


def unlike(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """{contender: what differs from one process} of loss and way after the same steps. Pure."""
    wrong = {}
    for name, its in found.items():
        differs = [key for key in ("loss", "moved") if ALONE in found
                   and not abs(its[key] - found[ALONE][key]) <= standings.TOLERANCE * found[ALONE][key]]
        if differs:
            wrong[name] = f"{' and '.join(differs)} unlike {ALONE}"
    return wrong
