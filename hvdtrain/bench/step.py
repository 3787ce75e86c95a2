"""``bench step``: whole training steps of hvdtrain and of its peers, in turns, in one run.

Owns the choice of contenders, the rounds and what is told of them (what is made of the times: `standings`). Each
contender is a job of its own under mpirun (`jobs`), started with the same flags, environment and threads. Machines are
noisy and drift, so all jobs are alive at once and take turns: in each round one after the other is resumed, steps, and
is suspended again; compared are the medians of the ratios within a round. Jobs that wait take no processor time, not
even with a spinning thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.bench import options, peers, record, standings, table
from hvdtrain.bench.jobs import GRACE_S, Job, JobFailed
from hvdtrain.bench.peers import Contender, ours
from hvdtrain.bench.standings import Times
from hvdtrain.bench.workloads import FILES, WORKLOADS
from hvdtrain.build.children import orderly_signals
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.run import say

OURS = {"torch": ("hvdtrain", "hvdtrain-null", "hvdtrain-horovod", "hvdtrain-mpi"),
        "tensorflow": ("hvdtrain", "hvdtrain-null", "hvdtrain-horovod")}
MIN_ROUNDS = 7
EXPORTED = ("OMP_NUM_THREADS", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "TORCH_NCCL_ENABLE_MONITORING")


@dataclass(frozen=True)
class Plan:
    """What is run: the contenders, how each is launched, and the facts for the records.

    ``left_out``: why, by contender. ``notes``: what was set for all jobs.
    """

    contenders: tuple[Contender, ...]
    launch: dict[str, tuple[str, ...]]
    env: dict[str, str]
    threads: int
    batch: int
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Race:
    """What the rounds have come to; ``rounds`` of them are complete, ``times`` may have one more."""

    jobs: dict[str, Job] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, JobFailed] = field(default_factory=dict)
    times: Times = field(default_factory=dict)
    rounds: int = 0


def main(argv: list[str]) -> int:
    """Measure, or with --check compare results; 0 if every contender did its part, 1 if one failed."""
    args = _parser().parse(argv)
    plan = _plan(args, os.environ)
    with orderly_signals(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as scratch:
        return _check(args, plan, scratch) if args.check else _measure(args, plan, scratch)


def _parser() -> options.Parser:
    parser = options.Parser("step", "Time whole training steps of hvdtrain's variants, and with --peers of other "
                            "trainers, on the same model, batch and optimizer (SGD with momentum), in interleaved "
                            "rounds. Not to be started under mpirun: it starts a job for each contender.")
    add, whole = parser.add_argument, options.whole
    add("--workload", type=options.one_of("--workload", WORKLOADS), default="mlp", metavar="NAME",
        help="; ".join(f"{w.name}: {w.doc}, batch {w.batch}" for w in WORKLOADS.values()))
    add("--framework", type=options.one_of("--framework", FILES), default="torch", metavar="NAME",
        help=" or ".join(FILES))
    add("--np", type=whole("--np", 1, 4096), default=2, metavar="N", help="ranks of each job; 1: without mpirun")
    add("--peers", action="store_true", help="measure hvdtrain against all peers of the framework: "
        + "; ".join(f"{f}: {', '.join(peers.peers(f))}" for f in FILES) + " (plain: in 1 process only)")
    add("--contenders", default="", metavar="A,B,...", help="just these: peers, or hvdtrain[-COLLECTIVES]"
        "[+COMPRESSION] such as hvdtrain-mpi, hvdtrain+powersgd, hvdtrain+auto")
    add("--rounds", type=whole("--rounds", 1), default=MIN_ROUNDS, metavar="N", help="rounds of each contender")
    add("--steps", type=whole("--steps", 1), default=20, metavar="N", help="timed steps of a round")
    add("--warmup", type=whole("--warmup", 0), default=20, metavar="N",
        help="steps before the first round; compression auto has settled after 14")
    add("--settle", type=whole("--settle", 0), default=2, metavar="N", help="untimed steps at the start of a round")
    add("--batch", type=whole("--batch", 0), default=0, metavar="N", help="samples of a rank; 0: the workload's own")
    add("--threads", type=whole("--threads", 0, 4096), default=0, metavar="N",
        help="compute threads of a rank; 0: its share of the cores here")
    add("--seed", type=whole("--seed", 0, 2**32 - 1), default=0, metavar="N", help="of weights and data")
    add("--powersgd_rank", type=whole("--powersgd_rank", 1), default=4, metavar="N", help="of hvdtrain and of DDP")
    add("--exchange", action="append", default=[], metavar="KEY=VALUE",
        help="a key of hvdtrain's exchange, such as bucket_mb=4; may be repeated")
    add("--hosts", default=os.environ.get("TWO_HOSTS_LIST", ""), metavar="A:1,B:1", help="hosts for mpirun")
    add("--mpirun_args", default=os.environ.get("TWO_HOSTS_MPIRUN_ARGS", ""), metavar="WORDS",
        help="more words for mpirun, quoted as for a shell")
    add("--iface", default=os.environ.get("TWO_HOSTS_IFACE", ""), metavar="NAME",
        help="network interface of wires other than MPI")
    add("--timeout", type=options.number("--timeout", 0, 1e6), default=300.0, metavar="S",
        help="longest wait for one answer of a job")
    add("--check", action="store_true", help="do not measure: take the same 3 steps in each contender and compare")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--jsonl", default="", metavar="FILE", help="append a JSON record per contender and round, and a summary")
    return parser


# --- what is run -----------------------------------------------------------------------------------------------------

def _plan(args: argparse.Namespace, env: Mapping[str, str]) -> Plan:
    """Check the options against this machine; `UserError` where they do not fit it."""
    from hvdtrain.cluster.launcher import launch_facts
    from hvdtrain.cluster.topology import affinity

    if launch_facts(env).kind != "solo":
        raise UserError("bench step was started under a launcher", "one process: it starts a job for each contender",
                        "start it with python -m hvdtrain bench step --np N")
    if importlib.util.find_spec(args.framework) is None:
        raise UserError(f"{args.framework} is not installed", "the framework that is to be measured",
                        "install it, or choose another --framework")
    contenders: list[Contender] = []
    left_out = {}
    for name in chosen(args.framework, args.np, args.peers, args.contenders):
        contender = peers.contender(name, args.framework)
        reason = contender.lacks(args.framework)
        if reason:
            left_out[name] = reason
            table.note(f"{name} is left out: {reason}")
        else:
            contenders.append(contender)
    if not contenders:
        raise UserError("no contender is left", "one at least", "correct --contenders")
    _check_settings(args, contenders)
    threads = args.threads or max(1, len(affinity()) // args.np)
    batch = args.batch or WORKLOADS[args.workload].batch
    settings = _environment(args.np, threads, env)
    prefix = _launcher(args, settings)
    return Plan(tuple(contenders), {c.name: () if c.alone or args.np == 1 else prefix for c in contenders}, settings,
                threads, batch, left_out, _set_for_all(settings, env))


def _check_settings(args: argparse.Namespace, contenders: Sequence[Contender]) -> None:
    """Raise `UserError` for an --exchange that hvdtrain would refuse, before any job is started."""
    exchange = ours.exchange(args.exchange, args.powersgd_rank)
    Config(exchange=exchange).check()
    for contender in contenders:
        if not contender.peer:
            Config(exchange=exchange, collectives=contender.options["wire"],
                   compression=contender.options["compression"]).check()


def chosen(framework: str, ranks: int, with_peers: bool, explicit: str) -> list[str]:
    """Names of the contenders that the options ask for, each once, in order. Pure."""
    if explicit:
        return list(dict.fromkeys(name.strip() for name in explicit.split(",") if name.strip()))
    if ranks == 1:
        return ["hvdtrain", "plain"] if with_peers else ["hvdtrain"]
    if not with_peers:
        return list(OURS[framework])
    return ["hvdtrain", "hvdtrain-null", *(name for name in peers.peers(framework) if name != "plain")]


def _environment(ranks: int, threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of every job; what hvdtrain's boot would set for itself is set for all."""
    from hvdtrain.cli.verify import AS_ROOT
    from hvdtrain.cluster.boot import YIELD, should_yield
    from hvdtrain.cluster.topology import affinity, cpu_quota

    own = {**env, "OMP_NUM_THREADS": str(threads), "TORCH_NCCL_ENABLE_MONITORING": "0"}
    own.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cores = min(float(os.cpu_count() or 1), cpu_quota())
    if ranks > 1 and should_yield(len(affinity()), cores, ranks):
        own.setdefault(YIELD, "1")
    return own | AS_ROOT if os.geteuid() == 0 else own


