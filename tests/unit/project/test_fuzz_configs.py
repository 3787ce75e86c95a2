"""Made-up configurations end in steps or in a `UserError`: 300 here, 10,000 by ``python tests/fuzz/configs.py``."""

import contextlib
import io
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from fuzzed import changes, kinds, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

seen: Counter[str] = Counter()


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes(), st.sampled_from([1, 2, 2, 3]))
def test_a_configuration_trains_or_is_refused(changed, size):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        seen.update(kinds([outcome(changed, size, Path(folder) / "run")]))


def test_a_good_part_of_them_trained():
    """Follows the test above: were all refused, it would prove little."""
    if not seen:
        pytest.skip("the configurations were not run in this process")
    assert seen["steps"] > 0.15 * seen.total() and seen["refused"] > 0.15 * seen.total(), seen


@pytest.mark.parametrize("changed", [
    {"checkpoint.every_steps": 10**400}, {"optimizer.args": {"momentum": "x"}}, {"callbacks": ["builtins:dict"]}])
def test_what_was_found_once(changed, tmp_path):
    assert outcome(changed, 2, tmp_path / "run") not in ("steps", "no steps")


@pytest.mark.slow
def test_the_probe_tries_no_more_samples_than_there_are(tmp_path):
    assert outcome({"balance": "static", "global_batch": 2**53}, 2, tmp_path / "run") == "steps"
