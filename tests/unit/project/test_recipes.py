"""The files in recipes/: each is a configuration that is sound, names a model that is there, and trains."""

import inspect
import math
from dataclasses import replace

import pytest
from pictures import write_folder

from hvdtrain import Trainer
from hvdtrain.backends.model_spec import build_spec
from hvdtrain.commands import train
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable

RECIPES = [path for path in sorted((ROOT.parent / "recipes").glob("*.yaml")) if path.stem != "digits"]


def test_the_built_in_recipe_is_what_trains_where_nothing_is_named():
    assert replace(train.parse(["--config", "hvdtrain:digits"], {}), optimizer="auto") == train.parse([], {})


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


@pytest.mark.slow
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


GROUPS = {"torch": ("torch_models", "groups.py"), "tensorflow": ("tf_models", "groups_keras.py")}
SIZES = {"vit": {"in_shape": [16, 16, 3], "patch": 8}, "bert": {"vocab": 7, "context": 8, "tied": True},
         "gpt": {"vocab": 7, "context": 8, "tied": True}}


@pytest.mark.parametrize("name", SIZES)
def test_norms_and_biases_alone_are_in_the_group_without_decay(name):
    """The same in the twins; parts of the model that are not the group's file's are found where the model is."""
    found = {}
    for package, (models, file) in GROUPS.items():
        pytest.importorskip(package, reason=f"{package} is not installed")
        spec = build_spec(f"{RECIPES[0].parent / file}:{name}", {**SIZES[name], "width": 8, "depth": 1, "heads": 2},
                          lambda: None)
        (group,) = spec.parameter_groups(spec.model)
        inside = {id(p) for p in group.get("params", group.get("variables"))}
        named = spec.model.named_parameters() if package == "torch" else (
            (v.path, v) for v in spec.model.trainable_variables)
        assert all((id(p) in inside) == (text.endswith("bias") or "norm" in text) for text, p in named)
        assert group["weight_decay"] == 0 and spec.blocks and (spec.task is None) == (name == "vit")
        found[package] = len(inside), sum(math.prod(p.shape) for p in group.get("params", group.get("variables")))
    assert found["torch"] == found["tensorflow"] and found["torch"][0] > 8


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem.startswith("gpt")], ids=lambda path: path.stem)
def test_groups_are_for_new_runs(path, tmp_path, monkeypatch):
    """A run without them goes on in Keras, whose checkpoints hold no groups; in PyTorch it is refused in words."""
    keras = path.stem.endswith("_keras")
    pytest.importorskip("tensorflow" if keras else "torch", reason="its framework is not installed")
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(path), *small(path, tmp_path), "--checkpoint.at_end", "true", "--resume", "auto"]
    assert Trainer(train.parse(words, {})).fit().steps == 2
    file = RECIPES[0].parent / ("groups_keras.py" if keras else "groups.py")
    again = Trainer(train.parse([*words, "--model", f"{file}:gpt", "--max_steps", "3"], {}))
    if keras:
        assert again.fit().steps == 3
    else:
        with pytest.raises(UserError, match="the checkpoint's optimizer has 1 parameter group; expected 2"):
            again.fit()
        assert Trainer(replace(again.config, resume="", out=str(tmp_path / "new"))).fit().steps == 3
