"""The layout of the package: how many packages and files, and no import cycle between files.

That imports go downward only is in setup.cfg (import-linter, ``make lint``).
"""

import re
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from hvdtrain.checkpoint.run_directory import RunOutput
from hvdtrain.core import ROOT
from hvdtrain.engine.run import Run
from hvdtrain.engine.run_parts import Findings, RunSetup, RunState, Services, StepOutcome

PACKAGES = {"backends", "checkpoint", "cluster", "comm", "commands", "config", "core", "data", "engine", "keras",
            "parallel", "planning", "recipes", "reports", "tensorflow", "torch"}
MOST_FILES = 552
"""Without recipes/, whose files users copy."""


def test_the_top_level_is_what_the_design_names():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "job.py", "trainer.py"}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= PACKAGES
    others = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert others <= PACKAGES, "a folder without __init__.py holds Python"


def test_files_are_few():
    assert len([path for path in ROOT.rglob("*.py") if path.parent.name != "recipes"]) <= MOST_FILES


def test_no_import_cycle_between_files():
    graph = grimp.build_graph("hvdtrain", cache_dir=None)
    imports = {module: {one for one in graph.find_modules_directly_imported_by(module)
                        if not module.startswith(f"{one}.")} for module in graph.modules}
    assert sum(map(len, imports.values())) > 1000
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {error.args[1]}")


def named(span: str) -> list[str]:
    """Return the paths of files in a code span, with {a,b} spelled out and NAME as any name."""
    found = []
    for path in re.findall(r"[\w/{},*]+\.py", span):
        head, _, rest = path.partition("{")
        inside, _, tail = rest.partition("}")
        found += [f"{head}{part}{tail}".replace("NAME", "*") for part in inside.split(",")]
    return found


def test_files_that_the_design_names_are_there():
    spans = re.findall(r"`([^`\n]+)`", (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8"))
    paths = [path for span in spans if not span.startswith("path/") for path in named(span)]
    assert len(paths) > 60
    assert not [path for path in paths if not any(ROOT.rglob(path)) and not any(ROOT.parent.glob(path))]


def test_no_run_config_or_control_is_typed_any():
    typed = re.compile(r"\b_?(run|config|control): Any\b")
    found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
                   if typed.search(path.read_text(encoding="utf-8")))
    assert found == ["cluster/boot.py"]  # notes of its own


def test_the_parts_of_a_run_are_small_and_joined_by_its_own_names():
    parts = {"setup": RunSetup, "state": RunState, "services": Services, "state.outcome": StepOutcome,
             "state.findings": Findings, "services.directory": RunOutput}
    for part in parts.values():
        assert len([name for name in part.__annotations__ if not name.startswith("_")]) < 15
    declared = re.findall(r"^    (\w+): (.+) = _of\(\"([\w.]+)\.(\w+)\"\)$", (ROOT / "engine/run.py").read_text(), re.M)
    assert len(declared) > 25
    for name, kind, part, field in declared:
        assert parts[part].__annotations__[field] == kind == Run.__annotations__[name], name
