"""Trial before the first step of what a run writes at its end: stored exactly, left out with a note, refused."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import config, lockstep, make_model, samples

from hvdtrain.checkpoint import CheckpointError, inspect
from hvdtrain.checkpoint.manifest import TAG, decode_state, encode_state
from hvdtrain.config import CheckpointConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.loop import fit as fit_run
from hvdtrain.trainer import Trainer

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.binary(max_size=3),
                 st.tuples(st.integers(), st.text(max_size=2)), st.just(TAG), st.just(np.int64(7)))
VALUES = st.recursive(
    st.one_of(KEYS.filter(lambda key: not isinstance(key, tuple)), st.floats(allow_nan=False),
              st.sampled_from([np.float32(0.1), np.float64(2), np.bool_(True), np.arange(6).reshape(2, 3),
                               np.zeros((0, 2), np.float16), np.array(3), np.array(["a", "bc"])]),
              st.sets(KEYS, max_size=3), st.frozensets(KEYS, max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=8)


def same(a, b):
    if isinstance(a, (list, dict)):
        pairs = zip(a, b) if isinstance(a, list) else ((a[key], b[key]) for key in a)
        return type(a) is type(b) and len(a) == len(b) and all(same(*pair) for pair in pairs)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value):
    stored = json.loads(json.dumps(encode_state(value, "it")))
    assert same(decode_state(stored), value)


def test_what_json_holds_is_stored_as_before():
    value = {"a": [1, 2.5, None, True, "x"], "b": {"$": "float", "value": "nan"}, "c": (1, 2)}
    assert encode_state(value, "it") == {**value, "c": [1, 2]}


class Keeps(Callback):
    """Keeps ``value`` in its state."""

    where = "all"

    def __init__(self, value):
        self.value, self.steps = value, 0

    def step_end(self, run):
        self.steps += 1

    def state_dict(self):
        return {"best": self.value, "by epoch": {3: np.float32(0.5)}}

    def load_state_dict(self, state):
        self.value = state


def small(tmp_path, **changes):
    return config(out=str(tmp_path / "run"), global_batch=8, checkpoint=CheckpointConfig(every_steps=3), **changes)


def test_states_of_numpy_are_resumed(tmp_path):
    Trainer(small(tmp_path, max_steps=3)).fit(make_model("numpy"), samples(48), callbacks=[Keeps({np.int32(1), "a"})])
    callback = Keeps(None)
    Trainer(small(tmp_path, max_steps=4, resume="auto")).fit(make_model("numpy"), samples(48), callbacks=[callback])
    assert callback.value["best"] == {np.int32(1), "a"} and callback.steps == 1
    assert same(callback.value["by epoch"], {3: np.float32(0.5)})


def test_a_renamed_callback_resumes_its_state(tmp_path):
    class Renamed(Keeps):
        state_key = "Keeps"

    Trainer(small(tmp_path, max_steps=3)).fit(make_model("numpy"), samples(48), callbacks=[Keeps(1)])
    for last in (4, 5):  # from a checkpoint of the old class, then from one of the new
        callback = Renamed(None)
        Trainer(small(tmp_path, max_steps=last, resume="auto")).fit(make_model("numpy"), samples(48),
                                                                    callbacks=[callback])
        assert callback.value is not None


def test_a_state_that_cannot_be_stored_is_refused_by_name_before_the_first_step(tmp_path):
    callbacks = [Keeps([1, {"x": object()}]) for _ in range(2)]

    def work(run):
        run.callbacks.append(callbacks[run.control.rank])
        with pytest.raises(UserError, match=r"callback Keeps: state_dict\(\)\['best'\]\[1\]\['x'\] is a object, which"):
            fit_run(run)
        return callbacks[run.control.rank].steps

    assert lockstep(2, small(tmp_path, epochs=1), lambda rank: make_model("numpy"), samples(48), work) == [0, 0]
    assert not (tmp_path / "run").exists()


def test_a_state_that_turns_unstorable_costs_the_checkpoint_and_not_the_model(tmp_path):
    class Turns(Keeps):
        def step_end(self, run):
            self.value = object()

    with pytest.raises(UserError, match=r"the last checkpoint could not be written: callback Turns.*is a object.*; the "
                       r"final model is in .*model\. Resume") as error:
        Trainer(small(tmp_path, epochs=1)).fit(make_model("numpy"), samples(48), callbacks=[Turns(1)])
    assert error.value.kind == "user" and "space" not in str(error.value)
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert not (tmp_path / "run/completed.json").exists() and not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("folder", ["model", "checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path, folder):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / folder).write_text("")
    callback = Keeps(1)
    with pytest.raises(UserError, match=f"{folder} is not a folder|already holds a run"):
        Trainer(small(tmp_path, epochs=1)).fit(make_model("numpy"), samples(48), callbacks=[callback])
    assert callback.steps == 0


def test_a_record_that_cannot_be_made_is_refused_before_the_first_step(tmp_path, monkeypatch):
    trainer = Trainer(small(tmp_path, epochs=1))
    trainer._assembled(make_model("numpy"), samples(48))
    monkeypatch.setattr(trainer.run.parts, "describe", lambda: {("not", "text"): 1})
    with pytest.raises(UserError, match="completed.json, cannot be made: TypeError"):
        trainer.fit()
    assert trainer.run.state.cursor.step == 0


def test_manifests_refuse_nothing_that_was_encoded(tmp_path):
    Trainer(small(tmp_path, max_steps=3)).fit(make_model("numpy"), samples(48), callbacks=[Keeps(np.ones(300))])
    meta = inspect(next((tmp_path / "run/checkpoints").iterdir())).meta
    assert [name for name, state in meta["callbacks"] if "best" in state] == ["Keeps"]
    with pytest.raises(CheckpointError, match="an array of object"):
        encode_state(np.array([object()]), "it")
