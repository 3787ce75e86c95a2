"""Keras' and TensorFlow's datasets and tensors as sources and streams of numpy arrays.

Owns the conversion only. A resumed run starts a shuffling dataset as often as the run before had.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.python.framework import op_def_registry

from hvdtrain.core.errors import UserError
from hvdtrain.data import grain_data, hugging_face
from hvdtrain.data.collate import Collated
from hvdtrain.data.layout import Columns, nested
from hvdtrain.data.objects import ObjectSource, PyDatasetStream, indexed, of_batches
from hvdtrain.data.rows import ColumnNames, columns
from hvdtrain.data.sources import ArraySource, Source, refuse_strings
from hvdtrain.data.stream import Arrays, Stream
from hvdtrain.data.stream_reading import chunk_sizes, files_identity

_BATCHES = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset",
            "_RebatchDataset", "_MapAndBatchDataset"}
_KEEPS_ELEMENTS = {"_PrefetchDataset", "_OptionsDataset", "CacheDataset", "_CacheDataset", "_RepeatDataset",
                   "_TakeDataset", "_SkipDataset", "_ShardDataset", "_ShuffleDataset", "_FilterDataset",
                   "_TakeWhileDataset", "_AssertCardinalityDataset", "_IgnoreErrorsDataset",
                   "_SnapshotDataset", "_ConcatenateDataset", "_ZipDataset", "_RestructuredDataset",
                   "_MapDataset", "_ParallelMapDataset"}
_BY_FILE = {"TFRecordDatasetV2", "TextLineDatasetV2", "FixedLengthRecordDatasetV2", "_FlatMapDataset",
            "_InterleaveDataset", "_ParallelInterleaveDataset", "ParallelInterleaveDataset", "_FilterDataset"}
_BY_ELEMENT = {"_MapDataset", "_ParallelMapDataset", "_ShuffleDataset", "_PrefetchDataset", "_OptionsDataset",
               "_RepeatDataset", "CacheDataset", "_CacheDataset", "_TensorSliceDataset"}
"""Steps that give the same samples whichever files they are given together; those `_BY_FILE` not after batches."""
_READS, _MAPS = _BY_FILE - {"_FilterDataset"}, {"_MapDataset", "_ParallelMapDataset"}
_READERS = {"TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "FixedLengthRecordDatasetV2"}
"""Operations that open files by name."""
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def adapt(obj: Any, seed: int = 0, rows: ColumnNames = ColumnNames(nests=True)) -> Source | Stream | None:
    """Return ``obj`` as a `Source` or `Stream`; None if it is nothing of TensorFlow's or Keras'.

    A tensor or a tuple or list of tensors: an `ArraySource`.
    A `keras.utils.PyDataset`: a `Stream` whose chunks are its items; see `hvdtrain.data.objects.PyDatasetStream`.
    A `tf.data.Dataset`: a `Stream`; see `DatasetStream`. Both carry their own order.
    A ``datasets.Dataset``: see `hvdtrain.data.hugging_face`; ``seed`` is that of its collator's masks.
    Data of grain: see `hvdtrain.data.grain_data`.
    Any other object that `indexed` takes: an `ObjectSource`, or a `Collated` with a collator in ``rows``.
    An element is a tensor, a tuple, or a dict, whose columns ``rows`` takes by name; so is a dict of whole columns.
    Where x, y or sample_weight is itself a dict or tuple of arrays, its leaves are laid flat and ``layout`` tells how.
    Errors: `UserError` for a dataset without an end, and for one that ranks would read in different orders.
    """
    if of_batches(obj):
        return PyDatasetStream(obj, rows, _array)
    if isinstance(obj, tf.data.Dataset):
        return DatasetStream(obj, rows)
    if (theirs := hugging_face.adapted(obj, seed, rows, _array)) is not None:
        return theirs
    if (grains := grain_data.adapted(obj, rows, _array)) is not None:
        return grains
    if (named := columns(obj, rows.for_source(), _array)) is not None:
        return named
    parts = obj if isinstance(obj, (tuple, list)) else (obj,)
    if 1 < len(parts) <= 3 and any(nested(part) for part in parts):
        return Columns(parts)
    tensors = [tf.is_tensor(part) for part in parts]
    if any(tensors) and all(is_tensor or isinstance(p, np.ndarray) for is_tensor, p in zip(tensors, parts)):
        return ArraySource([_array(part) for part in parts])
    if not indexed(obj):
        return None
    return ObjectSource(obj, rows, _array) if rows.collate is None else Collated(obj, rows, seed, _array)


class _Elements:
    """Conversion of a stream's elements to arrays; ``layout`` exists once the first nested one has been read."""

    rows: ColumnNames

    @property
    def layout(self) -> Any:
        """The structure of nested x and y."""
        return self.rows.layout

    def arrays(self, element: Any) -> Arrays:
        return self.rows.arrays(element, _array)


