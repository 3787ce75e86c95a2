"""Data by name: the built-in sets, files, user callables, and the words for what is wrong."""

import sys
import textwrap

import numpy as np
import pytest

from hvdtrain.core.errors import UserError
from hvdtrain.data.sets.digits import make as digits
from hvdtrain.data.sets.npz import make as npz
from hvdtrain.data.sets.synthetic import make as synthetic
from hvdtrain.data.sources import ArraySource, interpret, resolve


def everything(source):
    return source.fetch(np.arange(len(source), dtype=np.int64))


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write a module into a current directory of its own; return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    known = set(sys.modules)
    (tmp_path / "their_data.py").write_text(textwrap.dedent("""
        import numpy as np
        x, y = np.arange(6.0), np.arange(6)

        def arrays(n=6): return x[:n], y[:n]
        def weighted(): return [x, y, np.ones(6)]
        def named(): return {"y": y, "x": x}
        def named_pair(split): return {"x": x, "y": y, "x_test": x[:2], "y_test": y[:2]}
        def pair(): return (x, y), (x[:2], y[:2])
        def lone_pair(): return (x, y), None
        def by_split(split, n=3): return (x[:n], y[:n]) if split == "train" else (x[n:], y[n:])
        def no_test(split): return (x, y) if split == "train" else None
        def open_ended(**args): return x[:len(args)], y[:len(args)]
        def uneven(): return x, y[:5]
        def words(): return "data"
        def nothing(): return None
        def needs(size): return x, y
        def bad_name(): return {"x": x, "yy": y}
        def endless(): raise MemoryError("Unable to allocate 5 TiB")

        class Their:
            def __len__(self): return 4
            def fetch(self, indices_n): return (indices_n * 2,)

        class Flow:
            def chunks(self, epoch): yield (x,)
    """))
    yield "their_data"
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_digits_split_is_stratified_complete_and_deterministic():
    (train_x, train_y), (test_x, test_y) = everything(digits("train")), everything(digits("test"))
    assert train_x.shape[1:] == (8, 8) and train_x.dtype == np.float32 and train_y.dtype == np.int64
    assert train_x.min() == 0 and train_x.max() == 1
    assert len(train_x) + len(test_x) == 1797
    share = np.bincount(test_y) / (np.bincount(test_y) + np.bincount(train_y))
    assert np.abs(share - 0.2).max() < 0.005
    assert np.array_equal(everything(digits("test"))[0], test_x)
    assert not np.array_equal(everything(digits("test", seed=1))[0][:200], test_x[:200])


def test_synthetic_classes_can_be_learnt_and_do_not_change():
    (x, y), (test_x, test_y) = (everything(synthetic(s, samples=2000, shape=(3, 2), classes=4))
                                for s in ("train", "test"))
    assert x.shape == (2000, 3, 2) and x.dtype == np.float32 and set(y) == set(range(4))
    assert not np.array_equal(x, test_x)
    flat, flat_test = (np.c_[a.reshape(2000, 6), np.ones(2000)] for a in (x, test_x))
    fitted = np.linalg.lstsq(flat, np.eye(4)[y], rcond=None)[0]
    assert ((flat_test @ fitted).argmax(1) == test_y).mean() > 0.8
    again = everything(synthetic("train", samples=2000, shape=[3, 2], classes=4))
    assert np.array_equal(again[0], x) and np.array_equal(again[1], y)
    assert everything(synthetic("train", samples=2, shape=2))[0].shape == (2, 2)


def test_synthetic_tokens_follow_a_rule_nine_times_in_ten():
    x, y = everything(synthetic("train", samples=300, shape=(16,), vocab=11))
    assert x.shape == y.shape == (300, 16) and x.dtype == np.int64 and 0 <= x.min() and x.max() < 11
    assert np.array_equal(x[:, 1:], y[:, :-1])
    pairs = np.zeros((11, 11))
    np.add.at(pairs, (x, y), 1)
    assert 0.87 < pairs.max(axis=1).sum() / pairs.sum() < 0.95
    test_x, test_y = everything(synthetic("test", samples=300, shape=(16,), vocab=11))
    assert (pairs.argmax(axis=1)[test_x] == test_y).mean() > 0.87


