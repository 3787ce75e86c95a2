"""A rank of ``benchmarks case``: train a recipe for some steps and report the timed ones."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks import throttle
from benchmarks.worker import guarded, speaker
from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class Clock(Callback):
    """Reads time, samples and seconds in exchanges at the end of the step before those timed, and of the last."""

    where = "all"

    def __init__(self, warmup: int, steps: int) -> None:
        self._at = (warmup, warmup + steps)
        self.read: list[tuple[float, int, float]] = []

    def step_end(self, run: Run) -> None:
        """Wait for the other ranks, so that all begin and end together."""
        if run.state.cursor.step in self._at:
            before_s = _stood_s(run)
            run.control.barrier("the timed steps")  # standing here is of no timed step
            stood_s = before_s if self.read else _stood_s(run)
            self.read.append((time.perf_counter(), run.timeline.totals.samples, stood_s))


def _stood_s(run: Run) -> float:
    """Seconds so far in which this rank has stood in exchanges of any kind, those of an update included."""
    seconds = run.timeline.clock.seconds()
    return float(seconds["wait"] + seconds["wire"])


def main(argv: list[str] | None = None) -> int:
    """Run one rank; exit status of the process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.case_rank", allow_abbrev=False, description="One "
                                     "rank of one job; `python -m benchmarks case` starts it.")
    for name in ("--steps", "--warmup"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--cgroup", action="append", default=[], help="control group to enter, by rank")
    args, keys = parser.parse_known_args(argv)
    return guarded(lambda facts: _train(args, keys, facts))


def _train(args: argparse.Namespace, keys: list[str], facts: Any) -> int:
    from hvdtrain.cluster import boot
    from hvdtrain.commands.train import parse
    from hvdtrain.engine import loop
    from hvdtrain.engine.assemble import assemble

    config = parse(keys, os.environ)
    assert config is not None
    config = replace(config.quiet(), max_steps=args.warmup + args.steps, resume="")
    if args.cgroup:  # before anything is started: what reads the data for this rank has the same part of a core
        throttle.enter(args.cgroup[max(0, facts.rank)])
    control = boot.start_control(facts, config.control_timeout_s)
    run = assemble(config, control=control)
    run.eval_feeds = {}  # not what is measured, and it may take longer
    clock = Clock(args.warmup, args.steps)
    run.callbacks.append(clock)
    loop.fit(run)
    if len(clock.read) < 2:
        raise UserError(f"the run ended after {run.state.cursor.step} steps", f"{args.warmup + args.steps} steps",
                        "set --steps to fewer, or the recipe's epochs to more")
    (began, before, stood_s), (ended, after, stood_at_end_s) = clock.read
    stood_s_P = control.gather(stood_at_end_s - stood_s)
    exchange = 100 * min(stood_s_P) / (ended - began)  # who waits least waits for the exchange only
    if control.rank == 0:
        speaker(0)({"event": "done", "ranks": control.size, "hosts": run.topology.describe(), "framework":
                    run.spec.framework, "model": run.spec.name, "wire": run.collectives.name, "seed": config.seed,
                    "global_batch": config.global_batch, "epoch_samples": run.feed.samples, "samples": after - before,
                    "seconds": ended - began, "peak_bytes": run.memory.get("peak", []), "memory": run.memory,
                    "exchange_percent": exchange if control.size > 1 else None, "notes": run.notes})
    control.barrier("end of the bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