def _set_for_all(settings: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, ...]:
    """What `_environment` did that boot, in each job, then finds done and does not tell."""
    from hvdtrain.cluster.boot import YIELD

    if settings.get(YIELD) == env.get(YIELD):
        return ()
    return (f"{YIELD}={settings[YIELD]} was set: more busy threads than cores",)


def _launcher(args: argparse.Namespace, env: Mapping[str, str]) -> tuple[str, ...]:
    """The words before ``python``; nothing where there is one rank."""
    if args.np == 1:
        return ()
    from hvdtrain.cli.verify import launcher

    words = launcher(args.np)
    try:
        words += shlex.split(args.mpirun_args)
    except ValueError as error:
        raise UserError(f"--mpirun_args is {args.mpirun_args!r}: {error}", "words quoted as for a shell",
                        "correct --mpirun_args") from None
    if args.hosts:
        words += ["--host", args.hosts]
        for name in EXPORTED if "--oversubscribe" in words else ():  # Open MPI, which hands on what it is told to
            words += ["-x", name] if name in env else []
    return tuple(words)


def command(args: argparse.Namespace, plan: Plan, contender: Contender, scratch: str) -> list[str]:
    """The whole command line of one contender's job. Pure."""
    words = [*plan.launch[contender.name], sys.executable, "-m", "hvdtrain.bench.worker",
             "--contender", contender.name, "--framework", args.framework, "--workload", args.workload,
             "--batch", str(plan.batch), "--seed", str(args.seed), "--threads", str(plan.threads),
             "--warmup", str(args.warmup), "--settle", str(args.settle),
             "--powersgd_rank", str(args.powersgd_rank), "--scratch", scratch]
    for key in args.exchange:
        words += ["--exchange", key]
    words += ["--iface", args.iface] if args.iface else []
    return [*words, "--check"] if args.check else words