class DatasetStream(_Elements):
    """A finite `tf.data.Dataset`; one iteration is one epoch.

    Its elements are batches if its outermost transformation makes batches. Those that pass elements on (prefetch,
    options, cache, shuffle, take, repeat, filter and so on) are looked through, and so is a map whose results all keep
    the batch axis; zip and concatenate count if all their inputs do. Everything else is samples. Errors: `UserError` if
    its cardinality is infinite, if it shuffles without a seed, or asks for an order that may differ from run to run.
    Hosts may divide its files, ``num_shards``, as TensorFlow's own strategies do.
    """

    def __init__(self, dataset: Any, rows: ColumnNames = ColumnNames(nests=True)) -> None:
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise UserError("the tf.data.Dataset has no end", "one epoch's worth of elements",
                            "remove .repeat(), since the trainer repeats; or add .take(n)")
        for node in _nodes(dataset):
            _check_order(node)
        if dataset.options().deterministic is False:
            raise UserError("the tf.data.Dataset has options().deterministic = False",
                            "the same order on every rank",
                            "leave deterministic unset")
        self.dataset, self.rows = untuned(dataset), rows.for_source()
        self.batched = _is_batched(dataset)
        self.epochs_started = 0
        self._left: Iterator[Any] | None = None
        nodes = list(_nodes(dataset))
        self._shuffles = sum(type(node).__name__ == "_ShuffleDataset" for node in nodes)
        self._draws_late = any(type(node).__name__ == "_RepeatDataset" or len(_inputs(node)) > 1 for node in nodes)

    @cached_property
    def num_shards(self) -> int:
        """Return the number of files; 0 where it is not known, or where the samples depend on how they are divided."""
        chain = _chain(self.dataset)
        files = max(0, int(chain[-1].cardinality())) if chain else 0
        try:
            return files if files > 1 and _sharded(self.dataset, 2, 0) is not None else 0
        except tf.errors.OpError:  # TensorFlow finds no files either
            return 0

    @cached_property
    def identity(self) -> str:
        """Return a hash of the graph and the files; "" where a step calls Python, draws random numbers, keeps variables
        or opens other files, which may differ between ranks.
        """
        chain = _chain(self.dataset) if self.num_shards else []
        by_name = next((i for i, node in enumerate(reversed(chain)) if _kind(node) in _READS), 0)
        if not by_name or any(_kind(node) in _MAPS for node in chain[-by_name:]):
            return ""
        names, graph = list(chain[-1].as_numpy_iterator()), _graph(self.dataset)
        if not all(isinstance(name, bytes) for name in names) or not _is_pure(graph, names):
            return ""
        files = files_identity(map(os.fsdecode, names))
        for node in graph.node:  # numbers of this process' datasets
            node.attr.pop("metadata", None)
            node.name = node.name.partition("/")[0] if node.name.startswith("FileIdentity/") else node.name
        return files and hashlib.sha256(repr([_named_alike(graph), files]).encode()).hexdigest()

    def shard(self, num_shards: int, index: int) -> DatasetStream:
        """Return the stream of a part of the files."""
        stream = copy.copy(self)  # with the same rows, whose layout the first element tells
        stream.dataset, stream.epochs_started, stream._left = _sharded(self.dataset, num_shards, index), 0, None
        return stream

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        """Yield the elements of ``epoch``; one started before is read in the order that comes next."""
        if self._left is not None:
            self._draw(self._left)
        while self.epochs_started < epoch:
            self._draw(iter(self.dataset))
            self.epochs_started += 1
        self.epochs_started += 1
        try:
            self._left = elements = self.dataset.as_numpy_iterator()
        except TypeError as error:  # elements that are datasets themselves, and the like
            raise UserError(f"the tf.data.Dataset cannot be read as arrays: {error}",
                            "elements of plain tensors",
                            "map it to (x, y) or (x, y, sample_weight)") from None
        if self.batched:
            yield from map(self.arrays, elements)
            self._left = None
            return
        for n in chunk_sizes():
            if not (chunk := [self.arrays(element) for element in itertools.islice(elements, n)]):
                break
            yield _stacked(chunk)
        self._left = None

    def _draw(self, iterator: Iterator[Any]) -> None:
        """Have an epoch that is not read draw from the seeds of all shuffles, so that the next one is as it would be.

        The outermost shuffle draws with a new iterator, others with its first element, those behind a repeat or in one
        of several inputs later.
        """
        if self._shuffles and self._draws_late:
            for _ in iterator:
                pass
        elif self._shuffles > 1:
            next(iterator, None)


