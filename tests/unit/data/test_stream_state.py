"""Streams with ``state_dict``: a resumed run begins at its position, or reads up to it without a state that holds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from feed_ranks import on_ranks
from ledger_runs import DATA, facts, found, run_of
from small_runs import fitted, make_model, solo

from hvdtrain.checkpoint.manifest import decode_state, encode_state
from hvdtrain.cluster.control import SoloControl
from hvdtrain.config import CheckpointConfig
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data import stream_state
from hvdtrain.data.feed import Feed
from hvdtrain.data.stream import ShuffledStream
from hvdtrain.data.stream_state import MOST_BYTES, NotStorable, packed, unpacked


@pytest.fixture(autouse=True)
def every_state_is_taken(monkeypatch):
    monkeypatch.setattr(stream_state, "LEAST_INTERVAL", 0)


class Keeps:
    """0 .. n-1 in chunks of 3, from a place that is its state."""

    stays = False  # whether an epoch that was left in its middle is continued

    def __init__(self, n=60):
        self.n, self.place, self.loaded, self.read = n, 0, 0, 0

    def chunks(self, epoch):
        self.place = self.place if self.stays else self.loaded
        self.loaded = 0
        while self.place < self.n:
            x = np.arange(self.place, min(self.place + 3, self.n))
            self.place += len(x)
            self.read += len(x)
            yield self.rows(x, epoch)
        self.place = 0

    def rows(self, x, epoch):
        return x + 1000 * epoch, x * 0.5

    def state_dict(self):
        return {"place": self.place, "kinds": (np.arange(2), b"x", None)}

    def load_state_dict(self, state):
        assert isinstance(state["kinds"], tuple) and state["kinds"][0].tolist() == [0, 1]
        self.place = self.loaded = state["place"]


class Stays(Keeps):
    stays = True


class Drawing(Keeps):
    """Each reading draws other numbers."""

    def rows(self, x, epoch):
        return x, x + np.random.default_rng().random()


class Broken(Keeps):
    def load_state_dict(self, state):
        if state["place"]:
            raise ValueError("another number of workers")
        super().load_state_dict(state)


class Own(Keeps):
    def state_dict(self):
        return {**super().state_dict(), "file": object()}


def test_a_sample_of_the_position_is_read_by_the_state_too():
    _, state, *_ = walked(Keeps, 1, Cursor(1), 4)
    data, cursor = Keeps(), Cursor(1, 4, 4, 24)
    feed = Feed(data, 6, control=SoloControl())
    feed.walk.positions.restored = state
    assert feed.sample(2, cursor)[0].tolist() == [1024, 1025] and feed.walk.replay(cursor) == ""
    assert [step.micros[0][0][0] for step in feed.epoch(cursor)] == [1024, 1030, 1036, 1042, 1048, 1054]
    assert data.read <= 60 - state["samples"]


def walked(data, size, cursor, n=None, restored=None, prefetch=2, hosts=()):
    """Return (steps' first columns over all ranks, the state after them, the note about a replay, samples read)."""
    def work(rank, control):
        own = data()
        feed = Feed(own, 6, rank=rank, size=size, control=control, readers="host", prefetch=prefetch)
        feed.walk.settle()
        feed.sample(1)
        feed.walk.positions.restored = restored
        note, steps = feed.walk.replay(cursor), []
        batches = feed.epoch(cursor)
        for step in batches:
            steps.append(step)
            if len(steps) == n:
                break
        at = steps[-1].cursor_after
        state = feed.walk.positions.saved(at.epoch, at.samples)
        batches.close()
        state = decode_state(json.loads(json.dumps(encode_state(state, "state"))))
        mine = [np.concatenate([micro[0] for micro in s.micros] or [np.zeros(0)]).tolist() for s in steps]
        return mine, state, note, own.read

    rows = on_ranks(size, work, hosts)
    steps = [sum(step, []) for step in zip(*(row[0] for row in rows))]
    return steps, rows[0][1], rows[0][2], sum(row[3] for row in rows)


@pytest.mark.parametrize("data, prefetch", [(Keeps, 0), (Keeps, 2), (Stays, 2)])
def test_the_state_leads_to_the_position_at_another_number_of_ranks(data, prefetch):
    whole, *_ = walked(data, 1, Cursor(2), prefetch=prefetch)
    steps, state, note, _ = walked(data, 3, Cursor(2), 5, prefetch=prefetch, hosts=[[0, 1, 2]])
    assert steps == whole[:5] and note == "" and 24 <= state["samples"] <= 30, "no later than the position"
    for size, hosts in ((2, [[0, 1]]), (1, ()), (2, ())):
        rest, _, note, read = walked(data, size, Cursor(2, 5, 5, 30), None, state, prefetch, hosts)
        assert rest == whole[5:] and note == ""
        assert read <= len({min(h) for h in hosts} or range(size)) * (6 + 60 - state["samples"]), "6: tried first"


@pytest.mark.parametrize("data, words", [
    (Drawing, "other samples follow it"), (Broken, "another number of workers"), (Own, "holds a object"),
    (lambda: ShuffledStream(Keeps(), 10, 0), "the stream cannot seek")])
def test_a_state_that_does_not_hold_is_replaced_by_a_replay(data, words):
    whole, state, *_ = walked(data, 1, Cursor(1), 4)
    rest, _, note, _ = walked(data, 1, Cursor(1, 4, 4, 24), None, state)
    assert words in note and "24 samples of epoch 1 are read again and dropped" in note
    assert rest == walked(data, 1, Cursor(1))[0][4:] and len(rest) == 6


def test_a_stream_without_a_state_at_its_start_is_opened_as_it_is():
    class Late(Keeps):
        def state_dict(self):
            return {"place": self.place} if self.place else None

        def load_state_dict(self, state):
            assert state is not None
            self.loaded = state["place"]

    positions = stream_state.Positions(Late(9))
    next(positions.noted(positions._data.chunks(0), 0, 0))
    positions.rewind()
    assert positions._data.loaded == 0


def test_a_state_comes_back_as_it_was_or_is_refused():
    state = {"a": [1, (2, {"b": np.float32(3)})], 4: b"5", "c": (np.arange(3), None, True, "x", 2.5)}
    back = unpacked(decode_state(json.loads(json.dumps(encode_state(packed(state, [1000]), "state")))))
    np.testing.assert_equal(back, state)
    assert isinstance(back["a"][1], tuple) and isinstance(back["c"], tuple)
    for wrong in (object(), np.array([None]), {"a": [{1, 2}]}):
        with pytest.raises(NotStorable, match="cannot store"):
            packed(wrong, [1000])
    with pytest.raises(NotStorable, match="larger than 4 MiB"):
        packed([np.zeros(MOST_BYTES // 8), 0], [MOST_BYTES])


def test_a_run_resumes_by_the_state_in_its_checkpoint(tmp_path):
    class Rows(Keeps):
        def __init__(self):
            super().__init__(len(DATA[0]))

        def rows(self, x, epoch):
            return tuple(array[x] for array in DATA)

    first = run_of(tmp_path, max_steps=4, checkpoint=CheckpointConfig(at_end=True))
    assert fitted(solo(first, make_model("numpy"), Rows())).ledger["partial"] == 32
    data = Rows()
    run = solo(replace(first, resume="auto", max_steps=0, epochs=1), make_model("numpy"), data)
    assert run.feed.walk.positions.restored["samples"] >= 27
    assert found(run) == facts(1)
    assert data.read <= data.n - 27 + 12, "12: the first samples, which are tried"
