"""webdataset over tars, for ``benchmarks input``: each worker reads files of its own in order and shuffles a buffer.

Samples of one rank's files never reach another rank's batches: less of a shuffle than a permutation of all.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.input_rank import SEED, Decodes, Epoch
from benchmarks.peers.dataloader import decoded, tars

BUFFER = 1000  # samples that a worker shuffles


def read(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Return (samples, epoch) of the loader."""
    import torch
    import webdataset

    torch.set_num_threads(1)
    shards, n = tars(args.root)

    def counted(png: bytes) -> torch.Tensor:
        decodes.add(1)
        return decoded(png)

    data = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=SEED, empty_check=False,
                                 nodesplitter=lambda files: itertools.islice(files, control.rank, None, control.size))
    data = data.shuffle(BUFFER, seed=SEED).to_tuple("png", "cls").map_tuple(counted, int)
    loader = webdataset.WebLoader(data, batch_size=args.batch, num_workers=args.workers,
                                  persistent_workers=args.workers > 0)

    def epoch(number: int) -> Iterator[int]:
        for x, _ in loader:
            yield len(x)

    return n, epoch
