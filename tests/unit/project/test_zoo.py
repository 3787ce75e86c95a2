"""The scripts of docs/how-to/models.md: five, each a model file of under 35 lines; their packages are pinned."""

import ast
import re
import sys

import pytest
import zoo

from hvdtrain.core import ROOT


def test_every_package_of_the_page_has_a_script():
    assert sorted(zoo.scripts()) == [f"{name}.py" for name in ("hf_causal", "hf_classifier", "hub_model", "keras_app",
                                                               "timm_model")]


@pytest.mark.parametrize("name", zoo.scripts())
def test_a_script_is_short_and_its_packages_are_pinned(name):
    code = zoo.scripts()[name]
    assert len(code.strip().splitlines()) < 35
    pinned = "".join(path.read_text() for path in (ROOT.parent / "requirements").glob("*.txt"))
    imported = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
                for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))}
    for package in imported - set(sys.stdlib_module_names):
        assert re.search(rf"^{package.replace('_', '-')}==", pinned, re.MULTILINE), package
    assert {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)} >= {"build", "blocks"}


def test_hvdtrain_imports_none_of_them():
    sources = [path.read_text() for path in ROOT.rglob("*.py")]
    asked = re.compile(r"^\s*(import|from) (timm|transformers|keras_hub|torchvision)\b", re.MULTILINE)
    assert len(sources) > 100 and not any(asked.search(text) for text in sources)
