"""The set ``text_files``: tokens made once and whole, cut into sequences, and masked alike on any ranks."""

import importlib
import json
import os
import pickle
import sys
import textwrap
import threading

import numpy as np
import pytest

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data import kept
from hvdtrain.data import tokenizer as tokenizers_of_files
from hvdtrain.data import tokenizer as tokens
from hvdtrain.data.feed import Feed
from hvdtrain.data.sets.text import paragraphs
from hvdtrain.data.sources import EpochSource, Source, resolve, resolve_splits

ROWS = np.arange(40, dtype=np.int64)


def everything(source):
    return source.fetch(np.arange(len(source), dtype=np.int64))


def made(folder):
    """Return the kept files in ``folder``."""
    return sorted(path.name for path in (folder / tokens.FOLDER).iterdir())


@pytest.fixture
def english(tmp_path):
    """Return a file of 40,000 characters."""
    (tmp_path / "english.txt").write_bytes(paragraphs()[:40_000].encode("ascii", "replace"))
    return tmp_path / "english.txt"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Return a module with tokenizers of a user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    known = set(sys.modules)
    (tmp_path / "their_tokens.py").write_text(textwrap.dedent("""
        calls = []

        def letters(text):
            calls.append(text)
            return [ord(letter) % 128 for letter in text]

        letters.vocab = 128

        def without(text): return [ord(letter) % 128 for letter in text]
        def negative(text): return [-1]
        def words(text): return text.split()
        def number(text): return 3
        def missing(text): return open("/nowhere/merges")
    """))
    yield "their_tokens"
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_bytes_follow_one_another_and_are_kept(english):
    train, test = resolve_splits("text_files", {"root": str(english), "context": 64})
    assert isinstance(train, Source) and not isinstance(train, EpochSource) and train.vocab == 256
    x, y = everything(train)
    assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (len(train), 64)
    assert np.array_equal(x[:, 1:], y[:, :-1]) and len(test) == round(0.1 * (39_999 // 64))
    whole = np.frombuffer(english.read_bytes(), np.uint8)[:39_999 // 64 * 64].reshape(-1, 64).astype(np.int64)
    assert sorted(map(bytes, [*x, *everything(test)[0]])) == sorted(map(bytes, whole))
    assert len(made(english.parent)) == 1
    assert np.load(english.parent / tokens.FOLDER / made(english.parent)[0]).dtype == np.uint16
    sent = pickle.dumps(train)
    assert len(sent) < 1000 and np.array_equal(everything(pickle.loads(sent))[1], y)


def test_a_folder_is_its_files_in_bytewise_order_and_tests_may_be_apart(tmp_path):
    for name, text in (("b.txt", "b" * 50), ("B.md", "B" * 30), ("a/z.TXT", "z" * 21), ("notes.py", "no" * 9),
                       (".x.txt", "no"), ("apart.text", "t" * 40)):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text(text)
    (tmp_path / "set/apart.text").rename(tmp_path / "apart.log")
    train, test = resolve_splits("text_files", {"root": str(tmp_path / "set"), "test": str(tmp_path / "apart.log"),
                                                "context": 10})
    text = "".join(map(chr, everything(train)[0].reshape(-1)))
    assert text == "B" * 30 + "z" * 21 + "b" * 49 and len(test) == 3


def test_a_tokenizer_of_ones_own_gets_whole_lines_once(english, theirs, monkeypatch):
    monkeypatch.setattr(tokenizers_of_files, "PIECE", 1000)
    args = {"root": str(english), "tokenizer": f"{theirs}:letters", "context": 32, "test_fraction": 0.5}
    train, test = resolve_splits("text_files", args)
    calls = sys.modules[theirs].calls
    assert train.vocab == 128 and "".join(calls) == english.read_text() and len(calls) > 20
    assert all(text.endswith("\n") for text in calls[:-1])
    count = len(calls)
    again = resolve("text_files", args, "train")
    assert len(calls) == count, "the second reading makes no tokens"
    assert np.array_equal(everything(again)[0], everything(train)[0])
    os.utime(english, ns=(1, 1))
    resolve("text_files", args, "train")
    assert len(calls) == 2 * count and len(made(english.parent)) == 2


def test_a_character_on_the_edge_of_a_piece_is_read(tmp_path, theirs, monkeypatch):
    monkeypatch.setattr(tokenizers_of_files, "PIECE", 7)
    (tmp_path / "long.txt").write_text("añ€😀" * 30, encoding="utf-8")
    resolve("text_files", {"root": "long.txt", "tokenizer": f"{theirs}:letters", "context": 4}, "train")
    assert "".join(sys.modules[theirs].calls) == "añ€😀" * 30
    (tmp_path / "long.txt").write_bytes(b"good " * 5 + b"\xff\xfe")
    with pytest.raises(UserError, match="long.txt is not UTF-8: byte 25"):
        resolve("text_files", {"root": "long.txt", "tokenizer": f"{theirs}:letters"}, "train")
    assert not [name for name in made(tmp_path) if name.startswith(".")], "no draft is left"


def test_ranks_of_a_host_make_the_tokens_once(english, theirs, monkeypatch):
    """Ranks as threads: each opens the lock by itself, as a process would."""
    args = {"root": str(english), "tokenizer": f"{theirs}:letters", "context": 32}
    found, gate = [], threading.Barrier(4)

    def rank():
        gate.wait(30)
        found.append(everything(resolve("text_files", args, "train"))[0])

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert len(found) == 4 and all(np.array_equal(x, found[0]) for x in found)
    assert len(sys.modules[theirs].calls) == 1
    assert [name.rpartition(".")[2] for name in made(english.parent)] == ["npy"]
    kept_file = english.parent / tokens.FOLDER / made(english.parent)[0]
    kept_file.unlink()
    monkeypatch.setattr(kept, "WAIT_S", 0.1)
    lock = os.open(kept_file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    kept.fcntl.flock(lock, kept.fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another process has been tokenizing for more than .*npy|lock"):
        resolve("text_files", args, "train")
    os.close(lock)
    assert len(resolve("text_files", args, "train")) == len(found[0])


def test_the_cache_may_lie_elsewhere(english, tmp_path, monkeypatch):
    resolve("text_files", {"root": str(english), "cache": str(tmp_path / "c/d")}, "train")
    assert [path.suffix for path in (tmp_path / "c/d").iterdir()] == [".npy"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    resolve("text_files", {"root": str(english)}, "train")
    assert [path.suffix for path in (tmp_path / "home/hvdtrain/tokens").iterdir()] == [".npy"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be cached in .*file"):
        resolve("text_files", {"root": str(english), "cache": str(tmp_path / "file")}, "train")
    kept_file = next((tmp_path / "c/d").iterdir())
    kept_file.write_bytes(kept_file.read_bytes()[:-2])
    with pytest.raises(UserError, match="cannot be read.*[Rr]emove the file"):
        resolve("text_files", {"root": str(english), "cache": str(tmp_path / "c/d")}, "train")


def test_masks_are_those_of_bert_and_new_in_each_epoch(english):
    source = resolve("text_files", {"root": str(english), "context": 100, "masked": 0.15}, "train")
    plain = resolve("text_files", {"root": str(english), "context": 100}, "train")
    n = np.arange(len(source))
    was = plain.fetch(n)[0]
    (x, y), (next_x, next_y) = (source.fetch_in(n, epoch) for epoch in (0, 1))
    chosen = y != -1
    assert isinstance(source, EpochSource) and (source.vocab, source.mask) == (257, 256)
    assert x.dtype == y.dtype == np.int64 and (chosen.sum(1) == 15).all()
    assert np.array_equal(y[chosen], was[chosen]) and np.array_equal(x[~chosen], was[~chosen])
    masked, same = (x[chosen] == 256).mean(), (x[chosen] == was[chosen]).mean()
    assert 0.78 < masked < 0.82 and 0.08 < same < 0.13 and x.min() > 0
    assert np.abs(chosen.mean(0) - 0.15).max() < 0.1, "every place is chosen as often"
    assert ((next_y != -1) != chosen).mean() > 0.2
    assert all(np.array_equal(a, b) for a, b in zip(source.fetch(n), (x, y)))
    other = resolve("text_files", {"root": str(english), "context": 100, "masked": 0.15, "seed": 1,
                                   "mask_token": 7}, "train")
    assert other.vocab == 256 and (other.fetch(n)[0] == 7).mean() > 0.1


@pytest.mark.parametrize("shares", [[1, 1], [5, 0, 2]])
def test_the_masked_batches_are_the_same_at_any_cut(english, shares):
    source = resolve("text_files", {"root": str(english), "context": 32, "masked": 0.15}, "train")

    def batches(rank, size, cut):
        feed = Feed(pickle.loads(pickle.dumps(source)), 50, rank=rank, size=size, shares=cut, prefetch=0)
        return [step.micros for step in feed.epoch(Cursor(epoch=1))]

    whole = batches(0, 1, None)
    parts = [batches(rank, len(shares), shares) for rank in range(len(shares))]
    assert len(whole) > 10
    for step, (micro,) in enumerate(whole):
        for part in (0, 1):
            joined = np.concatenate([m[part] for rank in parts for m in rank[step]])
            assert np.array_equal(joined, micro[part])


def test_a_tokenizer_json_of_this_machine(english):
    library = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = library.models.WordLevel({"[UNK]": 0, "the": 1, "[MASK]": 2, "statement": 9}, unk_token="[UNK]")
    words = library.Tokenizer(model)
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    path = english.parent / "words.json"
    words.save(str(path))
    source = resolve("text_files", {"root": str(english), "tokenizer": str(path), "context": 16, "masked": 0.2},
                     "train")
    x, y = everything(source)
    assert (source.vocab, source.mask) == (10, 2) and set(np.unique(y)) <= {-1, 0, 1, 9} and (x == 2).any()
    path.write_text(json.dumps({"model": 3}))
    with pytest.raises(UserError, match="words.json cannot be read"):
        resolve("text_files", {"root": str(english), "tokenizer": str(path)}, "train")


@pytest.mark.parametrize("args, words", [
    ({}, "needs the argument 'root'"), ({"root": ""}, "root is ''"), ({"root": "nowhere"}, "does not exist"),
    ({"root": "empty"}, "holds no text"), ({"root": "short.txt"}, "has 3 tokens.*context is 128"),
    ({"root": "english.txt", "context": 0}, "context"), ({"root": "english.txt", "masked": 1.5}, "masked is 1.5"),
    ({"root": "english.txt", "tokenizer": "words"}, "tokenizer is 'words'"),
    ({"root": "english.txt", "tokenizer": "gone.json"}, "gone.json, which is no file"),
    ({"root": "english.txt", "vocab": 300}, "the 256 of tokenizer bytes"),
    ({"root": "english.txt", "tokenizer": "their_tokens:letter"}, "did you mean 'letters'"),
    ({"root": "english.txt", "tokenizer": "their_tokens:without"}, "set data.args.vocab|Set data.args.vocab"),
    ({"root": "english.txt", "tokenizer": "their_tokens:without", "vocab": 50}, "gave the number 1.. in .*english.txt"),
    ({"root": "english.txt", "tokenizer": "their_tokens:negative", "vocab": 50}, "gave the number -1"),
    ({"root": "english.txt", "tokenizer": "their_tokens:words", "vocab": 50}, "a list of whole numbers"),
    ({"root": "english.txt", "tokenizer": "their_tokens:number", "vocab": 50}, "a list of whole numbers"),
    ({"root": "english.txt", "mask_token": -2}, "mask_token"), ({"root": "english.txt", "test": "no"}, "test is .*no,"),
    ({"root": "english.txt", "test_fraction": 0}, "test_fraction"), ({"root": "english.txt", "mask": 3}, "'masked'"),
])
def test_what_is_wrong_is_one_clear_error(english, theirs, args, words):
    (english.parent / "empty").mkdir()
    (english.parent / "short.txt").write_text("abc")
    with pytest.raises(UserError, match=words):
        resolve_splits("text_files", args)


def test_an_error_of_the_users_tokenizer_is_not_taken_for_one_of_the_text(english, theirs):
    with pytest.raises(UserError, match="tokenizer their_tokens:missing failed: .*/nowhere/merges"):
        resolve("text_files", {"root": "english.txt", "tokenizer": f"{theirs}:missing", "vocab": 9}, "train")


@pytest.mark.parametrize("framework, models", [("torch", "torch_models"), ("tensorflow", "tf_models")])
def test_the_bert_twins_take_what_the_set_gives(english, framework, models):
    """Padding, the mask's number and the targets that do not count are the models'."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    bert = importlib.import_module(f"{models}.bert")
    source = resolve("text_files", {"root": str(english), "context": 16, "masked": 0.15}, "train")
    batch = source.fetch(ROWS)
    model = bert.build(vocab=source.vocab, context=16, width=8, depth=1, heads=2)
    tensor = getattr(sys.modules[framework], "from_numpy", None) or sys.modules[framework].convert_to_tensor
    loss_sum, weight = bert.task(model, tuple(map(tensor, batch)))
    keep = getattr(loss_sum, "detach", lambda: loss_sum)
    assert int(weight) == bert.weight(batch) == 40 * 2 and 4.5 < float(keep()) / 80 < 6.5
