"""A race: jobs of contenders that are alive at once and take turns, all launched alike.

Owns how a job is launched (words before ``python``, environment, options of the worker), its start, turns and end, and
the options for these. What is timed and what is made of the times is each bench's own (`step`, `mixed`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks import peers
from benchmarks.jobs import GRACE_S, Job, JobFailed
from benchmarks.peers import Contender, ours
from benchmarks.standings import Times
from benchmarks.workloads import FILES, WORKLOADS
from hvdtrain.commands.bench import cli, session
from hvdtrain.config import Config, RebalanceConfig
from hvdtrain.core import ROOT, terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.terminal import say

T = TypeVar("T")
EXPORTED = ("OMP_NUM_THREADS", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "TORCH_NCCL_ENABLE_MONITORING")


@dataclass(frozen=True)
class Plan:
    """Plan of a race: the contenders, how each is launched, and the facts for the records.

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
    """Results of the rounds; ``rounds`` of them are complete, ``times`` may have one more."""

    jobs: dict[str, Job] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, JobFailed] = field(default_factory=dict)
    times: Times = field(default_factory=dict)
    rounds: int = 0


def add_options(parser: cli.Parser, rounds: int, warmup: int, warmup_help: str, threads_help: str) -> None:
    """Add the options of every race; ``rounds``, ``warmup``: the defaults."""
    add, whole = parser.add_argument, cli.whole
    add("--workload", type=cli.one_of("--workload", WORKLOADS), default="mlp", metavar="NAME",
        help="; ".join(f"{w.name}: {w.doc}, batch {w.batch}" for w in WORKLOADS.values()))
    add("--framework", type=cli.one_of("--framework", FILES), default="torch", metavar="NAME",
        help=" or ".join(FILES))
    add("--rounds", type=whole("--rounds", 1), default=rounds, metavar="N", help="rounds of each contender")
    add("--steps", type=whole("--steps", 1), default=20, metavar="N", help="timed steps of a round")
    add("--warmup", type=whole("--warmup", 0), default=warmup, metavar="N", help=warmup_help)
    add("--settle", type=whole("--settle", 0), default=2, metavar="N", help="untimed steps at the start of a round")
    add("--batch", type=whole("--batch", 0), default=0, metavar="N", help="samples of a rank; 0: the workload's own")
    add("--threads", type=whole("--threads", 0, 4096), default=0, metavar="N", help=threads_help)
    add("--seed", type=whole("--seed", 0, 2**32 - 1), default=0, metavar="N", help="of weights and data")
    add("--powersgd_rank", type=whole("--powersgd_rank", 1), default=4, metavar="N", help="of hvdtrain and of DDP")
    add("--exchange", action="append", default=[], metavar="KEY=VALUE",
        help="a key of hvdtrain's exchange, such as bucket_mb=4; may be repeated")
    add("--hosts", default=os.environ.get("TWO_HOSTS_LIST", ""), metavar="A:1,B:1", help="hosts for mpirun")
    add("--mpirun_args", default=os.environ.get("TWO_HOSTS_MPIRUN_ARGS", ""), metavar="WORDS",
        help="more words for mpirun, quoted as for a shell")
    add("--iface", default=os.environ.get("TWO_HOSTS_IFACE", ""), metavar="NAME",
        help="network interface of wires other than MPI")
    parser.waits(300.0, "longest wait for one answer of a job, in seconds")
    parser.reports("contender and round, and a summary,")


# --- what is run -----------------------------------------------------------------------------------------------------