# --- rounds ----------------------------------------------------------------------------------------------------------

def _measure(args: argparse.Namespace, plan: Plan, scratch: str) -> int:
    """Start all, take turns, print and record; every job is ended however this is left.

    Where a signal ends it, the rounds that were complete are told first: whoever sent it may not wait long.
    """
    record.check(args.jsonl)
    race = Race()
    try:
        try:
            _start(args, plan, scratch, race)
            _take_turns(args, plan, race)
        finally:
            _tell(args, plan, race)
    finally:
        _end_all(race.jobs.values())
    return _report(race.failed)


def _start(args: argparse.Namespace, plan: Plan, scratch: str, race: Race) -> None:
    """Start the jobs, one after the other; each waits, suspended, for its first turn."""
    for contender in plan.contenders:
        argv = command(args, plan, contender, scratch)
        say(f"$ {shlex.join(argv)}")
        race.jobs[contender.name] = job = Job(contender.name, argv, {**plan.env, **contender.env})
        try:
            race.about[contender.name] = job.wait("ready", args.timeout)
            job.suspend()
            race.times[contender.name] = []
        except JobFailed as failure:
            _drop(failure, race)


def _take_turns(args: argparse.Namespace, plan: Plan, race: Race) -> None:
    """All rounds, or as many as there is a job for."""
    for number in range(args.rounds):
        for name in rotated(list(race.jobs), number):
            try:
                done = _turn(race.jobs[name], args.steps, args.timeout)
            except JobFailed as failure:
                _drop(failure, race)
                continue
            race.times[name].append(1e3 * done["seconds"] / done["steps"])
            race.about[name]["notes"] = done["notes"]
            if args.jsonl:
                record.append(args.jsonl, _facts(args, plan, race.about[name]) | {
                    "kind": "round", "contender": name, "launch": list(plan.launch[name]), "round": number,
                    "ms": race.times[name][-1]})
        if not race.jobs:
            break
        race.rounds = number + 1
        say(f"round {number + 1}/{args.rounds}: "
            + ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in race.times.items()))


def _turn(job: Job, steps: int, timeout_s: float) -> dict[str, Any]:
    """One round of one job: what it says when it is done."""
    job.resume()
    done = job.ask(f"go {steps}", "done", timeout_s)
    job.suspend()
    return done


def rotated(names: Sequence[str], number: int) -> list[str]:
    """``names``, begun at another one each round, so that none always follows the same noise. Pure."""
    at = number % len(names) if names else 0
    return [*names[at:], *names[:at]]


def _drop(failure: JobFailed, race: Race) -> None:
    """Go on without a job."""
    race.jobs.pop(failure.name).end()
    race.failed[failure.name] = failure
    race.times.pop(failure.name, None)
    say(f"{failure}; going on without it")


