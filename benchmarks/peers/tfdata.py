"""tf.data cut by shard(), for ``benchmarks input``: files are shuffled alike on all ranks, and decoded by threads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.input_rank import SEED, Decodes, Epoch, files_of


def read(args: argparse.Namespace, control: Any, decodes: Decodes) -> tuple[int, Epoch]:
    """Return (samples, epoch) of the pipeline."""
    import tensorflow as tf

    paths, labels = files_of(args.root)
    threads = max(1, args.workers)

    def decoded(path: Any, label: Any) -> Any:
        picture = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        return tf.cast(picture, tf.float32) / 255.0, label

    data = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths), seed=SEED)
    data = data.shard(control.size, control.rank).map(decoded, num_parallel_calls=threads)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    data = data.batch(args.batch).prefetch(2).with_options(options)

    def epoch(number: int) -> Iterator[int]:
        for x, _ in data:
            decodes.add(len(x))
            yield len(x)

    return len(paths), epoch
