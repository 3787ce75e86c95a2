"""A rank of ``benchmarks forecast``: calibrate in short runs, then time the rows of one job, one after the other.

Owns what is measured in a job. Prediction from it is left to `benchmarks.forecast`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks import throttle
from benchmarks.peers import IDLE_S, Cut, Prepared, Setup, ours
from benchmarks.worker import MARK
from benchmarks.workloads import BATCHES, FILES, WORKLOADS, part
from hvdtrain.planning.simulator.scene import BACKWARD

if TYPE_CHECKING:
    from hvdtrain.parallel.data_parallel.replicate import Replicate
    from hvdtrain.planning.linear import Link

WARM_STEPS = 3
TIMED_S = 3.0
"""Time that a row's steps are measured for, and no fewer steps than `LEAST_STEPS`."""

LEAST_STEPS, MOST_STEPS = 8, 60

MICRO_BATCHES = 4

ACCUMULATE = 2
"""Micro-batches of the steps that tell what adding gradients costs."""

SWEEP_S = 1.0
"""For measuring sums over one transport."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; exit status of the process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast_rank", allow_abbrev=False,
                                     description="One rank of one job; `python -m benchmarks forecast` starts it.")
    parser.add_argument("--framework", choices=sorted(FILES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", action="append", default=[], help="TRANSPORT+COMPRESSION@BALANCE/KIND; may be "
                        "repeated")
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--cgroup", action="append", default=[], help="control group to enter, by rank")
    args = parser.parse_args(argv)
    from hvdtrain.cluster import quiet
    from hvdtrain.cluster.exit import run_guarded
    from hvdtrain.core.launcher import launch_facts

    quiet.watch_import()
    facts = launch_facts(os.environ)
    return run_guarded(lambda: _Rank(args, facts).serve(), facts)


class _Rank:
    """Measure one rank of a job; every method is collective."""

    def __init__(self, args: argparse.Namespace, facts: Any) -> None:
        from hvdtrain.cluster import boot

        self.args, self.control = args, boot.start_control(facts, IDLE_S)
        if args.cgroup:
            importlib.import_module(args.framework)  # minutes in a slow group, and no part of what is measured
            throttle.enter(args.cgroup[self.control.rank])
        self._made = 0
        self._beside: Prepared | None = None

    def serve(self) -> int:
        """Calibrate, report, then measure and report each row; a row that fails is reported as its error."""
        from hvdtrain.cluster.topology import survey

        hosts = survey(self.control)
        names = [hosts.host_of(rank).node for rank in range(self.control.size)]
        batch = self.args.batch
        found: dict[str, Any] = {"event": "calibrated", "ranks": self.control.size, "cores": os.cpu_count(),
                                 "batch": batch,
                                 "hosts": [sorted(set(names)).index(name) for name in names],
                                 "compute": [self.compute(n) for n in (batch // 2, 3 * batch // 2)],
                                 "accumulated": self.compute(batch, ACCUMULATE) if any(
                                     text.endswith("/pipeline") for text in self.args.row) else None,
                                 "transports": {}}
        rows = [ours_row(text) for text in self.args.row]
        for wire in dict.fromkeys(row["wire"] for row in rows if self.control.size > 1):
            found["transports"][wire], link = self.links(wire, {row["compression"] for row in rows
                                                                if row["wire"] == wire})
            if any(row["wire"] == wire and row["kind"] == "zero2" for row in rows):
                found["transports"][wire]["shard"] = self.shard(wire, link)
        self._say(found)
        for text, row in zip(self.args.row, rows):
            self._say({"event": "row", "row": text, **self.row(row)})
        return 0

    def compute(self, batch: int, accumulate: int = 1) -> dict[str, Any]:
        """Return the phases of single-rank training, on all ranks at once: a step of each rank, without exchange.

        The first such run stays: its steps alternate with those of every row, to show how fast the machine is then.
        """
        prepared = self._prepare(batch, wire="null" if self.control.size > 1 else "auto", adam="whole",
                                 accumulate=accumulate)
        timed = self._timed(prepared)
        self._beside = self._beside or prepared
        run = prepared.run
        return {"batch": batch, **timed, "parameters": sum(int(spec.n) for spec in run.parts.params.specs)}

    def links(self, wire: str, compressions: set[str]) -> tuple[dict[str, Any], Link]:
        """Return links, buckets and when backward completes them, the compressors' own costs over a transport.

        And the link of its sums.
        """
        from hvdtrain.comm import sweep, transport_sweep

        prepared = self._prepare(self.args.batch, wire=wire, adam="whole")
        run = prepared.run
        nbytes = sum(bucket.nbytes for bucket in run.dp.buckets)
        dp = cast("Replicate", run.dp)
        found = sweep.measure(run.collectives, dp.ops, self.control, dp.buckets, run.config, dp.buckets_with)
        sums, = transport_sweep.measure({wire: run.collectives}, run.dp.ops, self.control, nbytes, SWEEP_S)
        return {"link": asdict(sums.link), "busy_cores": sums.busy_cores, "overlaps": run.collectives.overlaps,
                "in_graph": run.collectives.in_graph, "ready": self._ready(prepared),
                "buckets": [int(bucket.nbytes) for bucket in run.dp.buckets], "refused": found.refused,
                "links": {kind: asdict(link) for kind, link in found.links.items()},
                "costs": {cost.name: {**asdict(cost), "buckets": [b.nbytes for b in dp.buckets_with(cost.name)]}
                          for cost in found.costs if cost.name in compressions | {"none"}}}, sums.link

    def _ready(self, prepared: Prepared) -> list[float]:
        """Return the fraction of backward after which each bucket is handed to the transport; [] inside a graph."""
        taken = prepared.marks
        assert taken is not None, "of our own trainer"
        for number in range(WARM_STEPS + LEAST_STEPS):
            if number == WARM_STEPS:
                taken()
            self._step(prepared, number)
        marks = {name: statistics.median(times) for name, times in taken().items()}
        count = len(prepared.run.dp.buckets)
        own = [1 - (1 - marks[f"bucket{i}_s"] / marks["compute_s"]) / BACKWARD for i in range(count)
               if f"bucket{i}_s" in marks]
        return [max(portions) for portions in zip(*self.control.gather(own))] if len(own) == count else []

    def shard(self, wire: str, link: Link) -> dict[str, Any]:
        """Return ZeRO's update of each rank's shard, and the buckets of its run."""
        from hvdtrain.engine import calibration

        run = self._prepare(self.args.batch, wire=wire, adam="zero2").run
        own = calibration.zero_update(run, link)
        assert own is not None, "Adam updates slices"
        return {"overlaps": own.overlaps, "copy_s": own.copy_s, "updates_P": self.control.gather(own.update_s),
                "buckets": [int(bucket.nbytes) for bucket in run.dp.buckets]}

    def row(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Return the measured step of a row, and what its run planned by itself."""
        kind, options = row["kind"], {"wire": row["wire"], "compression": row["compression"]}
        if row["balance"] != "off":
            options["balance"] = row["balance"]
        prepared = self._prepare(self.args.batch, **options, adam="zero2" if kind == "zero2" else "whole",
                                 pipeline=kind == "pipeline")
        found = self._timed(prepared)
        run = prepared.run
        if kind == "pipeline":
            plan = run.parts.layout.plans[0]
            profile = plan.task.kinds[0]
            found["blocks"] = {"cost_s": [block.cost_s for block in profile.blocks], "samples": profile.samples,
                               "starts": list(plan.choice.starts), "order": plan.task.order, "micros": plan.task.micros,
                               "latency_s": plan.task.latency_s, "byte_s": plan.task.byte_s,
                               "cargo": [block.cargo_bytes for block in profile.blocks],
                               "parameters": [block.param_bytes for block in profile.blocks]}
        found["samples"] = self.control.gather(prepared.samples() if prepared.samples else self.args.batch)
        return found

    def _timed(self, prepared: Prepared) -> dict[str, Any]:
        """Return the median seconds of a step, of its phases by rank, and of the steps that alternate with it."""
        steps_s, phases, beside_s = [], [], []
        for number in range(MOST_STEPS + WARM_STEPS):
            other_s = self._step(self._beside, number)[0] if self._beside else 0.0
            step_s, phase = self._step(prepared, number)
            if number >= WARM_STEPS:
                steps_s.append(step_s)
                beside_s.append(other_s)
                phases.append(phase)
                if self.control.bcast(len(steps_s) >= LEAST_STEPS and sum(steps_s) > TIMED_S):
                    break
        own = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
        spread = statistics.pstdev([phase["compute"] for phase in phases]) / max(own["compute"], 1e-9)
        return {"step_s": statistics.median(steps_s), "steps": len(steps_s), "beside_s": statistics.median(beside_s),
                "phases": self.control.gather(own), "spread": self.control.gather(spread)}

    def _step(self, prepared: Prepared, number: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of a step on the slowest rank, and this rank's phases."""
        assert prepared.spent is not None
        before = prepared.spent()
        self.control.barrier("start of a step")
        begin = time.perf_counter()
        prepared.step(number)
        prepared.sync()
        ended_s = time.perf_counter() - begin
        after = prepared.spent()
        return max(self.control.gather(ended_s)), {name: after[name] - before[name] for name in after}

    def _prepare(self, batch: int, **options: Any) -> Prepared:
        args, control = self.args, self.control
        workload = WORKLOADS[args.workload]
        arrays = workload.arrays(BATCHES * batch * control.size, 0)
        self._made += 1
        setup = Setup(workload, args.framework, batch, 0, args.threads, control, arrays,
                      part(arrays, batch, control.rank, control.size),
                      scratch=str(Path(args.scratch, f"run{self._made}")),
                      cut=replace(Cut(), micro_batches=MICRO_BATCHES))
        return ours.prepare(setup, **options)

    def _say(self, message: dict[str, Any]) -> None:
        if self.control.rank == 0:
            sys.stdout.flush()
            os.write(1, f"\n{MARK}{json.dumps(message)}\n".encode())


def ours_row(text: str) -> dict[str, str]:
    """Return transport, compression, balance and kind of a row such as "mpi+fp16@static/zero2"."""
    rest, _, kind = text.partition("/")
    rest, _, balance = rest.partition("@")
    wire, _, compression = rest.partition("+")
    return {"wire": wire, "compression": compression or "none", "balance": balance or "off", "kind": kind or "whole"}


if __name__ == "__main__":
    sys.exit(main())
