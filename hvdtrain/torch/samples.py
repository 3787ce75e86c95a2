"""Samples that `hvdtrain.torch.shard` takes: datasets, tensors, arrays and the parts of a `DataLoader`.

Owns which objects these are and how a `DataLoader` reads them. Which rank reads what is `hvdtrain.torch.data`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from hvdtrain.backends.torch.data import DatasetSource, adapt
from hvdtrain.core.errors import UserError
from hvdtrain.data.objects import indexed
from hvdtrain.data.sources import ArraySource, Source

MOST_COLUMNS = 3
"""Tensors of a list that are (x, y, weight) rather than samples."""


class _Columns(Dataset):
    """Tensors whose first axis is samples, read by whole batches; ``single``: items are no lists."""

    def __init__(self, columns: Sequence[torch.Tensor], single: bool) -> None:
        self._columns, self._single = columns, single

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, rows: Any) -> Any:
        read = [column[rows] for column in self._columns]
        return read[0] if self._single else read

    def __getitems__(self, rows: list[int]) -> Any:
        return self[torch.as_tensor(rows, device=self._columns[0].device)]


def _as_read(batch: Any) -> Any:
    return batch


def _columns(dataset: Any) -> list[Any] | None:
    """Return a tensor, array, tuple or list of them, or `TensorDataset` as columns; None for anything else."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    parts = list(dataset) if isinstance(dataset, (tuple, list)) else [dataset]
    return parts if parts and all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts) else None


def source_of(dataset: Any) -> Source:
    """Return ``dataset`` as what its samples are compared by. Errors: `UserError` for what `shard` does not take."""
    if isinstance(dataset, IterableDataset):
        raise UserError(f"hvd.shard of an IterableDataset ({type(dataset).__qualname__})",
                        "samples by number: a map-style Dataset, or tensors",
                        "read it into a list or an array, or train with hvdtrain.Trainer, which divides streams")
    columns = _columns(dataset)
    if columns is not None and isinstance(dataset, list) and len(columns) > MOST_COLUMNS:
        raise UserError(f"hvd.shard of a list of {len(columns)} tensors", "samples, or columns of samples",
                        "give samples as torch.stack(samples) or a DataLoader of the list, columns as a tuple")
    if columns is not None:
        found = adapt(columns)
        return found if isinstance(found, ArraySource) else ArraySource(columns)
    if isinstance(dataset, Dataset) or indexed(dataset):
        return DatasetSource(dataset)
    raise UserError(f"hvd.shard of a {type(dataset).__qualname__}",
                    "a Dataset with len() and samples by number, tensors or arrays, or a DataLoader",
                    "give it as one of these, such as hvd.shard((x, y), global_batch)")


def readable(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> tuple[Any, Any]:
    """Return the dataset and ``collate_fn`` for a `DataLoader`; columns are read by whole batches."""
    columns = _columns(dataset)
    if columns is None:
        return dataset, collate_fn
    tensors = [torch.as_tensor(column) for column in columns]
    if collate_fn in (None, default_collate):
        return _Columns(tensors, not isinstance(dataset, (tuple, list, TensorDataset))), _as_read
    return TensorDataset(*tensors), collate_fn


def shuffles(loader: DataLoader) -> bool:
    """Return whether a `DataLoader` shuffles. Errors: `UserError` for an order that `shard` does not know."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if loader.batch_sampler is None or _name(loader.batch_sampler) == "BatchSampler":
        if _name(sampler) in ("DistributedSampler", "StatefulDistributedSampler"):
            return bool(sampler.shuffle)
        if _name(sampler) == "RandomSampler" and not sampler.replacement and sampler._num_samples is None:
            return True
        if _name(sampler) == "SequentialSampler":
            return False
        got = type(sampler).__qualname__
    else:
        got = type(loader.batch_sampler).__qualname__
    raise UserError(f"hvd.shard of a DataLoader with a {got}", "one that shuffles, or does not",
                    "give shuffle=True or False, or the dataset in the sampler's order")


def _name(sampler: Any) -> str:
    """Return the class name of a sampler of PyTorch or torchdata, "" of a user's own."""
    kind = type(sampler)
    return kind.__name__ if kind.__module__.partition(".")[0] in ("torch", "torchdata") else ""