@pytest.mark.parametrize("args, words", [
    ({"samples": 0}, "samples"), ({"classes": 1}, "classes"), ({"shape": (0,)}, "shape"),
    ({"vocab": -1}, "vocab"), ({"samples": 9999999999}, r"9999999999 samples of shape \[8, 8\] .* GiB"),
    ({"samples": 9999999999, "vocab": 5}, "GiB free on this host"), ({"shape": [10**6, 10**7]}, "GiB"),
    ({"sampels": 3}, "did you mean 'samples'"), ({"split": "test"}, "'split'"), ({"seed": "x"}, "seed"),
])
def test_wrong_arguments_of_a_built_in_set_are_named(args, words):
    with pytest.raises(UserError, match=words):
        resolve("synthetic", args, "train", [])


@pytest.mark.parametrize("fraction", [0, 1, -0.1, "0.2"])
def test_a_test_fraction_must_lie_between(fraction):
    with pytest.raises(UserError, match="test_fraction"):
        digits("train", test_fraction=fraction)


def test_npz_with_and_without_test_arrays(tmp_path):
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    np.savez(tmp_path / "whole.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "cut.npz", x=x, y=y, x_test=x[:3], y_test=y[:3])
    train, test = (everything(resolve(str(tmp_path / "whole.npz"), {}, split)) for split in ("train", "test"))
    assert len(test[1]) == 2 and sorted([*train[1], *test[1]]) == list(range(10))
    assert np.array_equal(train[0], x[train[1]])
    assert len(resolve(str(tmp_path / "cut.npz"), {}, "train")) == 10
    assert everything(resolve(str(tmp_path / "cut.npz"), {}, "test"))[1].tolist() == [0, 1, 2]


def test_npz_trouble_is_told_in_words(tmp_path):
    np.savez(tmp_path / "numbers.npz", x=np.arange(3))
    with pytest.raises(UserError, match="did you mean .*numbers.npz"):
        npz(str(tmp_path / "number.npz"), "train")
    with pytest.raises(UserError, match="no file"):
        npz(str(tmp_path / "nowhere" / "a.npz"), "train")
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "numbers.npz").read_bytes()[:60])
    np.save(tmp_path / "bare", np.arange(3))
    (tmp_path / "bare.npy").rename(tmp_path / "bare.npz")
    np.savez(tmp_path / "pickled.npz", x=np.array([{}, []], dtype=object))
    (tmp_path / "folder.npz").mkdir()
    for name in ("text", "cut", "bare", "pickled", "folder"):
        with pytest.raises(UserError, match="cannot be read"):
            npz(str(tmp_path / f"{name}.npz"), "train")


@pytest.mark.parametrize("arrays, words", [
    ({"y": np.zeros(3)}, "has the arrays y"),
    ({"x": np.zeros(3), "label": np.zeros(3)}, "'label'"),
    ({"x": np.zeros(3), "y": np.zeros(3), "x_test": np.zeros(3)}, "same of y"),
    ({"x": np.zeros(3), "y": np.zeros(2)}, "differ in length"),
    ({"x": np.zeros(1)}, "at least 2"),
])
def test_npz_with_the_wrong_arrays_is_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=words):
        npz(str(tmp_path / "a.npz"), "train")


@pytest.mark.parametrize("name, args, train, test", [
    ("arrays", {}, 6, None), ("arrays", {"n": 4}, 4, None), ("weighted", {}, 6, None), ("named", {}, 6, None),
    ("named_pair", {}, 6, 2), ("pair", {}, 6, 2), ("lone_pair", {}, 6, None), ("by_split", {"n": 4}, 4, 2),
    ("no_test", {}, 6, None), ("open_ended", {"a": 1}, 2, 2), ("Their", {}, 4, None),
])
def test_what_a_callable_may_return(user_module, name, args, train, test):
    found = [resolve(f"{user_module}:{name}", args, split) for split in ("train", "test")]
    assert [data and len(data) for data in found] == [train, test]


def test_named_arrays_come_in_the_order_x_y(user_module):
    x, y = everything(resolve(f"{user_module}:named", {}, "train"))
    assert x.dtype == np.float64 and y.dtype == np.int64


def test_a_file_path_and_a_stream_work_too(user_module, tmp_path):
    assert len(resolve(f"{tmp_path}/{user_module}.py:arrays", {}, "train")) == 6
    stream = resolve(f"{user_module}.py:Flow", {}, "train")
    assert [len(chunk[0]) for chunk in stream.chunks(0)] == [6]


