"""Each rank squares its own part of summed gradients; the parts are all of them, once."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.comm.reducer.reducer import ALIGN, own_parts


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200, 1000])
def test_the_parts_are_everything_once(size, n):
    x = np.arange(n)
    parts = [part for rank in range(size) for part in own_parts([x], [SimpleNamespace(n=n)], rank, size)]
    assert np.concatenate([np.arange(0), *parts]).tolist() == x.tolist()
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    assert all(start % ALIGN == 0 for start in starts)
    assert size == 1 or sum(len(part) % ALIGN > 0 for part in parts) <= 1, "views but for the end"
