"""A rank of Keras on TensorFlow that runs out of memory in a node of its graph: the step is repeated to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import apart, bits, config, fitted, lockstep, samples, weights

from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from fragile_keras import Faults, model  # noqa: E402

from hvdtrain.backends.tensorflow.graphs import Graph  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

SETTINGS = config(global_batch=24, max_steps=3, lr=0.01, accumulate=2, optimizer=Named("Adam"),
                  exchange=ExchangeConfig(bucket_mb=0.0005))
DATA = samples(72)


@pytest.fixture
def entered(monkeypatch):
    """For each graph that failed how many of its collectives it had entered, and how many it has."""
    found = []

    def counted(graph, value, own=Graph.enter_rest):
        found.append((sum(each.entered() == graph.runs for each in graph._collectives), len(graph._collectives)))
        own(graph, value)

    monkeypatch.setattr(Graph, "enter_rest", counted)
    return found


def trained(settings, faults, exact=False, shrinks=True):
    """Train runs whose ranks have ``faults``; each of these has happened. Unless it ``shrinks``, a rank retries
    at the size that it has."""
    def work(run):
        if not shrinks:
            run.recovery.training.lower = lambda size: size
        return fitted(run)

    runs = lockstep(len(faults), settings, lambda rank: model(faults[rank], exact=exact), DATA, work)
    for each in faults:
        assert each.happened == len(each.at)
    return runs


def undisturbed(settings, ranks, exact=False):
    return trained(settings, [Faults() for _ in range(ranks)], exact)


def all_state(run):
    """All that a repeated step could have changed: weights with statistics, optimizer, random generators."""
    groups, _ = run.parts.state.state()
    return [*groups["model"].values(), *groups.get("optimizer", {}).values(),
            *(a for name, a in sorted(run.parts.state.rank_state().items()) if name.startswith("seed."))]


PLACES = [(layer, way, at) for layer in ("low", "high") for way in ("forward", "backward") for at in (0, 3)]


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 1), (3, 2)])
def test_a_repeated_step_leaves_no_trace(ranks, zero, entered):
    """In the first micro-batch of a step and in the last, below and above what has been summed already."""
    settings = replace(SETTINGS, data_parallel=DataParallelConfig("zero", zero) if zero else DataParallelConfig())
    want = [all_state(run) for run in undisturbed(settings, ranks)]
    faults = [Faults() for _ in range(ranks)]
    faults[-1] = Faults(PLACES)
    got = trained(settings, faults, shrinks=False)
    for run, arrays in zip(got, want, strict=True):
        for a, b in zip(all_state(run), arrays, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(0 < n < total for n, total in entered) == (zero == 2)  # a part had been summed by then


def test_halves_of_a_micro_batch_give_the_same_gradient(tmp_path):
    settings = replace(SETTINGS, eval_every=1, epochs=1, max_steps=0, optimizer=Named("SGD"),
                       data_parallel=DataParallelConfig("zero", 2))
    data = DATA, samples(30)

    def ran(faults, out):
        settings_of = replace(settings, out=str(tmp_path / out))
        return lockstep(2, settings_of, lambda rank: model(faults[rank], exact=True), data, fitted)

    plain = [Faults(), Faults()]
    want = ran(plain, "undisturbed")
    # Some runs are of samples before the first step.
    last, trained = plain[1].runs["high", "evaluation"], plain[1].runs["low", "forward"]
    faults = [Faults(), Faults([("high", "backward", 1), ("low", "forward", trained), ("high", "evaluation", last - 1),
                                ("high", "evaluation", last)])]
    got = ran(faults, "disturbed")
    assert faults[1].happened == len(faults[1].at) and got[1].recovery.limit and got[1].recovery.evaluation.limit
    assert not got[0].recovery.limit and {bits(run) for run in got} == {bits(got[0])} != {bits(want[0])}
    assert apart(weights(got[0]), weights(want[0])) < 1e-6
    assert got[0].state.metrics == pytest.approx(want[0].state.metrics, rel=1e-6)


def test_metrics_of_training_batches_count_a_repeated_step_once():
    import keras

    from hvdtrain.engine.keras_bridge import Bridge

    def history(at):
        faults = [Faults(), Faults(at)]

        def made(rank):
            own = model(faults[rank], exact=True)
            own.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                        metrics=["accuracy"])
            return own

        def work(run):
            run.callbacks.append(Bridge([], run))
            return fitted(run).callbacks[-1].history

        settings = replace(SETTINGS, optimizer=Named("auto"), metrics=[])
        found, other = lockstep(2, settings, made, DATA, work)
        assert faults[1].happened == len(at) and found == other
        return found

    want = history([])
    got = history([("high", "backward", 1), ("low", "forward", 6), ("low", "forward", 7)])
    assert got["accuracy"] == want["accuracy"] and got["loss"] == pytest.approx(want["loss"], rel=1e-6)


def test_an_update_that_fails_in_its_middle_ends_the_run(tmp_path):
    import keras
    import tensorflow as tf

    class Breaking(keras.optimizers.SGD):
        def update_step(self, gradient, variable, rate):
            def run(x):
                if self.breaks and len(x) == 5:  # the bias of the last layer, after others
                    raise MemoryError("update")
                return x

            super().update_step(tf.ensure_shape(tf.numpy_function(run, [gradient], tf.float32), variable.shape),
                                variable, rate)

    made = model(Faults())
    made.compile(Breaking(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    made.optimizer.breaks = True
    settings = replace(SETTINGS, optimizer=Named("auto"), metrics=[], out=str(tmp_path))
    with pytest.raises(UserError, match="out of memory in a step, which cannot be repeated"):
        lockstep(1, settings, lambda rank: made, DATA, fitted)
