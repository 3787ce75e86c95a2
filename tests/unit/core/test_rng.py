"""Python's and numpy's generators continue bit by bit after a restore, and ranks have streams of their own."""

import random

import numpy as np
import pytest

from hvdtrain.core import rng


@pytest.fixture(autouse=True)
def put_back():
    before = rng.capture()
    yield
    rng.restore(before)


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(200),
        *np.random.rand(3),
        *np.random.randn(3),
        np.random.randint(2**31),
    ]


@pytest.mark.parametrize("warm", [0, 1, 2, 701])
def test_a_restored_generator_continues(warm):
    """An odd number of normal draws leaves one in store, which must come back too."""
    rng.seed(3, 1)
    for _ in range(warm):
        random.gauss(0, 1)
        np.random.randn()
    state = {name: array.copy() for name, array in rng.capture().items()}
    assert all(isinstance(a, np.ndarray) and a.dtype.kind in "uf" for a in state.values())
    after = draw()
    rng.seed(4, 0)
    draw()
    rng.restore(state)
    assert draw() == after


@pytest.mark.parametrize("between", [lambda: None, np.random.randn, np.random.rand, random.random, draw,
                                     lambda: np.random.seed(3)])
def test_a_mark_leads_back_to_where_it_was_made(between):
    """Any draws between two marks are undone, a stored normal number included."""
    rng.seed(5, 0)
    for _ in range(4):
        for _ in range(3):
            back = rng.mark()
            after = draw()
            back()
            assert draw() == after
            back()
        between()


def test_a_mark_after_a_return_knows_the_stored_number():
    """Its words are those of the mark in between, which had none in store."""
    rng.seed(5, 0)
    np.random.randn()
    back = rng.mark()
    np.random.randn()
    rng.mark()
    back()
    again = rng.mark()
    after = draw()
    again()
    assert draw() == after


@pytest.mark.parametrize("between", [random.random, lambda: random.gauss(0, 1), lambda: random.seed(5),
                                     lambda: random.setstate(random.getstate())])
def test_the_state_of_python_is_read_again_once_it_has_changed(between):
    random.seed(3)
    for _ in range(3):
        assert rng._pythons() == random.getstate()
        assert rng._pythons() is rng._pythons()  # else each step makes a tuple of 625 numbers
        between()


def test_streams_depend_on_seed_and_rank():
    seen = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (2**32 - 1, 0), (2**32 - 1, 4000)):
        rng.seed(seed, rank)
        seen.append(draw())
        rng.seed(seed, rank)
        assert draw() == seen[-1]
    assert len({s[0] for s in seen}) == len({s[3] for s in seen}) == len(seen)
