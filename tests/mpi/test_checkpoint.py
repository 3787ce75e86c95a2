"""A checkpoint of several ranks: who holds whose state meanwhile, and whether each gets its own back."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, config, fitted, samples

from hvdtrain.backends.numpy.model import Model
from hvdtrain.checkpoint import read_snapshot, weights, write_snapshot
from hvdtrain.checkpoint.stream import PIECE_BYTES, StreamedContent, head, in_order, local_pieces
from hvdtrain.checkpoint.transfer import arriving, fetch, receive_shards, send_shards
from hvdtrain.config import ExchangeConfig
from hvdtrain.core.protocols.run import Head, Shard, Want
from hvdtrain.engine import session
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
MIB = 2**20
OWN_MIB = 40


def peak_of(work):
    """Return what ``work`` returns, and the most MiB that it held at once beside what was there."""
    tracemalloc.start()
    try:
        value = work()
        return value, tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("way", [pytest.param("channel", marks=pytest.mark.world_size(2, 3)),
                                 pytest.param("control plane", marks=pytest.mark.world_size(3))])
def test_no_rank_ever_holds_the_whole_state(control, tmp_path, way):
    """Each rank has 40 MiB of one tensor. Saved, loaded and exported by pieces of 16 MiB, of which few are at hand."""
    out, rank, size = Path(control.bcast(str(tmp_path))) / "a", control.rank, control.size
    n, channel = OWN_MIB * MIB // 4, control.channel()
    values = np.arange(rank * n, (rank + 1) * n, dtype=np.int32)
    shards = in_order([Shard("model", "w", (size * n,), rank * n, values)])
    control.barrier("made")

    def save():
        if way == "channel" and rank:
            send_shards(channel, {}, shards)
            return
        if way == "channel":
            came = [({}, [head(one) for one in shards], local_pieces(shards)),
                    *(receive_shards(channel, r) for r in range(1, size))]
            content = StreamedContent([heads for _, heads, _ in came], [pieces for *_, pieces in came],
                                      {"framework": "torch"})
        else:
            heads_P = [[Head(*one) for one in row] for row in control.gather([tuple(head(one)) for one in shards])]
            content = StreamedContent(heads_P, arriving(control, heads_P, shards), {"framework": "torch"})
        if rank == 0:
            write_snapshot(out, content)
        else:
            content.drain()

    def load():
        kept = read_snapshot(out) if rank == 0 else None
        heads = [Head("model", "w", (size * n,), "<i4", 0, size * n)]
        return fetch(control, kept, [Want("model", "w", rank * n, (rank + 1) * n)], heads)

    def export():
        return weights.write(read_snapshot(out), out.parent / "w.safetensors") if rank == 0 else 0

    few = 2.5 * PIECE_BYTES / MIB
    _, saved = peak_of(save)
    control.barrier("saved")
    back, loaded = peak_of(load)
    _, exported = peak_of(export)
    assert (back["model"]["w"] == values).all()
    peaks = control.gather((saved, loaded - OWN_MIB, exported))
    assert max(max(row) for row in peaks) < few < size * OWN_MIB, peaks
    if rank == 0:
        written = read_snapshot(out).tensors["model"]["w"]
        assert (written == np.arange(size * n, dtype=np.int32)).all()
        assert (out.parent / "w.safetensors").read_bytes()[-written.nbytes:] == written.tobytes()
    control.barrier("looked")
    if channel is not None:
        channel.free()


def test_each_rank_gets_its_residuals_and_generators_back(control, tmp_path):
    out = control.bcast(str(tmp_path / "run"))
    settings = config(global_batch=4 * control.size, max_steps=3, out=out, compression="int8",
                      exchange=ExchangeConfig(bucket_mb=0.0005))

    def run():
        return assemble(settings, Model((FEATURES, 16, CLASSES), dtype="float32"), samples(60))

    first = fitted(run())
    own = first.rank_state()
    assert any(np.abs(a).max() > 0 for n, a in own.items() if n.startswith("compressor.") and a.dtype == np.float32)
    assert len(set(control.gather(own["python.words"].tobytes()))) == control.size
    assert session.save(first) == ""
    np.random.random(7)
    again = run()
    session.restore(again, session.find(out, None, print) if control.rank == 0 else None)
    back = again.rank_state()
    assert {n: a.tobytes() for n, a in back.items()} == {n: a.tobytes() for n, a in own.items()}
    assert again.state.cursor == first.state.cursor
