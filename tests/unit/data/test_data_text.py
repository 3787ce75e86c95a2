"""The text source: the same everywhere, numbered as the language models expect, train and test apart."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.core.errors import UserError
from hvdtrain.data.sets import text
from hvdtrain.data.sources import resolve


def both(**args):
    return [resolve("text", args, split).arrays for split in ("train", "test")]


def rows(x) -> set[bytes]:
    return {row.tobytes() for row in x}


def test_tokens_are_printable_ascii_in_order_then_the_line_break():
    printable = "".join(map(chr, range(32, 127)))
    assert text.encode(printable).tolist() == list(range(95))
    assert text.encode("\n").tolist() == [95] and text.VOCAB == 96
    assert text.encode("é\t\0").tolist() == text.encode("???").tolist()
    assert text.decode(text.encode(printable + "\n a")) == printable + "\n a"
    assert text.encode("").shape == (0,) and text.encode("a").dtype == np.int64


def test_sequences_follow_one_another_and_y_is_one_later():
    x, y = text.sequences(np.arange(13), 4)
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert [len(part) for part in text.sequences(np.arange(12), 4)] == [2, 2]  # the last has no successor
    assert [part.shape for part in text.sequences(np.arange(0), 4)] == [(0, 4), (0, 4)]


def test_the_text_is_english_and_no_paragraph_comes_twice():
    whole = text.paragraphs()
    assert whole == text.paragraphs() and len(whole) > 100_000
    parts = [part.strip("\n") for part in whole.split("\n\n") if part.strip()]
    assert len(parts) == len(set(parts)) > 1000
    assert whole.count(" the ") > 2000 and "\n\n\n" not in whole


def test_the_splits_are_whole_apart_and_deterministic():
    (x, y), (test_x, test_y) = both()
    assert x.dtype == y.dtype == np.int64 and x.shape == y.shape and x.shape[1:] == test_x.shape[1:] == (64,)
    assert 0 <= min(x.min(), y.min(), test_y.min()) and max(x.max(), y.max(), test_y.max()) < text.VOCAB
    assert np.array_equal(x[:, 1:], y[:, :-1])
    whole, _ = text.sequences(text.encode(text.paragraphs()), 64)
    assert len(x) + len(test_x) == len(whole) and len(test_x) == pytest.approx(0.1 * len(whole), abs=1)
    assert sorted(row.tobytes() for row in [*x, *test_x]) == sorted(row.tobytes() for row in whole)
    common = [text.decode(np.frombuffer(row, np.int64)) for row in rows(x) & rows(test_x)]
    assert all(not any(map(str.isalnum, row)) for row in common), "the rules of tables alone come twice"
    again = both()[1]
    assert np.array_equal(again[0], test_x) and np.array_equal(again[1], test_y)
    assert rows(both(seed=1)[1][0]) != rows(test_x)


def test_samples_limits_either_split_and_keeps_them_apart():
    (train_x, _), (test_x, _) = both()
    (few_x, few_y), (few_test_x, _) = both(samples=50, context=64)
    assert few_x.shape == few_y.shape == few_test_x.shape == (50, 64)
    assert rows(few_x) < rows(train_x) and rows(few_test_x) < rows(test_x)
    assert rows(few_x[-5:]) <= rows(train_x[-len(train_x) // 5:]), "they are spread over the text"
    assert len(both(samples=10**9)[0][0]) == len(train_x)
    assert both(context=16)[0][0].shape[1] == 16
    assert len(both(test_fraction=0.5)[1][0]) > 4 * len(test_x)


@pytest.mark.parametrize("args, words", [
    ({"context": 0}, "context"), ({"context": 10**7}, "context"), ({"samples": -1}, "samples"),
    ({"test_fraction": 1}, "test_fraction"), ({"contxt": 3}, "did you mean 'context'"), ({"seed": -1}, "seed"),
])
def test_wrong_arguments_are_named(args, words):
    with pytest.raises(UserError, match=words):
        resolve("text", args, "train")


def test_a_python_without_the_text_is_told(monkeypatch):
    def gone(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(text, "importlib", SimpleNamespace(import_module=gone))
    with pytest.raises(UserError, match="pydoc_data.topics.*synthetic"):
        resolve("text", {}, "train")


def test_a_model_reads_these_tokens():
    """The vocabulary is the default one of the language models, whose source says so."""
    import inspect
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    gpt = pytest.importorskip("torch_models.gpt")
    assert inspect.signature(gpt.build).parameters["vocab"].default == text.VOCAB
    x, _ = both(samples=2)[0]
    assert gpt.build(width=8, depth=1, heads=2)(torch.from_numpy(x)).shape == (2, 64, 96)
