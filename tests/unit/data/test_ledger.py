"""The ledger of samples: the sums, what it sees, and what it carries over resumptions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_runs import DATA, N, facts, found, run_of
from small_runs import Recut, fitted, lockstep, make_model, samples, solo

from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.data import ledger as books
from hvdtrain.data.ledger import Book, Sums
from hvdtrain.engine import loop
from hvdtrain.engine.callbacks.ledger import Ledger

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
                       (np.append(without, doubled), f"sample {lost} was lost and sample {doubled} was repeated")):
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
                       (np.append(whole[2:], [5, 6]), "as many were lost as were repeated")):
        assert words in books.unlike(books.sums_of(got, 0), want, 0, whole)


def test_a_book_adds_up_whatever_the_steps():
    book = Book()
    book.start(4, books.sums_of_range(0, 7, 4))
    for low in range(7, 5000, 13):
        book.add(np.arange(low, min(low + 13, 5000)))
    book.add(np.empty(0, np.int64))
    assert book.sums() == book.sums() == books.sums_of_range(0, 5000, 4)


@pytest.fixture
def blind(monkeypatch):
    """Stop the loop's comparison of weight and losses, so that only the ledger can see a feed's fault."""
    monkeypatch.setattr(loop, "check_weight", lambda *args: None)


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
    assert "epoch 0 is incomplete" in text and "start from scratch" in text.lower()
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
    with pytest.raises(UserError, match="epoch 0 is incomplete: 1 of 50 samples was lost"):
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
    reason = "the checkpoint does not record earlier samples"
    assert found(again) == facts(1, unchecked=[0], reason=reason)
    assert [note for note in again.notes if note.startswith("ledger: ")] == [
        f"ledger: epoch 0 is not verified: {reason}"]
