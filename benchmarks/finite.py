"""``python -m benchmarks finite``: what it costs to look at the summed gradients before every update.

Two runs of one model in one process, one of which does not look, take turns; what counts is the CPU time of the ranks'
own processes, all threads, since the wall time of busy ranks says little about one or two per cent.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workloads import BATCHES, FILES, WORKLOADS, part
from hvdtrain.commands.bench.cli import Parser, one_of, whole
from hvdtrain.core.terminal import spread


def main(argv: list[str]) -> int:
    """Measure on every rank, print one row on rank 0; return 0."""
    args = _parser().parse(argv)
    from hvdtrain.cluster import boot
    from hvdtrain.core.launcher import launch_facts

    control = boot.start_control(launch_facts(os.environ), 600.0)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as scratch:
        rows = _turns(args, control, control.bcast(scratch))
        control.barrier("end of the bench")
    if control.rank == 0:
        print(_told(args, control.size, *rows))
    return 0


def _parser() -> Parser:
    parser = Parser("benchmarks finite",
                    "CPU time of a step, with and without a look whether summed gradients are finite.")
    parser.add_argument("--framework", type=one_of("--framework", FILES), default="torch")
    parser.add_argument("--workload", type=one_of("--workload", WORKLOADS), default="mlp")
    parser.add_argument("--collectives", default="auto", help="transport, as in the configuration")
    parser.add_argument("--rounds", type=whole("--rounds", 2), default=15)
    parser.add_argument("--steps", type=whole("--steps", 1), default=12, help="steps of a run in a round")
    parser.add_argument("--threads", type=whole("--threads", 1), default=1)
    return parser


def _turns(args: Any, control: Any, scratch: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (rounds,) CPU seconds of a step over all ranks: with a look and without, in rotated order."""
    steps = [_run(args, control, os.path.join(scratch, name), name == "with") for name in ("with", "without")]
    for step in steps:
        _cpu_s(step, 5)
    seconds = np.zeros((args.rounds, 2))
    for i in range(args.rounds):
        for which in ((0, 1), (1, 0))[i % 2]:
            control.barrier("a turn")
            seconds[i, which] = control.sum(np.array([_cpu_s(steps[which], args.steps)]))[0]
    return seconds[:, 0], seconds[:, 1]


def _run(args: Any, control: Any, scratch: str, looks: bool) -> Callable[[int], Any]:
    """Return the step of one assembled run."""
    from benchmarks.peers import Setup, ours

    workload = WORKLOADS[args.workload]
    arrays = workload.arrays(BATCHES * workload.batch * control.size, 0)
    batches = part(arrays, workload.batch, control.rank, control.size)
    os.makedirs(scratch, exist_ok=True)
    setup = Setup(workload, args.framework, workload.batch, 0, args.threads, control, arrays, batches, scratch=scratch)
    return ours.prepare(setup, wire=args.collectives, looks=looks).step


def _cpu_s(step: Callable[[int], Any], steps: int) -> float:
    """CPU seconds of this process for one step, the mean over ``steps``."""
    begin = time.process_time()
    for i in range(steps):
        step(i)
    return (time.process_time() - begin) / steps


def _told(args: Any, size: int, looking: np.ndarray, not_looking: np.ndarray) -> str:
    """Return the row: CPU ms of a step without, and what looking adds in per cent, as median and quartiles."""
    plain, more = spread(not_looking * 1e3 / size), spread((looking / not_looking - 1) * 100)
    return (f"{args.framework} {args.workload}, {size} rank(s), {args.rounds} rounds of {args.steps} steps: "
            f"{plain['median']:.1f} CPU ms a step and rank without a look at the gradients; looking adds "
            f"{more['median']:+.2f} % ({more['p25']:+.2f} to {more['p75']:+.2f})")
