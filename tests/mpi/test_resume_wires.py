"""A run that continues over another transport, with other shares, or as one process: one curve, each sample once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_runs import CUTS, apart, config, fitted, make_model, samples, solo, weights

from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.comparison import LEAST
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
EPOCHS, STOP = 3, 4


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.world_size(2, 3)),
                                       pytest.param("tensorflow", marks=pytest.mark.world_size(2))])
def test_a_resumed_run_follows_the_curve_over_any_wire(framework, control, tmp_path):
    make_model(framework)  # skips where it is not installed
    root = Path(control.bcast(str(tmp_path)))

    def settings(name, **changes):
        return config(global_batch=23, epochs=EPOCHS, out=str(root / name), optimizer=Named("SGD", {"momentum": 0.5}),
                      checkpoint=CheckpointConfig(), **changes)

    def train(name, **changes):
        run = fitted(assemble(settings(name, **changes), make_model(framework), samples(60)))
        assert run.collectives.name == changes["collectives"]
        return run

    def half(name):
        if control.rank == 0:
            shutil.copytree(root / "half", root / name)
        control.barrier(f"copied for {name}")

    want = train("whole", collectives="shared")
    assert want.ledger["epochs"] == EPOCHS
    train("half", collectives="shared", max_steps=STOP)
    for name, wire, shares in (("same", "shared", []), ("cut", "mpi", CUTS[control.size][-1])):
        half(name)
        got = train(name, collectives=wire, shares=shares, resume="auto")
        distance = apart(weights(got), weights(want))
        assert distance == 0 if name == "same" else distance < LEAST, (name, distance)
        assert got.ledger["epochs"] == EPOCHS and not got.ledger["unchecked"]
    if control.rank == 0:
        shutil.copytree(root / "half", root / "alone")
        alone = fitted(solo(settings("alone", resume="auto"), make_model(framework), samples(60)))
        assert apart(weights(alone), weights(want)) < LEAST
        assert alone.ledger["epochs"] == EPOCHS and not alone.ledger["unchecked"]
    control.barrier("one process has gone on")
