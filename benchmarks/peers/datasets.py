"""Hugging Face's datasets over Parquet, for ``benchmarks input``: DataLoader and DistributedSampler."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.input_rank import SEED, Decodes, Epoch


def read(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Return (samples, epoch) of the loader."""
    import torch
    from datasets import load_dataset
    from PIL import Image
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    files = sorted(map(str, Path(args.root).glob("*.parquet")))

    def decoded(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        decodes.add(len(rows["label"]))
        pictures = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.float32) / 255 for png in rows["image"]]
        return {"image": [torch.from_numpy(x) for x in pictures], "label": rows["label"]}

    def loaded() -> Any:
        return load_dataset("parquet", data_files=files, split="train", cache_dir=f"{args.root}/cache")

    if control.rank == 0:
        loaded()  # makes the cache, which the others read
    control.barrier("cache")
    rows: Any = loaded().with_transform(decoded)
    sampler: Any = DistributedSampler(rows, control.size, control.rank, seed=SEED)
    loader: Any = DataLoader(rows, args.batch, sampler=sampler, num_workers=args.workers,
                             persistent_workers=args.workers > 0)

    def epoch(number: int) -> Iterator[int]:
        sampler.set_epoch(number)
        for batch in loader:
            yield len(batch["label"])

    return len(rows), epoch
