"""The ledger over streams, and over data that ranks read differently."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from ledger_runs import DATA, N, facts, found, run_of
from small_runs import fitted, lockstep, make_model, samples, solo

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.data import ledger as comparison
from hvdtrain.data.batches import READ_BEFORE
from hvdtrain.data.ledger import COMPARED
from hvdtrain.engine import summary as run_summary
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback

# --- streams ---------------------------------------------------------------------------------------------------------

class Lines:
    """A stream of ``n`` samples in chunks of 7."""

    def __init__(self, n):
        self.arrays = samples(n)

    def chunks(self, epoch):
        x, y = self.arrays
        for at in range(0, len(x), 7):
            yield x[at:at + 7], y[at:at + 7]


@pytest.mark.parametrize("size", [1, 3])
def test_positions_of_a_stream_are_checked(size, tmp_path):
    assert lockstep(size, run_of(tmp_path), lambda rank: make_model("numpy"), Lines(N), found) == [facts(2)] * size


def test_streams_of_several_lengths_are_not_checked(tmp_path):
    def work(run):
        run.feed.walk.reading.data = Lines(N - 20 * run.control.rank)
        return found(run)

    with pytest.warns(UserWarning, match="differ in length"):
        got = lockstep(2, run_of(tmp_path), lambda rank: make_model("numpy"), Lines(N), work)
    assert [each["unchecked"] for each in got] == [[1], [1]], "the first epoch was opened by assembly, alike"
    assert all(each["epochs"] == 1 for each in got)


def on_ranks(data, settings_):
    """Return the ledger of each rank, which reads its own of ``data``."""
    return LockstepWorld(len(data)).run(lambda control, wire: found(assemble(
        settings_, make_model("numpy"), data[control.rank], control, wire)), timeout_s=30.0)


class Shuffled(Lines):
    """A stream in an order of entropy: another one at each opening."""

    def chunks(self, epoch):
        order = np.random.default_rng().permutation(N)
        yield from ((x[order[at:at + 7]], y[order[at:at + 7]]) for x, y in [self.arrays] for at in range(0, N, 7))


def test_streams_that_ranks_shuffle_differently_are_not_verified(tmp_path):
    def work(run):
        run.feed.walk.reading.data = Shuffled(N)
        got = found(run)
        return got, [note for note in run.notes if note.startswith("ledger: ")], dict(run_summary.rows(run))

    with pytest.warns(UserWarning, match="read different streams"):
        ranks = lockstep(2, run_of(tmp_path, epochs=3), lambda rank: make_model("numpy"), Lines(N), work)
    reason = "the ranks read different streams"
    for got, notes, rows in ranks:
        assert got == facts(1, unchecked=[1, 2], reason=reason), "the first epoch was opened by assembly, alike"
        assert notes == [f"ledger: epoch 1 is not verified: {reason}"]
        assert rows["samples"] == f"each exactly once in 1 epoch; epochs 1, 2 not verified: {reason}"
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    told = [(r["epoch"], r["whole"], r.get("words")) for r in log if r["event"] == "ledger"]
    assert told == [(0, True, None), *((epoch, False, f"not verified: {reason}") for epoch in (1, 2))]


def test_streams_that_differ_within_a_batch_or_late_are_not_verified(tmp_path):
    class Swapped(Lines):
        def chunks(self, epoch):
            x, y = (a.copy() for a in self.arrays)
            x[[41, 43]], y[[41, 43]] = x[[43, 41]], y[[43, 41]]
            yield x, y

    with pytest.warns(UserWarning, match="read different streams"):
        got = on_ranks([Lines(N), Swapped(N)], run_of(tmp_path, epochs=1))
    assert [each["unchecked"] for each in got] == [[0], [0]] and all(each["epochs"] == 0 for each in got)


@pytest.mark.parametrize("stream, unchecked", [(Lines, []), (Shuffled, [0])])
def test_a_stream_that_resumes_in_another_order_is_not_verified(stream, unchecked, tmp_path):
    first = run_of(tmp_path, max_steps=4, checkpoint=CheckpointConfig(at_end=True))
    solo_fit = fitted(solo(first, make_model("numpy"), stream(N)))
    assert solo_fit.ledger["partial"] == 32
    got = found(solo(replace(first, resume="auto", max_steps=0), make_model("numpy"), stream(N)))
    assert got["unchecked"] == unchecked and got["epochs"] == 2 - len(unchecked)


class Rows:
    """A map-style dataset in an order of its rank's, from epoch ``since`` on."""

    def __init__(self, rank, since=0, fixed=False, draws=None):
        self.order, self.since, self.fixed = np.arange(N), since, fixed
        self.draws = draws
        self.own = np.arange(N)
        others = np.setdiff1d(self.own, np.linspace(0, N - 1, READ_BEFORE, dtype=np.int64))
        self.own[others] = np.roll(others, rank)
        self.begin_epoch(0)

    def begin_epoch(self, epoch):
        self.order = self.own if epoch >= self.since else self.order

    def __len__(self):
        return N

    def fetch(self, indices_n):
        x, y = (array[self.order[indices_n]] for array in DATA)
        return (x if self.draws is None else x + np.float32(self.draws())), y


