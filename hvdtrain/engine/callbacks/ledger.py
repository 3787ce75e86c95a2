"""Check that each sample of an epoch was trained on exactly once, over ranks, new plans and resumptions.

Hash and sums are left to `hvdtrain.data.ledger`; of a stream only positions are counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.cluster.control import control_of_replicas
from hvdtrain.core.errors import UserError
from hvdtrain.data import ledger as books
from hvdtrain.data.ledger import Book, Sums
from hvdtrain.data.sources import innermost
from hvdtrain.data.stream_walk import StreamWalk
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class Ledger(Callback):
    """Runs on all ranks, which compare at the end of each epoch, and of a fit that ends within one.

    ``run.ledger`` holds what was found: ``epochs`` whole, over all resumptions, the ``samples`` in them, ``skipped``:
    those of them whose step made no update (nan_guard skip, an overflow in fp16), ``unchecked`` epochs, which are not
    verified, with the ``reason``, and ``partial`` samples of an epoch that a fit ended in, and ``unread``: samples left
    out since they could not be read, ``compared`` rows across ranks, where these are not all, ``unit``, what came once
    each where that is no sample (a mixture), and ``evaluation``, why the evaluation data is not verified. A step
    without update counts as consumed. On a GPU it is told a step late.
    """

    where = "all"
    doing = "counting samples"
    state_key = "Ledger"

    def __init__(self) -> None:
        self._book = Book()
        self._at = (0, 0)
        self._unknown = self._reason = ""
        self._head: int | None = None
        self._resumed = False
        self._skipped = self._skipped_before = self._epochs = self._samples = 0
        self._unread = self._unread_before = self._compared = 0
        self._evaluation = self._unit = ""
        self._unchecked: list[int] = []
        self._kept: dict[str, Any] = {}

    def epoch_start(self, run: Run) -> None:
        """Continue from the current sums, or find that nothing is known of the samples before."""
        cursor = run.state.cursor
        if (cursor.epoch, cursor.samples) != self._at:
            why = "the checkpoint does not record earlier samples" if cursor.samples else ""
            self._begin(cursor.epoch, cursor.samples, why)
        self._resumed = bool(cursor.samples) and run.feed.samples is None
        if self._resumed and self._head is None and run.feed.head and run.feed.head[0] == cursor.epoch:
            self._head = run.feed.head[1]  # a second fit of this process
        self._unit = getattr(innermost(run.feed.data), "unit", "")
        if self._unknown:
            self._doubt(run, self._unknown)

    def step_end(self, run: Run) -> None:
        batch, feed = run.state.batch, run.setup.feed
        assert batch is not None
        cursor = batch.cursor_after
        self._at = (cursor.epoch, cursor.samples)
        if not run.state.outcome.updated:
            self._skipped += batch.n_global
        if batch.numbers is not None:
            computed = sum([len(micro[0]) for micro in batch.micros])
            self._book.add(batch.numbers if computed == len(batch.numbers) else batch.numbers[:computed])
            if batch.unread:
                self._left_out(run, batch)
        if unlike := feed.unlike:
            self._doubt(run, unlike)

    def _doubt(self, run: Run, reason: str) -> None:
        """Take the epoch under way as not verified, for a ``reason`` that all ranks have."""
        epoch = self._at[0]
        self._unknown = self._unknown or reason
        if epoch in self._unchecked:
            return
        self._unchecked.append(epoch)
        if reason != self._reason:  # one note, however many epochs
            run.note(f"ledger: epoch {epoch} is not verified: {reason}")
        self._reason = reason

    def _left_out(self, run: Run, batch: Any) -> None:
        """Account for samples that could not be read: a rank has seen its own; each is named once."""
        if batch.own_unread:
            self._book.add(np.array([number for number, _, _ in batch.own_unread], np.int64))
        self._unread += len(batch.unread)
        for text in run.feed.left_out():
            run.note(text)

    def eval_end(self, run: Run) -> None:
        unlike = {name: feed.unlike for name, feed in run.eval_feeds.items() if feed.unlike}
        if unlike:
            self._evaluation = "; ".join(f"{name}: {why}" if name else why for name, why in unlike.items())
            self._record(run, self._at[0], False, words=f"the evaluation is not verified: {self._evaluation}")

    def epoch_end(self, run: Run) -> None:
        """Compare the epoch that has ended with what it must hold; `UserError` on every rank. Collective."""
        epoch, consumed = self._at
        self._compare_head(run)
        self._compare_rows(run)
        if not self._unknown:
            samples = consumed if run.feed.samples is None else run.feed.samples
            self._compare(run, samples, None)
            self._epochs, self._samples = self._epochs + 1, self._samples + samples
            self._skipped_before += self._skipped
            self._unread_before += self._unread
        more = {"words": f"not verified: {self._unknown}"} if self._unknown else {}
        self._record(run, epoch, not self._unknown, **more)
        self._begin(epoch + 1, 0, "")
        run.ledger = self._facts()

    def fit_end(self, run: Run) -> None:
        """Compare the part of an epoch that a fit has ended in; `UserError` on every rank. Collective."""
        epoch, consumed = self._at
        partial = 0
        self._compare_head(run)
        if consumed and not run.state.requeue:  # the run that resumes compares
            self._compare_rows(run)
        if consumed and not self._unknown and (epoch, consumed) == (run.state.cursor.epoch, run.state.cursor.samples):
            feed = run.feed
            order = feed.walk.order(epoch, feed.shuffle)
            self._compare(run, consumed, order)
            partial = consumed
        found = self._facts()
        if partial and partial == run.feed.samples:  # stopped with its last step, before it was closed
            run.ledger = {**found, "epochs": found["epochs"] + 1, "samples": found["samples"] + partial}
        else:
            run.ledger = {**found, "partial": partial}

    def saving(self, run: Run) -> None:
        """Bring the ranks' sums together for `state_dict`. Collective."""
        sums = books.from_limbs(control_of_replicas(run.control, run.mesh).sum(books.to_limbs(self._book.sums())))
        epoch, samples = self._at
        begun = run.feed.head if samples and run.feed.head and run.feed.head[0] == epoch else (epoch, None)
        self._kept = {"epoch": epoch, "samples": samples, "count": sums.count, "sum": f"{sums.total:016x}",
                      "unknown": self._unknown, "skipped": self._skipped, "order": _order(run.feed),
                      "epochs": self._epochs, "whole": self._samples, "skipped_before": self._skipped_before,
                      "unread": self._unread, "unread_before": self._unread_before,
                      "compared": self._compared, "evaluation": self._evaluation,
                      "unchecked": list(self._unchecked), "reason": self._reason,
                      "head": begun[1] if self._head is None else self._head, "stream": _stream_state(run)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = dict(state)

    def restored(self, run: Run) -> None:
        """Continue from the sums of a checkpoint, which rank 0 takes over whatever ranks they come from."""
        kept = self._kept
        unknown = kept["unknown"]
        if kept["samples"] and kept["order"] != _order(run.feed):
            unknown = "the data's length, seed or shuffle differs from the epoch's start"
        before = Sums(kept["count"], int(kept["sum"], 16)) if run.control.rank == 0 else Sums()
        self._begin(kept["epoch"], kept["samples"], unknown, before)
        self._skipped, self._skipped_before = kept["skipped"], kept["skipped_before"]
        self._epochs, self._samples = kept["epochs"], kept["whole"]
        self._unread, self._unread_before = kept.get("unread", 0), kept.get("unread_before", 0)  # newer than the rest
        self._unchecked, self._reason = list(kept["unchecked"]), kept.get("reason", "")
        self._head = kept.get("head")
        if isinstance(run.feed.walk, StreamWalk):
            run.feed.walk.positions.restored = kept.get("stream")
        self._compared, self._evaluation = kept.get("compared", 0), kept.get("evaluation", "")

    def _begin(self, epoch: int, samples: int, unknown: str, before: Sums = Sums()) -> None:
        """Stand at ``samples`` of ``epoch``, of which ``before`` was counted; ``unknown``: why that is not all."""
        self._book.start(epoch, before)
        self._at, self._unknown, self._skipped, self._unread = (epoch, samples), unknown, 0, 0
        self._head = None

    def _compare_head(self, run: Run) -> None:
        """Doubt an epoch whose stream began otherwise before the resumption; collective after one."""
        if not self._resumed:
            return
        epoch, head = run.feed.head or (-1, None)
        differs = None not in (self._head, head) and epoch == self._at[0] and head != self._head
        if control_of_replicas(run.control, run.mesh).sum(np.array([float(differs)]))[0]:
            self._doubt(run, "the stream's order differs from that before the resume")

    def _compare_rows(self, run: Run) -> None:
        """Compare a few rows of a source across ranks, which may have come to differ; collective."""
        if self._unknown:
            return
        self._compared += run.feed.compare(self._at[0])
        if run.feed.unlike:
            self._doubt(run, run.feed.unlike)

    def _compare(self, run: Run, samples: int, order_n: np.ndarray | None) -> None:
        """Raise `UserError` on every rank unless the ranks together had the first ``samples`` of ``order_n`` once each.

        ``order_n``: int64[N], or None where it does not matter: all numbers of the walk's ranges. Each rank adds up its
        part of what there must be.
        """
        control, epoch = control_of_replicas(run.control, run.mesh), self._at[0]
        low, high = (samples * r // control.size for r in (control.rank, control.rank + 1))
        ranges = run.feed.walk.shards.ranges(samples)
        want = (books.sums_of_ranges(ranges, control.rank, control.size, epoch) if order_n is None
                else books.sums_of(order_n[low:high], epoch))
        both = control.sum(np.concatenate([books.to_limbs(self._book.sums()), books.to_limbs(want)]))
        got, want = books.from_limbs(both[:books.LIMBS]), books.from_limbs(both[books.LIMBS:])
        if got == want:
            return
        numbers = np.concatenate([np.arange(*each) for each in ranges]) if order_n is None else order_n[:samples]
        words = books.unlike(got, want, epoch, numbers if samples <= books.MOST_SEARCHED else None)
        self._record(run, epoch, False, got=got.count, want=want.count, words=words)
        again = "start from scratch" if epoch == 0 else f"resume from a checkpoint from before epoch {epoch}"
        raise UserError(f"epoch {epoch} is incomplete: {words}", f"each of its {samples} samples exactly once",
                        f"{again}, since later checkpoints carry the fault; a callback that truncates "
                        "batches must do so on every rank")

    def _facts(self) -> dict[str, Any]:
        unread = self._unread_before + self._unread
        return {"epochs": self._epochs, "samples": self._samples, "skipped": self._skipped_before + self._skipped,
                "unchecked": list(self._unchecked), "partial": 0, **({"unread": unread} if unread else {}),
                **({"compared": self._compared} if self._compared else {}),
                **({"unit": self._unit} if self._unit else {}),
                **({"reason": self._reason} if self._unchecked else {}),
                **({"evaluation": self._evaluation} if self._evaluation else {})}

    def _record(self, run: Run, epoch: int, whole: bool, **more: Any) -> None:
        run.record("ledger", epoch=epoch, whole=whole, skipped=self._skipped, unread=self._unread,
                   ledger={"epochs": self._epochs}, **more)


def _stream_state(run: Run) -> dict[str, Any] | None:
    """Return the state from which a resumed run reads its stream; None where ranks read different streams."""
    walk, cursor = run.feed.walk, run.state.cursor
    if not isinstance(walk, StreamWalk) or walk.unlike or len(walk.shards.taken) > 1:
        return None
    return walk.positions.saved(cursor.epoch, cursor.samples)


def _order(feed: Any) -> list[int]:
    """Return what the order of an epoch's samples depends on; nothing of ours for a stream."""
    if feed.samples is None:
        return [-1, 0, 0]
    bucket = [feed.walk.bucket] if feed.walk.bucket and feed.shuffle else []
    return [feed.samples, feed.seed if feed.shuffle else 0, int(feed.shuffle), *bucket]
