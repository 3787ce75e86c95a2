"""PyTorch's datasets, loaders and tensors as sources and streams of numpy arrays.

Owns the conversion only. A ``sampler`` shuffles by its seed and the epoch, never by torch's global generator (dropout).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from hvdtrain.backends.torch.worker_memory import collation
from hvdtrain.core.errors import UserError
from hvdtrain.data import grain_data, hugging_face
from hvdtrain.data.collate import Collated
from hvdtrain.data.objects import PyDatasetStream, indexed, of_batches, refuse_other_types, tidy
from hvdtrain.data.rows import ColumnNames, columns
from hvdtrain.data.sources import ArraySource, Source, refuse_strings
from hvdtrain.data.stream import Arrays, Stream
from hvdtrain.data.stream_reading import chunk_sizes


def adapt(obj: Any, seed: int = 0, rows: ColumnNames = ColumnNames()) -> Source | Stream | None:
    """Return ``obj`` as a `Source` or `Stream`; None if it is nothing of PyTorch's.

    A tensor, a tuple or list of tensors, a `TensorDataset`: an `ArraySource` that shares their memory. Another
    map-style `Dataset`, or any object that `indexed` takes: a `Source`; samples are put together by torch's own
    ``default_collate``. An `IterableDataset`: a `Stream` of its samples, read again each epoch; ``set_epoch(epoch)`` is
    called if there is one. A `DataLoader`: a `Stream` of its batches, each epoch shuffled from (its generator's seed or
    ``seed``, epoch), with its own ``collate_fn`` and workers. ``drop_last`` drops from the end of the stream; the
    loader's batch size is not the run's. A `PyDataset` of Keras: a `Stream` of its items. A sample or batch is a
    tensor, a flat tuple or list, or a dict or dataclass, whose columns ``rows`` takes by name; so is a dict of whole
    columns. A ``datasets.Dataset``: see `hvdtrain.data.hugging_face`; data of grain: `hvdtrain.data.grain_data`. With a
    collator in ``rows``, a `Dataset` is a `Collated`.

    Errors: `UserError` for a `DistributedSampler` (the feed divides batches) and for values that are not numeric.
    """
    if isinstance(obj, DataLoader):
        return (StatefulLoaderStream if hasattr(obj, "load_state_dict") else LoaderStream)(obj, seed, rows)
    if isinstance(obj, IterableDataset):
        return IterableStream(obj, rows)
    if of_batches(obj):
        return PyDatasetStream(obj, rows, _array)
    if isinstance(obj, TensorDataset):
        return ArraySource([_array(tensor) for tensor in obj.tensors])
    if (theirs := hugging_face.adapted(obj, seed, rows, _array)) is not None:
        return theirs
    if (grains := grain_data.adapted(obj, rows, _array)) is not None:
        return grains
    if isinstance(obj, Dataset) or indexed(obj):
        return DatasetSource(obj, rows) if rows.collate is None else Collated(obj, rows, seed, _array)
    if (named := columns(obj, rows.for_source(), _array)) is not None:
        return named
    parts = obj if isinstance(obj, (tuple, list)) else (obj,)
    if any(isinstance(part, torch.Tensor) for part in parts) and all(
            isinstance(part, (torch.Tensor, np.ndarray)) for part in parts):
        return ArraySource([_array(part) for part in parts])
    return None


class _Named:
    """Rows of a dataset as arrays; ``layout`` is known once a row with nested inputs has been read."""

    rows: ColumnNames

    @property
    def layout(self) -> Any:
        """Structure of nested inputs of a Keras model."""
        return self.rows.layout

    def read(self, batch: Any) -> Arrays:
        """Return a collated batch as a flat tuple of numpy arrays."""
        return self.rows.arrays(batch, _array)


class DatasetSource(_Named):
    """A map-style `Dataset` or another object of samples, sample by sample (or by its ``__getitems__``).

    Random numbers that it draws in ``__getitem__`` come from generators that law 2 does not cover.
    """

    def __init__(self, dataset: Any, rows: ColumnNames = ColumnNames()) -> None:
        if not hasattr(dataset, "__len__"):
            raise UserError(f"the dataset {type(dataset).__qualname__} has no len()",
                            "a map-style Dataset with __len__",
                            "add __len__, or make it an IterableDataset")
        self.dataset, self.rows = dataset, rows.for_source()
        self._types: list[np.dtype] = []

    @property
    def subset_indices(self) -> tuple[np.ndarray, ...]:
        """Indices of a `Subset`, such as `random_split` draws them, and of those within it."""
        found: list[np.ndarray] = []
        inner = self.dataset
        while isinstance(inner, Subset):
            found.append(np.asarray(inner.indices))
            inner = inner.dataset
        return tuple(found)

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices_n: np.ndarray) -> Arrays:
        indices = indices_n.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(indices) if callable(many) else [self.dataset[i] for i in indices]
        arrays = self.read(_collated(samples))
        refuse_other_types(self._types, arrays)
        return arrays


class IterableStream(_Named):
    """An `IterableDataset`: one iteration is one epoch, in the consumer's process.

    The dataset, its iterator, or both may have ``state_dict`` and ``load_state_dict``, as torchdata takes them.
    ``num_shards``: files that hosts may divide, by the dataset's ``shard(num_shards, index)``; 0: none.
    """

    def __init__(self, dataset: Any, rows: ColumnNames = ColumnNames()) -> None:
        self.dataset, self.rows = dataset, rows.for_source()
        self.num_shards = hugging_face.files_of(dataset)
        self._samples: Any = None
        self._state: Any = None

    @property
    def identity(self) -> str:
        """Return a text that determines the samples; "" where none does."""
        return hugging_face.identity_of(self.dataset)

    def shard(self, num_shards: int, index: int) -> IterableStream:
        """Return the stream of a part of the files."""
        stream = copy.copy(self)  # with the same rows, whose layout the first sample tells
        stream.dataset = self.dataset.shard(num_shards, index)
        stream._samples = stream._state = None
        return stream

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        _set_epoch(self.dataset, epoch)
        samples: Any = iter(self.dataset)
        self._samples = samples
        state, self._state = self._state, None
        if state is not None:
            samples.load_state_dict(state)
        for n in chunk_sizes():
            if not (chunk := list(itertools.islice(samples, n))):
                return
            yield self.read(_collated(chunk))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the place after the latest chunk; None where neither the dataset nor its iterator has one."""
        owners = {"dataset": self.dataset, "iterator": self._samples}
        found = {name: without_tensors(owner.state_dict()) for name, owner in owners.items()
                 if hasattr(owner, "load_state_dict")}
        return found or None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Have the next epoch that is opened begin at ``state``."""
        state = state or {}
        self._samples, self._state = None, with_tensors(state.get("iterator"))
        if "dataset" in state:
            self.dataset.load_state_dict(with_tensors(state["dataset"]))  # type: ignore[attr-defined]


class LoaderStream(_Named):
    """A `DataLoader`: one iteration is one epoch; its batches are the chunks.

    ``num_shards``: as of `IterableStream`; 0 where batches make samples: with ``drop_last`` or a ``collate_fn``.
    """

    num_shards = 0

    def __init__(self, loader: DataLoader, seed: int = 0, rows: ColumnNames = ColumnNames()) -> None:
        for sampler in _samplers(loader):
            if isinstance(sampler, DistributedSampler):
                raise UserError("the DataLoader has a DistributedSampler",
                                "a loader of the whole data on every rank",
                                "remove the sampler: the trainer divides each global batch over the ranks")
        self.loader, self.rows = loader, rows.for_source()
        # A sampler of torchdata has a generator in any case, of a random seed where none was given.
        seeded = [own for own in _samplers(loader) if not type(own).__module__.startswith("torchdata.")]
        owned = [getattr(owner, "generator", None) for owner in (loader, *seeded)]
        self.seed = next((own.initial_seed() for own in owned if own is not None), seed)
        by_sample = not loader.drop_last and loader.collate_fn in (default_collate, default_convert)
        # The copy of a loader with a state would share the state.
        if by_sample and isinstance(loader.dataset, IterableDataset) and not hasattr(loader, "load_state_dict"):
            self.num_shards = hugging_face.files_of(loader.dataset)

    @property
    def identity(self) -> str:
        """Return a text that determines the samples; "" where none does."""
        known = self.num_shards and self.loader.worker_init_fn is None  # a function of the user's may ask for the rank
        of_data = hugging_face.identity_of(self.loader.dataset) if known else ""
        return of_data and f"{of_data}, {self.loader.batch_size} by {self.loader.num_workers}"

    def shard(self, num_shards: int, index: int) -> LoaderStream:
        """Return the stream of a loader of a part of the files."""
        stream, loader, dataset = copy.copy(self), copy.copy(self.loader), vars(self.loader)["dataset"]
        vars(loader).update(dataset=dataset.shard(num_shards, index), _iterator=None)  # it refuses to be set
        stream.loader = loader
        return stream

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        for owner in (self.loader.dataset, *_samplers(self.loader)):
            _set_epoch(owner, epoch)
        with _seeded(self.loader, self.seed, epoch):
            for batch in self.loader:
                yield self.read(batch)


class StatefulLoaderStream(LoaderStream):
    """A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``."""

    _open = False

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        self._open = True
        try:
            yield from super().chunks(epoch)
        finally:
            self._open = False

    def state_dict(self) -> dict[str, Any] | None:
        """Return the place after the latest batch; None where the loader itself would read up to it."""
        if not self._open:
            return self._start()
        state: dict[str, Any] = self.loader.state_dict()  # type: ignore[attr-defined]
        if isinstance(self.loader.dataset, IterableDataset) and not _of_dataset(state):
            return None
        return dict(without_tensors(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch that is opened begin at ``state``."""
        start = set(state) <= {_START}
        if _START in state:
            self.loader.dataset.load_state_dict(with_tensors(state[_START]))  # type: ignore[attr-defined]
        self.loader.load_state_dict({} if start else with_tensors(state))  # type: ignore[attr-defined]

    def _start(self) -> dict[str, Any]:
        """Return the state of a fresh loader, whose own would start its workers; theirs are copies of the dataset."""
        dataset: Any = self.loader.dataset
        if self.loader.num_workers or not all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict")):
            return {}
        return {_START: without_tensors(dataset.state_dict())}


