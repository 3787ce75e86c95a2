"""Checkpoints and configuration files of earlier releases are read.

`test_resume` has a checkpoint of the first release.
"""

from pathlib import Path

import kept_runs
import pytest
import yaml
from small_runs import apart

from hvdtrain.commands.train import parse

CONFIGS = sorted(Path(kept_runs.__file__).with_name("configs").glob("*.yaml"))


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


def leaves(values, names=()):
    """(name in parts, value) of nested mappings, down to free-form arguments."""
    for key, value in values.items():
        here = (*names, key)
        if isinstance(value, dict) and here[-1] not in ("args", "model_args"):
            yield from leaves(value, here)
        else:
            yield here, value


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_kept_configuration_loads(path):
    """Together they name every key of their time: whoever takes one away breaks a file of a user."""
    config = parse(["--config", str(path)], {})
    for names, value in leaves(yaml.safe_load(path.read_text())):
        got = config.to_dict()
        for name in names:
            got = got[name]
        assert (got["name"] if isinstance(got, dict) and isinstance(value, str) else got) == value, names
