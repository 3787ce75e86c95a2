"""Training for real: both frameworks over both transports, compared on every rank with one process alone.

The reference is computed in this very process by `small_runs.solo`, so law 2 is checked at whatever number of ranks
the job has.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from small_runs import (
    CLASSES,
    CUTS,
    FEATURES,
    FRAMEWORKS,
    Record,
    apart,
    bits,
    config,
    fitted,
    make_model,
    samples,
    solo,
    weights,
)

from hvdtrain.cluster import horovod
from hvdtrain.config import CheckpointConfig, DataConfig, ExchangeConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
FEW = pytest.mark.usefixtures("few_ranks")
N, BATCH = 107, 53
"""Steps of 53, 53 and 1 samples: no world size divides the batch, and the last one is shorter than any world."""


@pytest.fixture
def out(control, tmp_path):
    """Return a directory of rank 0's that all ranks name alike, and one of this rank's own."""
    return control.bcast(str(tmp_path / "run")), str(tmp_path / "solo")


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


@pytest.fixture(params=["horovod", "mpi", "shared"])
def wire(request, framework):
    return usable(request.param, framework)


def usable(wire, framework):
    reason = horovod.horovod_reason(framework) if wire == "horovod" else None
    if reason:
        pytest.skip(reason)
    return wire


def distributed(control, settings, model, data, *callbacks):
    """Return a run over all ranks of this job."""
    run = assemble(settings, model, data)
    assert run.control.size == control.size
    run.callbacks[:0] = callbacks
    return run


def same_bits(control, run):
    """Every rank holds the same bits."""
    found = control.gather(bits(run))
    assert len(set(found)) == 1, found


def alone(settings, framework, out, data, seed=0):
    """Return the same training in one process."""
    return fitted(solo(replace(settings, out=out[1], collectives="auto"), make_model(framework, seed), data))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return, by framework, a function of weights and loss that one process trains, and weights that it begins with.

    Neither the transport nor the shares change them, so one run serves all cases.
    """
    made = {}

    def of(framework, settings):
        if framework not in made:
            out = tmp_path_factory.mktemp("solo")
            runs = [solo(replace(settings, out=str(out / name), collectives="auto"), make_model(framework), samples(N))
                    for name in ("untrained", "trained")]
            fitted(runs[1])
            made[framework] = weights(runs[1]), runs[1].state.loss, weights(runs[0])
        return made[framework]

    return of


@pytest.mark.parametrize("cut", [pytest.param(0, marks=pytest.mark.tensorflow_size(2)),
                                 pytest.param(-1, marks=pytest.mark.tensorflow_size(3))], ids=["equal", "unequal"])
def test_law2_twenty_steps_follow_one_process(control, framework, wire, cut, out, one_process):
    settings = config(global_batch=BATCH, max_steps=20, collectives=wire, out=out[0], shares=CUTS[control.size][cut],
                      optimizer=Named("SGD", {"momentum": 0.5}))
    run = fitted(distributed(control, settings, make_model(framework), samples(N)))
    assert run.collectives.name == wire
    assert run.state.cursor.step == 20
    same_bits(control, run)
    trained, loss, untrained = one_process(framework, settings)
    assert apart(trained, untrained) > 0.05
    assert apart(weights(run), trained) < 1e-5
    assert run.state.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.tensorflow_size(3)
def test_a_global_batch_smaller_than_the_world(control, framework, out):
    settings = config(global_batch=max(1, control.size - 1), max_steps=6, out=out[0])
    run = fitted(distributed(control, settings, make_model(framework), samples(10)))
    same_bits(control, run)
    assert apart(weights(run), weights(alone(settings, framework, out, samples(10)))) < 1e-5


@pytest.mark.tensorflow_size(3)
def test_accumulation_with_clipping_is_the_whole_batch(control, framework, out):
    settings = config(global_batch=23, max_steps=8, out=out[0], accumulate=3, micro_batch=3, clip_norm=0.3,
                      shares=CUTS[control.size][-1], optimizer=Named("Adam"), lr=0.01)
    run = fitted(distributed(control, settings, make_model(framework), samples(60)))
    same_bits(control, run)
    plain = replace(settings, accumulate=1, micro_batch=0)
    reference = alone(plain, framework, out, samples(60))
    assert apart(weights(run), weights(reference)) < 2e-4  # Adam magnifies the rounding of gradients near zero
    assert run.state.grad_norm == pytest.approx(reference.state.grad_norm, rel=1e-3)


