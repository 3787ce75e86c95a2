"""Law 2 over a resumption: a run that continues with other ranks, shares or batches follows the curve it was on.

Bit-equal with the same ranks and shares; elsewhere within the least tolerance of `python -m hvdtrain verify`, while the
ledger finds each sample exactly once. Here in one process; over other wires: tests/mpi/test_resume_wires.py. Whole jobs
that are killed: tests/jobs/test_resume.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from small_runs import SLOW_TENSORFLOW, apart, bits, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.comparison import LEAST

N, BATCH, STEPS, STOP = 107, 53, 12, 5
"""Steps of 53, 53 and 1 samples: the first part stops between two steps of an epoch."""

WAYS = [(2, [3, 1]), (1, []), (3, [5, 0, 2]), (4, [])]
"""(ranks, shares) that a run of 2 ranks with shares 3:1 continues with; the first are its own."""


def settings(out, **changes):
    return config(global_batch=BATCH, out=str(out), optimizer=Named("SGD", {"momentum": 0.5}), epochs=STEPS // 3,
                  checkpoint=CheckpointConfig(), **changes)


def ended(run):
    """(weights, their hash, loss, the ledger's epochs and gaps) of a fit."""
    fitted(run)
    return weights(run), bits(run), run.state.loss, (run.ledger["epochs"], run.ledger["unchecked"])


@pytest.mark.parametrize("framework", ["numpy", *SLOW_TENSORFLOW])
def test_a_resumed_run_follows_the_curve_on_any_ranks(framework, tmp_path):
    make_model(framework)  # skips where it is not installed

    def train(name, ranks, shares, **changes):
        return lockstep(ranks, settings(tmp_path / name, shares=shares, **changes), lambda rank: make_model(framework),
                        samples(N), ended)

    (want, want_bits, loss, _), _ = train("whole", 2, [3, 1])
    train("half", 2, [3, 1], max_steps=STOP)
    for at, (ranks, shares) in enumerate(WAYS):
        name = f"{ranks} ranks {shares}"
        shutil.copytree(tmp_path / "half", tmp_path / name)
        for got, got_bits, got_loss, ledger in train(name, ranks, shares, resume="auto"):
            assert apart(got, want) < (1e-12 if framework == "numpy" else LEAST), name
            assert got_loss == pytest.approx(loss, rel=1e-5) and ledger == (STEPS // 3, [])
            assert got_bits == want_bits or at > 0, "the same ranks and shares give the same bits"


def test_a_resumed_run_may_take_another_global_batch(tmp_path):
    """Its curve is another from there on; that each sample comes once is not."""
    first = settings(tmp_path / "run", max_steps=STOP)
    lockstep(2, first, lambda rank: make_model("numpy"), samples(N), fitted)
    again = replace(first, max_steps=0, global_batch=17, resume="auto")
    found = lockstep(3, again, lambda rank: make_model("numpy"), samples(N), ended)
    assert [ledger for *_, ledger in found] == [(STEPS // 3, [])] * 3
