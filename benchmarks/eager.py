"""``benchmarks eager``: what one call of `hvdtrain.tensorflow` takes outside of graphs, against Horovod's.

Owns the turns and the table. Both call the same Horovod in the same processes, one after the other in each round, in
alternating order. What is called is in ``peers/eager_tensorflow.py``.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.commands.bench import cli
from hvdtrain.commands.bench.session import Session, open_session, records
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.terminal import spread
from hvdtrain.core.units import format_number

HEADERS = ("call", "hvdtrain (ms)", "quartiles", "Horovod (ms)", "quartiles", "ratio", "quartiles")
CALLS = 20
"""Calls of a turn."""
WARM_UPS = 3


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = cli.Parser("benchmarks eager",
                            "Time of one call of hvdtrain.tensorflow outside of graphs, and of the same call "
                            "of Horovod, interleaved. Start it under mpirun with at least 2 ranks.")
    parser.waits(600.0, "longest wait for other ranks, in seconds")
    parser.common(repeats=15)
    args = parser.parse(argv)
    return bench(open_session("tensorflow", "horovod", args.timeout, argv), args)


def bench(session: Session, args: argparse.Namespace) -> int:
    """Measure, print the table, append records; 1 where the two disagree about a result. Collective."""
    control = session.control
    if control.size == 1:
        raise UserError("bench eager in one process", "at least 2 ranks, between which something moves",
                        "start it as: mpirun -np 2 python -m benchmarks eager")
    keep = records(session, "eager", args.jsonl)
    peers = importlib.import_module("benchmarks.peers.eager_tensorflow")
    ours, bare = peers.apis()
    found = []
    for name, case in peers.cases().items():
        row = {"call": name, "same": not control.agree(not peers.same(case(ours), case(bare))),
               **measure(session, lambda: case(ours), lambda: case(bare), args.repeats)}
        found.append(row)
        keep(row)
    if control.rank == 0:
        title = f"one call outside of graphs: {control.size} ranks, {session.hosts}, {args.repeats} rounds"
        terminal.show(title, HEADERS, [cells(row) for row in found], args.markdown, launched=True)
        for row in found:
            if not row["same"]:
                terminal.note(f"{row['call']}: hvdtrain and Horovod disagree about the result")
    return int(not all(row["same"] for row in found))


def measure(session: Session, ours: Callable[[], Any], bare: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Spread of milliseconds a call and of the ratio in each round; times are those of the slowest rank. Collective."""
    def turn(call: Callable[[], Any]) -> float:
        for _ in range(WARM_UPS):
            call()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return 1e3 * (time.perf_counter() - begin) / CALLS

    own = np.empty((rounds, 2))
    for i in range(rounds):
        for k in (0, 1) if i % 2 else (1, 0):
            own[i, k] = turn((ours, bare)[k])
    slowest = np.max(np.stack(session.control.gather(own)), axis=0)
    return {"hvdtrain_ms": spread(slowest[:, 0]), "horovod_ms": spread(slowest[:, 1]),
            "ratio": spread(slowest[:, 0] / slowest[:, 1]), "rounds": rounds, "calls_a_round": CALLS}


def cells(row: dict[str, Any]) -> Sequence[str]:
    """Return a record as a row of the table."""
    told = [row["call"]]
    for key in ("hvdtrain_ms", "horovod_ms", "ratio"):
        middle, low, high = (format_number(row[key][part]) for part in ("median", "p25", "p75"))
        told += [middle, f"{low} - {high}"]
    return told