@FEW
@pytest.mark.parametrize("kind", ["horovod", "shared"])
def test_a_task_that_throws_gradients_away_trains_like_one_process(control, kind, out, monkeypatch):
    """``zero_grad()`` sets ``.grad`` to None; the next gradient is summed all the same."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.nn import functional as F

    import torch_models.mlp

    def task(model, batch):
        model.zero_grad()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    monkeypatch.setattr(torch_models.mlp, "task", task, raising=False)
    args = {"in_features": 12, "hidden": [16], "classes": 5}
    settings = config(model="torch_models.mlp:build", model_args=args, global_batch=23, max_steps=5)
    run = fitted(assemble(replace(settings, collectives=usable(kind, "torch"), out=out[0]), None, samples(60)))
    same_bits(control, run)
    reference = fitted(solo(replace(settings, out=out[1]), None, samples(60)))
    assert apart(weights(run), weights(reference)) < 1e-5


def test_a_gradient_that_comes_twice_is_refused(control, out):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.utils.checkpoint import checkpoint
    if control.size == 1:
        pytest.skip("one rank exchanges nothing, and gradients may come as they like")

    class Twice(torch.nn.Module):
        """A layer under two reentrant checkpoints, each of which runs a backward of its own."""

        def __init__(self):
            super().__init__()
            self.linear, self.head = torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, x):
            x = x.clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(lambda t: torch.tanh(self.linear(t)), x, use_reentrant=True)
            return self.head(x)

    run = assemble(config(global_batch=24, max_steps=1, collectives="mpi", out=out[0],
                          exchange=ExchangeConfig(bucket_mb=1e-4)), Twice(), samples(24))
    with pytest.raises(UserError, match="use_reentrant=False"):
        loop.fit(run)


@pytest.mark.tensorflow_size(2)
@FEW
def test_ranks_seeded_apart_start_alike(control, framework, wire, out):
    model = make_model(framework, seed=10 + control.rank)
    run = assemble(config(collectives=wire, out=out[0]), model, samples(20))
    same_bits(control, run)
    root = solo(config(out=out[1]), make_model(framework, seed=10), samples(20))
    assert bits(run) == bits(root)


@pytest.mark.tensorflow_size(2)
@FEW
def test_evaluation_over_uneven_shards_is_exact(control, framework, out):
    data = samples(20), samples(29, seed=1)
    settings = config(global_batch=8, out=out[0], shares=CUTS[control.size][-1])
    runs = (distributed(control, settings, make_model(framework), data),
            solo(replace(settings, out=out[1]), make_model(framework), data))
    got, want = (loop.measure(run, run.eval_feed) for run in runs)
    assert len({repr(sorted(m.items())) for m in control.gather(got)}) == 1
    assert got.keys() == want.keys() and {"loss", "accuracy"} <= got.keys()
    assert got["accuracy"] == pytest.approx(want["accuracy"], abs=1e-9)
    assert got["accuracy"] * 29 == pytest.approx(round(got["accuracy"] * 29), abs=1e-6)
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)


def stream(framework, n):
    """``n`` samples that can only be read in order, as the framework's own dataset."""
    x, y = samples(60)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x[:n], y[:n]))
    import torch

    class Reader(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(torch.from_numpy(x[:n]), torch.from_numpy(y[:n])))

    return Reader()


@pytest.mark.tensorflow_size(2)
@FEW
def test_streams_follow_one_process(control, framework, out):
    settings = config(global_batch=16, epochs=2, out=out[0])
    run = fitted(distributed(control, settings, make_model(framework), stream(framework, 41)))
    assert run.state.cursor.step == 6  # 16, 16 and 9 samples, twice
    same_bits(control, run)
    reference = fitted(solo(replace(settings, out=out[1]), make_model(framework), stream(framework, 41)))
    assert apart(weights(run), weights(reference)) < 1e-5


@pytest.mark.tensorflow_size(3)
@FEW
def test_streams_of_uneven_length_end_together(control, framework, out):
    settings = config(global_batch=16, epochs=2, out=out[0], data=DataConfig(prefetch=0, workers=0, readers="each"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 is told that the streams differ
        run = fitted(distributed(control, settings, make_model(framework), stream(framework, 20 + 11 * control.rank)))
    assert len(set(control.gather(run.state.cursor))) == 1
    assert run.state.cursor.step == 2 * -(-(20 + 11 * (control.size - 1)) // 16)
    same_bits(control, run)


def with_norm(framework):
    """Return a model with BatchNorm."""
    if framework == "torch":
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, CLASSES))
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                             keras.layers.Dense(CLASSES)])


