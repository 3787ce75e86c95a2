"""The words of a user's mistake, and the nearest name."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UserError, nearest


def test_got_expected_do():
    assert str(UserError("lr is -1", "a number above 0", "set lr")) == "lr is -1; expected a number above 0. Set lr."
    assert str(UserError("lr is -1", "a number above 0")) == "lr is -1; expected a number above 0."
    assert str(UserError("lr is -1", do="set lr")) == "lr is -1. Set lr."
    assert str(UserError("lr is -1")) == "lr is -1."


@given(st.text(), st.text(), st.text())
def test_it_travels_between_ranks(got, expected, do):
    back = pickle.loads(pickle.dumps(UserError(got, expected, do)))
    assert type(back) is UserError and (back.got, back.expected, back.do) == (got, expected, do)


@pytest.mark.parametrize("name, choices, said", [
    ("lr", ["lr", "seed"], "one of lr, seed (did you mean 'lr'?)"),
    ("Adma", ["Adam", "SGD"], "one of Adam, SGD (did you mean 'Adam'?)"),
    ("ADAM", ["Adam", "SGD"], "one of Adam, SGD (did you mean 'Adam'?)"),
    ("zzz", ["b", "a"], "one of a, b"),
    ("x", [], "one that exists (there is none here)")])
def test_nearest(name, choices, said):
    assert nearest(name, choices) == said


def test_nearest_of_many_is_short():
    many = [f"name_{i:03d}" for i in range(500)]
    assert nearest("nmae_123", many) == "a known name (did you mean 'name_123'?)"
    assert nearest("!", many) == "a known name"
