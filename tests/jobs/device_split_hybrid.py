"""Ranks that each own two logical CPU devices, against one process with one; run by mpirun from its test.

``python device_split_hybrid.py FOLDER`` on two ranks.
"""

import dataclasses
import os
import sys

import numpy as np

from hvdtrain.cluster.control import SoloControl
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.config import CheckpointConfig, Config, ExchangeConfig, Named
from hvdtrain.core.launcher import launch_facts
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble

CONFIG = Config(model="tf_models.mlp:build", global_batch=32, max_steps=5, eval_every=0, progress="off", lr=0.1,
                optimizer=Named("sgd", {"momentum": 0.9}), checkpoint=CheckpointConfig(at_end=False), clip_norm=1.0,
                exchange=ExchangeConfig(bucket_mb=0.05))
HYBRID = dataclasses.replace(CONFIG, model_parallel=2, split_micro_batches=4, shares=[3, 1])


def weights(config, **parts):
    run = assemble(config, **parts)
    loop.fit(run)
    return run, [v.value.numpy() for v in run.spec.model.weights]


def check_places(run):
    """Weights, slots, buckets and the compressor's state are where their blocks are."""
    model, optimizer = run.spec.model, run.parts.optimizer.own
    for held in (model.trainable_variables, optimizer.momentums):
        assert [v.value.device[-5:] for v in held] == [f"CPU:{p.place}" for p in run.parts.params.specs]
    places = [bucket.place for bucket in run.dp.reducer.buckets]
    assert set(places) == {0, 1}
    if run.collectives.in_graph:
        for cells, place in zip(run.dp.reducer.state.cells, places):
            assert all(c.variable.device.endswith(f"CPU:{place}") for c in cells.values())


def main():
    folder, whole = sys.argv[1], []
    for wire, compression, tolerance in (("auto", "none", 1e-5), ("auto", "int8", 0.1), ("mpi", "bf16", 0.02)):
        config = dataclasses.replace(HYBRID, collectives=wire, compression=compression,
                                     out=f"{folder}/{wire}-{compression}")
        run, found = weights(config)
        check_places(run)
        control = run.control
        alike = control.gather([w.tobytes() for w in found])
        assert alike[0] == alike[1], "ranks with other weights"
        cuts = control.gather(run.parts.stage._gradients.split.plan.choice)
        assert cuts[0] == cuts[1]
        whole = whole or weights(dataclasses.replace(CONFIG, out=f"{folder}/one-{control.rank}"),
                                 control=SoloControl(), collectives=NullCollectives())[1]
        for got, want in zip(found, whole):
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
        if control.rank == 0:
            print(f"equal over {run.collectives.name} with {compression}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main, launch_facts(os.environ)))
