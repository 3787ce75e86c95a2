"""PyTorch's ops pass the cases that every backend's ops must pass."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from ops_cases import CASES, name_of  # noqa: E402

from hvdtrain.backends.torch.ops import Ops  # noqa: E402


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_ops(check):
    check(Ops())


def test_an_array_that_may_not_be_written_to_is_taken_without_a_warning(recwarn):
    """Collectives hand out such arrays (views of received bytes)."""
    x = np.arange(3, dtype=np.float32)
    x.flags.writeable = False
    got = Ops().from_host(x)
    got += 1
    np.testing.assert_array_equal(x, [0, 1, 2])
    assert [w for w in recwarn if "writable" in str(w.message)] == []


def test_gradients_are_not_recorded():
    x = torch.ones(3, requires_grad=True)
    assert Ops().to_host(x).tolist() == [1, 1, 1]