def statistics(run):
    """Return running means and variances, by name."""
    return [a.astype(np.float64) for n, a in sorted(run.parts.state.state()[0]["model"].items())
            if n.endswith(("running_mean", "running_var", "moving_mean", "moving_variance"))]


@pytest.mark.tensorflow_size(2)
@FEW
def test_batchnorm_statistics_become_their_mean_over_ranks(control, framework, wire, out):
    settings = config(global_batch=8 * control.size, max_steps=4, out=out[0], collectives=wire)
    run = distributed(control, settings, with_norm(framework), samples(8 * control.size * 3))
    for batch in run.feed.epoch(run.state.cursor):
        loop.train_step(run, batch)
    own = control.gather(statistics(run))
    assert len(own[0]) == 2
    if control.size > 1:
        assert any(apart(own[0], other) > 1e-3 for other in own[1:])
        assert any("BatchNorm" in note for note in run.notes)
    run.parts.buffers.sync()
    same_bits(control, run)
    assert apart(statistics(run), [np.mean(rows, axis=0) for rows in zip(*own)]) < 1e-6


class WishAt(Callback):
    """A callback that asks one rank to stop and to save at a step."""

    where = "all"

    def __init__(self, stop_at, save_at):
        self.stop_at, self.save_at = stop_at, save_at

    def step_end(self, run):
        if run.control.rank == run.control.size - 1:
            if run.state.cursor.step == self.save_at:
                run.want_save()
            if run.state.cursor.step == self.stop_at:
                run.want_stop(f"rank {run.control.rank} has seen enough")


@pytest.mark.tensorflow_size(2)
def test_law6_the_wish_of_one_rank_is_everyones(control, framework, out):
    record = Record()
    settings = config(global_batch=8, max_steps=12, out=out[0])
    wish = WishAt(stop_at=7, save_at=3)
    run = fitted(distributed(control, settings, make_model(framework), samples(40), wish, record))
    assert control.gather((run.state.cursor.step, run.state.stop, record.saved_at)) == [
        (8, f"rank {control.size - 1} has seen enough", [4])] * control.size


@FEW
@pytest.mark.parametrize("mode", [pytest.param("skip", marks=pytest.mark.tensorflow_size(3)),
                                  pytest.param("stop", marks=pytest.mark.tensorflow_size(2))])
def test_law6_a_nan_on_one_rank_is_everyones(control, framework, mode, out):
    x, y = samples(24)
    x[-1] = np.nan  # unshuffled, the last sample of the third batch of 8 is the last rank's
    record = Record()
    settings = config(global_batch=8, epochs=1, out=out[0], nan_guard=mode, data=replace(config().data, shuffle=False))
    run = distributed(control, settings, make_model(framework), (x, y), record)
    if mode == "stop":
        with pytest.raises(UserError, match=rf"not finite at step 2 on rank {control.size - 1};"):
            loop.fit(run)
    else:
        fitted(run)
        assert run.state.cursor.step == 3 and record.non_finite_at == [2]
    assert np.isfinite(np.concatenate([w.reshape(-1) for w in weights(run)])).all()
    same_bits(control, run)
    two = alone(replace(settings, max_steps=2), framework, out, (x, y))
    assert apart(weights(run), weights(two)) < 1e-6


@FEW
@pytest.mark.parametrize("first", [pytest.param("world", marks=pytest.mark.tensorflow_size(3)),
                                   pytest.param("solo", marks=pytest.mark.tensorflow_size(2))])
def test_a_run_resumed_at_another_number_of_ranks(control, framework, first, out):
    saving = CheckpointConfig(every_steps=0, at_end=True)
    settings = config(global_batch=11, max_steps=16, optimizer=Named("SGD", {"momentum": 0.9}), lr=0.02)
    half = replace(settings, max_steps=7, checkpoint=saving)
    data = samples(40)
    if first == "world":
        fitted(distributed(control, replace(half, out=out[0]), make_model(framework), data))
    elif control.rank == 0:
        fitted(solo(replace(half, out=out[0]), make_model(framework), data))
    control.barrier("first half")
    second = replace(settings, resume=out[0], out=control.bcast(out[1] + "-second"))
    if first == "world":
        run = fitted(solo(replace(second, out=out[1] + "-mine"), make_model(framework, seed=5), data))
    else:
        run = fitted(distributed(control, second, make_model(framework, seed=5), data))
        same_bits(control, run)
    assert run.state.cursor.step == 16
    whole = alone(settings, framework, out, data)
    assert apart(weights(run), weights(whole)) < 1e-5
