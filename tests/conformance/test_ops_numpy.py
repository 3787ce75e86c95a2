"""The numpy reference passes the cases that every backend's ops must pass."""

import pytest
from ops_cases import CASES, name_of

from hvdtrain.backends.numpy.ops import Ops


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_ops(check):
    check(Ops())
