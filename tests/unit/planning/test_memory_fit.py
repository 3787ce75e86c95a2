"""Micro-batches and blocks of one rank: as few parts as fit, recomputing where that is faster or nothing else fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.protocols import BlockCost
from hvdtrain.planning.linear import LinearTime
from hvdtrain.planning.memory.fit import MemoryRoom, choose


def room(free, fixed=1000, per_sample=10, blocks=0, forward_s=0.0, line=LinearTime(0.0, 1.0)):
    """Return a rank that holds ``fixed`` bytes and for each sample some more, all of which are in its blocks."""
    def costs(n):
        return [BlockCost(f"b{i}", n * per_sample // blocks, n * forward_s) for i in range(blocks)]
    return MemoryRoom(lambda n: fixed + per_sample * n, free, costs, line)


def test_the_largest_micro_batch_that_fits_is_taken():
    assert (choose(room(1640), 64, 1, 64).micro_batch, choose(room(1639), 64, 1, 64).micro_batch) == (64, 32)
    fit = choose(room(1110), 64, 1, 64)
    assert (fit.micro_batch, fit.parts, fit.need, fit.choice.names) == (11, 6, 1110, ())
    assert choose(room(None), 64, 2, 64).parts == 2, "where the room is unknown nothing is made smaller"


@given(st.integers(1, 300), st.integers(900, 5000), st.integers(1, 4))
def test_no_larger_one_would_fit(n, free, least):
    one = room(free)
    fit = choose(one, n, min(least, n), n)
    assert fit.parts >= min(least, n) and fit.micro_batch == -(-n // fit.parts)
    if fit.choice.fits:
        assert one.need(fit.micro_batch) <= free
        assert fit.parts == min(least, n) or one.need(-(-n // (fit.parts - 1))) > free
    else:
        assert one.need(1) > free and fit.need <= 1.05 * one.need(1)


def test_micro_batches_are_not_made_tiny_where_that_saves_hardly_anything():
    """A process that has held more before shows no rise with the samples."""
    fit = choose(room(900, fixed=1000, per_sample=0), 1024, 1, 512)
    assert (fit.parts, fit.choice.fits) == (1, False)
    fit = choose(room(900, fixed=1000, per_sample=1), 1024, 1, 512)
    assert 40 <= fit.micro_batch <= 52 and not fit.choice.fits


def test_a_micro_batch_that_is_configured_is_made_to_fit_by_recomputing():
    fit = choose(room(1320, blocks=4, forward_s=0.1), 64, 2, 2)
    assert (fit.micro_batch, fit.choice.names, fit.choice.fits) == (32, (), True)
    fit = choose(room(1240, blocks=4, forward_s=0.1), 64, 2, 2)
    assert (fit.micro_batch, fit.choice.names, fit.choice.peak) == (32, ("b0",), 1240)
    assert not choose(room(1010, blocks=4), 64, 2, 2).choice.fits


def test_of_both_smaller_micro_batches_come_first_where_they_cost_nothing():
    fit = choose(room(1320, blocks=4, forward_s=0.1), 64, 1, 64)
    assert (fit.parts, fit.choice.names) == (2, ())


def test_of_both_recomputing_is_taken_where_small_micro_batches_are_slow():
    slow = LinearTime(100.0, 1.0)
    fit = choose(room(1159, blocks=4, forward_s=0.25, line=slow), 64, 1, 64)
    assert (fit.parts, fit.choice.names) == (2, ("b0", "b1", "b2")), "2 x 100 and recomputing, in place of 5 x 100"
    fit = choose(room(1160, blocks=4, forward_s=5.0, line=slow), 64, 1, 64)
    assert (fit.parts, fit.choice.names) == (4, ())


def test_one_sample_that_does_not_fit_is_recomputed():
    fit = choose(room(1004, blocks=4, forward_s=0.1), 4, 1, 4)
    assert (fit.micro_batch, fit.choice.fits, len(fit.choice.names)) == (1, True, 3)
    nearest = choose(room(0, 0, blocks=4, forward_s=0.1), 8, 1, 8).choice
    assert nearest.names == ("b0", "b1", "b2") and not nearest.fits


def test_a_rank_without_samples_needs_nothing():
    fit = choose(room(0), 0, 1, 1)
    assert (fit.micro_batch, fit.choice.fits) == (0, True)
