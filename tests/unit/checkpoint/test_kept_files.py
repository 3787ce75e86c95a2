"""Checkpoints and configuration files of earlier releases are read.

`test_resume` has a checkpoint of the first release, `mpi/test_former_checkpoints.py` those of commit 5a0a8f0.
"""

from pathlib import Path

import kept_runs
import numpy as np
import pytest
import yaml
from small_runs import apart

from hvdtrain.commands.train import parse

CONFIGS = sorted(Path(kept_runs.__file__).with_name("configs").glob("*.yaml"))
FORMER = Path(kept_runs.__file__).with_name("v0_1_5a0a8f0")
FORMER_CONFIGS = sorted(FORMER.rglob("*.yaml"))
NEW_DEFAULTS = {("exchange", "bucket_mb"): "auto", ("early_stop", "mode"): "auto"}
"""Of the keys that 5a0a8f0 had, those with another default since; CHANGELOG has both."""


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_a_kept_checkpoint_goes_on_as_it_did(tmp_path, framework, capsys):
    """To 1e-6, as kernels differ between machines."""
    if framework != "numpy":
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    got, want = kept_runs.resumed(framework, tmp_path / "run")
    assert apart(got, want) <= 1e-6
    said = capsys.readouterr().out
    assert "resumed at step 8, epoch 1" in said and "anew" not in said


def test_values_that_are_not_finite_are_apart():
    a, nan = np.ones(2), np.array([1, np.nan])
    assert apart([a, nan], [a, a]) == apart([nan, a], [a, a]) == apart([a], [nan]) == float("inf")
    assert apart([a * np.inf], [a * np.inf]) == 0.0 == apart([a], [a])  # a mask


def leaves(values, names=()):
    """(name in parts, value) of nested mappings, down to free-form arguments."""
    for key, value in values.items():
        here = (*names, key)
        if isinstance(value, dict) and here[-1] not in ("args", "model_args"):
            yield from leaves(value, here)
        else:
            yield here, value


@pytest.mark.parametrize("path", [*CONFIGS, *FORMER_CONFIGS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kept_configuration_loads(path):
    """Together they name every key of their time: whoever takes one away breaks a file of a user."""
    config = parse(["--config", str(path)], {})
    for names, value in leaves(yaml.safe_load(path.read_text())):
        got = config.to_dict()
        for name in names:
            got = got[name]
        assert (got["name"] if isinstance(got, dict) and isinstance(value, str) else got) == value, names


def test_keys_that_a_former_file_leaves_out_have_the_values_they_had():
    """default.yaml is what 5a0a8f0 printed without any option: all keys of its time."""
    former, now = (dict(leaves(keys)) for keys in (yaml.safe_load((FORMER / "default.yaml").read_text()),
                                                   parse([], {}).to_dict()))
    assert {names: now[names] for names in former} == former | NEW_DEFAULTS
