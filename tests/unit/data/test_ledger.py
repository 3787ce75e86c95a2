"""The ledger of samples: the sums, what it sees, and what it carries over resumptions."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import Recut, config, fitted, lockstep, make_model, samples, solo

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.data import ledger as books
from hvdtrain.data import ledger as comparison
from hvdtrain.data.batches import READ_BEFORE
from hvdtrain.data.ledger import COMPARED, Book, Sums
from hvdtrain.engine import loop
from hvdtrain.engine import summary as run_summary
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.ledger import Ledger

N = 50
DATA = samples(N)


# --- sums ------------------------------------------------------------------------------------------------------------

def test_hashes_differ_by_number_and_by_epoch():
    numbers = np.arange(20000)
    both = np.concatenate([books.hashes(numbers, 0), books.hashes(numbers, 1)])
    assert both.dtype == np.uint64 and len(np.unique(both)) == len(both)
    bits = np.unpackbits(both.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01


def test_sums_are_those_of_arbitrary_whole_numbers():
    numbers = np.random.default_rng(0).permutation(3 * books.CHUNK + 5)
    want = sum(int(h) for h in books.hashes(numbers, 3)) % books.WORD
    assert books.sums_of(numbers, 3) == books.sums_of_range(0, len(numbers), 3) == Sums(len(numbers), want)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, books.WORD - 1)), min_size=1, max_size=50))
def test_limbs_of_ranks_add_up_exactly(pairs):
    rows = np.stack([books.to_limbs(Sums(*pair)) for pair in pairs])
    want = Sums(sum(n for n, _ in pairs), sum(total for _, total in pairs) % books.WORD)
    assert books.from_limbs(np.add.accumulate(rows, axis=0)[-1]) == want


@settings(max_examples=40)
@given(st.integers(2, 200), st.integers(0, 5), st.data())
def test_one_lost_one_doubled_and_both_are_seen_and_named(n, epoch, data):
    lost, doubled = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    whole = np.arange(n)
    want = books.sums_of(whole, epoch)
    without = np.delete(whole, lost)
    for got, words in ((without, f"1 of {n} samples was lost: sample {lost}"),
                       (np.append(whole, doubled), f"{n} samples and 1 of them twice: sample {doubled}"),
                       (np.append(without, doubled), f"sample {lost} was lost and sample {doubled} came twice")):
        found = books.sums_of(got, epoch)
        assert found != want
        assert books.unlike(found, want, epoch, whole) == words
        assert books.unlike(found, want, epoch, None)
    assert books.unlike(want, want, epoch, whole) == ""


def test_many_faults_are_told_by_their_count():
    whole = np.arange(100)
    want = books.sums_of(whole, 0)
    for got, words in ((whole[:90], "10 of 100 samples were lost"),
                       (np.append(whole, [1, 2, 3]), "3 more than the 100"),
                       (np.append(whole[2:], [5, 6]), "as many were lost as came twice")):
        assert words in books.unlike(books.sums_of(got, 0), want, 0, whole)


def test_a_book_adds_up_whatever_the_steps():
    book = Book()
    book.start(4, books.sums_of_range(0, 7, 4))
    for low in range(7, 5000, 13):
        book.add(np.arange(low, min(low + 13, 5000)))
    book.add(np.empty(0, np.int64))
    assert book.sums() == book.sums() == books.sums_of_range(0, 5000, 4)


# --- runs ------------------------------------------------------------------------------------------------------------

def run_of(tmp_path, **changes):
    return config(**{"out": str(tmp_path / "run"), "epochs": 2, "global_batch": 8, **changes})


def found(run):
    loop.fit(run)
    return dict(run.ledger)


@pytest.fixture
def blind(monkeypatch):
    """Stop the loop's comparison of weight and losses, so that only the ledger can see a feed's fault."""
    monkeypatch.setattr(loop, "check_weight", lambda *args: None)


def facts(epochs, **more):
    return {"epochs": epochs, "samples": epochs * N, "skipped": 0, "unchecked": [], "partial": 0, **more}


def tamper(run, change):
    """Let ``change(numbers)`` say what rank 1 got in the third step of each epoch."""
    whole = run.feed.epoch

    def epoch(cursor):
        for batch in whole(cursor):
            if run.control.rank == run.control.size - 1 and batch.cursor_before.epoch_step == 2:
                batch = replace(batch, numbers=change(batch.numbers))
                arrays = run.feed.data.fetch(batch.numbers)
                batch = replace(batch, micros=[arrays])
            yield batch

    run.feed.epoch = epoch


@pytest.mark.parametrize("size, shares", [(1, []), (2, [3, 1]), (3, [0, 1, 1]), (4, [])])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_epoch_is_found_whole(size, shares, prefetch, tmp_path):
    settings_ = run_of(tmp_path, shares=shares, data=DataConfig(prefetch=prefetch), accumulate=2)
    assert lockstep(size, settings_, lambda rank: make_model("numpy"), DATA, found) == [facts(2)] * size
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    told = [record for record in log if record["event"] == "ledger"]
    assert [(r["epoch"], r["whole"], r["ledger"]) for r in told] == [(0, True, {"epochs": 1}), (1, True, {"epochs": 2})]
    assert [record["event"] for record in log[-2:]] == ["end", "seconds"] and log[-2]["ledger"] == facts(2)


@pytest.mark.parametrize("change, words", [
    (lambda numbers: numbers[1:], "1 of 50 samples was lost: sample "),
    (lambda numbers: np.append(numbers, numbers[:1]), "50 samples and 1 of them twice: sample "),
    (lambda numbers: np.append(numbers[1:], numbers[1:2]), " was lost and sample "),
])
@pytest.mark.parametrize("size", [1, 2])
def test_a_feed_that_loses_or_doubles_ends_the_run_on_every_rank(change, words, size, tmp_path, blind):
    def work(run):
        tamper(run, change)
        with pytest.raises(UserError, match=words) as caught:
            loop.fit(run)
        return str(caught.value), (run.ledger, run.state.cursor.epoch)

    told = lockstep(size, run_of(tmp_path, checkpoint=CheckpointConfig(at_end=True)), lambda rank: make_model("numpy"),
                    DATA,
                    work)
    text, = {text for text, _ in told}
    assert "epoch 0 is not whole" in text and "start anew" in text.lower()
    assert all(rest == ({}, 1) for _, rest in told)
    assert not list((tmp_path / "run").glob("checkpoints/step-*")), "what carries the fault is not saved"


def test_a_sample_that_no_micro_batch_holds_is_lost(tmp_path, blind):
    run = solo(run_of(tmp_path), make_model("numpy"), DATA)
    whole = run.feed.epoch
    run.feed.epoch = lambda cursor: (replace(b, micros=[tuple(a[:-1] for a in m) for m in b.micros])
                                     if b.cursor_before.epoch_step == 1 else b for b in whole(cursor))
    with pytest.raises(UserError, match="1 of 50 samples was lost"):
        loop.fit(run)


def test_a_fit_that_stops_within_an_epoch_checks_what_it_had(tmp_path):
    assert found(solo(run_of(tmp_path, max_steps=9), make_model("numpy"), DATA)) == facts(1, partial=16)
    assert found(solo(run_of(tmp_path / "end", max_steps=7), make_model("numpy"), DATA)) == facts(1)
    assert found(solo(run_of(tmp_path / "none", epochs=0), make_model("numpy"), DATA)) == facts(0)


def test_skipped_steps_count_as_consumed_and_are_told_apart(tmp_path):
    x, y = samples(N)
    x[7] = np.nan
    run = solo(run_of(tmp_path, nan_guard="skip"), make_model("numpy"), (x, y))
    assert found(run) in (facts(2, skipped=16), facts(2, skipped=10), facts(2, skipped=4))


def test_new_cuts_while_training_lose_nothing(tmp_path):
    def work(run):
        run.callbacks.insert(0, Recut({2: [1, 2, 3], 5: [0, 1, 0], 9: [5, 1, 1]}))
        return found(run)

    assert lockstep(3, run_of(tmp_path), lambda rank: make_model("numpy"), DATA, work) == [facts(2)] * 3


# --- resumptions -----------------------------------------------------------------------------------------------------

WAYS = [(2, {}), (1, {}), (3, {"shares": [5, 0, 2]}), (4, {"global_batch": 12}), (2, {"shares": [1, 3]})]


@pytest.mark.slow
@pytest.mark.parametrize("size, changes", WAYS)
@pytest.mark.parametrize("at", [4, 7])
def test_sums_hold_over_a_resumption_at_other_ranks_shares_and_batches(size, changes, at, tmp_path):
    first = run_of(tmp_path, max_steps=at, checkpoint=CheckpointConfig(at_end=True))
    lockstep(2, first, lambda rank: make_model("numpy"), DATA, fitted)
    again = replace(first, resume="auto", max_steps=0, **changes)
    assert lockstep(size, again, lambda rank: make_model("numpy"), DATA, found) == [facts(2)] * size


def test_a_loss_before_a_save_is_seen_after_it(tmp_path, blind):
    first = run_of(tmp_path, max_steps=4, checkpoint=CheckpointConfig(every_steps=4))

    def losing(run):
        tamper(run, lambda numbers: numbers[:-1])
        with pytest.raises(UserError, match="was lost"):
            loop.fit(run)

    lockstep(2, first, lambda rank: make_model("numpy"), DATA, losing)
    run = solo(replace(first, resume="auto", max_steps=0), make_model("numpy"), DATA)
    with pytest.raises(UserError, match="epoch 0 is not whole: 1 of 50 samples was lost"):
        loop.fit(run)


def test_other_data_at_a_resumption_leaves_the_epoch_unchecked(tmp_path):
    first = run_of(tmp_path, max_steps=4, checkpoint=CheckpointConfig(at_end=True))
    solo_fit = fitted(solo(first, make_model("numpy"), DATA))
    assert solo_fit.ledger["partial"] == 32
    again = solo(replace(first, resume="auto", max_steps=0), make_model("numpy"), samples(60))
    got = found(again)
    assert got["unchecked"] == [0] and got["epochs"] == 1 and got["samples"] == 60
    assert sum(note.startswith("ledger: ") for note in again.notes) == 1


def test_a_checkpoint_from_before_the_ledger_is_told_once(tmp_path, monkeypatch):
    first = run_of(tmp_path, max_steps=4, checkpoint=CheckpointConfig(at_end=True))
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "state_dict", lambda self: {})
        fitted(solo(first, make_model("numpy"), DATA))
    again = solo(replace(first, resume="auto", max_steps=0), make_model("numpy"), DATA)
    reason = "the checkpoint does not say which samples came before"
    assert found(again) == facts(1, unchecked=[0], reason=reason)
    assert [note for note in again.notes if note.startswith("ledger: ")] == [
        f"ledger: epoch 0 is not verified: {reason}"]


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
        run.feed._walk._data = Lines(N - 20 * run.control.rank)
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
        run.feed._walk._data = Shuffled(N)
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