def plan(args: argparse.Namespace, bench: str, names: Iterable[str], ranks: int, env: Mapping[str, str]) -> Plan:
    """Check the options against this machine; `UserError` where they do not fit it. Tells who is left out."""
    from hvdtrain.cluster.topology import affinity

    refuse_launcher(bench, "contender", env)
    if importlib.util.find_spec(args.framework) is None:
        raise UserError(f"{args.framework} is not installed", "the framework that is to be measured",
                        "install it, or choose another --framework")
    contenders: list[Contender] = []
    left_out = {}
    for name in names:
        contender = peers.contender(name, args.framework)
        reason = contender.lacks(args.framework)
        if reason:
            left_out[name] = reason
            terminal.note(f"{name} is left out: {reason}")
        else:
            contenders.append(contender)
    if not contenders:
        raise UserError("no contender is left", "one at least", "correct --contenders")
    _check_settings(args, contenders)
    threads = args.threads or max(1, len(affinity()) // ranks)
    batch = args.batch or WORKLOADS[args.workload].batch
    settings = environment(ranks, threads, env)
    prefix = launcher(args, ranks, settings)
    return Plan(tuple(contenders), {c.name: () if c.alone or ranks == 1 else prefix for c in contenders}, settings,
                threads, batch, left_out, set_for_all(settings, env))


def refuse_launcher(bench: str, each: str, env: Mapping[str, str]) -> None:
    """Raise `UserError` under a launcher."""
    from hvdtrain.core.launcher import launch_facts

    if launch_facts(env).kind != "solo":
        raise UserError(f"bench {bench} was started under a launcher", f"one process: it starts a job for each {each}",
                        f"start it with python -m benchmarks {bench}")


def named(text: str) -> list[str]:
    """Return the names of a comma-separated list, each once, in order. Pure."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _check_settings(args: argparse.Namespace, contenders: Sequence[Contender]) -> None:
    """Raise `UserError` for settings that hvdtrain would refuse, before any job is started."""
    exchange = ours.exchange(args.exchange, args.powersgd_rank)
    rebalance = ours.section(RebalanceConfig, "--rebalance", getattr(args, "rebalance", []))
    Config(exchange=exchange, rebalance=rebalance).check()
    for contender in contenders:
        if "wire" in contender.options:
            Config(exchange=exchange, collectives=contender.options["wire"],
                   compression=contender.options["compression"]).check()


def environment(ranks: int, threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every job; what hvdtrain's boot would set for itself is set for all."""
    from hvdtrain.cluster.boot import YIELD, should_yield
    from hvdtrain.cluster.machine.usage import cpu_quota
    from hvdtrain.cluster.topology import affinity
    from hvdtrain.commands.verify import AS_ROOT

    own = {**env, "OMP_NUM_THREADS": str(threads), "TORCH_NCCL_ENABLE_MONITORING": "0",
           "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT.parent), env.get("PYTHONPATH"))))}  # not installed
    own.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cores = min(float(os.cpu_count() or 1), cpu_quota())
    if ranks > 1 and should_yield(len(affinity()), cores, ranks):
        own.setdefault(YIELD, "1")
    return own | AS_ROOT if os.geteuid() == 0 else own


def set_for_all(settings: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Note the settings of `environment` that boot, in each job, finds made and does not report."""
    from hvdtrain.cluster.boot import YIELD

    if settings.get(YIELD) == env.get(YIELD):
        return ()
    return (f"{YIELD}={settings[YIELD]} was set: more busy threads than cores",)


def launcher(args: argparse.Namespace, ranks: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words before ``python``; nothing where there is one rank."""
    if ranks == 1:
        return ()
    from hvdtrain.commands import verify

    words = verify.launcher(ranks)
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


def worker(args: argparse.Namespace, plan: Plan, contender: str, scratch: str) -> list[str]:
    """Return the command line of one rank of a contender's job, without what launches it. Pure."""
    words = [sys.executable, "-m", "benchmarks.worker",
             "--contender", contender, "--framework", args.framework, "--workload", args.workload,
             "--batch", str(plan.batch), "--seed", str(args.seed), "--threads", str(plan.threads),
             "--warmup", str(args.warmup), "--settle", str(args.settle),
             "--powersgd_rank", str(args.powersgd_rank), "--scratch", scratch]
    for key in args.exchange:
        words += ["--exchange", key]
    return words + (["--iface", args.iface] if args.iface else [])


# --- jobs ------------------------------------------------------------------------------------------------------------

def start(race: Race, name: str, argv: list[str], env: dict[str, str], timeout_s: float) -> None:
    """Start a job; it waits, suspended, for its first turn."""
    say(f"$ {shlex.join(argv)}")
    race.jobs[name] = job = Job(name, argv, env)
    try:
        race.about[name] = job.wait("ready", timeout_s)
        job.suspend()
        race.times[name] = []
    except JobFailed as failure:
        drop(failure, race)


def run(jobs: Callable[[Race], Iterator[tuple[str, list[str], dict[str, str]]]], turns: Callable[[Race], None],
        tell: Callable[[Race], None], timeout_s: float) -> int:
    """Start the ``jobs`` (name, words, environment), take ``turns``, ``tell``; every job is ended however this is left.

    Where a signal ends it, the rounds that were complete are told first: whoever sent it may not wait long.
    """
    found = Race()
    try:
        try:
            for name, argv, env in jobs(found):
                start(found, name, argv, env, timeout_s)
            turns(found)
        finally:
            tell(found)
    finally:
        end_all(found.jobs.values())
    return report(found.failed)


def turn(job: Job, orders: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """Run one turn of a job: resume, send each of ``orders``, suspend; return its answers."""
    job.resume()
    done = [job.ask(order, "done", timeout_s) for order in orders]
    job.suspend()
    return done


def rotated(names: Sequence[T], number: int) -> list[T]:
    """``names``, begun at another one each round, so that none always follows the same noise. Pure."""
    at = number % len(names) if names else 0
    return [*names[at:], *names[:at]]


def drop(failure: JobFailed, race: Race) -> None:
    """Continue without a job."""
    race.jobs.pop(failure.name).end()
    race.failed[failure.name] = failure
    race.times.pop(failure.name, None)
    say(f"{failure}; going on without it")


def end_all(jobs: Iterable[Job]) -> None:
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


def report(failed: Mapping[str, JobFailed]) -> int:
    """Print the last lines of those that failed; the exit status."""
    for failure in failed.values():
        print("\n".join([*(f"  {line}" for line in failure.lines), f"{failure}; its last lines are above"]),
              file=sys.stderr, flush=True)
    return int(bool(failed))


# --- facts -----------------------------------------------------------------------------------------------------------

def whole_job(about: Mapping[str, dict[str, Any]], times: Times, ranks: int) -> dict[str, Any]:
    """Return the facts of a job with as many ranks as were asked for; of another where there is none."""
    return min((about[name] for name in times), key=lambda facts: facts["ranks"] != ranks)


def notes_of(plan: Plan, about: Mapping[str, Any]) -> list[str]:
    """Return the notes on all jobs, then those of this one."""
    return list(dict.fromkeys([*plan.notes, *about["notes"]]))


def facts(args: argparse.Namespace, bench: str, plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a record: the environment as the job saw it, and what was asked for."""
    known = session.environment(about["hosts"], about["ranks"], about["wire"], args.seed, plan.threads, args.framework)
    return {**known, "mpi": about["mpi"] or known["mpi"], "omp_num_threads": plan.env["OMP_NUM_THREADS"],
            "settings": about["settings"], "notes": notes_of(plan, about), "bench": bench, "workload": args.workload,
            "batch": plan.batch, "steps": args.steps, "rounds": args.rounds, "powersgd_rank": args.powersgd_rank,
            "exchange": args.exchange}
