"""Law 2: the global batch of step t depends on (seed, t) only; ranks merely cut it.

Here in one process: numpy in float64 and the frameworks in fp32 over the lockstep world. Under mpirun:
tests/mpi/test_training.py. As a command for any model and data: ``python -m hvdtrain verify``, in tests/jobs.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from small_runs import (CUTS, FRAMEWORKS, Recut, apart, config, fitted, lockstep, make_model, replans, samples,
                        weights)

from hvdtrain.config import Named
from hvdtrain.data.cursor import Cursor
from hvdtrain.data.sampler import epoch_order

N, BATCH, STEPS = 107, 53, 20
"""Steps of 53, 53 and 1 samples: no world size divides the batch, and the last one is shorter than any world."""


def settings(tmp_path, **changes):
    return config(global_batch=BATCH, max_steps=STEPS, out=str(tmp_path), optimizer=Named("SGD", {"momentum": 0.5}),
                  **changes)


def curve(run):
    """Weights after the run and its last loss."""
    fitted(run)
    return weights(run), run.state.loss, run.state.cursor


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_curve_is_one_in_float64(size, tmp_path):
    ((want, loss, cursor),) = lockstep(1, settings(tmp_path / "1"), lambda rank: make_model("numpy"), samples(N), curve)
    assert cursor.step == STEPS
    assert apart(want, [param for _, param in sorted(make_model("numpy").params.items())]) > 0.01
    for shares in CUTS[size]:
        name = str(tmp_path / str(shares))
        for got in lockstep(size, settings(name, shares=shares), lambda rank: make_model("numpy"), samples(N), curve):
            assert apart(got[0], want) < 1e-12
            assert got[1] == pytest.approx(loss, rel=1e-12) and got[2] == cursor


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_curve_is_one_in_float32(framework, size, tmp_path):
    make_model(framework)
    ((want, loss, _),) = lockstep(1, settings(tmp_path / "1"), lambda rank: make_model(framework), samples(N), curve)
    for shares in CUTS[size]:
        name = str(tmp_path / str(shares))
        for got in lockstep(size, settings(name, shares=shares), lambda rank: make_model(framework), samples(N), curve):
            assert apart(got[0], want) < 1e-5
            assert got[1] == pytest.approx(loss, rel=1e-5)


def replanned(run):
    """As `curve`, with other parts of the batch for each rank along the way."""
    run.callbacks.insert(0, Recut(replans(run.control.size)))
    return curve(run)


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_the_curve_does_not_notice_a_new_plan(framework, tmp_path):
    make_model(framework)
    sized = settings(tmp_path / "1")
    ((want, loss, _),) = lockstep(1, sized, lambda rank: make_model(framework), samples(N), curve)
    for got in lockstep(3, settings(tmp_path / "3", accumulate=2), lambda rank: make_model(framework), samples(N),
                        replanned):
        assert apart(got[0], want) < (1e-12 if framework == "numpy" else 1e-5)
        assert got[1] == pytest.approx(loss, rel=1e-5)


def batches_of(run, cursor):
    """Every step's arrays of this rank."""
    with contextlib.closing(run.feed.epoch(cursor)) as batches:
        return [[np.concatenate(parts) for parts in zip(*batch.micros)] for batch in batches]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_ranks_parts_are_the_global_batch_in_order(size, epoch):
    x, _ = samples(N)
    index = np.arange(N)
    order_N = epoch_order(N, 5, epoch, True)
    cursor = Cursor(epoch, 3 * epoch)
    for shares in CUTS[size]:
        rows = lockstep(size, config(global_batch=BATCH, shares=shares, seed=5, accumulate=2),
                        lambda rank: make_model("numpy"), (x, index), lambda run: batches_of(run, cursor))
        for t, parts in enumerate(zip(*rows)):
            joined = [part for part in parts if part]
            got = np.concatenate([part[1] for part in joined])
            assert got.tolist() == order_N[t * BATCH:(t + 1) * BATCH].tolist()
            assert np.concatenate([part[0] for part in joined]).tobytes() == x[got].tobytes()


def test_another_seed_is_another_order_and_ranks_share_it():
    orders = [epoch_order(N, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(N)) for order in orders)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_depends_on_the_cut_is_said_at_start(framework):
    """The named exceptions: BatchNorm over a rank's own samples, and dropout."""
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")

        def build(rank):
            return torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.1),
                                       torch.nn.Linear(6, 5))
    else:
        pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
        keras = pytest.importorskip("keras", reason="Keras is not installed")

        def build(rank):
            return keras.Sequential([keras.Input((12,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                                     keras.layers.Dropout(0.1), keras.layers.Dense(5)])
    for notes in lockstep(2, config(), build, samples(9), lambda run: " ".join(run.notes)):
        assert "BatchNorm" in notes and "dropout" in notes
    (notes,) = lockstep(1, config(), build, samples(9), lambda run: run.notes)
    assert not notes
    assert not any(lockstep(2, config(), lambda rank: make_model(framework), samples(9), lambda run: run.notes))
