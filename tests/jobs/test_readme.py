"""The two examples of README.md, run as the page says, on two ranks."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from runner import ROOT, mpirun

EXAMPLES = re.findall(r"```python\n(# script\.py\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def test_readme_has_one_example_for_each_framework():
    assert len(EXAMPLES) == 2
    assert "import torch" in EXAMPLES[0] and "import keras" in EXAMPLES[1]


@pytest.mark.parametrize("text, framework, native", [
    (EXAMPLES[0], "torch", "model.pt"), (EXAMPLES[1], "tensorflow", "model.keras")], ids=["torch", "keras"])
def test_example_of_the_readme_reaches_the_accuracy_that_it_states(text, framework, native, tmp_path, monkeypatch):
    """Every rank returns the same result; the run's directory has the record and the model in both formats."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    job = mpirun(2, ["script.py"], timeout_s=120)
    assert job.returncode == 0, job.text
    printed = re.findall(r"\{'loss'[^}]*\}", job.stdout)
    assert len(printed) == 2, job.text
    metrics = [ast.literal_eval(line) for line in printed]
    assert metrics[0] == metrics[1]
    assert metrics[0]["accuracy"] > 0.9
    out, = Path("runs").iterdir()
    record = json.loads((out / "completed.json").read_text())
    assert record["ranks"] == 2 and record["framework"] == framework and record["wire"] in ("horovod", "mpi", "shared")
    assert {native, "model.safetensors"} <= {path.name for path in (out / "model").iterdir()} and not job.orphans
