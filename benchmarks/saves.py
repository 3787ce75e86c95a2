"""``python -m benchmarks saves``: what checkpoints cost the training that they are taken of.

Two cases. ``often``: a training that saves every few steps; of its time the seconds that saves hold it up and the
processor seconds of the threads beside it. ``large``: a state of many parameters, saved beside the run and, in turns
with that, while the run waits; for how long training is blocked in each.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import BATCHES, FILES, WORKLOADS
from hvdtrain.commands.bench import session
from hvdtrain.commands.bench.cli import Parser, one_of, size, whole
from hvdtrain.core import terminal
from hvdtrain.core.terminal import spread
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run

CASES = ("often", "large")
WARM_STEPS = 20
"""Steps before the clock runs: graphs are traced, and the first save makes the memory of its copies."""

HEADERS = {"often": ("rank", "steps", "saves", "wall s", "held up ms a save", "thread CPU ms a save", "% of the time"),
           "large": ("way", "rounds", "state MiB", "held up s", "quartiles", "whole save s", "% of waiting")}


def main(argv: list[str]) -> int:
    """Measure on every rank, print a table on rank 0; return 0."""
    args = _parser().parse(argv)
    from hvdtrain.cluster import boot
    from hvdtrain.core.launcher import launch_facts

    control = boot.start_control(launch_facts(os.environ), 600.0)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-", dir=args.dir or None) as scratch:
        shared = Path(control.bcast(scratch))
        rows, facts = (_often if args.case == "often" else _large)(args, control, shared)
        control.barrier("end of the bench")
    if control.rank == 0:
        title = f"saves, case {args.case}: {args.framework}, {control.size} rank(s), layout {args.layout}"
        terminal.show(title, HEADERS[args.case], rows, args.markdown, launched=control.size > 1)
        if args.jsonl:
            where = session.environment(ranks=control.size, framework=args.framework, threads=args.threads, seed=0)
            session.append(args.jsonl, {"bench": "saves", "case": args.case, **facts, **where})
    return 0


def _parser() -> Parser:
    parser = Parser("benchmarks saves", "What checkpoints cost the training that they are taken of.")
    parser.add_argument("--case", type=one_of("--case", CASES), default="often")
    parser.add_argument("--framework", type=one_of("--framework", FILES), default="torch")
    parser.add_argument("--workload", type=one_of("--workload", WORKLOADS), default="resnet", help="case often")
    parser.add_argument("--every", type=whole("--every", 1), default=10, help="case often: steps between two saves")
    parser.add_argument("--steps", type=whole("--steps", 1), default=200, help="case often: steps that are timed")
    parser.add_argument("--parameters", type=size("--parameters"), default=60_000_000,
                        help="case large: parameters of the model, about; M are 2^20")
    parser.add_argument("--layout", type=one_of("--layout", ("gathered", "sharded")), default="gathered")
    parser.add_argument("--threads", type=whole("--threads", 0), default=1, help="compute threads of a rank")
    parser.add_argument("--dir", default="", metavar="PATH", help="where to write; the system's place for such files")
    parser.common(7)
    return parser


class Clock(Callback):
    """Reads at the end of each step what saves have cost so far, and the time."""

    where = "all"

    def __init__(self) -> None:
        self.begin: Any = None
        self.end: Any = None

    def step_end(self, run: Run) -> None:
        """Begin after the warm steps, and continue to the last."""
        self.end = _read(run)
        if run.state.cursor.step == WARM_STEPS:
            self.begin = self.end


def _read(run: Run) -> np.ndarray:
    """(4,): the time, saves, seconds that they held training up, processor seconds of threads."""
    if run.saver is None:
        return np.array([time.perf_counter(), 0.0, 0.0, 0.0])
    spent = run.saver.spent
    return np.array([time.perf_counter(), spent.saves, spent.blocked_s, spent.cpu_s])


def _config(args: Any, control: Any, out: Path) -> Any:
    from hvdtrain.config import CheckpointConfig, Config, DataConfig, Named

    workload = WORKLOADS[args.workload]
    return Config(model=workload.model(args.framework), model_args=workload.args, data=DataConfig(prefetch=2),
                  epochs=10**6,
                  global_batch=workload.batch * control.size, optimizer=Named("Adam"),
                  threads=args.threads, out=str(out), metrics=[],
                  checkpoint=CheckpointConfig(keep=2, layout=args.layout)).quiet()


def _often(args: Any, control: Any, scratch: Path) -> tuple[list[list[str]], dict[str, Any]]:
    """Train with a save every few steps; what that costs each rank."""
    from hvdtrain.engine import loop
    from hvdtrain.engine.assemble import assemble

    config = _config(args, control, scratch / "run")
    config = replace(config, max_steps=WARM_STEPS + args.steps,
                     checkpoint=replace(config.checkpoint, every_steps=args.every))
    workload = WORKLOADS[args.workload]
    run = assemble(config, data=workload.arrays(BATCHES * workload.batch * control.size, 0))
    clock = Clock()
    run.callbacks.append(clock)
    loop.fit(run)
    clock.end[3] = run.saver.spent.cpu_s if run.saver is not None else 0.0  # of the last save too
    rows, facts = [], []
    for rank, (wall_s, saves, blocked_s, cpu_s) in enumerate(control.gather(clock.end - clock.begin)):
        percent = 100 * (blocked_s + cpu_s) / wall_s
        each = [1e3 * seconds / max(1, saves) for seconds in (blocked_s, cpu_s)]
        rows.append([str(rank), str(args.steps), str(int(saves)), f"{wall_s:.2f}", *(f"{ms:.2f}" for ms in each),
                     f"{percent:.2f}"])
        facts.append({"rank": rank, "saves": saves, "wall_s": wall_s, "blocked_s": blocked_s, "threads_cpu_s": cpu_s})
    return rows, {"workload": args.workload, "every": args.every, "rows": facts}


def _large(args: Any, control: Any, scratch: Path) -> tuple[list[list[str]], dict[str, Any]]:
    """Save a large state in both ways by turns; how long each holds training up on the slowest rank."""
    from hvdtrain.checkpoint.savers import InlineSaver
    from hvdtrain.engine import loop
    from hvdtrain.engine.assemble import assemble
    from hvdtrain.engine.saving import Saving

    width = max(8, int((args.parameters / 2) ** 0.5))
    args.workload = "mlp"
    config = replace(_config(args, control, scratch / "run"), max_steps=1, global_batch=2 * control.size,
                     model_args={"in_features": 64, "hidden": [width] * 3, "classes": 10})
    samples = np.zeros((4 * control.size, 64), np.float32), np.zeros(4 * control.size, np.int64)
    run = assemble(config, data=samples)
    loop.fit(run)  # Adam makes its state in its first step
    ways = {"beside": Saving(run), "waiting": Saving(run, InlineSaver())}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with loop.joined(run):
        for turn in range(args.repeats + 1):
            for name in list(ways)[::1 if turn % 2 else -1]:
                control.barrier("a turn")
                began = time.perf_counter()
                ways[name].begin()
                blocked_s = time.perf_counter() - began
                ways[name].wait()
                if any(outcome.error for outcome in ways[name].settled()):
                    raise OSError("a save of the bench was not written")
                slowest = np.max(control.gather((blocked_s, time.perf_counter() - began)), axis=0)
                if turn:  # the first makes the memory of the copies
                    seconds[name].append((float(slowest[0]), float(slowest[1])))
    held = {name: spread([s[0] for s in found]) for name, found in seconds.items()}
    rows = []
    for name, found in seconds.items():
        part = 100 * held[name]["median"] / held["waiting"]["median"]
        rows.append([name, str(args.repeats), f"{run.parts.state.state_bytes() / 2**20:.0f}",
                     f"{held[name]['median']:.3f}", f"{held[name]['p25']:.3f} to {held[name]['p75']:.3f}",
                     f"{spread([s[1] for s in found])['median']:.3f}", f"{part:.1f}"])
    return rows, {"parameters": args.parameters, "seconds": seconds}
