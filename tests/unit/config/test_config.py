"""Config: types and ranges are checked for library users too, and two configurations can be compared."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from hvdtrain import Trainer
from hvdtrain.commands.train import parse
from hvdtrain.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EarlyStopConfig,
    ExchangeConfig,
    Named,
    ScheduleConfig,
    assumed,
    schema,
)
from hvdtrain.core.errors import UserError


def refusal(**values):
    with pytest.raises(UserError) as caught:
        Config(**values).check()
    return str(caught.value)


def test_the_defaults_are_possible():
    assert Config().check() == Config()


@pytest.mark.parametrize("values, words", [
    ({"optimizer": 5}, ["optimizer is 5", "a name, or a section with name, args"]),
    ({"exchange": "fp16"}, ["exchange is 'fp16'", "expected a section with bucket_mb"]),
    ({"lr": "0.1"}, ["lr is '0.1'", "a number"]),
    ({"lr": None}, ["lr is empty (null)", "a number"]),
    ({"global_batch": 32.0}, ["global_batch is 32.0", "a whole number"]),
    ({"global_batch": True}, ["global_batch is true", "a whole number"]),
    ({"deterministic": 1}, ["deterministic is 1", "true or false"]),
    ({"shares": True}, ["shares is true", "a list of numbers"]),
    ({"shares": [1, "2"]}, ["shares is [1, '2']", "a list of numbers"]),
    ({"metrics": 5}, ["metrics is 5", "a list of names"]),
    ({"model_args": {1: 2}}, ["model_args is {1: 2}", "keyword arguments"]),
    ({"nan_guard": "none"}, ["nan_guard is 'none'", "one of stop, skip"]),
    ({"data": DataConfig(args=[1])}, ["data.args is [1]", "keyword arguments"]),
    ({"schedule": ScheduleConfig(interval="day")}, ["schedule.interval is 'day'", "one of step, epoch"])], ids=str)
def test_wrong_types_are_refused_in_words(values, words):
    text = refusal(**values)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    "name, value",
    [
        ("global_batch", 0),
        ("devices_per_rank", 2**31),
        ("global_batch", -1),
        ("epochs", -1),
        ("max_steps", -1),
        ("micro_batch", -1),
        ("eval_every", -1),
        ("threads", -1),
        ("threads", 10**6),
        ("seed", -1),
        ("seed", 2**32),
        ("accumulate", 0),
        ("log_every", 0),
        ("max_skipped", 0),
        ("clip_norm", -0.1),
        ("clip_norm", math.nan),
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", math.inf),
        ("lr", math.nan),
        ("control_timeout_s", 0),
        ("control_timeout_s", 0.001),
        ("control_timeout_s", 1e10),
        ("global_batch", 2**54),
        ("shares", [-1, 2]),
        ("shares", [0, 0]),
        ("shares", [1, math.inf]),
        ("shares", [math.nan, 1]),
        ("data", DataConfig(prefetch=-1)),
        ("checkpoint", CheckpointConfig(keep=0)),
        ("checkpoint", CheckpointConfig(every_steps=-1)),
        ("checkpoint", CheckpointConfig(every_s=-0.5)),
        ("checkpoint", CheckpointConfig(every_s=math.nan)),
        ("schedule", ScheduleConfig(warmup_steps=-1)),
        ("schedule", ScheduleConfig(linear_scaling_base=-1)),
        ("early_stop", EarlyStopConfig(patience=0)),
        ("early_stop", EarlyStopConfig(min_delta=math.nan)),
        ("exchange", ExchangeConfig(bucket_mb=0)),
        ("exchange", ExchangeConfig(cycle_time_ms=math.inf)),
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(name, value):
    text = refusal(**{name: value})
    assert name in text and "expected" in text and text.endswith(".")


@pytest.mark.parametrize(
    "name, value",
    [
        ("epochs", 0),
        ("lr", 1),
        ("lr", np.float64(0.5)),
        ("global_batch", np.int64(8)),
        ("shares", (3, 1)),
        ("shares", [0, 2.5]),
        ("seed", 2**32 - 1),
        ("clip_norm", 0),
        ("metrics", []),
        ("model_args", {"a": object()}),
    ],
    ids=str,
)
def test_unusual_values_are_possible(name, value):
    assert repr(getattr(Config(**{name: value}).check(), name)) == repr(value)


def test_a_bare_text_is_the_name_of_a_section():
    made = Config(data="mydata.py:load", optimizer="SGD", schedule="StepLR", loss="mse").check()
    assert made == Config(data=DataConfig("mydata.py:load"), optimizer=Named("SGD"), schedule=ScheduleConfig("StepLR"),
                          loss=Named("mse"))
    assert dataclasses.replace(made, optimizer="Adam").optimizer == Named("Adam")


def test_it_is_frozen_and_no_two_share_a_default():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 1  # type: ignore[misc]
    a, b = Config(), Config()
    a.model_args["x"] = 1
    a.data.args["x"] = 1
    a.metrics.append("x")
    assert b.model_args == {} and b.metrics == ["accuracy"]
    assert b.data.args == {} and Config().data.args == {} and Named().args == {}


def test_the_digest_tells_configurations_apart():
    a = Config(model_args={"b": 1, "a": 2})
    assert a.digest() == Config(model_args={"a": 2, "b": 1}).digest() != Config().digest()
    seen = {
        Config().digest(),
        *(
            Config(**{n: v}).digest()
            for n, v in (
                ("lr", 0.1),
                ("seed", 1),
                ("out", "x"),
                ("data", DataConfig(prefetch=0)),
                ("optimizer", Named("SGD")),
                ("shares", [1.0]),
            )
        ),
    }
    assert len(seen) == 7
    assert json.loads(json.dumps(a.to_dict())) == a.to_dict()


# --- schema --------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Inner:
    """An inner section."""

    name: str = "x"
    args: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outer:
    """A tree."""

    n: int = 1
    inner: Inner = Inner()
    many: list[float] = dataclasses.field(default_factory=list)
    kind: Literal["a", "b"] = "a"
    on: bool = False


def test_keys_and_sections_of_a_tree():
    assert [k.name for k in schema.keys(Outer)] == ["n", "inner.name", "inner.args", "many", "kind", "on"]
    assert schema.sections(Outer) == schema.named_sections(Outer) == {"inner": Inner}
    assert schema.named_sections(Inner) == {}
    assert dict(schema.leaves(Outer(n=3, many=[1.0]))) == {
        "n": 3, "inner.name": "x", "inner.args": {}, "many": [1.0], "kind": "a", "on": False}
    assert [k.default for k in schema.keys(Outer)] == [1, "x", {}, [], "a", False]


@pytest.mark.parametrize(
    "value, hint, fit",
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        (1, float, True),
        (True, float, False),
        ("1", float, False),
        (np.float32(1), float, True),
        (np.bool_(True), int, False),
        (True, bool, True),
        (0, bool, False),
        ("", str, True),
        (None, str, False),
        ([], list[float], True),
        ([1, 2.5], list[float], True),
        (["a"], list[float], False),
        ("ab", list[str], False),
        ({}, dict, True),
        ({"a": 1}, dict, True),
        ({1: 1}, dict, False),
        ([], dict, False),
        ("a", Literal["a"], True),
        ("b", Literal["a"], False),
        ([1], Literal["a"], False),
        (Inner(), Inner, True),
        ("x", Inner, False),
    ],
)
def test_fits(value: Any, hint: Any, fit):
    assert schema.fits(value, hint) is fit


def test_values_are_shown_on_one_short_line():
    assert (schema.shown(None), schema.shown(True), schema.shown(1), schema.shown("a\nb")) == (
        "empty (null)",
        "true",
        "1",
        r"'a\nb'",
    )
    assert len(schema.shown("x" * 500)) == 60 and schema.shown("x" * 500).endswith("...")
    assert schema.shown(10**5000) == "a int too large to show"
    loop: list = []
    loop.append(loop)
    assert schema.shown(loop) == "[[...]]"


def test_every_key_that_may_hold_numbers_of_ranks_is_declared_so():
    """The supervisor refits what is declared when ranks leave; any other list would end the run."""
    lists = {key.name for key in schema.keys(Config) if schema.lists_numbers(key.hint) or schema.by_name(key.hint)}
    other = {"pipeline.depths", "freeze"}  # of replicas, see launch/recut.py; of layers
    assert lists - set(schema.per_rank(Config())) == other


@pytest.mark.parametrize("made, idle, line", [
    (lambda: Config(), (), "assumed: Adam, lr 0.002, 12 epochs; set lr, epochs, optimizer"),
    (lambda: Config(learning_rate=0.002, optimizer="SGD"), (), "assumed: 12 epochs; set epochs"),
    (lambda: Config(optimizer="SGD", max_steps=3), (), "assumed: lr 0.002; set lr"),
    (lambda: Config(epochs=12), ("lr", "optimizer.args"), ""),
    (lambda: parse(["--seed", "1"], {"HVDTRAIN_EPOCHS": "12"}), (), "assumed: Adam, lr 0.002; set lr, optimizer"),
    (lambda: parse(["--optimizer.name", "SGD", "--lr", "0.002", "--epochs", "1"], {}), (), ""),
    (lambda: Trainer(Config(optimizer="SGD"), learning_rate=0.002).config, (), "assumed: 12 epochs; set epochs"),
])
def test_what_nobody_set_is_assumed_in_one_line(made, idle, line):
    assert assumed(made(), idle) == line


def test_the_line_is_printed_but_for_the_recipe(capsys):
    run = SimpleNamespace(setup=SimpleNamespace(idle=frozenset()))
    for config, given in ((Config(), None), (Config(progress="off"), "model"), (Config(), "model")):
        Trainer(config)._tell_assumed(run, given, None)
    assert capsys.readouterr().out == "assumed: Adam, lr 0.002, 12 epochs; set lr, epochs, optimizer\n"
