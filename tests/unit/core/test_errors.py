"""The words of a user's mistake, and the nearest name."""

import io
import locale
import os
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.exit import run_guarded
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.terminal import Stdout, say


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


@pytest.mark.parametrize("fails", [lambda: "modèle".encode("ascii"), lambda: b"\xc3".decode("ascii"),
                                   lambda: os.fsdecode(b"\xff").encode()], ids=["encode", "decode", "surrogate"])
def test_a_text_that_the_locale_does_not_hold_names_the_locale(fails, monkeypatch, capsys):
    solo = launch_facts({})
    assert run_guarded(fails, solo) == 1 and "Traceback" in capsys.readouterr().err, "in UTF-8 it is a bug"
    monkeypatch.setattr(locale, "getpreferredencoding", lambda do: "ANSI_X3.4-1968")
    monkeypatch.setenv("LC_ALL", "C")
    assert run_guarded(fails, solo) == 2
    said = capsys.readouterr().err
    assert "not LC_ALL=C" in said and "PYTHONUTF8=1" in said and "test_errors.py" in said and "Traceback" not in said
    assert run_guarded(lambda: "è".encode("latin-1").decode("utf-8"), solo) == 1, "the program's own encoding"

    def unknown():
        raise UnicodeDecodeError("of a library", b"x", 0, 1, "of a test")
    assert run_guarded(unknown, solo) == 1 and "of a library" in capsys.readouterr().err


def test_a_line_is_printed_with_escapes_where_stdout_does_not_hold_it(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    say("note: modèle")
    Stdout().write("é")
    say("note: more")
    assert sys.stdout is stdout and stdout.buffer.getvalue() == b"note: mod\\xe8le\n\\xe9note: more\n"