def _named_alike(graph: Any) -> list[str]:
    """Return the parts of a graph as text, its functions named by their order: their numbers count all of a process."""
    names = sorted((function.signature.name for function in graph.library.function), key=_number)
    order = {name: f"{name.rstrip('0123456789')}{i}" for i, name in enumerate(names)}
    texts = map(text_format.MessageToString, (*graph.node, *graph.library.function))
    return sorted(_QUOTED.sub(lambda found: f'"{order.get(found[1], found[1])}"', text) for text in texts)


def _number(name: str) -> int:
    return int(name[len(name.rstrip("0123456789")):] or 0)


def _array(part: Any) -> np.ndarray:
    if not isinstance(part, (tuple, list, Mapping, tf.RaggedTensor, tf.SparseTensor)):
        array = np.asarray(part)
        if not array.dtype.hasobject and array.dtype.kind not in "SU":
            return array
        refuse_strings(array, "a dataset element")
    raise UserError(f"a dataset element holds a {type(part).__qualname__}, not a plain array of numbers",
                    "arrays or numbers, in a flat tuple",
                    "map the dataset to (x, y) or (x, y, sample_weight)")


def _stacked(samples: list[Arrays]) -> Arrays:
    shapes = {tuple(part.shape for part in sample) for sample in samples}
    if len(shapes) > 1:
        raise UserError(f"samples of the tf.data.Dataset have the shapes {sorted(shapes)[:4]}", "one shape",
                        "pad or crop them, or use .padded_batch()")
    return tuple(np.stack(column) for column in zip(*samples))


def _inputs(dataset: Any) -> list[Any]:
    return list(getattr(dataset, "_inputs", list)())


def _nodes(dataset: Any) -> Iterator[Any]:
    yield dataset
    for node in _inputs(dataset):
        yield from _nodes(node)


def _kind(node: Any) -> str:
    return type(node).__name__


def _chain(dataset: Any) -> list[Any]:
    """Return the steps from ``dataset`` down to the dataset of the files, which it reads one by one; [] where a step
    counts elements or mixes files.
    """
    node, by_file, chain = dataset, False, list[Any]()
    while True:
        kind, inputs = _kind(node), _inputs(getattr(node, "_impl", node))
        chain.append(node)
        batches = kind in ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset") and not by_file
        if not (_is_batched(dataset) if batches else kind in _BY_FILE | _BY_ELEMENT) or len(inputs) > 1:
            return []
        if bool(np.asarray(getattr(node, "_drop_remainder", False))) or np.asarray(
                getattr(node, "_filename", b"")).item():  # of a cache
            return []
        by_file = by_file or kind in _BY_FILE
        if not inputs:
            return chain if by_file else []
        node = inputs[0]


_OWN_STATE = {"ShuffleDatasetV3": (4, "DummySeedGenerator"), "CacheDatasetV2": (2, "DummyMemoryCache")}
"""Steps with state that copies of a dataset share: their input for it, and the operation that makes a new one."""
_OF_DATASETS = {"DummySeedGenerator", "DummyMemoryCache", "DummyIterationCounter", "_Retval", "TensorDataset",
                "TensorSliceDataset", "RangeDataset", "BatchDatasetV2", "ParallelBatchDataset", "PaddedBatchDatasetV2",
                "MapDataset", "ParallelMapDatasetV2", "FlatMapDataset", "InterleaveDataset", "FilterDataset",
                "ParallelInterleaveDatasetV2", "ParallelInterleaveDatasetV3", "ParallelInterleaveDatasetV4",
                "ShuffleDatasetV3", "PrefetchDataset", "OptionsDataset", "RepeatDataset", "CacheDatasetV2",
                "TakeDataset", "SkipDataset", *_READERS}
"""Operations of a dataset's graph that give all ranks the same, although some count as stateful."""
_OF_NAMES = {"Const", "Identity", "Reshape", "ExpandDims", "NoOp"}
"""Operations that leave the names of files as they are."""
_COMPRESSIONS = {b"", b"ZLIB", b"GZIP"}
"""Texts in a reading function that are no names of files."""
_OTHER_INPUT = {"PyFuncStateless", "ReadFile", "MatchingFiles", "ImmutableConst"}
"""Operations without state whose results depend on more than their inputs."""


