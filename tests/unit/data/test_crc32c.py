"""CRC-32C by numpy: published values, long data, and packages that compute it faster."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.data import crc32c as crc
from hvdtrain.data.crc32c import crc32c

UNKEPT = crc._native.__wrapped__


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch):
    """Leave packages out that compute it."""
    monkeypatch.setattr(crc, "_native", lambda: None)


@pytest.mark.parametrize("data, crc", [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43),
                                       (bytes(range(32)), 0x46DD794E)])
def test_crc32c_has_the_values_of_rfc_3720(data, crc):
    assert crc32c(data) == crc


def test_crc32c_of_long_data_is_that_of_its_pieces():
    data = np.random.default_rng(0).bytes(100_000)
    table = [crc32c(bytes([b])) ^ crc32c(b"\0") for b in range(256)]  # linear: checked against single bytes
    assert table[0] == 0
    ends = [0, 49, 64, 255, 256, 257, 1000, 5685, 5686, 11_370, 11_371, 16_384, 70_000, 100_000]
    states, state = [], 0xFFFFFFFF
    for n, byte in enumerate(data):
        states.append(state ^ 0xFFFFFFFF)
        state = table[(state ^ byte) & 255] ^ state >> 8
    states.append(state ^ 0xFFFFFFFF)
    assert [crc32c(data[:n]) for n in ends] == [states[n] for n in ends]
    some = [data[:n] for n in (ends + [3, 1025, 5685])[::-1]]
    assert crc.masked_each(some) == [crc.masked(each) for each in some]


def test_a_package_that_computes_crc32c_is_used_where_it_is_right(monkeypatch):
    calls = []
    for value, used in ((0, False), (0xE3069283, True)):
        module = SimpleNamespace(value=lambda data: (calls.append(data), value)[1])
        monkeypatch.setitem(sys.modules, "google_crc32c", module)
        monkeypatch.setitem(sys.modules, "crc32c", None)
        monkeypatch.setattr(crc, "_native", UNKEPT)
        assert crc32c(b"123456789") == 0xE3069283 and (len(calls) > 2) is used
