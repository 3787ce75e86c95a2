"""A rank of ``benchmarks memory``: train a perceptron for a few steps and report the peak memory.

What counts begins after a step of a tiny model: frameworks import parts of themselves when a first optimizer is made,
and threads, transports and libraries take some MiB at their first use, of whatever size the model is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.worker import guarded, speaker
from benchmarks.workloads import FILES, WORKLOADS, Workload

EVERY_S = 0.005
"""How long the watching thread sleeps between two looks."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; exit status of the process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_rank", allow_abbrev=False, description="One "
                                     "rank of one way; `python -m benchmarks memory` starts it.")
    parser.add_argument("--framework", choices=sorted(FILES), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", default="")
    for name in ("--parameters", "--layer", "--batch", "--steps", "--threads"):
        parser.add_argument(name, type=int, required=True)
    args, keys = parser.parse_known_args(argv)
    return guarded(lambda facts: _train(args, keys, facts))


def _train(args: argparse.Namespace, keys: list[str], facts: Any) -> int:
    from hvdtrain.cluster import boot

    control = boot.start_control(facts, 600.0)
    importlib.import_module(args.framework)
    importlib.import_module(f"hvdtrain.backends.{args.framework}")
    imported = status("VmRSS")
    _fit(args, keys, control, [4])
    began = status("VmRSS"), smaps("Pss")
    with watched() as peak:
        run = _fit(args, keys, control, layers(args.parameters, args.layer), args.workload)
    n_parameters = sum(spec.n for spec in run.parts.params.specs)
    mine = status("VmHWM") - began[0], peak[0] - began[1]
    rss, pss, late = zip(*control.gather((*mine, began[0] - imported)))
    if control.rank == 0:
        speaker(0)({"event": "done", "parameters": n_parameters, "wire": run.collectives.name, "rss_bytes": rss,
                    "pss_bytes": pss, "late_bytes": late, "notes": run.notes})
    control.barrier("end of the bench")
    return 0


def _fit(args: argparse.Namespace, keys: list[str], control: Any, hidden: list[int], workload: str = "") -> Any:
    """Train a perceptron of these widths, or a workload of ``benchmarks step``; return its run."""
    from hvdtrain.commands.train import parse
    from hvdtrain.config import Config, schema
    from hvdtrain.engine import loop
    from hvdtrain.engine.assemble import assemble

    made = WORKLOADS.get(workload) or Workload("mlp", "", "mlp", args.batch, (hidden[0],), args={
        "in_features": hidden[0], "hidden": hidden})
    config = parse([
        *("--model", made.model(args.framework)), *("--model_args", json.dumps(made.args)),
        *("--global_batch", str(args.batch * control.size)),
        *("--max_steps", str(args.steps)), *("--epochs", "1000000"), *schema.options(schema.quiet(Config)),
        *("--data.prefetch", "0"),
        *("--optimizer.name", "Adam"), *("--metrics", "[]"), *("--out", f"{args.out}-{len(hidden)}"),
        *("--threads", str(args.threads)), *keys], os.environ)
    assert config is not None
    run = assemble(config, data=made.arrays(4 * args.batch * control.size, 0), control=control)
    loop.fit(run)
    return run


def layers(parameters: int, layer: int) -> list[int]:
    """Widths of equal hidden layers of at most ``layer`` parameters each, in sum about ``parameters``.

    >>> layers(60_000_000, 5_000_000)[:2], len(layers(60_000_000, 5_000_000))
    ([2235, 2235], 12)
    """
    width = int((-1 + (1 + 4 * layer) ** 0.5) / 2)
    return [width] * max(1, round(parameters / (width * width + width)))


def status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    return _field(Path("/proc/self/status"), name)


def smaps(name: str) -> int:
    """Return a field of /proc/self/smaps_rollup in bytes, such as Pss."""
    return _field(Path("/proc/self/smaps_rollup"), name)


def _field(file: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    assert found, f"{file} has no {name}"
    return int(found[1]) * 1024


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """Within it a thread looks every few milliseconds; a list with the largest Pss in bytes that it saw."""
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            peak[0] = max(peak[0], smaps("Pss"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak[0] = max(peak[0], smaps("Pss"))


if __name__ == "__main__":
    sys.exit(main())
