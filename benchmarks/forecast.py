"""``benchmarks forecast``: the simulator's step against the measured one, over hosts, transports and partitions.

Owns the jobs, the prediction from a job's calibration, and the table (what a job measures: `forecast_rank`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import race, throttle
from benchmarks.forecast_rank import ACCUMULATE, ours_row
from benchmarks.jobs import GRACE_S, Job, JobFailed
from benchmarks.throttle import Throttle
from benchmarks.workloads import FILES, WORKLOADS
from hvdtrain.commands.bench import cli, session
from hvdtrain.core import ROOT, terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say
from hvdtrain.planning.batch.plan import equal, of_shares, plan
from hvdtrain.planning.compressor_choice import CodecCost, CompressorCost, codec_of
from hvdtrain.planning.linear import LinearTime, Link, Traffic, fit, with_adding
from hvdtrain.planning.simulator import Exchange, Host, Rank, Scene, Stages, StepForecast, host_links, step

MEDIAN, WORST = 8.0, 20.0
"""Percent by which the median and the worst forecast may be off."""

HEADERS = ("framework", "job", "row", "predicted ms", "measured ms", "off by %", "compute", "exchange", "wait")


@dataclass(frozen=True)
class Case:
    """A job and its rows. ``rate``: of the link between two hosts, none without a limit; "" on one host.

    ``slots``: ranks of a host. ``speeds``: of the ranks, as part of a core; () unthrottled.
    """

    name: str
    ranks: int
    rows: tuple[str, ...]
    rate: str = ""
    slots: int = 1
    speeds: tuple[float, ...] = ()


CASES = (
    Case("1 rank", 1, ("auto",)),
    Case("2 ranks", 2, ("shared", "mpi", "horovod", "shared+fp16", "mpi+topk", "mpi+powersgd", "mpi+int8",
                        "shared/zero2", "shared/pipeline")),
    Case("4 ranks", 4, ("shared", "mpi", "horovod")),
    Case("1 and 0.4", 2, ("shared", "shared@static"), speeds=(1.0, 0.4)),
    Case("2 hosts", 2, ("mpi", "horovod", "mpi+fp16", "mpi+powersgd", "mpi/zero2", "mpi/pipeline"), "none"),
    Case("2 hosts 1gbit", 2, ("mpi", "horovod", "mpi+fp16", "mpi+topk", "mpi/zero2", "mpi/pipeline"), "1gbit"),
    Case("2 hosts 100mbit", 2, ("mpi", "mpi+powersgd", "mpi/pipeline"), "100mbit"),
    Case("2 x 2 ranks 1gbit", 4, ("shared", "mpi"), "1gbit", slots=2),
)


def main(argv: list[str]) -> int:
    """Measure; 0 where the forecasts are within `MEDIAN` and `WORST`, else 1."""
    args = _parser().parse(argv)
    if args.again:
        return _told(args, _read(args.again))
    from hvdtrain.core.launcher import launch_facts

    if launch_facts(os.environ).kind != "solo":
        raise UserError("bench forecast was started under a launcher", "one process: it starts each job",
                        "run it without mpirun")
    session.check(args.jsonl)
    found: list[dict[str, Any]] = []
    failed: dict[str, JobFailed] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-"))
        for framework in args.frameworks:
            for case in CASES:
                rows = [row for row in case.rows if _asked(args.only, f"{framework} {case.name} {row}")]
                if rows:
                    found += _job(args, framework, case, rows, scratch, failed)
    status = race.report(failed)
    return status or _told(args, found)


def _parser() -> cli.Parser:
    parser = cli.Parser("benchmarks forecast", "Predict training steps from short runs of single ranks and sweeps over "
                        "links, measure them, and compare. Not to be started under mpirun.")
    add = parser.add_argument
    add("--workload", type=cli.one_of("--workload", WORKLOADS), default="gpt", metavar="NAME",
        help=", ".join(WORKLOADS))
    add("--frameworks", type=cli.some_of("--frameworks", FILES), default=list(FILES), metavar="A,B",
        help=", ".join(FILES))
    add("--only", default="", metavar="TEXT,...", help="rows whose framework, job and row contain one of "
        "these, such as 'torch 2 hosts'; jobs: " + "; ".join(f"{case.name}: {', '.join(case.rows)}" for case in CASES))
    add("--batch", type=cli.whole("--batch", 0), default=0, metavar="N",
        help="samples of a rank; 0: the workload's own")
    add("--again", default="", metavar="FILE", help="measure nothing: predict again from the records of --jsonl")
    parser.waits(240.0, "longest wait for one answer of a job, in seconds")
    parser.reports("row")
    return parser


def _asked(only: str, name: str) -> bool:
    return not only or any(text.strip() in name for text in only.split(","))


def _read(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "records of --jsonl", "correct --again") from None
    return [json.loads(line) for line in lines]


# --- jobs ------------------------------------------------------------------------------------------------------------

def _job(args: argparse.Namespace, framework: str, case: Case, rows: Sequence[str], scratch: str,
         failed: dict[str, JobFailed]) -> list[dict[str, Any]]:
    """Run one job to its end; return a record for each row that was measured."""
    name, found = f"{framework} {case.name}", []
    with contextlib.ExitStack() as stack:
        groups: Sequence[Path] = ()
        if case.speeds:
            lacks = throttle.available()
            if lacks:
                terminal.note(f"{name} is left out: {lacks}")
                return []
            groups = stack.enter_context(Throttle(case.speeds)).paths
        env = race.environment(case.ranks, 1, os.environ)
        if case.rate:
            env["SLOTS"] = str(case.slots)
        words = _words(args, framework, case, rows, os.path.join(scratch, name.replace(" ", "-")), groups)
        say(f"$ {shlex.join(words)}")
        job = Job(name, words, env)
        try:
            calibrated = job.wait("calibrated", args.timeout)
            for row in rows:
                measured = job.wait("row", args.timeout)
                record = {"bench": "forecast", "framework": framework, "case": case.name, "row": row,
                          "workload": args.workload, "calibrated": calibrated, "measured": measured}
                found.append(record)
                if args.jsonl:
                    session.append(args.jsonl, record)
        except JobFailed as failure:
            failed[name] = failure
        finally:
            job.end(0.0 if name in failed else GRACE_S)
    return found


def _words(args: argparse.Namespace, framework: str, case: Case, rows: Sequence[str], scratch: str,
           groups: Sequence[Path]) -> list[str]:
    """Return the command line of a job. Pure but for the search of MPI."""
    from hvdtrain.commands import verify

    words = verify.launcher(case.ranks) if case.ranks > 1 else []
    if case.rate:
        words = [str(ROOT.parent / "mpi_scripts" / "two_hosts.sh"), case.rate, *words]
    words += [sys.executable, "-m", "benchmarks.forecast_rank", "--framework", framework, "--workload", args.workload,
              "--batch", str(args.batch or WORKLOADS[args.workload].batch), "--scratch", scratch]
    for row in rows:
        words += ["--row", row]
    for path in groups:
        words += ["--cgroup", str(path)]
    return words


# --- prediction ------------------------------------------------------------------------------------------------------

def predict(calibrated: Mapping[str, Any], row: str, blocks: Mapping[str, Any] | None = None,
            slower: float = 1.0, samples_P: Sequence[int] = ()) -> StepForecast:
    """Return the forecast of a row from its job's calibration. Pure.

    ``blocks``: of a pipeline, as its run measured. ``samples_P``: of the ranks, as a run with a static balance planned.
    ``slower``: factor on all times but those on the links.
    """
    asked, size = ours_row(row), calibrated["ranks"]
    runs = [_paced(run, slower * (calibrated["compute"][0]["step_s"] / run["beside_s"] if run["beside_s"] else 1.0))
            for run in calibrated["compute"]]
    batch = calibrated["batch"]
    lines = [fit([run["batch"] for run in runs], [run["phases"][rank]["compute"] for run in runs])
             for rank in range(size)]
    made = equal(lines, batch * size) if asked["balance"] == "off" else of_shares(
        lines, batch * size, samples_P) if samples_P else plan(lines, batch * size)
    zero = 2 if asked["kind"] == "zero2" else 0
    updates = 1 if asked["kind"] == "whole" else 1 / size  # each rank has a part of the parameters, or of their state
    updates_P = [_mean(run["phases"][rank]["update"] for run in runs) * updates for rank in range(size)]
    if zero and (shard := calibrated["transports"][asked["wire"]].get("shard")):
        updates_P = [slower * update_s for update_s in shard["updates_P"]]
    ranks = tuple(Rank(host, line, share.samples, share.accumulate, updates_P[rank],
                       input_s=_mean(run["phases"][rank]["data"] for run in runs))
                  for rank, (host, line, share) in enumerate(zip(calibrated["hosts"], lines, made.parts)))
    agreement_s = max(0.0, _mean(run["step_s"] - max(_busy(phases) for phases in run["phases"]) for run in runs))
    exchange = _exchange(calibrated, asked, zero, agreement_s, slower) if size > 1 else Exchange("null", (),
                                                                                         agreement_s=agreement_s)
    per_host = calibrated["cores"] / len(set(calibrated["hosts"]))
    hosts = tuple(Host(max(per_host, calibrated["hosts"].count(h))) for h in sorted(set(calibrated["hosts"])))
    stages: tuple[Stages, ...] = ()
    if blocks:
        stages = (_stages(calibrated, asked, blocks, lines, batch * size, _adding(calibrated, lines, slower)),)
    return step(Scene(ranks, exchange, stages, hosts=hosts))


def _adding(calibrated: Mapping[str, Any], lines: Sequence[LinearTime], slower: float) -> list[float]:
    """Return each rank's seconds of adding the whole model's gradients to those of an earlier micro-batch."""
    run = calibrated.get("accumulated")
    if not run:
        return [0.0] * len(lines)
    run = _paced(run, slower * calibrated["compute"][0]["step_s"] / run["beside_s"])
    n = run["batch"]
    return [with_adding(line, n, (1, line.seconds(n, 1)), (ACCUMULATE, phases["compute"]))[1]
            for phases, line in zip(run["phases"], lines)]


def _paced(run: Mapping[str, Any], slower: float) -> dict[str, Any]:
    """Return a run without exchange with all its times multiplied."""
    return {**run, "step_s": slower * run["step_s"],
            "phases": [{name: slower * seconds for name, seconds in phases.items()} for phases in run["phases"]]}


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _busy(phases: Mapping[str, float]) -> float:
    return phases["compute"] + phases["data"] + phases["update"]


def _exchange(calibrated: Mapping[str, Any], asked: Mapping[str, str], zero: int, agreement_s: float,
              slower: float) -> Exchange:
    found = calibrated["transports"][asked["wire"]]
    links = {kind: Link(**link) for kind, link in found["links"].items()}
    plain_buckets, size = found["buckets"], calibrated["ranks"]
    cost = found["costs"][asked["compression"]]
    buckets = tuple(cost.get("buckets", plain_buckets))
    sums = Link(**found["link"])
    within, between = host_links(asked["wire"], calibrated["hosts"], sums)
    codec = CodecCost(0.0, 1.0)
    if asked["compression"] != "none":
        codec = codec_of(_cost(cost), _cost(found["costs"]["none"]), links, sums, buckets, plain_buckets)
    if asked["kind"] == "pipeline" or size < 2:
        buckets = ()
    shard, overlaps, copy_s = found.get("shard") if zero else None, found["overlaps"], 0.0
    if shard:
        buckets, overlaps, copy_s = tuple(shard["buckets"]), shard["overlaps"], slower * shard["copy_s"]
    ready = tuple(found.get("ready", ()))
    return Exchange(asked["wire"], buckets, within, between, overlaps, slower * codec.codec_s, codec.ratio, zero,
                    found["busy_cores"], ready if len(ready) == len(buckets) else (), later_s=codec.later_s,
                    agreement_s=agreement_s, copy_s=copy_s)


def _cost(row: Mapping[str, Any]) -> CompressorCost:
    return CompressorCost(row["name"], row["codec_s"], tuple(Traffic(**traffic) for traffic in row["traffic"]),
                          row["wire_bytes"])


def _stages(calibrated: Mapping[str, Any], asked: Mapping[str, str], blocks: Mapping[str, Any],
            lines: Sequence[LinearTime], samples: int, adding_s: Sequence[float]) -> Stages:
    """Return the stages: each block's part of a whole micro-batch, by its part of the blocks' measured seconds.

    ``adding_s``: of each rank, of the whole model's gradients, in all micro-batches but the first.
    """
    micros, ends = blocks["micros"], [*blocks["starts"][1:], len(blocks["cost_s"])]
    size, total_s = samples / micros, sum(blocks["cost_s"])
    link = Link(**calibrated["transports"][asked["wire"]]["link"])
    forward, backward, travel = [], [], []
    for place, (begin, end) in enumerate(zip(blocks["starts"], ends)):
        line = lines[place % len(lines)]
        seconds = sum(blocks["cost_s"][begin:end]) / total_s * (line.a_s + line.c_s * size)
        forward.append(seconds / 3)
        own = sum(blocks["parameters"][begin:end]) / sum(blocks["parameters"])
        backward.append(seconds * 2 / 3 + own * adding_s[place % len(lines)] * (1 - 1 / micros))
        travel.append(link.seconds(blocks["cargo"][end - 1] * size / blocks["samples"]))
    return Stages(tuple(range(len(lines))), blocks["order"], micros, tuple(forward), tuple(backward),
                  tuple(travel[:-1]))


# --- table -----------------------------------------------------------------------------------------------------------

def _told(args: argparse.Namespace, found: Sequence[Mapping[str, Any]]) -> int:
    """Print predictions beside measurements; return 1 where they are off."""
    rows, errors = [], []
    for record in found:
        measured = record["measured"]
        measured_s = measured["step_s"]
        # Other load on the machine slows the steps without exchange, which alternate with the row's, as well.
        slower = measured["beside_s"] / record["calibrated"]["compute"][0]["step_s"]
        forecast = predict(record["calibrated"], record["row"], measured.get("blocks"), slower,
                           measured.get("samples", ()))
        error = 100 * (forecast.mid_s / measured_s - 1)
        errors.append(abs(error))
        rows.append([record["framework"], record["case"], record["row"], f"{1e3 * forecast.mid_s:.1f}",
                     f"{1e3 * measured_s:.1f}", f"{error:+.1f}",
                     *(f"{1e3 * forecast.parts[part]:.1f}" for part in ("compute", "exchange", "wait"))])
    if not rows:
        raise UserError("no row was measured", "a row", "correct --only")
    terminal.show(f"predicted and measured steps, {found[0]['workload']}; parts of the prediction in ms", HEADERS, rows,
                  markdown=args.markdown)
    median, worst = statistics.median(errors), max(errors)
    terminal.note(f"{len(rows)} rows: off by {median:.1f} % (median), {worst:.1f} % (worst); targets {MEDIAN:g} and "
                  f"{WORST:g} %")
    return int(median > MEDIAN or worst > WORST)
