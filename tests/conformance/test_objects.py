"""A user's own objects with len() and items: the same training as from arrays, on any ranks; others are refused."""

from collections import namedtuple
from dataclasses import dataclass, replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, bits, config, fitted, lockstep, make_model, samples, solo, weights

from hvdtrain import backends
from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.data import prepare, stream_state
from hvdtrain.data.sources import interpret
from hvdtrain.data.workers.worker import fetch

X, Y = samples(40)
SHORT = config(epochs=1, global_batch=12, metrics=[], data=DataConfig(prefetch=0, workers=0, shuffle=False))
Sample = namedtuple("Sample", "label image")


@dataclass
class Record:
    image: np.ndarray
    label: int


KINDS = {"tuple": lambda x, y: (x, int(y)), "dict": lambda x, y: {"label": y, "image": x},
         "named tuple": lambda x, y: Sample(y, x), "dataclass": lambda x, y: Record(x, int(y)),
         "numbers": lambda x, y: (x.tolist(), int(y))}


class Rows:
    """An object of no framework's class, which may also be iterated and takes slices."""

    def __init__(self, kind, n=40):
        self.kind, self.n = kind, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int and 0 <= i < self.n
        return KINDS[self.kind](X[i], Y[i])

    def __iter__(self):
        raise AssertionError("iterated")


def read(framework, data, **more):
    return interpret(data, "train", (backends.load(framework).adapt_data,), **more)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_samples_by_number_train_as_arrays_do(framework):
    want = bits(fitted(solo(SHORT, make_model(framework), (X, Y))))
    assert bits(fitted(solo(SHORT, make_model(framework), Rows("dict")))) == want
    for kind in KINDS:
        x, y = read(framework, Rows(kind)).fetch(np.array([7, 3]))
        assert x.dtype == np.float32 and y.dtype == np.int64
        assert (x == X[[7, 3]]).all() and (y == Y[[7, 3]]).all(), kind
    train, test = (interpret((Rows("dict"), Rows("tuple", 5)), split, (backends.load(framework).adapt_data,))
                   for split in ("train", "test"))
    assert (len(train), len(test)) == (40, 5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_list_of_samples_is_an_object_too(framework):
    rows = [(x, int(y)) for x, y in zip(X, Y)]
    x, y = read(framework, rows).fetch(np.arange(40))
    assert (x == X).all() and (y == Y).all() and prepare.may_need(SHORT, rows) is False
    assert prepare.may_need(replace(SHORT, data=DataConfig()), rows)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_object_gives_ranks_the_same_training(framework):
    def trained(size, **changes):
        return lockstep(size, replace(SHORT, **changes), lambda rank: make_model(framework), Rows("named tuple"),
                        lambda run: weights(fitted(run)))

    alone, = trained(1)
    for size, shares in ((2, [3, 1]), (3, [2, 0, 1])):
        assert all(apart(got, alone) < 1e-5 for got in trained(size, shares=shares))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_random_numbers_of_an_object_depend_on_the_sample(framework):
    class Noisy(Rows):
        def __getitem__(self, i):
            return np.random.random(3).astype(np.float32), int(Y[i])

    source = read(framework, Noisy("tuple"))
    assert prepare.cost(source)[1], "draws random numbers"
    together = fetch(source, np.array([5, 9]), 1, 0)[0]
    assert (fetch(source, np.array([9]), 1, 0)[0][0] == together[1]).all() and (together[0] != together[1]).any()


class Batches:
    """A placeholder for a dataset of Keras, whose items are batches; the end of an epoch reverses them."""

    __module__ = "keras.src.trainers"

    def __init__(self):
        self.read, self.step = 0, 1

    def on_epoch_end(self):
        self.step = -self.step

    def __len__(self):
        return 5

    def __getitem__(self, i):
        self.read += 1
        return X[8 * i:8 * i + 8][::self.step], Y[8 * i:8 * i + 8][::self.step]


Batches.__name__ = Batches.__qualname__ = "PyDataset"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_pydataset_is_a_stream_of_its_batches_on_which_a_resume_reads_on(framework, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_state, "LEAST_INTERVAL", 0)
    settings = replace(SHORT, epochs=2, out=str(tmp_path / "run"), checkpoint=CheckpointConfig(at_end=True))
    whole = fitted(solo(replace(SHORT, epochs=2), make_model(framework), Batches()))
    assert whole.ledger["samples"] == 80
    order = np.concatenate([np.arange(8 * i, 8 * i + 8)[::-1] for i in range(5)])
    fitted(solo(replace(settings, max_steps=7), make_model(framework), Batches()))  # 36 samples of the second epoch
    data = Batches()
    run = solo(replace(settings, resume="auto"), make_model(framework), data)
    before = data.read
    assert bits(fitted(run)) == bits(whole) and data.read - before <= 2
    assert [len(x) for x, _ in read(framework, Batches()).chunks(0)] == [8] * 5
    assert (np.concatenate([x for x, _ in read(framework, Batches()).chunks(1)]) == X[order]).all()


class Table(Rows):
    columns = ("image", "label")


class Items(Rows):
    """Rows that are ``made(i)``."""

    def __init__(self, made):
        super().__init__("tuple")
        self.made = made

    def __getitem__(self, i):
        return self.made(i)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("data, words", [
    (Table("dict"), "indexed by column"), ("a string", "gave a str"),
    (Items(lambda i: [0.5, 1, 2.0]), "a list of 3 numbers.*a tuple of columns"),
    (Items(lambda i: ([1.0] * (i + 1), 0)), "cannot be collated|types and shapes"),
    (Items(lambda i: (X[i], None)), "one holds None"), (Items(lambda i: (X[i], "cat")), "strings"),
    (Items(lambda i: ([[1], [2, 3]], 0)), "different lengths"),
    (Items(lambda i: {"image": X[i]} if i else {"img": X[i]}), "the columns|cannot be collated"),
    (Items(lambda i: {"image": X[i], "site": 1}), "not used by position"),
])
def test_what_is_no_sample_is_refused(framework, data, words):
    with pytest.raises(UserError, match=words):
        read(framework, data).fetch(np.arange(3))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_columns_keep_their_type_over_batches_and_images_are_converted(framework):
    source = read(framework, Items(lambda i: (X[i], 0.5 if i > 2 else 1)))
    source.fetch(np.arange(2))
    with pytest.raises(UserError, match="types float32, int64, others float32, float"):
        source.fetch(np.array([5, 6]))
    image = pytest.importorskip("PIL.Image").new("RGB", (6, 4))
    with pytest.raises(UserError, match=r"a Pillow image \(RGB, 6 x 4\)"):
        read(framework, Items(lambda i: (image, 0))).fetch(np.arange(1))


def test_a_keras_model_gets_its_named_inputs():
    keras = pytest.importorskip("keras")
    pytest.importorskip("tensorflow")

    def model():
        keras.utils.set_random_seed(1)
        inputs = [keras.Input((12,), name="left"), keras.Input((1,), name="right")]
        return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.Concatenate()(inputs)))

    right = np.arange(40, dtype=np.float32)[:, None] / 40
    want = bits(fitted(solo(SHORT, model(), {"left": X, "right": right, "label": Y})))
    flat = Items(lambda i: {"right": right[i], "label": int(Y[i]), "left": X[i]})
    nested = Items(lambda i: ({"left": X[i], "right": right[i]}, int(Y[i])))
    for data in (flat, nested):
        assert bits(fitted(solo(SHORT, model(), data))) == want
