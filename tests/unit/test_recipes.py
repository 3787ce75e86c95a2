"""The files in recipes/: each is a configuration that is sound, names a model that is there, and trains."""

import inspect
import math
from pathlib import Path

import pytest
from pictures import write_folder

from hvdtrain import Trainer
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


def small(path, tmp_path):
    """Options of the command line that make a recipe small, for data that are written to ``tmp_path``."""
    name = path.stem.partition("_")[0]
    models = "tf_models" if path.stem.endswith("_keras") else "torch_models"
    own = ["--model", f"{models}.{name}:build", "--model_args.width", "16", "--model_args.depth", "1",
           "--model_args.heads", "2", "--data.args.root", str(tmp_path / "data"), "--global_batch", "4",
           "--schedule.warmup_steps", "1", "--max_steps", "2", "--eval_every", "0", "--out", str(tmp_path / "run"),
           "--progress", "off"]
    if name == "vit":
        write_folder(tmp_path / "data", train=8, test=2, classes=2, size=(20, 20))
        return [*own, "--model_args.in_shape", "[16,16,3]", "--model_args.classes", "2", "--model_args.patch", "8",
                "--data.args.size", "16", "--data.augment.crop", "2"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 12)
    return [*own, "--model_args.context", "16", "--data.args.context", "16"]


@pytest.mark.parametrize("path", [p for p in RECIPES if not p.stem.startswith("cifar100")], ids=lambda path: path.stem)
def test_a_recipe_trains(path, tmp_path, monkeypatch):
    """Two steps with all that the file asks for, of a small model; those of CIFAR-100 are in tests/jobs."""
    package = "tensorflow" if path.stem.endswith("_keras") else "torch"
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    asked = train.parse(["--config", str(path)], {})
    inspect.signature(load_callable(asked.model, "model")).bind(**asked.model_args)
    config = train.parse(["--config", str(path), *small(path, tmp_path)], {})
    assert {**asked.model_args, **config.model_args}.keys() == config.model_args.keys()
    ended = Trainer(config).fit()
    assert ended.steps == 2 and math.isfinite(ended.loss) and 0 < ended.loss < 10
