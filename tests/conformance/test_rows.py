"""Rows with named columns: taken by name, whole by a task, or refused; never by position."""

from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, bits, config, fitted, make_model, samples, solo

from hvdtrain import backends
from hvdtrain.config import DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.data.rows import ColumnNames, note_of
from hvdtrain.data.sources import Source, interpret

X, Y = samples(40)
SITE = np.arange(40) % 4
SHORT = config(epochs=1, global_batch=8, metrics=[])


def plain(part):
    return np.asarray(part)


# --- names -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("row, order", [
    ({"label": Y, "image": X}, "image label"), ({"weights": SITE, "y": Y, "pixel_values": X}, "pixel_values y weights"),
    ({"features": X}, "features"), ({"sample_weight": SITE, "x": X, "target": Y}, "x target sample_weight"),
])
def test_known_names_are_taken_in_any_order(row, order):
    rows = ColumnNames()
    got = rows.arrays(row, plain)
    assert all(a is row[name] for a, name in zip(got, order.split(), strict=True))
    assert rows.note.startswith(f"data: x is {order.split()[0]}")
    made = namedtuple("Sample", row)(**row)
    assert all(a is b for a, b in zip(ColumnNames().arrays(made, plain), got, strict=True))


@pytest.mark.parametrize("row", [
    {"image": X, "site": SITE, "label": Y}, {"a": X, "b": Y}, {"image": X, "features": X, "label": Y},
    {"image": X, "label": Y, "target": Y}, {"label": Y}, {"image": X, "weight": SITE}, {"x": X, "yy": Y}, {},
])
def test_other_columns_are_refused(row):
    with pytest.raises(UserError, match="not used by position"):
        ColumnNames().arrays(row, plain)
    with pytest.raises(UserError, match="not used by position"):
        ColumnNames().arrays(namedtuple("Sample", row)(**row), plain)


def test_a_task_gets_names_and_one_length_has_one_meaning():
    rows = ColumnNames(whole=True)
    first = rows.for_source().arrays({"site": SITE, "label": Y, "image": X}, plain)
    assert [a is b for a, b in zip(first, (X, Y, SITE))] == [True] * 3
    again = rows.packed(rows.for_source().arrays({"image": X, "label": Y, "site": SITE}, plain))
    assert again["site"] is SITE and again["label"] is Y
    with pytest.raises(UserError, match=r"asks for batch\[0\]"):
        again[0]
    for other in ({"image": X, "label": Y, "age": SITE}, (X, Y, SITE)):
        with pytest.raises(UserError, match="as before"):
            rows.for_source().arrays(other, plain)
    assert rows.packed(rows.arrays({"x": X, "y": Y}, plain)) == (X, Y)


def test_a_model_with_named_inputs_and_outputs_gets_its_columns():
    rows = ColumnNames(inputs=("b", "a"), outputs=("p", "q"))
    x, y, weight = rows.parts({"a": 1, "q": 2, "b": 3, "p": 4, "weight": 5})
    assert (x, y, weight) == ({"b": 3, "a": 1}, {"p": 4, "q": 2}, 5)
    assert rows.note == "data: x is b, a, y is p, q, the sample weight is weight"
    assert ColumnNames(inputs=("label",)).parts({"label": 1, "target": 2}) == [1, 2]


# --- runs ------------------------------------------------------------------------------------------------------------

try:
    from torch.utils.data import DataLoader, Dataset, IterableDataset
except ImportError:
    Dataset = IterableDataset = object


class Records(Dataset):
    """Map-style rows, as a loader of records gives them."""

    def __init__(self, *names):
        self.names = names

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        row = {"image": X[i], "label": int(Y[i]), "site": int(SITE[i])}
        return {name: row[name] for name in self.names}


class Streamed(IterableDataset):
    """The same rows, one after the other."""

    def __init__(self, *names):
        self.records = Records(*names)

    def __iter__(self):
        return map(self.records.__getitem__, range(len(X)))


def records(framework, kind, *names):
    """Return the samples as ``kind`` of dataset, with the columns ``names`` in this order."""
    arrays = {name: {"image": X, "label": Y, "site": SITE}[name] for name in names}
    if kind == "columns":
        return arrays
    if framework == "tensorflow":
        tf = pytest.importorskip("tensorflow")
        rows = tf.data.Dataset.from_tensor_slices(arrays)
        return rows.batch(8) if kind == "batches" else rows
    pytest.importorskip("torch")
    if kind == "stream":
        return Streamed(*names)
    return DataLoader(Records(*names), batch_size=8) if kind == "batches" else Records(*names)


CASES = [(framework, kind) for framework in FRAMEWORKS for kind in ("rows", "batches", "stream", "columns")
         if (framework, kind) != ("tensorflow", "stream")]


