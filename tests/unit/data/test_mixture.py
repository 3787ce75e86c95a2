"""Mixtures of sources: exact proportions, each source read evenly, the same samples on any number of ranks."""

from collections import Counter

import numpy as np
import pytest
from feed_ranks import numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import config, fitted, make_model, samples, solo

from hvdtrain.core.errors import UserError
from hvdtrain.data.pictures import Normalisation
from hvdtrain.data.sets.mixture import Mixture, make
from hvdtrain.data.sources import ArraySource, Unreadable
from hvdtrain.engine import summary


def of_tens(sizes):
    """Return sources whose sample i of source k is 1000 k + i."""
    return [ArraySource((np.arange(n) + 1000 * k,)) for k, n in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), weights=st.lists(st.integers(0, 5), min_size=4),
       samples=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 3))
def test_proportions_are_exact_and_no_sample_comes_twice_before_its_source_has_ended(sizes, weights, samples, epochs,
                                                                                     seed):
    weights = weights[:len(sizes)] if any(weights[:len(sizes)]) else [1] * len(sizes)
    mixture = Mixture(of_tens(sizes), weights, samples, seed)
    every = Counter()
    for epoch in range(epochs):
        (x,) = mixture.fetch_in(np.arange(samples), epoch)
        counts = Counter((x // 1000).tolist())
        for k, weight in enumerate(weights):
            assert abs(counts[k] - samples * weight / sum(weights)) < 1
        every.update(x.tolist())
    for k, n in enumerate(sizes):
        times = [every[1000 * k + i] for i in range(n)]
        assert max(times) - min(times) <= 1


def test_augmentation_knows_the_normalisation_of_all_sources():
    def normalised(*means):
        sources = of_tens([2, 3])
        for source, mean in zip(sources, means):
            source.scale = Normalisation.of(mean, None, 3, "channels_first")
        return Mixture(sources, [1, 1])
    assert normalised(0.5, 0.5).scale.mean == (0.5,) * 3 and normalised(0.5).scale is None
    with pytest.raises(UserError, match="normalise pictures differently"):
        normalised(0.5, 0.4)


def test_a_sample_depends_on_seed_epoch_and_number_only():
    one, other = (Mixture(of_tens([7, 5]), [2, 1], 12, 3) for _ in range(2))
    whole = {epoch: one.fetch_in(np.arange(12), epoch)[0] for epoch in (2, 0, 1)}
    for epoch in range(3):
        parts = [other.fetch_in(part, epoch)[0] for part in np.array_split(np.arange(12), 3)]
        assert np.array_equal(np.concatenate(parts), whole[epoch])
    assert not np.array_equal(whole[0], whole[1])
    assert not np.array_equal(Mixture(of_tens([7, 5]), [2, 1], 12, 4).fetch_in(np.arange(12), 0)[0], whole[0])


def ramp(epoch):
    """Move from the first source to the second."""
    return [3 - epoch, epoch]


def test_a_curriculum_changes_the_weights_by_epoch_and_resumes_alike():
    straight = make("train", [{"name": f"{__name__}:first"}, {"name": f"{__name__}:second"}], 6,
                    f"{__name__}:ramp")
    shares = []
    for epoch in range(4):
        x = straight.fetch_in(np.arange(6), epoch)[0]
        shares.append(int((x >= 1000).sum()))
    again = Mixture(of_tens([5, 8]), [1, 1], 6, 0, ramp)
    assert shares == [0, 2, 4, 6]
    assert np.array_equal(again.fetch_in(np.arange(6), 3)[0], x)  # without the epochs before


def first():
    return of_tens([5])[0].arrays[0]


def second():
    return np.arange(8) + 1000


def test_the_test_split_has_each_test_sample_once():
    given = [{"name": "synthetic", "args": {"samples": 5}}, {"name": f"{__name__}:first", "weight": 7}]
    mixture = make("test", given[:1] * 2)
    assert len(mixture) == 10 and make("test", given[1:]) is None
    x, y = mixture.fetch_in(np.arange(10), 0)
    assert len(np.unique(x.reshape(10, -1), axis=0)) == 5 and y.shape == (10,)


class Broken(ArraySource):
    def fetch(self, indices_n):
        if 2 in indices_n:
            raise Unreadable(2, "b.tar", "truncated")
        return super().fetch(indices_n)


@pytest.mark.parametrize("make_it, words", [
    (lambda: make("train", []), "data.args.sources"),
    (lambda: make("train", [{"nam": "digits"}]), "a dict with name"),
    (lambda: make("train", [{"name": f"{__name__}:first", "wait": 1}]), "weight"),
    (lambda: make("train", [{"name": f"{__name__}:stream"}]), "can only be read in order"),
    (lambda: Mixture(of_tens([3, 3]), [1], 6), "2 finite numbers"),
    (lambda: Mixture(of_tens([3, 3]), [0, 0], 6), "one of them positive"),
    (lambda: Mixture(of_tens([3, 3]), [1, "2"], 6), "2 finite numbers"),
    (lambda: Mixture([numbers(3), of_tens([3])[0]], [1, 1], 6).fetch_in(np.arange(6), 0), "one type and shape")])
def test_mistakes_are_named(make_it, words):
    with pytest.raises(UserError, match=words):
        make_it()


def stream():
    class Stream:
        def chunks(self, epoch):
            yield (np.zeros(2),)
    return Stream()


def test_an_unreadable_sample_is_named_by_its_number_in_the_mixture():
    mixture = Mixture([Broken((np.arange(4),))], [1], 4, 1)
    order = [int(Mixture(of_tens([4]), [1], 4, 1).fetch_in(np.array([i]), 0)[0][0]) for i in range(4)]
    with pytest.raises(Unreadable, match="sample 2 of source 0") as error:
        mixture.fetch_in(np.arange(4), 0)
    assert order[error.value.number] == 2


def test_a_mixture_is_verified_by_its_places_since_samples_may_repeat(tmp_path):
    x, y = samples(10)
    run = solo(config(out=str(tmp_path), epochs=2, global_batch=8), make_model("numpy"),
               Mixture([ArraySource((x, y)), ArraySource((x, y))], [3, 1], 24))
    assert fitted(run).ledger["unit"] == "place of the mixture"
    assert dict(summary._ledger(run.ledger))["samples"] == "each place of the mixture exactly once in 2 epochs"
