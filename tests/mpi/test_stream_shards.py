"""A stream whose files hosts divide: each sample decoded and trained on once, the exact mean, resume on other hosts.

The hosts are made up: ranks of one machine, of which only those of a "host" share memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, config, fitted, make_model, samples, solo, weights

from hvdtrain.cluster.control import MpiControl
from hvdtrain.cluster.messages.shared_memory import SharedMemoryCarrier
from hvdtrain.config import CheckpointConfig, DataConfig, DataParallelConfig, RebalanceConfig
from hvdtrain.data.stream_reading import HEAD_ROWS
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(180)]
HOSTS = {2: [[0], [1]], 3: [[0], [1], [2]], 4: [[0, 1], [2, 3]]}
OTHER_HOSTS = {2: [[0, 1]], 3: [[0, 1], [2]], 4: [[0], [1], [2, 3]]}
SIZES = [30, 8, 20, 30, 20, 12, 30]
N, EPOCHS = sum(SIZES), 2


class Hosts(MpiControl):
    """The ranks of a job on hosts that are made up."""

    def __init__(self, comm, hosts):
        super().__init__(comm.Dup(), 60.0)
        self.hosts = hosts

    def shared_carrier(self):
        host = self._comm.Split(next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks), self.rank)
        carrier = SharedMemoryCarrier.make(host, self.rank, self.timeout_s)
        host.Free()
        return carrier


class Seen(Callback):
    """First features of the samples that this rank has trained on, by epoch."""

    where = "all"

    def __init__(self):
        self.rows = []

    def step_end(self, run):
        batch = run.state.batch
        firsts = [float(x) for micro in batch.micros for x in np.asarray(micro[0])[:, 0]]
        self.rows += [(batch.cursor_after.epoch, x) for x in firsts]


def stream_of(framework, folder, sizes, rank):
    """Return a stream of the samples in files of ``sizes``: text files, or JSON lines of Hugging Face's or a generator.
    """
    x, y = samples(sum(sizes))
    cuts = np.cumsum([0, *sizes]).tolist()
    if framework == "tensorflow":
        import tensorflow as tf

        names = [f"{folder}/{len(sizes)}-{i}.txt" for i in range(len(sizes))]
        written(rank, names, cuts, lambda i: " ".join(map(repr, [*x[i].tolist(), int(y[i])])))

        def parsed(line):
            numbers = tf.strings.to_number(tf.strings.split(line), tf.float64)
            return tf.reshape(tf.cast(numbers[:-1], tf.float32), x.shape[1:]), tf.cast(numbers[-1], tf.int64)

        return tf.data.TextLineDataset(names).map(parsed).shuffle(9, seed=4)
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    if len(set(sizes)) == 1:
        names = [f"{folder}/{i}.jsonl" for i in range(len(sizes))]
        written(rank, names, cuts, lambda i: json.dumps({"x": x[i].tolist(), "y": int(y[i])}))
        return datasets.load_dataset("json", data_files=names, split="train", streaming=True).with_format("torch")

    def rows(files):
        for low, high in files:
            yield from ({"x": row.tolist(), "y": int(label)} for row, label in zip(x[low:high], y[low:high]))

    return datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"files": list(zip(cuts, cuts[1:]))}).with_format("torch")


def written(rank, names, cuts, line):
    """Write each of the files on rank 0, from which all read; the same on a second call."""
    for name, low, high in zip(names, cuts, cuts[1:]) if rank == 0 else ():
        Path(f"{name}.new").write_text("".join(line(i) + "\n" for i in range(low, high)))
        Path(f"{name}.new").rename(name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_hosts_divide_the_files_of_a_stream(control, comm, framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    if control.size == (4 if framework == "tensorflow" else 2):
        pytest.skip("PyTorch runs with 3 and 4 ranks, TensorFlow with 2 and 3, to keep the whole short")
    out = control.bcast(str(tmp_path))

    def trained(hosts, sizes, folder, **more):
        settings = replace(config(epochs=EPOCHS, out=f"{out}/{folder}", eval_every=0, **more),
                           data=DataConfig(prefetch=2, workers=0, shuffle_buffer=9 * (framework == "torch")))
        model = make_model(framework)  # before the stream: it sets the global seed, which a shuffle takes too
        streams = [stream_of(framework, out, sizes, 0)] if control.rank == 0 else []
        control.barrier("the files are there")
        streams = streams or [stream_of(framework, out, sizes, control.rank)]
        run, seen = assemble(settings, model, streams[0], Hosts(comm, hosts)), Seen()
        run.callbacks.insert(0, seen)
        fitted(run)
        return run, sum(control.gather(seen.rows), [])

    hosts, even = HOSTS[control.size], [12] * 6
    run, rows = trained(hosts, even, "even", global_batch=sum(even))
    assert any(f"{len(hosts)} hosts divide the stream's 6 files" in note and "law 2" in note for note in run.notes)
    settings = replace(run.config, out=f"{out}/alone{control.rank}", data=DataConfig(workers=0))
    alone = fitted(solo(settings, make_model(framework), samples(sum(even))))
    assert run.state.cursor.step == EPOCHS and apart(weights(run), weights(alone)) < 1e-5, "the mean over all samples"
    assert run.ledger["epochs"] == EPOCHS and not run.ledger["unchecked"]
    if control.rank == 0:
        last = json.loads((Path(run.out) / "log.jsonl").read_text().splitlines()[-1])
        # None to compare the ranks, whose files are the same. Where a process of TensorFlow's has made other graphs
        # before than its peers, names in its graph may differ: then the ranks compare the first samples.
        more = control.size * HEAD_ROWS if framework == "tensorflow" else 0
        assert last["decodes"] in (EPOCHS * sum(even), EPOCHS * sum(even) + more)

    x, _ = samples(N)
    want = sorted((epoch, float(first)) for epoch in range(EPOCHS) for first in x[:, 0])
    stopped = {"global_batch": 16, "checkpoint": CheckpointConfig(at_end=True), "accumulate": 2, "balance": "auto",
               "rebalance": RebalanceConfig(probe_s=0.05, probe_cache=False),
               "data_parallel": DataParallelConfig("zero", stage=2)}
    _, before = trained(hosts, SIZES, "stopped", max_steps=4, **stopped)
    run, after = trained(OTHER_HOSTS[control.size], SIZES, "stopped", resume="auto", max_steps=13, **stopped)
    assert control.rank or any("are read again by a host" in note for note in run.notes)
    seen, step = Seen(), run.state.cursor.step
    if control.rank == 0:  # the last epoch was divided too; one rank reads the rest of its shards
        alone = solo(replace(run.config, max_steps=0, resume="auto", data_parallel=DataParallelConfig()),
                     make_model(framework), stream_of(framework, out, SIZES, control.rank))
        alone.callbacks.insert(0, seen)
        fitted(alone)
        assert step == 13 < alone.state.cursor.step, "it trained on"
        assert alone.ledger["epochs"] == EPOCHS and not alone.ledger["unchecked"]
    control.barrier("the rest is read")
    rest = sum(control.gather(seen.rows), [])
    assert sorted([*before, *after, *rest]) == want, "each sample once: more files a host, fewer, one host"
