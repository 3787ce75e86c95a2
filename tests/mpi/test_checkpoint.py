"""A checkpoint of several ranks: who holds whose state meanwhile, and whether each gets its own back."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, config, fitted, samples

from hvdtrain.assemble import assemble
from hvdtrain.backends.numpy.model import Model
from hvdtrain.checkpoint import session
from hvdtrain.checkpoint.transfer import collect, own_group
from hvdtrain.config import Exchange
from hvdtrain.errors import UserError
from hvdtrain.protocols.state import Shard

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
MIB = 2**20


def test_only_the_writer_holds_the_state_of_others(control):
    own = Shard(own_group(control.rank), "residual", (20 * MIB,), 0, np.full(20 * MIB, control.rank, np.uint8))
    control.barrier("made")
    tracemalloc.start()
    tensors = collect(control, [own])
    peak = tracemalloc.get_traced_memory()[1] / MIB
    tracemalloc.stop()
    peaks = control.gather(peak)
    others = 20 * (control.size - 1)
    assert others <= peaks[0] < others + 2 and max(peaks[1:]) < 2, peaks
    assert all((tensors[own_group(r)]["residual"] == r).all() for r in range(control.size if control.rank == 0 else 0))


def test_a_rank_that_cannot_give_its_state_is_every_ranks_error(control):
    def shards():
        yield Shard(own_group(control.rank), "seed", (3,), 0, np.zeros(3))
        if control.rank == control.size - 1:
            raise UserError("the device is lost", "a device", "look at it")

    with pytest.raises(UserError, match=rf"rank {control.size - 1} on host \S+: the device is lost"):
        collect(control, shards())
    assert control.agree(True)


def test_each_rank_gets_its_residuals_and_generators_back(control, tmp_path):
    out = control.bcast(str(tmp_path / "run"))
    settings = config(global_batch=4 * control.size, max_steps=3, out=out, compression="int8",
                      exchange=Exchange(bucket_mb=0.0005))

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
