"""A rank of ``benchmarks input``: read whole epochs of one format in one of five ways.

The ways of others are in `benchmarks.peers`: `dataloader`, `tfdata`, `webdataset`, `datasets`. Pictures are float32
(B, H, W, 3) in [0, 1] with class numbers, tokens int64 (B, T). A decode is counted where it is done: one byte more in a
file that all processes of the job append to; tf.data's are those samples that come out of its map.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.input import CONTENDERS, OWN
from benchmarks.input_data import FORMATS
from benchmarks.worker import MARK

SEED = 0


class Decodes:
    """A count that processes share: the length of a file, opened in each when it first counts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = -1

    def add(self, n: int) -> None:
        """Count ``n`` more."""
        if self._file < 0:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._file, bytes(n))

    def total(self) -> int:
        """Return what all have counted."""
        return os.path.getsize(self.path) if os.path.exists(self.path) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": -1}


class Counted:
    """A source whose samples are counted when they are fetched."""

    def __init__(self, source: Any, decodes: Decodes) -> None:
        self.wraps, self.decodes = source, decodes

    def __len__(self) -> int:
        return len(self.wraps)

    def fetch(self, indices_n: np.ndarray) -> Any:
        """Fetch and count."""
        self.decodes.add(len(indices_n))
        return self.wraps.fetch(indices_n)


Epoch = Callable[[int], Iterator[int]]
"""From the number of an epoch to the sizes of this rank's batches in it."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; exit status of the process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.input_rank", allow_abbrev=False, description="One "
                                     "rank of one job; `python -m benchmarks input` starts it.")
    parser.add_argument("--reader", choices=list(CONTENDERS), required=True)
    parser.add_argument("--format", choices=list(FORMATS), required=True)
    for name in ("--root", "--decodes"):
        parser.add_argument(name, required=True)
    for name in ("--batch", "--workers", "--epochs"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args(argv)
    from hvdtrain.cluster.exit import run_guarded
    from hvdtrain.core.launcher import launch_facts
    from hvdtrain.data.workers import start

    facts = launch_facts(os.environ)
    with start.early(args.reader == OWN and args.workers > 0):  # before MPI starts
        return run_guarded(lambda: _read(args, facts), facts)


def files_of(root: str) -> tuple[list[str], list[int]]:
    """(paths, class numbers) of root/train/CLASS/*, classes and files sorted."""
    classes = sorted(path for path in Path(root, "train").iterdir() if path.is_dir())
    found = [(str(file), number) for number, folder in enumerate(classes) for file in sorted(folder.iterdir())]
    return [path for path, _ in found], [number for _, number in found]


def own(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Make hvdtrain's own: the set of the format, its worker processes and the feed, as a run has them."""
    from hvdtrain.cluster.control import agreed
    from hvdtrain.config import Config, DataConfig
    from hvdtrain.core.protocols.types import Cursor
    from hvdtrain.data import sources
    from hvdtrain.data.feed import Feed
    from hvdtrain.data.prepare import with_workers

    source: Any
    if args.format == "stream":
        source, n = _stream(args, control, decodes)
    else:
        name, named = SETS[args.format](args.root)
        config = Config(data=DataConfig(name, named, workers=args.workers), control_timeout_s=600.0)
        counted = Counted(agreed(control, lambda: sources.resolve(name, named, "train"), "data"), decodes)
        (source,), _ = with_workers(config, SEED, [counted], 1)
        n = len(counted)
    feed = Feed(source, args.batch * control.size, rank=control.rank, size=control.size, seed=SEED, control=control,
                readers="host")

    def epoch(number: int) -> Iterator[int]:
        for step in feed.epoch(Cursor(epoch=number)):
            yield sum(len(micro[0]) for micro in step.micros)

    return n, epoch


SETS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "folder": lambda root: ("folder", {"root": root}), "tokens": lambda root: ("npy", {"root": root}),
    "tar": lambda root: ("webdataset", {"files": f"{root}/*.tar"}),
    "tfrecord": lambda root: ("tfrecord", {"files": f"{root}/*.tfrecord", "x": "image", "y": "label"}),
    "parquet": lambda root: ("parquet", {"files": f"{root}/*.parquet", "x": "image", "y": "label"})}
"""Format -> the set that reads it, and its arguments for a folder."""


def _stream(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[Any, int]:
    """Return the folder as a stream of one reader, which has the workers of all ranks of its host; its samples."""
    from torch.utils.data import DataLoader

    from benchmarks.peers.dataloader import DividedFiles
    from hvdtrain.backends.torch.data import adapt

    pairs = list(zip(*files_of(args.root)))
    workers = args.workers * control.local_size
    loader: Any = DataLoader(DividedFiles(pairs, lambda pair: [pair], decodes, 0, 1), args.batch, num_workers=workers,
                             persistent_workers=workers > 0)
    return adapt(loader), len(pairs)


def _reader(name: str) -> Callable[..., tuple[int, Epoch]]:
    """Return the factory of (samples, epoch) of a contender."""
    return own if name == OWN else importlib.import_module(f"benchmarks.peers.{name}").read


def _read(args: argparse.Namespace, facts: Any) -> int:
    from hvdtrain.cluster import boot

    control = boot.start_control(facts, 600.0)
    decodes = Decodes(args.decodes)
    samples, epoch = _reader(args.reader)(args, control, decodes)
    sum(epoch(0))
    control.barrier("the first epoch")
    before = decodes.total()
    control.barrier("the timed epochs")
    began, used = time.perf_counter(), time.process_time()
    read = sum(sum(epoch(number)) for number in range(1, args.epochs + 1))
    ended_s, cpu_s = time.perf_counter() - began, time.process_time() - used
    rows = control.gather((ended_s, read, cpu_s))
    if control.rank == 0:
        about = {"event": "done", "format": args.format, "reader": args.reader, "ranks": control.size,
                 "framework": CONTENDERS[args.reader],
                 "workers": args.workers, "epochs": args.epochs, "samples": samples,
                 "seconds": max(seconds for seconds, _, _ in rows), "read": sum(n for _, n, _ in rows),
                 "cpu_seconds": sum(seconds for _, _, seconds in rows),
                 "decodes": decodes.total() - before}
        sys.stdout.flush()
        os.write(1, f"\n{MARK}{json.dumps(about)}\n".encode())
    control.barrier("end of the bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
