"""A rank of Keras on TensorFlow that runs out of memory in a node of its graph: the step is repeated to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import config, fitted, lockstep, samples

from hvdtrain.config import DataParallel, Exchange, Named

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from fragile_keras import Faults, model  # noqa: E402

SETTINGS = config(global_batch=24, max_steps=3, lr=0.01, accumulate=2, optimizer=Named("Adam"),
                  exchange=Exchange(bucket_mb=0.0005))
DATA = samples(72)


def trained(settings, faults, exact=False, shrinks=True):
    """Runs whose ranks have ``faults``; each of these has happened. Unless it ``shrinks``, a rank tries again and again
    at the size that it has."""
    def work(run):
        if not shrinks:
            run.recovery.ran_out = lambda batch: "again"
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


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2)])
def test_a_repeated_step_leaves_no_trace(ranks, zero):
    """In the first micro-batch of a step and in the last, below and above what has been summed already."""
    settings = replace(SETTINGS, data_parallel=DataParallel("zero", zero) if zero else DataParallel())
    want = [all_state(run) for run in undisturbed(settings, ranks)]
    faults = [Faults() for _ in range(ranks)]
    faults[-1] = Faults(PLACES)
    got = trained(settings, faults, shrinks=False)
    for run, arrays in zip(got, want, strict=True):
        for a, b in zip(all_state(run), arrays, strict=True):
            np.testing.assert_array_equal(a, b)
