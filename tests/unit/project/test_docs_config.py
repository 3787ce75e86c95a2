"""docs/reference/settings.md is what docs/generate.py makes of the dataclasses, and its example works."""

import importlib.util
import re
import runpy

import pytest

from hvdtrain.commands.train import parse
from hvdtrain.config import Config, schema
from hvdtrain.core import ROOT


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT.parent / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generate):
    page = (ROOT.parent / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == generate.page(), "run python docs/generate.py"


@pytest.mark.parametrize("name, path", [("layers", "layers.svg"), ("efficiency", "benchmarks/efficiency.svg")])
def test_pictures_are_up_to_date(name, path):
    docs = ROOT.parent / "docs"
    assert runpy.run_path(str(docs / "picture.py"))[name]() + "\n" == (docs / path).read_text(encoding="utf-8"), (
        f"run python docs/picture.py {name} > docs/{path}")


def test_every_key_has_a_row_with_type_and_meaning(generate):
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]*) \| (.+) \|$", generate.page(), re.M)
    assert sorted(r[0] for r in rows) == sorted(k.name for k in schema.keys(Config))
    for name, words, default, _, doc in rows:
        assert words.strip() and default.strip() and len(doc.strip()) > 3, name


def test_every_number_that_measures_something_has_a_unit():
    # relative, or without a dimension
    bare = {"shares", "data_parallel.shards", "seed", "lr", "clip_norm", "early_stop.min_delta"}
    for key in schema.keys(Config):
        if key.hint in (int, float) or key.hint == list[float]:
            assert bool(key.unit) != (key.name in bare), key.name


def test_the_example_is_accepted(generate, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(generate.EXAMPLE, encoding="utf-8")
    config = parse(["--config", str(path), "--lr", "0.1", "--optimizer.args.momentum", "0.8"], {"HVDTRAIN_SEED": "1"})
    assert (config.lr, config.seed, config.schedule.warmup_steps) == (0.1, 1, 30)
    assert config.optimizer.args == {"momentum": 0.8, "nesterov": True}
