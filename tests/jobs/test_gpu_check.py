"""`make gpu-check` on a CPU: rows are jobs, of which those that need a GPU are skipped with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

ROOT = Path(__file__).resolve().parent.parent.parent


def test_rows_run_or_are_skipped(tmp_path):
    argv = [sys.executable, str(ROOT / "tests/gpu/check.py"), "--python", sys.executable, "--out", str(tmp_path),
            "--rows", "staged,training,oom", "--no-build", "--limit-s", "110"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    told = {row["name"]: row for row in found["rows"]}
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["training"]["status"] == "passed" and told["training"]["numbers"]["mpi"] < 1e-4
    assert told["oom"]["status"] == "passed"
    assert found["facts"]["gpus"] or told["staged"]["status"] == "skipped" and "GPU" in told["staged"]["detail"]