class Reorder(Callback):
    where = "all"

    def epoch_start(self, run):
        run.feed.data.begin_epoch(run.state.cursor.epoch)


def of_rows(make, settings_):
    """Return the ledger, notes and summary of two ranks, of which each reads its own ``make(rank)``."""
    def work(control, wire):
        run = assemble(settings_, make_model("numpy"), make(control.rank), control, wire)
        run.callbacks.insert(0, Reorder())
        return found(run), run.notes, dict(run_summary.rows(run))

    return LockstepWorld(2).run(work, timeout_s=30.0)


DIFFER = "the ranks read different samples at the same place"
READ_HERE = {"data": DataConfig(workers=0, prefetch=0)}


@pytest.mark.parametrize("make, epochs", [
    (lambda rank: Rows(rank), 0), (lambda rank: Rows(rank, since=1), 1),
    (lambda rank: Rows(0, draws=np.random.default_rng().normal), 0)],
    ids=["rows between", "later epoch", "entropy"])
def test_samples_that_ranks_read_differently_are_not_verified(make, epochs, tmp_path):
    with pytest.warns(UserWarning, match="read different samples"):
        ranks = of_rows(make, run_of(tmp_path, **READ_HERE))
    for ledger, notes, table in ranks:
        assert ledger["unchecked"] == list(range(epochs, 2)) and ledger["epochs"] == epochs
        assert ledger["reason"] == DIFFER and f"ledger: epoch {epochs} is not verified: {DIFFER}" in notes
        assert f"not verified: {DIFFER}" in table["samples"]


@pytest.mark.parametrize("draws", [None, lambda: np.random.normal()], ids=["as they are", "augmented"])
def test_a_certificate_says_how_many_rows_were_compared(draws, tmp_path, monkeypatch):
    seeded, one_process = comparison.fetch_seeded, threading.Lock()  # whose threads share the generators

    def alone(*args):
        with one_process:
            return seeded(*args)

    monkeypatch.setattr(comparison, "fetch_seeded", alone)
    for ledger, _, table in of_rows(lambda rank: Rows(0, draws=draws), run_of(tmp_path, **READ_HERE)):
        rows = ledger["compared"]
        assert ledger == facts(2, compared=rows) and READ_BEFORE + 2 * COMPARED < rows <= READ_BEFORE + 3 * COMPARED
        assert table["samples"] == f"each index exactly once in 2 epochs, {rows} rows compared across ranks"


def test_fixed_samples_that_come_to_differ_end_the_run(tmp_path):
    with pytest.raises(UserError, match="ranks hold different samples"):
        of_rows(lambda rank: Rows(rank, since=1, fixed=True), run_of(tmp_path, **READ_HERE))


@pytest.mark.parametrize("kind, reason", [(Rows, DIFFER), (Shuffled, "the ranks read different streams")])
def test_evaluation_data_that_ranks_read_differently_is_not_verified(kind, reason, tmp_path):
    with pytest.warns(UserWarning, match="read different"):
        ranks = of_rows(lambda rank: ((Rows(0)), kind(rank if kind is Rows else N)),
                        run_of(tmp_path, eval_every=1, **READ_HERE))
    words = f"the evaluation is not verified: {reason}"
    for ledger, notes, table in ranks:
        assert ledger["epochs"] == 2 and not ledger["unchecked"] and ledger["evaluation"] == reason
        assert notes.count(f"ledger: {words}") == 1 and table["samples"].endswith(f"; {words}")
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert words in [r.get("words") for r in log if r["event"] == "ledger"]


def test_arrays_that_differ_anywhere_are_refused(tmp_path):
    x, y = samples(N)
    other = y.copy()
    other[7] += 1  # none of the first, middle and last sample
    with pytest.raises(UserError, match="ranks hold different samples"):
        on_ranks([(x, y), (x, other)], run_of(tmp_path))