@pytest.mark.parametrize("name, args, words", [
    ("digit", {}, "did you mean 'digits'"), ("their_data:arays", {}, "did you mean 'arrays'"),
    ("their_dat:arrays", {}, "no module 'their_dat'"), ("nofile.py:arrays", {}, "no file"),
    ("their_data:arrays", {"m": 1}, "no argument 'm'"), ("their_data:needs", {}, "'size'"),
    ("their_data:uneven", {}, "differ in length"), ("their_data:words", {}, "gave a str"),
    ("their_data:nothing", {}, "gave a NoneType"), ("their_data:bad_name", {}, "'yy'"),
    ("their_data:endless", {}, "does not fit into this host's memory: Unable to allocate 5 TiB"),
])
def test_mistakes_in_naming_data_are_told_with_the_nearest_name(user_module, name, args, words):
    with pytest.raises(UserError, match=words):
        resolve(name, args, "train")


def test_adapters_are_asked_in_turn():
    asked = []

    def deaf(obj):
        asked.append(obj)

    found = interpret("thing", "train", [deaf, lambda obj: ArraySource((np.arange(len(obj)),))])
    assert asked == ["thing"] and len(found) == 5
    assert interpret("thing", "test", [deaf]) is None
    pair = ("one", "three"), [lambda obj: ArraySource((np.arange(len(obj)),))]
    assert [len(interpret(pair[0], split, pair[1])) for split in ("train", "test")] == [3, 5]


@pytest.mark.parametrize("arrays", [(), (np.float64(3),), (np.array([None]),)])
def test_array_source_refuses_what_holds_no_samples(arrays):
    with pytest.raises(UserError, match="data array"):
        ArraySource(arrays)


@pytest.mark.parametrize("y, words", [
    (np.array(["a", "b", "c"]), r"array 1 \(y\) holds strings, such as 'a'; expected numbers.*tokenize.*StringLookup"),
    (np.array(["a", "b", "c"], object), "holds strings"), (np.array([b"a", b"b", b"c"]), "holds strings, such as 'a'"),
    (np.zeros(3, complex), "complex128"),
    (np.array([1, None, 2]), "dtype object"), (np.zeros(3, "M8[s]"), "datetime64"),
])
def test_arrays_that_are_not_numbers_are_refused_by_name(y, words):
    with pytest.raises(UserError, match=words):
        ArraySource((np.zeros((3, 2)), y))


def test_a_list_of_strings_is_refused_as_strings():
    with pytest.raises(UserError, match="data holds strings, such as 'a b'; expected numbers"):
        interpret((["a b", "c"], np.zeros(2)), "train")
    with pytest.raises(UserError, match="data holds strings, such as 'a b'; expected numbers"):
        interpret((["a b", "c", "d"], [0, 1, 2]), "train")


def test_a_file_that_is_no_npz_is_said_to_be_none(tmp_path):
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "garbage.npz").write_bytes(bytes(range(1, 200)))
    for name in ("empty", "garbage"):
        with pytest.raises(UserError, match="it is not a .npz file") as told:
            npz(str(tmp_path / f"{name}.npz"), "train")
        assert "pickle" not in str(told.value)
    np.savez(tmp_path / "objects.npz", x=np.array([{}, []], dtype=object))
    with pytest.raises(UserError, match="it holds Python objects"):
        npz(str(tmp_path / "objects.npz"), "train")


def test_a_damaged_npz_file_is_said_to_be_damaged(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", x=np.random.default_rng(0).standard_normal(4000))
    whole = bytearray((tmp_path / "whole.npz").read_bytes())
    for name, at in (("early", 60), ("late", len(whole) // 2)):
        broken = whole.copy()
        broken[at:at + 40] = b"\xff" * 40
        (tmp_path / f"{name}.npz").write_bytes(broken)
        with pytest.raises(UserError, match="cannot be read: it is damaged"):
            npz(str(tmp_path / f"{name}.npz"), "train")


def test_weights_without_targets_are_refused():
    with pytest.raises(UserError, match="sample_weight without y"):
        interpret({"x": np.zeros((4, 2)), "sample_weight": np.ones(4)}, "train")
