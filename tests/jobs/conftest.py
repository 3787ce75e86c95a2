"""Fixtures of tests that start whole jobs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def script(tmp_path):
    """Write a script for the ranks to run: ``script(text) -> path``."""
    def write(text):
        path = tmp_path / "job.py"
        path.write_text(text)
        return str(path)

    return write
