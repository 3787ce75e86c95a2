"""A rank of a contender of `benchmarks step` or `mixed`: build the training job, then step on request.

Owns the conversation with the parent. Rank 0 reads lines from its standard input ("go STEPS", "go STEPS UNTIMED",
"whatif", "quit") and answers with lines of JSON behind `MARK`; the other ranks hear of it through the control plane,
outside what is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import floor, throttle
from benchmarks.peers import IDLE_S, Cut, Prepared, Setup, contender
from benchmarks.workloads import BATCHES, FILES, WORKLOADS, part

MARK = "@hvdtrain-bench "
"""What a line for the parent begins with, after a newline of its own: mpirun may mix the ranks' lines."""

CHECK_STEPS = 3

LINKS_S = 2.0
"""Most time for the links between hosts."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; exit status of the process."""
    args = _parser().parse_args(argv)
    from hvdtrain.cluster import quiet

    quiet.watch_import()
    return guarded(lambda facts: _serve(args, facts))


def guarded(work: Callable[[Any], int]) -> int:
    """Return the status of ``work`` on the facts of this rank's launch, its exit guarded."""
    from hvdtrain.cluster.exit import run_guarded
    from hvdtrain.core.launcher import launch_facts

    facts = launch_facts(os.environ)
    return run_guarded(lambda: work(facts), facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", allow_abbrev=False, description="One rank "
                                     "of one contender; `python -m benchmarks step` starts it.")
    parser.add_argument("--contender", required=True)
    parser.add_argument("--framework", choices=sorted(FILES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a rank")
    parser.add_argument("--warmup", type=int, default=20, help="steps before it is ready")
    parser.add_argument("--settle", type=int, default=2, help="untimed steps at the start of each round")
    parser.add_argument("--powersgd_rank", type=int, default=4)
    parser.add_argument("--exchange", action="append", default=[], help="KEY=VALUE of hvdtrain's exchange")
    parser.add_argument("--iface", default="", help="network interface of wires other than MPI")
    parser.add_argument("--scratch", required=True, help="folder for the files of a run")
    parser.add_argument("--rebalance", action="append", default=[], help="KEY=VALUE of hvdtrain's rebalance")
    parser.add_argument("--emulate_speed", type=float, action="append", default=[], help="of hvdtrain, by rank")
    parser.add_argument("--cgroup", action="append", default=[], help="control group to enter, by rank")
    parser.add_argument("--order", default="1f1b", help="of a pipeline")
    parser.add_argument("--micro_batches", type=int, default=0, help="of a pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="of each rank of a pipeline")
    parser.add_argument("--cut", default="", help="blocks that the second and further chunks of a pipeline begin with")
    parser.add_argument("--places", default="", help="the rank at each place of a pipeline")
    parser.add_argument("--links", action="store_true", help="measure the links between hosts first")
    parser.add_argument("--check", action="store_true", help=f"take {CHECK_STEPS} steps, say where they led, and end")
    return parser


def _serve(args: argparse.Namespace, facts: Any) -> int:
    """Build, warm up, say ready, then answer until there are no more orders."""
    from hvdtrain.cluster import boot

    control = boot.start_control(facts, IDLE_S)
    if control.size == 1:
        boot.prepare_lone_mpi(os.environ)  # for peers that start MPI by themselves
    if args.cgroup:
        importlib.import_module(args.framework)  # minutes in a slow group, and no part of what is measured
        throttle.enter(args.cgroup[control.rank])
    say = speaker(control.rank)
    entry = contender(args.contender, args.framework)
    link = _link(control) if args.links and floor.counts(entry) else None
    prepared = entry.prepare(_setup(args, control))
    before = [p.copy() for p in prepared.params()] if args.check else []
    for i in range(CHECK_STEPS if args.check else args.warmup):
        prepared.step(i)
    prepared.sync()
    ready = _about(prepared, control)
    if args.check:
        say({"event": "checked", **ready, **_outcome(prepared, control, before)})
        return 0
    say({"event": "ready", **ready, "link": link})
    at = args.warmup
    while True:
        order = control.bcast(_order() if control.rank == 0 else None)
        if order is None:
            return 0
        steps, untimed = order
        if not steps:
            say({"event": "whatif", **(prepared.whatif() if prepared.whatif else {})})
            continue
        untimed = args.settle if untimed is None else untimed
        told: dict[str, float] = {}
        step_s = _timed(prepared, control, at, untimed, steps, told)
        at += untimed + steps
        mine = prepared.samples() if prepared.samples else args.batch
        say({"event": "done", "steps": steps, "seconds": sum(step_s), "step_s": step_s, "spent": control.gather(told),
             "samples": control.gather(mine), "notes": _notes(prepared, control), "marks": _marks(prepared, control)})


def _setup(args: argparse.Namespace, control: Any) -> Setup:
    """Return the same data on every rank, and this rank's batches of it."""
    workload = WORKLOADS[args.workload]
    arrays = workload.arrays(BATCHES * args.batch * control.size, args.seed)
    return Setup(workload, args.framework, args.batch, args.seed, args.threads, control, arrays,
                 part(arrays, args.batch, control.rank, control.size), args.iface, args.powersgd_rank,
                 tuple(args.exchange), args.scratch, tuple(args.rebalance), tuple(args.emulate_speed), _cut(args))


def _cut(args: argparse.Namespace) -> Cut:
    return Cut(args.order, args.micro_batches, args.chunks, tuple(args.cut.split(",")) if args.cut else (),
               tuple(map(int, args.places.split(","))) if args.places else ())


def _order() -> tuple[int, int | None] | None:
    """Read (next steps, untimed ones before them) from the parent; None: end, also where nobody asks any more.

    No steps: it asks what a step would take without each of the ranks.
    """
    words = sys.stdin.readline().split()
    if words == ["whatif"]:
        return 0, None
    if len(words) not in (2, 3) or words[0] != "go" or int(words[1]) <= 0:
        return None
    return int(words[1]), int(words[2]) if len(words) == 3 else None


def _timed(prepared: Prepared, control: Any, at: int, untimed: int, steps: int,
           told: dict[str, float] | None = None) -> list[float]:
    """Seconds of each of ``steps`` steps after ``untimed`` ones, from barrier or end to its end on the slowest rank.

    Their sum is the time of all, with the last wait for the device in it. ``told``: filled with what this rank spent.
    """
    for i in range(at, at + untimed):
        prepared.step(i)
    prepared.sync()
    at += untimed
    if prepared.marks:
        prepared.marks()  # of steps that are not timed
    control.barrier("start of a round")
    before = _spent(prepared)
    begin = time.perf_counter()
    ends = []
    for i in range(at, at + steps):
        prepared.step(i)
        ends.append(time.perf_counter() - begin)
    prepared.sync()
    ends[-1] = time.perf_counter() - begin
    if told is not None:
        told.update({name: value - before[name] for name, value in _spent(prepared).items()})
    return np.diff(np.max(control.gather(ends), axis=0), prepend=0.0).tolist()


def _spent(prepared: Prepared) -> dict[str, float]:
    """Processor seconds of this rank so far, and by what its contender counts."""
    return {"cpu": time.process_time(), **(prepared.spent() if prepared.spent else {})}


def _marks(prepared: Prepared, control: Any) -> dict[str, float]:
    """Of each mark the median over the timed steps, on the rank where that is largest; collective."""
    own = {key: float(np.median(seconds)) for key, seconds in prepared.marks().items()} if prepared.marks else {}
    rows = control.gather(own)
    return {key: max(row[key] for row in rows) for key in sorted(set.intersection(*map(set, rows)))}


def _link(control: Any) -> dict[str, Any] | None:
    """Return the slowest link between the job's hosts, over its MPI; None on one host or without MPI. Collective."""
    from hvdtrain.cluster import boot, links
    from hvdtrain.cluster.links import slowest_link
    from hvdtrain.cluster.topology import survey

    hosts = survey(control).hosts
    if len(hosts) < 2 or not boot.has_mpi():
        return None
    worst = slowest_link(links.measure(boot.mpi_comm(), [host.ranks for host in hosts], LINKS_S))
    a, b = (hosts[place].node for place in worst.hosts)
    return {"hosts": len(hosts), "slowest": f"{a} and {b}", "rate_Bps": worst.rate_Bps, "latency_s": worst.latency_s}


def _about(prepared: Prepared, control: Any) -> dict[str, Any]:
    """Return the facts about a job for the records; collective."""
    from hvdtrain.cluster.topology import survey
    from hvdtrain.commands.bench.session import mpi_library, settings

    mine = int(sum(p.size for p in prepared.params()))
    return {"ranks": control.size, "hosts": survey(control).describe(), "wire": prepared.wire, "mpi": mpi_library(),
            "parameters": sum(control.gather(mine)) if prepared.split else mine, "settings": settings(os.environ),
            "notes": _notes(prepared, control), "pipeline": prepared.pipeline,
            "gradient_bytes": prepared.gradient_bytes}


def _notes(prepared: Prepared, control: Any) -> list[str]:
    """Return the notes of boot, then those of the contender."""
    return list(dict.fromkeys([*getattr(control, "notes", ()), *prepared.notes]))


def _outcome(prepared: Prepared, control: Any, before: list[np.ndarray]) -> dict[str, Any]:
    """Return the result of the steps: global loss, length of the parameters' way, whether ranks are equal (None where
    each has a part of the model)."""
    after = prepared.params()
    way = sum(float(np.sum((a.astype(np.float64) - b) ** 2)) for a, b in zip(after, before))
    loss = float(prepared.loss())
    if prepared.split:
        losses = [loss] if prepared.global_loss else control.gather(loss)
        return {"loss": sum(losses), "moved": math.sqrt(sum(control.gather(way))), "equal": None}
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in after)).hexdigest()
    if not prepared.global_loss:
        loss = float(control.sum(np.array([loss]))[0] / control.size)
    return {"loss": loss, "moved": math.sqrt(way), "equal": len(set(control.gather(digest))) == 1}


def speaker(rank: int) -> Any:
    """Rank 0's way to tell the parent something, in one write; the others keep silent."""
    def say(message: dict[str, Any]) -> None:
        if rank == 0:
            sys.stdout.flush()
            os.write(1, f"\n{MARK}{json.dumps(message, default=str)}\n".encode())
    return say


if __name__ == "__main__":
    sys.exit(main())
