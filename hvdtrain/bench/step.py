"""``bench step``: whole training steps of hvdtrain and of its peers, in turns, in one run.

Owns the choice of contenders, the rounds and what is told of them. Each contender is a job of its own under mpirun
(`jobs`), started with the same flags, environment and threads. Machines are noisy and drift, so all jobs are alive at
once and take turns: in each round one after the other is resumed, steps, and is suspended again; compared are the
medians of the ratios within a round. Jobs that wait take no processor time, not even with a spinning thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdtrain.bench import options, peers, record, table
from hvdtrain.bench.jobs import GRACE_S, Job, JobFailed, orderly_signals
from hvdtrain.bench.peers import Contender
from hvdtrain.bench.workloads import FILES, WORKLOADS
from hvdtrain.errors import UserError
from hvdtrain.run import say

OURS = {"torch": ("hvdtrain", "hvdtrain-null", "hvdtrain-horovod", "hvdtrain-mpi"),
        "tensorflow": ("hvdtrain", "hvdtrain-null", "hvdtrain-horovod")}
HEADERS = ("contender", "wire", "ms a step", "min", "max", "x hvdtrain", "x best peer")
TOLERANCE = 1e-3
"""Of --check: largest relative difference between contenders that sum gradients as they are."""
MIN_ROUNDS = 7
EXPORTED = ("OMP_NUM_THREADS", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "TORCH_NCCL_ENABLE_MONITORING")


@dataclass(frozen=True)
class Plan:
    """What is run: the contenders, how each is launched, and the facts for the records."""

    contenders: tuple[Contender, ...]
    launch: dict[str, tuple[str, ...]]
    env: dict[str, str]
    threads: int
    batch: int


Times = dict[str, list[float]]
"""Milliseconds a step of each contender, by round."""


def main(argv: list[str]) -> int:
    """Measure, or with --check compare results; 0 if every contender did its part, 1 if one failed."""
    args = _parser().parse(argv)
    plan = _plan(args, os.environ)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as scratch, orderly_signals():
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
    contenders = []
    for name in chosen(args.framework, args.np, args.peers, args.contenders):
        contender = peers.contender(name, args.framework)
        reason = contender.lacks()
        if reason:
            table.note(f"{name} is left out: {reason}")
        else:
            contenders.append(contender)
    if not contenders:
        raise UserError("no contender is left", "one at least", "correct --contenders")
    threads = args.threads or max(1, len(affinity()) // args.np)
    batch = args.batch or WORKLOADS[args.workload].batch
    settings = _environment(args.np, threads, env)
    prefix = _launcher(args, settings)
    return Plan(tuple(contenders), {c.name: () if c.alone or args.np == 1 else prefix for c in contenders}, settings,
                threads, batch)


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
             "--powersgd-rank", str(args.powersgd_rank), "--scratch", scratch]
    for key in args.exchange:
        words += ["--exchange", key]
    words += ["--iface", args.iface] if args.iface else []
    return [*words, "--check"] if args.check else words


# --- rounds ----------------------------------------------------------------------------------------------------------

def _measure(args: argparse.Namespace, plan: Plan, scratch: str) -> int:
    """Start all, take turns, print and record; every job is ended however this is left."""
    jobs: dict[str, Job] = {}
    about: dict[str, dict[str, Any]] = {}
    failed: dict[str, JobFailed] = {}
    times: Times = {}
    try:
        for contender in plan.contenders:
            argv = command(args, plan, contender, scratch)
            say(f"$ {shlex.join(argv)}")
            jobs[contender.name] = job = Job(contender.name, argv, plan.env)
            try:
                about[contender.name] = job.wait("ready", args.timeout)
                job.suspend()
                times[contender.name] = []
            except JobFailed as failure:
                _drop(failure, jobs, failed)
        for number in range(args.rounds):
            names = list(jobs)
            for name in rotated(names, number):
                try:
                    done = _turn(jobs[name], args.steps, args.timeout)
                    times[name].append(1e3 * done["seconds"] / done["steps"])
                    about[name]["notes"] = done["notes"]
                except JobFailed as failure:
                    _drop(failure, jobs, failed)
                    del times[name]
            say(f"round {number + 1}/{args.rounds}: "
                + ", ".join(f"{name} {times[name][-1]:.1f} ms" for name in names if name in times))
    finally:
        _end_all(jobs.values())
    if times:
        _tell(args, plan, times, about)
    return _report(failed)


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


def _drop(failure: JobFailed, jobs: dict[str, Job], failed: dict[str, JobFailed]) -> None:
    """Go on without a job."""
    jobs.pop(failure.name).end()
    failed[failure.name] = failure
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

def summarise(times: Times, contenders: Sequence[Contender], ranks: int) -> dict[str, dict[str, float]]:
    """Of each contender: median_ms, min_ms, max_ms, to_hvdtrain and to_best_peer, NaN where there is none. Pure.

    A ratio is the median over rounds of (its time / the other's time in that round): below 1 is faster. The best peer
    is the one with the smallest median among those with the same number of ranks and exact sums; where no peer has
    exact sums, among the compressing ones.
    """
    own = [c.name for c in contenders if c.name in times and not c.peer]
    ours = "hvdtrain" if "hvdtrain" in own else next(iter(own), "")
    others = [c for c in contenders if c.name in times and c.peer and not (c.alone and ranks > 1)]
    alike = [c.name for c in others if c.exact] or [c.name for c in others]
    best = min(alike, key=lambda name: median(times[name]), default="")
    return {name: {"median_ms": median(ms), "min_ms": min(ms), "max_ms": max(ms),
                   "to_hvdtrain": ratio(times, name, ours), "to_best_peer": ratio(times, name, best)}
            for name, ms in times.items()}


def ratio(times: Times, name: str, other: str) -> float:
    """Median over rounds of the ratio of two contenders' times; NaN without the other. Pure."""
    return median(a / b for a, b in zip(times[name], times[other])) if other else math.nan


def _tell(args: argparse.Namespace, plan: Plan, times: Times, about: Mapping[str, Mapping[str, Any]]) -> None:
    """Table and records."""
    found = summarise(times, plan.contenders, args.np)
    rows = [(name, about[name]["wire"], *(f"{s[key]:.2f}" for key in ("median_ms", "min_ms", "max_ms")),
             *("-" if math.isnan(s[key]) else f"{s[key]:.3f}" for key in ("to_hvdtrain", "to_best_peer")))
            for name, s in found.items()]
    for name in times:
        for text in about[name]["notes"]:
            table.note(f"{name}: {text}")
    first = next(iter(times))
    title = (f"{args.workload} in {args.framework}, {about[first]['parameters']:,} parameters, "
             f"batch {plan.batch} a rank, {args.np} rank{'s' if args.np > 1 else ''} of "
             f"{plan.threads} thread{'s' if plan.threads > 1 else ''}, {about[first]['hosts']}; "
             f"median of {args.rounds} rounds of {args.steps} steps")
    table.show(title, HEADERS, rows, markdown=args.markdown)
    if not args.jsonl:
        return
    base = {"bench": "step", "workload": args.workload, "batch": plan.batch, "steps": args.steps,
            "rounds": args.rounds, "powersgd_rank": args.powersgd_rank, "exchange": args.exchange}
    for name, each in times.items():
        facts = _facts(args, plan, about[name]) | base | {"kind": "round", "contender": name,
                                                          "launch": list(plan.launch[name])}
        for number, ms in enumerate(each):
            record.append(args.jsonl, facts | {"round": number, "ms": ms})
    summary = {name: {**s, "wire": about[name]["wire"], "notes": about[name]["notes"]} for name, s in found.items()}
    missing = [c.name for c in plan.contenders if c.name not in times]
    record.append(args.jsonl, _facts(args, plan, about[first]) | base
                  | {"kind": "summary", "wire": "", "contenders": summary, "missing": missing})


def _facts(args: argparse.Namespace, plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a record, as the job saw it."""
    facts = record.environment(about["hosts"], about["ranks"], about["wire"], args.seed, plan.threads, args.framework)
    return {**facts, "mpi": about["mpi"] or facts["mpi"], "omp_num_threads": plan.env["OMP_NUM_THREADS"]}


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
    wrong = disagreements(found, plan.contenders, args.np)
    rows = [(name, f["wire"], f"{f['loss']:.6f}", f"{f['moved']:.6f}", "yes" if f["equal"] else "no",
             wrong.get(name, "")) for name, f in found.items()]
    if rows:
        table.show("after 3 steps: loss, length of the parameters' way, whether all ranks hold the same bits",
                   ("contender", "wire", "loss", "moved", "ranks equal", "wrong"), rows, markdown=args.markdown)
    return _report(failed) or int(bool(wrong))


def disagreements(found: Mapping[str, Mapping[str, Any]], contenders: Sequence[Contender],
                  ranks: int) -> dict[str, str]:
    """{contender: what is wrong with it}: those that ought to agree with the first of their kind and do not. Pure."""
    wrong = {}
    alike = [c for c in contenders if c.name in found and c.exact and not (c.alone and ranks > 1)]
    for c in alike:
        first, own = found[alike[0].name], found[c.name]
        off = [key for key in ("loss", "moved") if not abs(own[key] - first[key]) <= TOLERANCE * abs(first[key])]
        if off:
            wrong[c.name] = f"{' and '.join(off)} unlike {alike[0].name}'s"
    for c in contenders:
        if c.name in found and not found[c.name]["equal"] and c.options.get("wire") != "null":
            wrong[c.name] = "; ".join(filter(None, [wrong.get(c.name), "ranks differ"]))
    return wrong