def _sharded(dataset: Any, num_shards: int, index: int) -> tf.data.Dataset:
    """Return part ``index`` of ``num_shards`` of the dataset's files, with shuffles and caches of its own.

    Errors: `tf.errors.OpError` where TensorFlow finds no files.
    """
    flat, graph = tf.nest.flatten(dataset.element_spec), _graph(dataset)
    for node in [node for node in graph.node if node.op in _OWN_STATE]:
        place, op = _OWN_STATE[node.op]
        own = graph.node.add(name=f"{node.name}/own", op=op)
        node.input[place] = own.name
    variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString()),
        num_workers=num_shards, index=index,
        output_types=[spec.dtype for spec in flat], output_shapes=[spec.shape for spec in flat],
        auto_shard_policy=int(tf.data.experimental.AutoShardPolicy.FILE))
    return tf.data.experimental.from_variant(variant, dataset.element_spec).with_options(dataset.options())


def _graph(dataset: Any) -> Any:
    return tf.compat.v1.GraphDef.FromString(tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1).numpy())  # 1: ignore


def _is_pure(graph: Any, names: Iterable[bytes]) -> bool:
    """Return whether a dataset's graph and the contents of the files ``names`` determine the elements."""
    bodies = {function.signature.name: function.node_def for function in graph.library.function}
    if not all(_is_pure_op(node.op) for body in (graph.node, *bodies.values()) for node in body):
        return False
    # A file that a function opens must be one of ``names``: it comes to the function, or through others, as it is.
    reading, grown = {name for name, body in bodies.items() if any(node.op in _READERS for node in body)}, True
    while grown:
        callers = {name for name, body in bodies.items() if any(_calls(node, reading) for node in body)}
        grown, reading = not callers <= reading, reading | callers
    known = _COMPRESSIONS | {*names}
    return all(_keeps_name(node, known) for node in graph.node if node.op == "Const") and all(
        _keeps_name(node, _COMPRESSIONS) for name in reading for node in bodies[name])


def _calls(node: Any, functions: set[str]) -> bool:
    return any(one.name in functions for value in node.attr.values() for one in (value.func, *value.list.func))


def _is_pure_op(op: str) -> bool:
    known = op_def_registry.get(op)
    return op in _OF_DATASETS or "Dataset" not in op and op not in _OTHER_INPUT and (
        known is not None and not known.is_stateful)


def _keeps_name(node: Any, known: set[bytes]) -> bool:
    if node.op == "Const" and node.attr["dtype"].type == tf.string.as_datatype_enum:
        texts = tf.io.parse_tensor(node.attr["value"].tensor.SerializeToString(), tf.string).numpy()
        return set(np.reshape(texts, -1).tolist()) <= known
    return node.op in _OF_NAMES or node.op in _OF_DATASETS


def _check_order(node: Any) -> None:
    if type(node).__name__ == "_ShuffleDataset" and int(node._seed) == int(node._seed2) == 0:
        raise UserError("the tf.data.Dataset shuffles without a seed",
                        "the same order on every rank and after a resume",
                        "write .shuffle(..., seed=0)")
    if str(getattr(node, "_deterministic", "default")).lower() == "false":
        raise UserError("a step of the tf.data.Dataset has deterministic=False",
                        "the same order on every rank",
                        "leave deterministic unset")


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return ``dataset`` without the thread that tunes its parallelism while it runs, unless ``autotune.enabled`` is
    set.

    If an iterator ends just as that thread goes to sleep, the end waits until it wakes, up to 60 s (measured with
    TensorFlow 2.21: docs/how-to/keras.md), and all ranks wait for this one. AUTOTUNE then means the default.
    """
    if dataset.options().autotune.enabled is not None or not type(dataset).__module__.startswith("tensorflow."):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _is_batched(dataset: Any) -> bool:
    kind, inputs = type(dataset).__name__, _inputs(dataset)
    if kind in _BATCHES:
        return True
    if kind not in _KEEPS_ELEMENTS or not inputs or not all(_is_batched(node) for node in inputs):
        return False
    return "MapDataset" not in kind or _leading(dataset) - {None} <= _leading(inputs[0])


def _leading(dataset: Any) -> set[Any]:
    """Return the sizes of the first axis in the element spec: None if unknown, "none" for a scalar."""
    shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in tf.nest.flatten(dataset.element_spec)]
    return {None if shape.rank is None else shape[0] if shape.rank else "none" for shape in shapes}