@pytest.mark.parametrize("framework, kind", CASES)
def test_columns_become_arrays_by_their_names(framework, kind):
    for names, whole in ((("label", "image"), False), (("site", "label", "image"), True)):
        rows = ColumnNames(whole, nests=framework == "tensorflow")
        data = backends.load(framework).adapt_data(records(framework, kind, *names), rows=rows)
        batches = [data.fetch(np.arange(40))] if isinstance(data, Source) else list(data.chunks(0))
        arrays = [np.concatenate(column) for column in zip(*batches)]
        assert all((a == b).all() for a, b in zip(arrays, (X, Y, SITE)[:len(names)], strict=True))
        assert note_of(data, whole) == ("data: the task gets each batch as a dict of image, label, site" if whole
                                        else "data: x is image, y is label")
        assert not whole or list(rows.packed(arrays)) == ["image", "label", "site"]


@pytest.mark.parametrize("framework, kind", [("torch", "rows"), ("tensorflow", "columns")])
def test_training_by_names_is_training_by_position(framework, kind):
    settings = replace(SHORT, max_steps=2, data=DataConfig(prefetch=0, workers=0, shuffle=False))
    want = fitted(solo(settings, make_model(framework), (X, Y)))
    got = fitted(solo(settings, make_model(framework), records(framework, kind, "label", "image")))
    assert bits(got) == bits(want)
    assert "data: x is image, y is label" in got.notes
    assert not any(note.startswith("data: ") for note in want.notes)


def test_three_arrays_are_named_in_a_note():
    for data in ((X, Y, np.ones(40)), {"x": X, "y": Y, "sample_weight": np.ones(40)}):
        run = solo(SHORT, make_model("numpy"), data)
        assert "data: the arrays are x, y and sample weight, in this order" in run.notes
    torch = pytest.importorskip("torch")
    three = backends.load("torch").adapt_data(torch.utils.data.TensorDataset(*map(torch.from_numpy, (X, Y, SITE))))
    assert note_of(three, False).endswith("in this order") and note_of(three, True) == ""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_columns_that_are_python_lists_are_refused(framework):
    adapters = (backends.load(framework).adapt_data,)
    for columns, names in (({"image": X.tolist(), "label": Y}, "'image'"), ({"x": X, "y": Y.tolist()}, "'y'")):
        with pytest.raises(UserError, match=f"the columns {names} as Python lists; expected arrays.*numpy.asarray"):
            interpret(columns, "train", adapters)


@pytest.mark.parametrize("framework, kind", CASES)
def test_columns_of_no_clear_meaning_end_the_run_before_its_first_step(framework, kind):
    with pytest.raises(UserError, match="'image', 'site', 'label'"):
        solo(SHORT, make_model(framework), records(framework, kind, "image", "site", "label"))


TASK = """
from small_runs import make_model

def build():
    return make_model({framework!r})

def task(model, batch):
    assert list(batch) == ["image", "label", "site"], batch
    logits = model(batch["image"])
    return loss(logits, batch["label"]), batch["site"].shape[0]

def weight(batch):
    return float(len(batch["site"]))

def metrics(model, batch):
    return {{"sites": (total(batch["site"]), 1)}}
"""
LOSSES = {"torch": """
import torch
total = torch.sum
def loss(logits, label):
    return torch.nn.functional.cross_entropy(logits, label, reduction="sum")
""", "tensorflow": """
import tensorflow as tf
total = tf.reduce_sum
def loss(logits, label):
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits))
"""}


@pytest.mark.parametrize("framework, kind, workers", [
    ("torch", "rows", 1), ("tensorflow", "batches", 0)])
def test_a_task_gets_whole_rows(framework, kind, workers, tmp_path, monkeypatch):
    pytest.importorskip(framework)
    (tmp_path / "named_rows.py").write_text(LOSSES[framework] + TASK.format(framework=framework))
    data = records(framework, kind, "site", "image", "label")
    settings = replace(SHORT, model=f"{tmp_path}/named_rows.py:build", eval_every=1,
                       data=DataConfig(prefetch=0, workers=workers, shuffle=False))
    run = fitted(solo(settings, None, (data, data)))
    assert run.state.metrics["sites"] == pytest.approx(SITE.sum() / 5)
    assert "data: the task gets each batch as a dict of image, label, site" in run.notes


def test_inputs_of_a_keras_model_are_taken_by_their_names():
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")

    def model():
        keras.utils.set_random_seed(1)
        left, right = (keras.Input(shape, name=name) for name, shape in (("left", (12,)), ("right", (1,))))
        joined = keras.layers.Concatenate()([left, right])
        return keras.Model([left, right], keras.layers.Dense(5, name="out")(joined))

    columns = {"right": SITE[:, None].astype(np.float32), "label": Y, "left": X}
    inputs = {name: columns[name] for name in ("left", "right")}
    want = fitted(solo(SHORT, model(), tf.data.Dataset.from_tensor_slices((inputs, Y)).batch(8)))
    for data in (tf.data.Dataset.from_tensor_slices(columns), columns):
        settings = replace(SHORT, data=DataConfig(prefetch=0, shuffle=False))
        got = fitted(solo(settings, model(), data))
        assert bits(got) == bits(want)
        assert "data: x is left, right, y is label" in got.notes
    with pytest.raises(UserError, match="the model's inputs 'left', 'right'"):
        solo(SHORT, model(), tf.data.Dataset.from_tensor_slices({**columns, "site": SITE}))
