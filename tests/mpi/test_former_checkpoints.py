"""Checkpoints of commit 5a0a8f0 load to the bit, and training continues from them as it did with that commit.

The runs are described in fixtures/v0_1_5a0a8f0; `unit/checkpoint/test_kept_files.py` loads the YAML files beside them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import small_runs
from safetensors import safe_open

from hvdtrain import Trainer
from hvdtrain.checkpoint import read_snapshot
from hvdtrain.commands.train import parse
from hvdtrain.engine.callbacks import balance

FORMER = Path(small_runs.__file__).with_name("v0_1_5a0a8f0")
AT, AFTER = 6, 9
TOLERANCE = 1e-6
"""Relative to the largest value of a tensor: kernels differ between machines."""

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


def plain(name):
    """Return a tensor's name without Keras' count of the generators and optimizers that a process has made."""
    return re.sub(r"(seed_generator|\b(?:sgd|adam))_\d+\b", r"\1", name)


def tensors(path):
    """Return all tensors of a checkpoint, the random generators' included, by "group|name"."""
    return {plain(f"{group}|{name}"): named[name] for group, named in read_snapshot(path).tensors.items()
            for name in named}


def stored(path):
    """Return (tensors, texts) of after.safetensors."""
    with safe_open(path, "np") as file:
        return {plain(name): file.get_tensor(name) for name in file.keys()}, file.metadata()


def metas(path):
    """Return the small state of a checkpoint."""
    return json.loads((path / "manifest.json").read_text())["meta"]


def same_place(case, monkeypatch):
    """Have a balance plan fit this machine: of the world that it was made for only the keys are compared."""
    states = dict(map(tuple, metas(case / "checkpoint")["callbacks"]))
    if "Balance" not in states:
        return
    world, own = states["Balance"]["world"], balance._world
    monkeypatch.setattr(balance, "_world", lambda run: world if keys_of(own(run)) == keys_of(world) else own(run))


def keys_of(world):
    return world[world.index("["):]


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
@pytest.mark.parametrize("framework", small_runs.FRAMEWORKS)
def test_a_former_checkpoint_continues_as_it_did(control, tmp_path, monkeypatch, capfd, framework, layout):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    if control.size > 2:
        pytest.skip("the checkpoints are of 2 ranks")
    case, out = FORMER / framework / layout, Path(control.bcast(str(tmp_path / "run")))
    same_place(case, monkeypatch)
    monkeypatch.chdir(FORMER)  # workload.py is named as it was
    trainer = Trainer(parse(["--config", str(case / "config.yaml"), "--out", str(out), "--max_steps", str(AFTER),
                             "--resume", str(case / "checkpoint")], {}))
    before = {path.name: path.read_bytes() for path in (case / "checkpoint").iterdir()}
    loaded = trainer.save() / f"step-{AT:08d}"
    found = trainer.run.state.cursor.to_dict()
    assert found == metas(case / "checkpoint")["cursor"] and (found["step"], found["epoch"]) == (AT, 1)
    trainer.fit()
    control.barrier("compare")
    if control.rank:
        return
    got, want = tensors(loaded), tensors(case / "checkpoint")
    assert got.keys() == want.keys()
    assert all(got[name].tobytes() == want[name].tobytes() for name in want), "after loading"
    same_states(metas(loaded), metas(case / "checkpoint"), "NanGuard", "Ledger", "EarlyStop")
    continued_alike(out, case)
    said = capfd.readouterr().out
    assert f"resumed at step {AT}, epoch 1" in said
    for word in ("anew", "scratch", "changed settings", "the checkpoint holds"):
        assert word not in said
    assert before == {path.name: path.read_bytes() for path in (case / "checkpoint").iterdir()}


def same_states(meta, wanted, *names):
    """Check what a former checkpoint has of the callbacks' states; later ones have more."""
    got, want = (dict(map(tuple, each["callbacks"])) for each in (meta, wanted))
    for name in names:
        assert name not in want or {key: got[name][key] for key in want[name]} == want[name], name


def continued_alike(out, case):
    """Check weights, optimizer, averages, what compression has not sent, generators, losses and callbacks."""
    got, (want, texts) = tensors(out / "checkpoints" / f"step-{AFTER:08d}"), stored(case / "after.safetensors")
    assert got.keys() == want.keys()
    for name, array in want.items():
        if array.dtype == np.float32:
            assert small_runs.apart([got[name]], [array]) <= TOLERANCE, name
        else:  # generators and counts
            assert got[name].tobytes() == array.tobytes(), name
    meta = metas(out / "checkpoints" / f"step-{AFTER:08d}")
    wanted = json.loads(texts["meta"])
    assert meta["cursor"] == wanted["cursor"]
    assert {key: meta["step_rest"][key] for key in wanted["step_rest"]} == wanted["step_rest"]
    same_states(meta, wanted, "NanGuard", "Ledger", "Balance")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = {str(row["step"]): row["loss"] for row in rows if row["event"] == "step"}
    assert losses and losses == pytest.approx({step: json.loads(texts["losses"])[step] for step in losses}, rel=1e-6)
    evals = {str(row["step"]): row["metrics"] for row in rows if row["event"] == "eval"}
    assert evals == {step: pytest.approx(json.loads(texts["evals"])[step], rel=1e-6) for step in evals} and evals
