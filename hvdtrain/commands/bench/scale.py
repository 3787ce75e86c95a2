"""``bench scale``: strong and weak scaling of a training on this host, against copies of it, and as predicted.

Owns the jobs, the comparison, the table and the picture. Weak scaling gives each rank a batch of its own size, strong
scaling divides one batch. The limit of the host is what as many single-rank copies, run at once, do together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.commands import verify
from hvdtrain.commands.bench import cli, scale_rank, session
from hvdtrain.commands.bench.scale_rank import COUNTED, DONE, GO, READY
from hvdtrain.commands.train import parse
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.processes import CapturedChild, orderly_signals
from hvdtrain.core.terminal import say
from hvdtrain.planning import simulator
from hvdtrain.planning.linear import Link, fit
from hvdtrain.planning.simulator import Exchange, Host, Rank, Scene
from hvdtrain.reports.html.curves import Axis, linear

WAYS = ("weak", "strong")
HEADERS = ("scaling", "ranks", "batch", "samples/s", "speed-up", "copies at once", "efficiency %", "predicted",
           "off by %")
TICK_S = 0.02


@dataclass(frozen=True)
class ScalePoint:
    """``rate``: samples/s of the job; ``limit``: of its copies together; ``predicted``: of the simulator, or None."""

    way: str
    ranks: int
    batch: int
    rate: float
    limit: float
    predicted: float | None = None

    @property
    def efficiency(self) -> float:
        """Return the job's throughput as a fraction of the copies'."""
        return self.rate / self.limit


def main(argv: list[str]) -> int:
    """Measure, print the table, write picture and records; return 0."""
    at = argv.index("--") if "--" in argv else len(argv)
    args, options = _parser().parse(argv[:at]), argv[at + 1:]
    if args.rank_of:
        return scale_rank.main(Path(args.rank_of), args.job, args.seconds, args.sizes, options)
    if launch_facts(os.environ).kind != "solo":
        raise UserError("bench scale under a launcher", "one process, which starts the jobs", "start it without mpirun")
    options = [*options, f"--threads={args.threads}"]
    if parse(list(options)) is None:
        return 0
    for path in (args.jsonl, args.picture):
        session.check(path)
    sizes = sorted({_share(way, args.batch, ranks) for way in WAYS for ranks in args.np})
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_signals())
        bench = Bench(args, options, sizes, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-"))))
        points = bench.points()
    facts = bench.facts
    title = (f"scaling of {facts.get('model', 'the model')} ({facts.get('framework', '')}) on "
             f"{count(facts.get('cores', [0])[0], 'core')}, {count(args.threads, 'thread')} a rank")
    terminal.show(title, HEADERS, _rows(points), args.markdown)
    if args.picture:
        Path(args.picture).write_text(picture(title, points), encoding="utf-8")
    for point in points if args.jsonl else ():
        session.append(args.jsonl, {"bench": "scale", **vars(point), "efficiency": point.efficiency, "seconds":
                                    args.seconds, "options": options, **session.environment(
            ranks=point.ranks, wire=facts.get("wire", ""), threads=args.threads, framework=facts.get("framework", ""))})
    return 0


def _parser() -> cli.Parser:
    parser = cli.Parser("hvdtrain bench scale", "Strong and weak scaling on this host. Options of train follow after "
                        "--, such as -- --model my_model.py:build. Not to be started under mpirun.")
    add = parser.add_argument
    add("--np", type=_numbers("--np"), default=[1, 2], metavar="N,N", help="numbers of ranks")
    add("--batch", type=cli.whole("--batch", 1), default=64,
        help="samples of a rank in weak scaling, of all ranks in strong scaling")
    add("--seconds", type=cli.number("--seconds", 0, 3600), default=4.0, metavar="S", help="time of each measurement")
    add("--rounds", type=cli.whole("--rounds", 1), default=1, metavar="N",
        help="measurements of each job, interleaved; the median counts")
    add("--threads", type=cli.whole("--threads", 1), default=1, help="compute threads of a rank")
    add("--picture", default="", metavar="FILE", help="draw the curves as SVG into this file")
    add("--mpirun_args", default="", metavar="TEXT", help="more options of mpirun")
    parser.waits(300.0, "longest wait for a job to begin")
    parser.reports("point")
    add("--rank-of", default="", help=argparse.SUPPRESS)  # of the processes that the bench starts
    add("--job", type=int, default=0, help=argparse.SUPPRESS)
    add("--sizes", type=_numbers("--sizes"), default=[], help=argparse.SUPPRESS)
    return parser


def _numbers(option: str) -> Callable[[str], list[int]]:
    read = cli.whole(option, 1, 4096)
    return lambda text: sorted({read(part) for part in text.split(",")})


def _share(way: str, batch: int, ranks: int) -> int:
    """Return the samples of a rank."""
    return batch if way == "weak" else -(-batch // ranks)


class Bench:
    """The jobs of all points. ``facts``: of the model and the host, as its jobs report them."""

    def __init__(self, args: Any, options: Sequence[str], sizes: Sequence[int], scratch: Path) -> None:
        self.args, self.options, self.sizes, self.scratch = args, list(options), sizes, scratch
        self.facts: dict[str, Any] = {}
        self._rates: dict[tuple[int, int, int], list[float]] = {}
        self._runs = 0

    def points(self) -> list[ScalePoint]:
        """Measure every point, then predict all of them from the steps of copies and the smallest job's transport."""
        ways = [(way, ranks, _share(way, self.args.batch, ranks)) for ranks in sorted({1, *self.args.np})
                for way in WAYS]
        # Each round measures every job once, so that what else runs on the host disturbs all alike.
        for _ in range(self.args.rounds):
            for job in dict.fromkeys((n, m, share) for _, ranks, share in ways for n, m in ((1, ranks), (ranks, 1))):
                self._rates.setdefault(job, []).append(self._measured(*job))
        rates = {job: statistics.median(found) for job, found in self._rates.items()}
        found = [ScalePoint(way, ranks, share * ranks, rates[1, ranks, share], rates[ranks, 1, share])
                 for way, ranks, share in ways]
        return [replace(point, predicted=predicted(self.facts, point, self.args.threads)) for point in found]

    def _measured(self, jobs: int, ranks: int, share: int) -> float:
        """Return the samples/s of ``jobs`` jobs at once, each of ``ranks`` ranks with ``share`` samples a rank."""
        self._runs += 1
        folder = self.scratch / str(self._runs)
        folder.mkdir()
        batch = share * ranks
        what = f"{count(jobs, 'copy', 'copies')}" if jobs > 1 else count(ranks, "rank")
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(CapturedChild(self._words(folder, job, ranks, batch), dict(os.environ)))
                        for job in range(jobs)]
            self._all(children, folder, READY, what)
            (folder / GO).touch()
            self._all(children, folder, COUNTED, what)
            (folder / DONE).touch()
            found = [json.loads((folder / f"{COUNTED}-{job}").read_text(encoding="utf-8")) for job in range(jobs)]
            if jobs == 1:
                self._all(children, folder, "facts", what)
                self._learn(json.loads((folder / "facts-0").read_text(encoding="utf-8")), found[0], ranks, share)
                children[0].ends_within(self.args.timeout)
        rate = math.fsum(one["samples"] / one["seconds"] for one in found)
        say(f"{what}, {batch} samples a step: {rate:,.0f} samples/s")
        return rate

    def _learn(self, facts: Mapping[str, Any], counted: Mapping[str, Any], ranks: int, share: int) -> None:
        """Keep the facts of the first job of one rank, and of the first of several."""
        for name, value in facts.items():
            if name not in self.facts or ranks > 1 and name in ("wire", "buckets", "overlaps") and self.facts.get(
                    "ranks", 1) == 1:
                self.facts[name] = value
        self.facts.setdefault("alone", {"share": share, **counted})
        if ranks > 1 and "ranks" not in self.facts:
            self.facts |= {"ranks": ranks, "outside_s": outside_s(counted) - outside_s(self.facts["alone"])}

    def _words(self, folder: Path, job: int, ranks: int, batch: int) -> list[str]:
        more = shlex.split(self.args.mpirun_args)
        launcher = [*verify.launcher(ranks), *more] if ranks > 1 else []
        sizes = ["--sizes", ",".join(map(str, self.sizes))] if ranks == 1 else []
        return [*launcher, sys.executable, "-m", "hvdtrain", "bench", "scale", "--rank-of", str(folder), "--job",
                str(job), "--seconds", str(self.args.seconds), *sizes, "--", *self.options, f"--global_batch={batch}"]

    def _all(self, children: Sequence[CapturedChild], folder: Path, word: str, what: str) -> None:
        """Wait until each job has written ``word``; `UserError` where one ends before, or takes too long."""
        ends_at = time.monotonic() + self.args.timeout + self.args.seconds
        while not all((folder / f"{word}-{job}").exists() for job in range(len(children))):
            for job, child in enumerate(children):
                if child.process.poll() is not None and not (folder / f"{word}-{job}").exists():
                    last = "\n".join(text.strip() for text in child.texts()).strip().splitlines()[-12:]
                    raise UserError(f"the job of {what} ended with status {child.process.returncode}: "
                                    + "\n".join(last), "a training that runs", "try it with train")
            if time.monotonic() > ends_at:
                raise UserError(f"{what}: no sign ({word}) within {self.args.timeout:g} s", "jobs that begin",
                                "raise --timeout, or use fewer ranks")
            time.sleep(TICK_S)


