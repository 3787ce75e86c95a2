"""The files in recipes/: each is a configuration that is sound, and names a model that is there."""

from pathlib import Path

import pytest

from hvdtrain.cli import train
from hvdtrain.resolve import load_callable

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_a_configuration_and_names_a_model(path):
    config = train.parse(["--config", str(path)], {})
    config.check()
    package = "torch" if config.model.startswith("torch") else "tensorflow"
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert callable(load_callable(config.model, "model"))
