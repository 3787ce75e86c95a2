"""torch's DataLoader under a DistributedSampler, for ``benchmarks input``: its workers are kept between epochs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.input_rank import SEED, Decodes, Epoch, files_of


def read(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Return (samples, epoch) of the loader."""
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    torch.set_num_threads(1)
    paths, labels = files_of(args.root)

    class Pictures(Dataset):
        """A map-style data set, as torchvision's ImageFolder with a transform to float."""

        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, i: int) -> tuple[Any, int]:
            decodes.add(1)
            with Image.open(paths[i]) as picture:
                x = np.asarray(picture.convert("RGB"), np.float32) / 255
            return torch.from_numpy(x), labels[i]

    pictures = Pictures()
    sampler: Any = DistributedSampler(pictures, control.size, control.rank, seed=SEED)
    loader: Any = DataLoader(pictures, args.batch, sampler=sampler, num_workers=args.workers,
                             persistent_workers=args.workers > 0)

    def epoch(number: int) -> Iterator[int]:
        sampler.set_epoch(number)
        for x, _ in loader:
            yield len(x)

    return len(pictures), epoch
