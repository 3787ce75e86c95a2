"""PackedSequences sequences: each token pair once, targets within a sequence, and one weight on any number of ranks."""

from collections import Counter

import numpy as np
import pytest
from feed_ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.sets.packed import PackedSequences, make


def made(lengths):
    """Return sequences with a number for each token that no other has."""
    return [np.arange(n) + 1000 * (i + 1) for i, n in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda ns: max(ns) > 1),
       context=st.integers(1, 16))
def test_each_pair_of_tokens_comes_once_and_rows_are_full(lengths, context):
    packed = PackedSequences(made(lengths), np.arange(len(lengths)), context)
    x, y = packed.fetch(np.arange(len(packed)))
    counted = y != -1
    assert Counter(zip(x[counted].tolist(), y[counted].tolist())) == Counter(
        (token, token + 1) for sequence in made(lengths) for token in sequence[:-1].tolist())
    assert (x[~counted] == 0).all()
    used = sorted(counted.sum(axis=1))
    assert len(used) < 2 or used[0] + used[1] > context  # no two rows would fit into one


def test_a_mean_over_tokens_has_one_weight_on_any_number_of_ranks():
    lengths = np.random.default_rng(0).integers(2, 30, 50).tolist()

    def work(rank, control, size):
        feed = Feed(PackedSequences(made(lengths), np.arange(50), 32), 5, rank=rank, size=size, control=control,
                    weight_fn=lambda batch: float((batch[1] != -1).sum()))
        return [(step.weight, step.cursor_after) for step in feed.epoch(Cursor())]

    (alone,), ranks = on_ranks(1, lambda r, c: work(r, c, 1)), on_ranks(3, lambda r, c: work(r, c, 3))
    assert ranks == [alone] * 3 and sum(weight for weight, _ in alone) == sum(lengths) - 50


def some(n=20):
    return made([3 + i % 5 for i in range(n)])


class Read:
    lengths = np.full(6, 4)

    def __init__(self, n=4):
        self.n = n

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return np.arange(self.n)


def texts():
    return ["a", "b", "c", "d"]


def test_a_part_is_held_out_and_lengths_are_taken_from_the_object():
    train, test = (make(split, f"{__name__}:some", context=8) for split in ("train", "test"))
    tokens = [set((source.fetch(np.arange(len(source)))[0] // 1000).ravel()) - {0} for source in (train, test)]
    assert len(tokens[0]) == 18 and len(tokens[1]) == 2 and not tokens[0] & tokens[1]
    with pytest.raises(UserError, match="another length"):
        PackedSequences(Read(3), np.arange(6), 8).fetch(np.array([0]))
    assert len(PackedSequences(Read(), np.arange(6), 9)) == 2


@pytest.mark.parametrize("make_it, words", [
    (lambda: make("train", f"{__name__}:some", context=0), "data.args.context"),
    (lambda: make("train", f"{__name__}:some", {"n": 0}), "without sequences"),
    (lambda: make("train", f"{__name__}:texts"), "Tokenize the text"),
    (lambda: PackedSequences(made([1, 0]), np.arange(2), 4), "no sequence has two tokens")])
def test_mistakes_are_named(make_it, words):
    with pytest.raises(UserError, match=words):
        make_it()
