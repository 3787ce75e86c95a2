"""Names and docstrings of the package: each class once, and docstrings that say what a reader can do with a thing."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from hvdtrain.core import ROOT

PLUG_INS = ("backends/", "comm/compressors/", "cluster/launchers/", "data/augment/", "reports/trackers/",
            "reports/html/sections/", "comm/compression.py", "tensorflow/compression.py", "torch/compression.py",
            "torch/sync_batch_norm.py")
"""Folders whose files are alternatives of each other and may repeat names of classes. Those of tensorflow/ and
torch/ have Horovod's names."""
OPENINGS = re.compile(r"(What|Whether|Where|How|Nothing|One|Those|Who|Whom|Which|When|Whatever)\b")
TREES = ("hvdtrain", "benchmarks", "tests")


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return (line, docstring) of a file's module, classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]


def test_a_class_name_stands_once():
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(PLUG_INS):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(place)
    assert len(places) > 300
    assert not {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("tree", TREES)
def test_no_docstring_opens_with_a_question_word(tree):
    texts = [(f"{path.relative_to(ROOT.parent)}:{line}", text) for path in sorted((ROOT.parent / tree).rglob("*.py"))
             for line, text in docstrings(path)]
    assert len(texts) > 300
    assert not [f"{place}: {text.splitlines()[0]}" for place, text in texts if OPENINGS.match(text)]
