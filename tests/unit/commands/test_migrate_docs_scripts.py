"""`migrate` moves every script that docs/how-to/migrate shows, and finds nothing to do in one that moved."""

from __future__ import annotations

import ast
import re

import pytest

from hvdtrain.commands.migrate import finding, plan
from hvdtrain.commands.migrate import plan as source
from hvdtrain.config import Config, Named
from hvdtrain.core import ROOT

DOCS = ROOT.parent / "docs" / "how-to" / "migrate"
DIFFS = {"horovod_keras": "horovod_keras", "horovod_keras2": "horovod_keras", "horovod_tape": "horovod_keras",
         "tf_distribute": "tf_distribute", "horovod_torch": "horovod_torch"}
"""Folders of scripts that a diff moves, and their kinds."""
LOOPS = ("ddp", "accelerate", "data_parallel")
"""Kinds with a loop of their own, for which there is code to continue from."""


def test_every_folder_is_told_of():
    assert {folder.name for folder in DOCS.iterdir() if folder.is_dir()} == {*DIFFS, *LOOPS}


@pytest.mark.parametrize("name", DIFFS)
def test_a_script_of_the_docs_moves_whole(name):
    found = plan.migrate(source.read(str(DOCS / name / "before.py")), finding.MigrateOptions())
    assert found.kind == DIFFS[name] and not [f for f in found.findings if f.kind == "by hand"], found.findings
    code, shown = (text.partition('"""\n\n')[2]  # behind the sentence that opens the file
                   for text in (found.after.decode(), (DOCS / name / "after.py").read_text()))
    if name == "tf_distribute":  # which shows it as one would write it
        assert "hvd.shard(x_train, y_train, global_batch=GLOBAL_BATCH)" in code and "strategy" not in code
    else:
        assert code == shown


def config(code: str) -> Config:
    """Return what the call of Config in ``code`` makes."""
    call = next(node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name) and node.func.id == "Config")
    return eval(ast.unparse(call), {"Config": Config, "Named": Named})


@pytest.mark.parametrize("name", LOOPS)
def test_the_code_for_a_loop_of_the_docs_is_that_of_the_script_that_moved(name):
    found = plan.migrate(source.read(str(DOCS / name / "before.py")), finding.MigrateOptions("trainer", 2))
    after = (DOCS / name / "after.py").read_text()
    assert found.kind == name and config(found.snippet) == config(after) and "..." not in found.snippet
    assert found.snippet.endswith("trainer.fit(model, train)") and ".fit(model, (train, test))" in after
    lines = found.source.data.decode().splitlines()
    gone = next(f.what for f in found.findings if f.what.startswith("removed: "))
    for what, line in re.findall(r"([\w.]+) \(line (\d+)\)", gone):
        assert what in lines[int(line) - 1] and what not in after.partition('"""\n\n')[2]


def test_the_diff_of_the_ddp_page_is_that_of_migrate():
    found = plan.migrate(source.read(str(DOCS / "ddp" / "before.py")), finding.MigrateOptions())
    shown = re.search(r"```diff\n(.*?)```", (DOCS / "ddp" / "README.md").read_text(), re.S)
    assert shown and set(shown[1].splitlines()) <= set(plan.diff(found.source, found.after).splitlines())


@pytest.mark.parametrize("name", [*DIFFS, *LOOPS])
def test_a_script_that_moved_stays(name):
    moved = source.read(str(DOCS / name / "after.py"))
    assert plan.migrate(moved, finding.MigrateOptions()).after == (DOCS / name / "after.py").read_bytes()