_TENSOR, _START = "torch.Tensor", "dataset at its start"


def without_tensors(state: Any) -> Any:
    """Return ``state`` with arrays in place of tensors, for `with_tensors`."""
    if isinstance(state, torch.Tensor):
        return {_TENSOR: state.detach().cpu().numpy()}
    if isinstance(state, Mapping):
        return {key: without_tensors(value) for key, value in state.items()}
    return type(state)(map(without_tensors, state)) if type(state) in (list, tuple) else state


def with_tensors(state: Any) -> Any:
    """Undo `without_tensors`."""
    if isinstance(state, Mapping):
        if set(state) == {_TENSOR}:
            return torch.from_numpy(state[_TENSOR].copy())
        return {key: with_tensors(value) for key, value in state.items()}
    return type(state)(map(with_tensors, state)) if type(state) in (list, tuple) else state


def _of_dataset(state: Any) -> bool:
    """Return whether a loader's state holds one of its `IterableDataset` or its iterator."""
    return isinstance(state, Mapping) and any(
        value is not None if key in ("dataset_state", "dataset_iter_state") else _of_dataset(value)
        for key, value in state.items())


def _collated(samples: list[Any], collate: Callable[[list[Any]], Any] = default_collate) -> Any:
    """Collate samples as `tidy` gives them. Errors: `UserError` for what PyTorch cannot collate."""
    try:
        return collate([tidy(sample) for sample in samples])
    except (TypeError, KeyError, RuntimeError) as error:
        if "memory" in str(error):
            raise
        raise UserError(f"samples of type {type(samples[0]).__qualname__} cannot be collated: {error}",
                        "tensors, arrays or numbers of the same shapes, in a tuple, dict or dataclass",
                        "return (x, y) or (x, y, sample_weight), or give a DataLoader a collate_fn") from None


