"""Time breakdown of several ranks on every transport: each second once, and the slow rank is the straggler."""

from __future__ import annotations

import json
import time

import pytest
from small_runs import FRAMEWORKS, config, fitted, make_model, samples

from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.seconds import Seconds

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
STEPS, SLOW_S = 12, 0.1  # in all longer than a rank may wait for another's first step, which is traced


def recorded(run):
    """Return the "seconds" of the log."""
    lines = map(json.loads, (run.out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == "seconds"]


@pytest.mark.parametrize("wire", ["auto", "horovod"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_slow_rank_is_waited_for(control, framework, wire, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    if control.size != 3:
        pytest.skip("who waits for whom takes two that wait and one that is slow: tried on 3 ranks")
    settings = config(global_batch=24, max_steps=STEPS, epochs=STEPS, collectives=wire,
                      out=control.bcast(str(tmp_path / "run")))
    run = assemble(settings, make_model(framework), samples(48))
    slow, inner = control.size - 1, run.parts.stage.run
    if control.rank == slow:
        def late(*args):
            time.sleep(SLOW_S)
            return inner(*args)

        run.parts.stage.run = late
    run.callbacks = [callback for callback in run.callbacks if not isinstance(callback, Seconds)] + [Seconds(0.1)]
    began = time.perf_counter() - run.timeline.clock.seconds()["start"]
    fitted(run)
    took_s = time.perf_counter() - began
    records = control.bcast(recorded(run) if control.rank == 0 else [])
    assert len(records) > 1
    total_P = [sum(sum(record["ranks"][rank].values()) for record in records) for rank in range(control.size)]
    assert total_P[control.rank] == pytest.approx(took_s, rel=0.02, abs=0.05)
    assert all(seconds >= 0 for record in records for of_rank in record["ranks"] for seconds in of_rank.values())
    waited = {(r, k): sum(s for record in records for rr, kk, s in record["waits"] if (rr, kk) == (r, k))
              for r in range(control.size) for k in range(control.size)}
    for rank in range(control.size - 1):
        assert waited[rank, slow] > 0.7 * STEPS * SLOW_S
        assert waited[rank, slow] > waited[slow, rank] and waited[rank, rank] == 0
