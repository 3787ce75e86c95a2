"""torch's DataLoader for ``benchmarks input``: its workers are kept between epochs.

Pictures of a folder and tokens by number under a DistributedSampler; tars, and the folder as a stream, as
IterableDatasets that divide files over ranks and workers.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from benchmarks.input_rank import SEED, Decodes, Epoch, files_of


def read(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Return (samples, epoch) of the loader."""
    torch.set_num_threads(1)
    workers = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    if args.format in ("tar", "stream"):
        stream: Any
        if args.format == "tar":
            shards, n = tars(args.root)
            stream = DividedFiles(shards, tar_rows, decodes, control.rank, control.size)
        else:
            pairs = list(zip(*files_of(args.root)))
            stream = DividedFiles(pairs, lambda pair: [pair], decodes, control.rank, control.size)
            n = len(pairs)
        loader: Any = DataLoader(stream, args.batch, **workers)

        def streamed(number: int) -> Iterator[int]:
            for x, _ in loader:
                yield len(x)
        return n, streamed
    data: Any = Tokens(args.root, decodes) if args.format == "tokens" else Pictures(*files_of(args.root), decodes)
    sampler: Any = DistributedSampler(data, control.size, control.rank, seed=SEED)
    by_number: Any = DataLoader(data, args.batch, sampler=sampler, **workers)

    def epoch(number: int) -> Iterator[int]:
        sampler.set_epoch(number)
        for x, _ in by_number:
            yield len(x)

    return len(data), epoch


def decoded(picture: Any) -> torch.Tensor:
    """Return a PNG's pixels as torchvision's transforms to float do; ``picture``: its path or bytes."""
    with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as opened:
        return torch.from_numpy(np.asarray(opened.convert("RGB"), np.float32) / 255)


class Pictures(Dataset):
    """A map-style data set, as torchvision's ImageFolder with a transform to float."""

    def __init__(self, paths: list[str], labels: list[int], decodes: Decodes) -> None:
        self.paths, self.labels, self.decodes = paths, labels, decodes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        self.decodes.add(1)
        return decoded(self.paths[i]), self.labels[i]


class Tokens(Dataset):
    """Rows of memory-mapped arrays."""

    def __init__(self, root: str, decodes: Decodes) -> None:
        self.x, self.y = (np.load(Path(root, f"{name}_train.npy"), mmap_mode="r") for name in "xy")
        self.decodes = decodes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        self.decodes.add(1)
        return torch.from_numpy(np.array(self.x[i])), torch.from_numpy(np.array(self.y[i]))


def tars(root: str) -> tuple[list[str], int]:
    """Return the tars of a folder and the samples in them."""
    shards = sorted(map(str, Path(root).glob("*.tar")))
    return shards, sum(len(tarfile.open(shard).getnames()) // 2 for shard in shards)


def tar_rows(shard: str) -> Iterator[tuple[bytes, int]]:
    """Yield (PNG, class) of a tar, in order, as webdataset reads tars."""
    with tarfile.open(shard, "r|") as tar:
        png = b""
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            if member.name.endswith(".png"):
                png = file.read()
            else:
                yield png, int(file.read())


class DividedFiles(IterableDataset):
    """Every n-th of ``files``, n the number of all workers of all ranks; ``rows``: file -> (picture, class)."""

    def __init__(self, files: Sequence[Any], rows: Callable[[Any], Any], decodes: Decodes, rank: int,
                 size: int) -> None:
        self.files, self.rows, self.decodes, self.rank, self.size = files, rows, decodes, rank, size

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for file in self.files[self.rank * workers + worker::self.size * workers]:
            for picture, label in self.rows(file):
                self.decodes.add(1)
                yield decoded(picture), label
