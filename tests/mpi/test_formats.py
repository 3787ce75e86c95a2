"""Shards of each format: ranks decode each sample once per epoch, and train as one process on arrays."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shards import ENDINGS, FORMATS, write_shards
from small_runs import CUTS, Recut, apart, config, fitted, make_model, replans, samples, solo, weights

from hvdtrain.config import DataConfig
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import resolve
from hvdtrain.engine.assemble import assemble
from hvdtrain.planning.batch.sampler import epoch_order

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
N, BATCH, EPOCHS = 59, 16, 2


@pytest.mark.parametrize("kind", FORMATS)
def test_every_rank_reads_its_share_of_the_same_batches(control, few_ranks, kind, tmp_path):
    package = {"parquet": "pyarrow", "hf": "datasets", "tfrecord": "google_crc32c"}.get(kind, "numpy")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (x, y), root = samples(N), Path(control.bcast(str(tmp_path)))
    if control.rank == 0:
        write_shards(root, kind, x, y)
    control.barrier("written")
    files = str(root / f"*.{ENDINGS[kind]}")
    source = resolve(kind, {"files": files, **({"cache": str(root / "hf")} if kind == "hf" else {})}, "train")
    feed = Feed(source, BATCH, rank=control.rank, size=control.size, shares=CUTS[control.size][1], control=control,
                seed=3, prefetch=2)
    steps = [(batch.numbers, [micro[i] for micro in batch.micros for i in range(2)])
             for batch in feed.epoch(Cursor().next_epoch())]
    ranks = control.gather((steps, feed.walk.decodes))
    assert sum(decodes for _, decodes in ranks) == N
    order = epoch_order(N, 3, 1, True)
    for t, at in enumerate(range(0, N, BATCH)):
        parts = [steps[t] for steps, _ in ranks]
        numbers = np.concatenate([numbers for numbers, _ in parts])
        assert np.array_equal(numbers, order[at:at + BATCH])
        for column, whole in enumerate((x, y)):
            got = np.concatenate([arrays[column] for _, arrays in parts if arrays])
            assert got.dtype == whole.dtype and np.array_equal(got, whole[numbers]), "the same bits on any ranks"


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.world_size(3)),
                                       pytest.param("tensorflow", marks=pytest.mark.world_size(2))])
def test_law2_holds_and_samples_are_decoded_once(control, few_ranks, framework, tmp_path):
    """With TensorFlow as one process on arrays; with PyTorch as one process on the same shards, one of them damaged."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    (x, y), root, damaged = samples(N), Path(control.bcast(str(tmp_path))), framework == "torch"
    if control.rank == 0:
        write_shards(root, "tfrecord", x, y)
        if damaged:
            flip_bit(root / "part-01.tfrecord", 500)
    control.barrier("written")
    data = DataConfig(name="tfrecord", args={"files": str(root / "*.tfrecord")}, prefetch=2, workers=1)
    settings = config(global_batch=BATCH, epochs=EPOCHS, max_steps=0, out=str(root / "run"), collectives="mpi",
                      data=data, on_bad_sample="skip" if damaged else "stop")
    run = assemble(settings, make_model(framework))
    run.callbacks[:0] = [Recut(replans(control.size))]
    fitted(run).feed.data.pool.close()
    alone = replace(settings, out=str(tmp_path / "solo"), collectives="auto", data=replace(data, prefetch=0, workers=0))
    want = fitted(solo(alone, make_model(framework), None if damaged else (samples(N), None)))
    assert apart(weights(run), weights(want)) < 1e-5
    assert run.ledger.get("unread", 0) == want.ledger.get("unread", 0) == damaged * EPOCHS
    assert run.ledger["epochs"] == EPOCHS and not run.ledger["unchecked"]
    if control.rank == 0:
        last = json.loads((root / "run" / "log.jsonl").read_text().splitlines()[-1])
        # Each sample once per epoch, over all ranks; a share with a damaged one is fetched again without it.
        assert 0 <= last["decodes"] - N * EPOCHS <= damaged * EPOCHS * BATCH


def flip_bit(path, at):
    """Damage a file at one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
