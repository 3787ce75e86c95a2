"""Law 2: the global batch of step t depends on (seed, t) only; ranks merely cut it.

Here in one process: numpy in float64 and the frameworks in fp32 over the lockstep world. Under mpirun:
tests/mpi/test_training.py. As a command for any model and data: ``python -m hvdtrain verify``, in tests/jobs.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from small_runs import (
    CLASSES,
    CUTS,
    FEATURES,
    FRAMEWORKS,
    SLOW_TENSORFLOW,
    Recut,
    apart,
    config,
    fitted,
    lockstep,
    make_model,
    replans,
    samples,
    weights,
)

from hvdtrain.comm.collectives.base import ReadyHandle
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named
from hvdtrain.core import comparison as curve_of
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.augment import Augmented
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource
from hvdtrain.planning.batch.sampler import epoch_order

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
@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_the_curve_is_one_in_float32(framework, size, tmp_path):
    make_model(framework)
    ((want, loss, _),) = lockstep(1, settings(tmp_path / "1"), lambda rank: make_model(framework), samples(N), curve)
    for shares in CUTS[size]:
        name = str(tmp_path / str(shares))
        for got in lockstep(size, settings(name, shares=shares), lambda rank: make_model(framework), samples(N), curve):
            assert apart(got[0], want) < 1e-5
            assert got[1] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_the_curve_is_one_where_owners_update_their_parts(framework, stage, tmp_path):
    """data_parallel zero: parts of the state follow neither the ranks' shares nor their number."""
    make_model(framework)
    small = settings(tmp_path / "1", exchange=ExchangeConfig(bucket_mb=0.0005))
    ((want, loss, _),) = lockstep(1, small, lambda rank: make_model(framework), samples(N), curve)
    for size in (2, 3, 4):
        for i, shares in enumerate(CUTS[size][-1:]):
            way = DataParallelConfig("zero", stage, [i, *range(1, size)])
            sized = replace(small, out=str(tmp_path / f"{size}{i}"), shares=shares, data_parallel=way)
            for got in lockstep(size, sized, lambda rank: make_model(framework), samples(N), curve):
                assert apart(got[0], want) < (1e-12 if framework == "numpy" else 1e-5)
                assert got[1] == pytest.approx(loss, rel=1e-5)


def replanned(run):
    """As `curve`, with other parts of the batch for each rank along the way."""
    run.callbacks.insert(0, Recut(replans(run.control.size)))
    return curve(run)


@pytest.mark.parametrize("framework", ["numpy", *SLOW_TENSORFLOW])
def test_the_curve_does_not_notice_a_new_plan(framework, tmp_path):
    make_model(framework)
    sized = settings(tmp_path / "1")
    ((want, loss, _),) = lockstep(1, sized, lambda rank: make_model(framework), samples(N), curve)
    for got in lockstep(3, settings(tmp_path / "3", accumulate=2), lambda rank: make_model(framework), samples(N),
                        replanned):
        assert apart(got[0], want) < (1e-12 if framework == "numpy" else 1e-5)
        assert got[1] == pytest.approx(loss, rel=1e-5)


def almost_even(n=53):
    """Pairs of opposite samples with all but opposite targets.

    A tanh network without biases is odd, so its biases' gradients cancel over the batch but for a little: what float32
    leaves of such a sum is large against them, as in a transformer, whose keys' biases have no gradient at all.
    """
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((n // 2, FEATURES)), draw.standard_normal((n // 2, CLASSES))
    rest = np.zeros((n % 2, FEATURES)), np.zeros((n % 2, CLASSES))
    return (np.concatenate([x, -x, rest[0]]).astype(np.float32),
            (np.concatenate([y, -y, rest[1]]) + 4e-4).astype(np.float32))


def zero_biases(framework):
    """Return the tiny perceptron, its biases zero, as Keras makes them."""
    model = make_model(framework)
    if framework == "torch":
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.data.zero_()
    return model


def misread(run):
    """Make the last rank read its first sample in place of its last one, in one step."""
    epoch = run.feed.epoch

    def wrong(cursor):
        for batch in epoch(cursor):
            if batch.cursor_after.step == 3 and run.control.rank == run.control.size - 1:
                swapped = [np.concatenate([array[:-1], array[:1]]) for array in batch.micros[-1]]
                batch = replace(batch, micros=[*batch.micros[:-1], tuple(swapped)])
            yield batch

    run.feed.epoch = wrong


def heavier(run):
    """Make the last rank's samples count one per cent more."""
    if run.control.rank == run.control.size - 1:
        plain = run.parts.stage.run
        run.parts.stage.run = lambda micro, scale, final, sink: plain(micro, 1.01 * scale, final, sink)


def averaged(run):
    """Average the ranks' gradients, where their sum is right."""
    wire, plain = run.collectives, run.collectives.allreduce
    wire.allreduce = lambda flat_N, name, op="sum": ReadyHandle(plain(flat_N, name, op).wait() / wire.size)


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_the_tolerance_of_the_curve_lets_rounding_pass_and_no_fault(framework, tmp_path):
    """`verify`'s tolerance, where float32 alone is beyond 1e-5: what one process does with its batch cut otherwise."""
    def trained(size, name, plant=lambda run: None, **changes):
        def work(run):
            plant(run)
            return fitted(run).parts.state.state()[0]["model"]
        changes = {"optimizer": Named("SGD", {"momentum": 0.9}), "global_batch": 53, "max_steps": 12, "lr": 0.1,
                   "metrics": [], "out": str(tmp_path / name), **changes}
        return lockstep(size, config(**changes), lambda rank: zero_biases(framework), almost_even(), work)[0]

    one = trained(1, "one")
    limit = curve_of.tolerance(one, lambda parts: trained(1, f"cut-{parts}", accumulate=parts))
    difference, name = curve_of.largest_difference(one, trained(2, "two", shares=[1, 2]))
    assert curve_of.LEAST < difference <= limit.value, (limit, name)
    for plant in (averaged, misread, heavier):
        assert curve_of.largest_difference(one, trained(2, plant.__name__, plant, shares=[1, 2]))[0] > limit.value
    assert limit.value <= curve_of.MOST


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


def test_augmented_pictures_are_cut_and_not_drawn_anew():
    draw = np.random.default_rng(0)
    pictures = ArraySource((draw.normal(size=(40, 6, 5, 3)).astype(np.float32), np.arange(40) % 4))
    augment = {"crop": 2, "flip": 0.5, "cutout": 3, "mixup": 0.4}

    def batches(size):
        feeds = [Feed(Augmented(pictures, augment, 1), 12, rank=r, size=size, seed=1) for r in range(size)]
        for steps in zip(*(feed.epoch(Cursor(epoch=2)) for feed in feeds)):
            yield [np.concatenate(parts) for parts in zip(*(micro for step in steps for micro in step.micros))]

    alone = list(batches(1))
    for size in (2, 3):
        for one, several in zip(alone, batches(size), strict=True):
            for a, b in zip(one, several, strict=True):
                np.testing.assert_array_equal(a, b)
