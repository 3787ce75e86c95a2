"""tf.data cut by shard(), for ``benchmarks input``: files of a folder are shuffled alike on all ranks, and decoded by
threads; TFRecord is cut by file and read in order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.input_rank import SEED, Decodes, Epoch, files_of


def read(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Return (samples, epoch) of the pipeline."""
    import tensorflow as tf

    threads = max(1, args.workers)

    def pixels(png: Any) -> Any:
        return tf.cast(tf.io.decode_image(png, channels=3, expand_animations=False), tf.float32) / 255.0

    def decoded(path: Any, label: Any) -> Any:
        return pixels(tf.io.read_file(path)), label

    def parsed(record: Any) -> Any:
        kinds = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}
        row = tf.io.parse_single_example(record, kinds)
        return pixels(row["image"]), row["label"]

    if args.format == "tfrecord":
        shards = sorted(map(str, Path(args.root).glob("*.tfrecord")))
        n = sum(1 for _ in tf.data.TFRecordDataset(shards))
        data = tf.data.TFRecordDataset(shards[control.rank::control.size] if len(shards) >= control.size else shards)
        data = data if len(shards) >= control.size else data.shard(control.size, control.rank)
        data = data.map(parsed, num_parallel_calls=threads)
    else:
        paths, labels = files_of(args.root)
        n = len(paths)
        data = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(n, seed=SEED)
        data = data.shard(control.size, control.rank).map(decoded, num_parallel_calls=threads)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    data = data.batch(args.batch).prefetch(2).with_options(options)

    def epoch(number: int) -> Iterator[int]:
        for x, _ in data:
            decodes.add(len(x))
            yield len(x)

    return n, epoch