def outside_s(counted: Mapping[str, Any]) -> float:
    """Return the seconds of a step outside its timed parts: callbacks, the ends of epochs. Pure."""
    return float(counted["seconds"] / counted["steps"] - math.fsum(counted["parts_s"].values()))


def predicted(facts: Mapping[str, Any], point: ScalePoint, threads: int) -> float | None:
    """Return samples/s of a point: the steps of its copies with the simulator's exchange. Pure.

    None where the transport was not measured.
    """
    if "lines" not in facts or point.ranks > 1 and "transport" not in facts:
        return None
    line = fit(*zip(*facts["lines"]))
    parts = facts["alone"]["parts_s"]
    rest_s = max(0.0, facts["alone"]["seconds"] / facts["alone"]["steps"]
                 - line.seconds(facts["alone"]["share"], 1) - parts["data"])
    exchange, hosts = Exchange("null", ()), (Host(facts["cores"][0]),)
    if point.ranks > 1:
        # Ranks that shared cores in the measurement need no second delay for it: the hosts are those of the scene.
        within, between = simulator.host_links(facts["wire"], [0] * facts["ranks"], Link(**facts["transport"]["link"]),
                                               hosts)
        exchange = Exchange(facts["wire"], tuple(n for n in facts["buckets"] if n), within, between, facts["overlaps"],
                            busy_cores=facts["transport"]["busy_cores"], agreement_s=facts["agreement_s"])
    rank = Rank(0, line, point.batch // point.ranks, 1, update_s=rest_s, input_s=parts["data"], threads=threads)
    copies = simulator.step(Scene((rank,) * point.ranks, Exchange("null", ()), hosts=hosts)).samples_per_s
    # What copies slow one another down is a matter of this host's caches and memory: measured, not simulated.
    slowed = copies / point.limit
    more_s = max(0.0, facts.get("outside_s", 0.0)) if point.ranks > 1 else 0.0
    rank = replace(rank, line=line.scaled(slowed), update_s=rest_s * slowed + more_s, input_s=parts["data"] * slowed)
    return simulator.step(Scene((rank,) * point.ranks, exchange, hosts=hosts)).samples_per_s


def _rows(points: Sequence[ScalePoint]) -> list[list[str]]:
    rows = []
    for way in WAYS:
        own = [point for point in points if point.way == way]
        for p in own:
            guess = ["-", "-"] if p.predicted is None else [f"{p.predicted:,.0f}",
                                                           f"{100 * (p.predicted / p.rate - 1):+.1f}"]
            rows.append([way, str(p.ranks), str(p.batch), f"{p.rate:,.0f}", f"{p.rate / own[0].rate:.2f}",
                         f"{p.limit:,.0f}", f"{100 * p.efficiency:.1f}", *guess])
    return rows


COLOURS = (("measured", "#2563c9", ""), ("copies at once", "#1d2129", ""), ("predicted", "#c2410c", "6 4"))
WIDTH, HEIGHT, LEFT, TOP = 380, 240, 70, 60


def picture(title: str, points: Sequence[ScalePoint]) -> str:
    """Return samples/s by ranks as SVG: a panel for each way, with what the copies do and what was predicted. Pure."""
    panels = []
    for number, way in enumerate(WAYS):
        own = [point for point in points if point.way == way]
        top = max(max(p.rate, p.limit, p.predicted or 0.0) for p in own)
        across, up = linear(0.0, float(own[-1].ranks), zero=True), linear(0.0, top, zero=True)
        x0 = LEFT + number * (WIDTH + LEFT)
        panels.append(f'<g transform="translate({x0} {TOP})">{_axes(way, across, up)}')
        for (name, colour, dash), values in zip(COLOURS, zip(*[(p.rate, p.limit, p.predicted) for p in own])):
            at = [(across.at(p.ranks) / 100 * WIDTH, HEIGHT - up.at(v) / 100 * HEIGHT)
                  for p, v in zip(own, values) if v is not None]
            panels.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" points="'
                          + " ".join(f"{x:.1f},{y:.1f}" for x, y in at) + f'"><title>{name}</title></polyline>')
            panels += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        panels.append("</g>")
    legend = "".join(f'<text x="{LEFT + 130 * i}" y="44" fill="{colour}">{name}</text>'
                     for i, (name, colour, _) in enumerate(COLOURS))
    width, height = 2 * (WIDTH + LEFT) + 20, HEIGHT + TOP + 50
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="13"><rect width="{width}" height="{height}" fill="#fff"/><text x="{LEFT}" y="22" '
            f'font-size="15">{escape(title)}</text>{legend}{"".join(panels)}</svg>\n')


def _axes(way: str, across: Axis, up: Axis) -> str:
    ticks = "".join(f'<text x="{at / 100 * WIDTH:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{words}</text>'
                    for at, words in across.ticks)
    ticks += "".join(f'<path d="M0 {HEIGHT - at / 100 * HEIGHT:.1f}H{WIDTH}" stroke="#d8dde4"/><text x="-6" '
                     f'y="{HEIGHT - at / 100 * HEIGHT + 4:.1f}" text-anchor="end">{words}</text>'
                     for at, words in up.ticks)
    words = f"samples/s by ranks, {way} scaling"
    return ticks + f'<text x="{WIDTH / 2}" y="{HEIGHT + 38}" text-anchor="middle">{words}</text>'
