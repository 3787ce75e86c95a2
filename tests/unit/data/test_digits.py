"""The digits are scikit-learn's own, without an import of it."""

import subprocess
import sys

import numpy as np
import pytest

from hvdtrain.core.errors import UserError
from hvdtrain.data.sets import digits


def test_the_table_is_what_scikit_learn_loads():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    raw = datasets.load_digits()
    rows = digits.table()
    assert np.array_equal(rows[:, :-1], raw.data) and np.array_equal(rows[:, -1], raw.target)


def test_scikit_learn_is_not_imported():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    code = "import sys\nfrom hvdtrain.data.sets.digits import make\nmake('train')\nprint('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_without_scikit_learn_it_is_said(monkeypatch):
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="scikit-learn"):
        digits.table()


def test_a_version_that_keeps_them_elsewhere_is_asked(monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    want = digits.table()
    monkeypatch.setattr(digits, "Path", lambda *parts: "/nowhere/digits.csv.gz")
    assert np.array_equal(digits.table(), want)