def _end_all(jobs: Iterable[Job]) -> None:
    """End every job, in order where it can; whatever happens meanwhile, all are ended."""
    left = list(jobs)
    try:
        for job in left:
            job.quit()
        ends_at = time.monotonic() + GRACE_S
        for job in left:
            job.end(max(0.0, ends_at - time.monotonic()))
    finally:
        for job in left:
            job.end()


def _report(failed: Mapping[str, JobFailed]) -> int:
    """Print the last lines of those that failed; the exit status."""
    for failure in failed.values():
        print("\n".join([*(f"  {line}" for line in failure.lines), f"{failure}; its last lines are above"]),
              file=sys.stderr, flush=True)
    return int(bool(failed))


# --- what is told ----------------------------------------------------------------------------------------------------

def _tell(args: argparse.Namespace, plan: Plan, race: Race) -> None:
    """Table and summary of the complete rounds; the rounds' own records are written already."""
    times = {name: ms[:race.rounds] for name, ms in race.times.items()} if race.rounds else {}
    if not times:
        say("no round was completed")
        return
    found = standings.summarise(times, plan.contenders, args.np)
    notes = {name: _notes(plan, race.about[name]) for name in times}
    for text in standings.remarks(notes):
        table.note(text)
    about = _whole(args, race.about, times)
    ranks, threads = about["ranks"], plan.threads
    of = "" if race.rounds == args.rounds else f" of {args.rounds}"
    title = (f"{args.workload} in {args.framework}, {about['parameters']:,} parameters, batch {plan.batch} a rank, "
             f"{ranks} rank{'s' if ranks > 1 else ''} of {threads} thread{'s' if threads > 1 else ''}, "
             f"{about['hosts']}; median of {race.rounds}{of} rounds of {args.steps} steps")
    table.show(title, standings.HEADERS, standings.rows(found, race.about), markdown=args.markdown)
    if plan.left_out:
        table.note("left out: " + "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items()))
    if args.jsonl:
        summary = {name: {**s, "wire": race.about[name]["wire"], "notes": notes[name]} for name, s in found.items()}
        record.append(args.jsonl, _facts(args, plan, about) | {
            "kind": "summary", "wire": "", "contenders": summary, "rounds_done": race.rounds,
            "base": standings.BASE if standings.BASE in times else None, "left_out": plan.left_out,
            "missing": [c.name for c in plan.contenders if c.name not in times]})


def _whole(args: argparse.Namespace, about: Mapping[str, dict[str, Any]], times: Times) -> dict[str, Any]:
    """The facts of a job with as many ranks as were asked for; of another where there is none."""
    return min((about[name] for name in times), key=lambda facts: facts["ranks"] != args.np)


def _notes(plan: Plan, about: Mapping[str, Any]) -> list[str]:
    """What was set for all jobs, then what this one told."""
    return list(dict.fromkeys([*plan.notes, *about["notes"]]))


def _facts(args: argparse.Namespace, plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a record begins with: the environment as the job saw it, and what was asked for."""
    facts = record.environment(about["hosts"], about["ranks"], about["wire"], args.seed, plan.threads, args.framework)
    return {**facts, "mpi": about["mpi"] or facts["mpi"], "omp_num_threads": plan.env["OMP_NUM_THREADS"],
            "settings": about["settings"], "notes": _notes(plan, about), "bench": "step", "workload": args.workload,
            "batch": plan.batch, "steps": args.steps, "rounds": args.rounds, "powersgd_rank": args.powersgd_rank,
            "exchange": args.exchange}


# --- do they all do the same? ----------------------------------------------------------------------------------------

def _check(args: argparse.Namespace, plan: Plan, scratch: str) -> int:
    """Take the same steps in each contender, one job after the other, and compare where they lead."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, JobFailed] = {}
    for contender in plan.contenders:
        job = Job(contender.name, command(args, plan, contender, scratch), plan.env)
        try:
            found[contender.name] = job.wait("checked", args.timeout)
        except JobFailed as failure:
            failed[contender.name] = failure
        finally:
            job.end(GRACE_S if contender.name in found else 0.0)
    wrong = standings.disagreements(found, plan.contenders, args.np)
    rows = [(name, f["wire"], f"{f['loss']:.6f}", f"{f['moved']:.6f}", "yes" if f["equal"] else "no",
             wrong.get(name, "")) for name, f in found.items()]
    if rows:
        table.show("after 3 steps: loss, length of the parameters' way, whether all ranks hold the same bits",
                   ("contender", "wire", "loss", "moved", "ranks equal", "wrong"), rows, markdown=args.markdown)
    return _report(failed) or int(bool(wrong))
