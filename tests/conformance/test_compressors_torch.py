"""Compressors with PyTorch's ops: as the numpy reference, the same bits on every rank, nothing hidden."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from compressor_cases import (  # noqa: E402
    MAKE,
    SHAPES,
    SIZES,
    check_like_numpy,
    check_not_finite_among_many,
    check_not_finite_is_seen,
    check_shards_are_those_of_the_sum,
    check_state_survives,
    check_zeros,
)

from hvdtrain.backends.torch.ops import Ops  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", MAKE)
def test_as_numpy(name, shapes, size):
    check_like_numpy(name, Ops, size, SHAPES[shapes])


@pytest.mark.parametrize("name", MAKE)
def test_what_is_not_finite_is_seen(name):
    check_not_finite_is_seen(name, Ops)


def test_what_is_not_finite_is_seen_among_many():
    check_not_finite_among_many(Ops)


@pytest.mark.parametrize("name", MAKE)
def test_shards_are_those_of_the_sum(name):
    check_shards_are_those_of_the_sum(name, Ops, 3, SHAPES["model"])


@pytest.mark.parametrize("name", MAKE)
def test_zeros(name):
    check_zeros(name, Ops)


@pytest.mark.parametrize("name", MAKE)
def test_state_survives(name):
    check_state_survives(name, Ops)