def _array(part: Any) -> np.ndarray:
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        return (part.float() if part.dtype is torch.bfloat16 else part).numpy()  # numpy has no bfloat16
    if isinstance(part, np.ndarray) and not part.dtype.hasobject:
        return part
    if isinstance(part, (list, tuple, np.ndarray)):
        refuse_strings(part, "a sample")
    raise UserError(f"a sample holds a {type(part).__qualname__} after collation",
                    "tensors, arrays or numbers, in a flat tuple",
                    "return (x, y) or (x, y, sample_weight), or give the DataLoader a collate_fn")


def _samplers(loader: DataLoader) -> list[Any]:
    """Return the loader's samplers, outermost first."""
    found: list[Any] = []
    inner: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while inner is not None:
        found.append(inner)
        inner = getattr(inner, "sampler", None)
    return found


def _set_epoch(owner: Any, epoch: int) -> None:
    set_epoch = getattr(owner, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


@contextlib.contextmanager
def _seeded(loader: DataLoader, seed: int, epoch: int) -> Iterator[None]:
    """Give the loader and its samplers one generator of (seed, epoch) for the body, and a collation of dataclasses."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    owners = [owner for owner in (loader, *_samplers(loader)) if hasattr(owner, "generator")]
    before = [owner.generator for owner in owners]
    for owner in owners:
        owner.generator = generator
    collate = loader.collate_fn
    if collate is default_collate:
        loader.collate_fn = partial(_collated, collate=collation(loader.num_workers))
    try:
        yield
    finally:
        loader.collate_fn = collate
        for owner, old in zip(owners, before):
            owner.generator = old
