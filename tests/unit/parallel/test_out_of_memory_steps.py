"""A rank that runs out of memory repeats the step with all others, alone with smaller micro-batches."""

from __future__ import annotations

import contextlib
import json
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import CUTS, Record, apart, bits, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.config import DataParallelConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor, StepBatch
from hvdtrain.engine import summary
from hvdtrain.parallel.recovery import attempt, attempt_halving, no_repeat, recut, stopped

SETTINGS = replace(config(), max_steps=6, global_batch=24)
DATA = samples(96)


def test_a_part_is_cut_again_in_its_own_order():
    x = np.arange(10)
    batch = StepBatch(Cursor(), Cursor(), [(x[:6],), (x[6:],)], 10, 20, 20.0, 10.0)
    parts = [micro[0] for micro in recut(batch, 4).micros]
    assert [len(part) for part in parts] == [3, 3, 4] and np.array_equal(np.concatenate(parts), x)
    assert recut(batch, 6) is batch and recut(batch, 0) is batch


def test_a_shortage_is_caught_with_its_frames_forgotten_and_halved_down_to_the_least():
    freed: list[bool] = []
    alive: list[Any] = []

    def short(error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def compute(n: int) -> str:
        array = np.zeros(n)
        alive.append(weakref.ref(array))
        if n > 3:
            raise MemoryError("of a test")
        return f"{n} samples"

    def free() -> None:
        freed.append(alive[-1]() is None)

    assert attempt(lambda: compute(9), short, free) == (None, "MemoryError: of a test")
    assert attempt_halving(compute, 13, short, free, 2) == (
        "3 samples", 3, "out of memory with 13 samples (MemoryError: of a test)")
    assert attempt_halving(compute, 3, short, free) == ("3 samples", 3, "") and freed == [True] * 3
    with pytest.raises(UserError, match="out of memory with 4 samples while the model is measured"):
        attempt_halving(compute, 8, short, free, least=4)

    def refused() -> None:
        raise UserError("got") from MemoryError("inner")

    assert attempt(refused, short, free)[1] == "MemoryError: inner"
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0, short, free)


def failing(run: Any, rank: int, at: set[int]) -> Any:
    """Train ``run``, whose ``rank`` runs out of memory in its runs of a micro-batch number ``at`` (from 0)."""
    stage, count = run.parts.stage, iter(range(10_000))
    own = stage.run
    stage.sizes = []

    def step(micro: Any, scale: float, final: bool, sink: Any) -> Any:
        stage.sizes.append(len(micro[0]))
        if run.control.rank == rank and next(count) in at:
            raise MemoryError
        return own(micro, scale, final, sink)

    stage.run = step
    return fitted(run)


@pytest.mark.parametrize("size, shares", [(n, cut) for n in (1, 2, 3) for cut in CUTS[n] if cut[-1]])
def test_a_step_is_repeated_at_its_size_first_and_then_in_halves(size, shares):
    settings = replace(SETTINGS, shares=shares)
    runs = {at: lockstep(size, settings, lambda r: make_model("numpy"), DATA,
                         lambda run, at=at: failing(run, size - 1, at)) for at in ((), (2,), (2, 3))}
    assert {bits(run) for run in runs[()]} == {bits(run) for run in runs[2,]}
    assert len({bits(run) for run in runs[2, 3]}) == 1
    assert apart(weights(runs[2, 3][0]), weights(runs[()][0])) < 1e-5
    n = max(runs[()][-1].parts.stage.sizes)
    assert runs[2, 3][-1].parts.stage.sizes[-1] <= -(-n // 2)
    for rank in range(size - 1):
        assert set(runs[2, 3][rank].parts.stage.sizes) == set(runs[()][rank].parts.stage.sizes)


def test_every_rank_ends_alike_where_one_has_no_smaller_size():
    def work(run: Any) -> str:
        with pytest.raises(UserError, match="rank 1 is out of memory in training with a micro-batch of 1") as error:
            failing(run, 1, set(range(2, 1000)))
        return str(error.value)

    said = lockstep(2, SETTINGS, lambda r: make_model("numpy"), DATA, work)
    assert said[0] == said[1]


def test_the_run_ends_with_the_error_where_it_is_to_stop():
    with pytest.raises(UserError, match="out of memory in training with micro-batches of 24"):
        lockstep(1, replace(SETTINGS, on_oom="stop"), lambda r: make_model("numpy"), DATA,
                 lambda run: failing(run, 0, {2}))


def said(size: int, work: Any, **changes: Any) -> list[str]:
    """Return what the ranks' runs end with, each its own; "" for one that was cut off."""
    ends = [""] * size

    def rank(run: Any) -> None:
        try:
            work(run)
        except UserError as error:
            ends[run.control.rank] = str(error)
            raise

    with contextlib.suppress(UserError):
        lockstep(size, replace(SETTINGS, **changes), lambda r: make_model("numpy"), DATA, rank)
    return ends


def raising(*_: Any) -> None:
    raise MemoryError("of a test")


def replaced(run: Any, owner: Any, name: str, by: Any = raising) -> Any:
    """Train with ``owner.name`` replaced on rank 1."""
    if run.control.rank == 1:
        setattr(owner, name, by)
    return fitted(run)


def test_what_cannot_be_repeated_ends_the_run_with_one_message_of_a_kind_that_a_supervisor_restarts():
    ends = {
        "the update": said(2, lambda run: replaced(run, run.dp, "update")),
        "the exchange of gradients": said(2, lambda run: replaced(run, run.dp.reducer.wires[0], "arrived")),
        "the end of a step that is repeated": said(2, lambda run: replaced(
            run, run.parts.stage, "run", lambda *_: setattr(run.dp, "put", raising) or raising())),
    }
    for what, (other, own) in ends.items():
        assert own.startswith(f"out of memory in {what}, which cannot be repeated (MemoryError: of a test)"), ends
        assert not other, other
    assert no_repeat("x", "y").kind == "oom" and stopped(1, "training", "x", "y").kind == "oom"


def test_a_rank_told_to_stop_or_with_sync_batchnorm_says_so():
    _, own = said(2, lambda run: failing(run, 1, {2}), on_oom="stop")
    assert own.startswith("out of memory in training with micro-batches of 12") and "on_oom is stop" in own
    run = lockstep(2, replace(SETTINGS, sync_batchnorm=True), lambda r: make_model("numpy"), DATA, lambda run: run)[1]
    assert not run.recovery.shrinks and run.recovery.in_evaluation
    assert any(note.startswith("on_oom: a rank that runs out of memory in training ends the run") for note in run.notes)


def test_evaluation_is_exact_in_smaller_parts_and_ends_on_all_ranks_where_none_is_left():
    data = (samples(96), samples(50, 1))
    settings = replace(SETTINGS, eval_every=1)

    def evaluated(fails: set[int], size: int = 2) -> list[Any]:
        def work(run: Any) -> Any:
            own, count = run.parts.evaluator.add, iter(range(10_000))
            sizes: list[int] = []

            def add(batch: Any) -> None:
                sizes.append(len(batch[0]))
                if run.control.rank == 1 and next(count) in fails:
                    raise MemoryError
                own(batch)

            run.parts.evaluator.add = add
            try:
                return fitted(run), sizes
            except UserError as error:
                return str(error), sizes

        return lockstep(size, settings, lambda r: make_model("numpy"), data, work)

    (plain, _), _ = evaluated(set())
    (run, others), (_, sizes) = evaluated({1, 2, 4, 5})
    assert run.state.metrics == pytest.approx(plain.state.metrics, rel=1e-12) and bits(run) == bits(plain)
    assert set(others) == {12, 1} and sizes[:6] == [12, 12, 12, 6, 6, 6] and 3 in sizes
    assert [each["then"] for each in run.shortages] == [12, 6, 6, 3] and not run.recovery.ceilings
    ends = [end for end, _ in evaluated(set(range(1000)))]
    assert ends[0] == ends[1] and "rank 1 is out of memory in evaluation with a micro-batch of 1" in ends[0]


def test_a_loss_that_is_not_finite_is_found_when_the_step_is_repeated():
    x, y = samples(96)
    x = x.copy()
    x[::24] = np.nan
    runs = lockstep(2, replace(SETTINGS, nan_guard="skip", max_skipped=100), lambda r: make_model("numpy"), (x, y),
                    lambda run: failing(run, 1, {0, 1, 2}))
    assert len(runs[0].shortages) == 3 and runs[0].state.cursor.step == 6
    assert any("not finite" in note for note in runs[0].notes)
    plain = lockstep(2, replace(SETTINGS, nan_guard="skip", max_skipped=100), lambda r: make_model("numpy"), (x, y),
                     lambda run: fitted(run))
    skipped = [[note for note in each[0].notes if "not finite" in note] for each in (runs, plain)]
    assert skipped[0] == skipped[1]


SELDOM = """
from hvdtrain.parallel.data_parallel.alone import Alone


class Seldom(Alone):
    def meets(self, step):
        return step % 3 == 2


def make(setup):
    return Seldom(setup.parts.optimizer, setup.ops)
"""


def test_a_rank_repeats_by_itself_a_step_in_which_the_copies_do_not_meet(tmp_path):
    (tmp_path / "seldom.py").write_text(SELDOM)
    settings = replace(SETTINGS, data_parallel=DataParallelConfig(f"{tmp_path / 'seldom.py'}:make"), check_every=0)
    plain, runs = (lockstep(2, settings, lambda r: make_model("numpy"), DATA,
                            lambda run, at=at: failing(run, 1, at)) for at in (set(), {0, 3}))
    told = [[(each["rank"], each["step"], each["then"]) for each in run.shortages] for run in runs]
    assert told[0] == told[1] == [(1, 0, 12), (1, 2, 6)]  # the second in a step in which they do
    assert bits(runs[0]) == bits(plain[0]) and apart(weights(runs[1]), weights(plain[1])) < 1e-5


def test_two_ranks_at_once_and_a_rank_without_samples():
    def both(run: Any) -> Any:
        return failing(run, run.control.rank, {3})

    def idle(run: Any) -> Any:
        if run.control.rank == 1:
            own, count = run.parts.stage.nothing, iter(range(10_000))
            run.parts.stage.nothing = lambda sink, poison=False: (
                raising() if not poison and next(count) == 2 else own(sink, poison))
        return fitted(run)

    plain = {shares: lockstep(2, replace(SETTINGS, shares=shares), lambda r: make_model("numpy"), DATA, fitted)
             for shares in ((1, 1), (1, 0))}
    for work, shares, ranks in ((both, (1, 1), {0, 1}), (idle, (1, 0), {1})):
        runs = lockstep(2, replace(SETTINGS, shares=shares), lambda r: make_model("numpy"), DATA, work)
        assert {each["rank"] for each in runs[0].shortages} == ranks and len(runs[0].shortages) == len(ranks)
        assert {bits(run) for run in runs} == {bits(run) for run in plain[shares]}


def test_what_happened_is_in_notes_log_and_summary(tmp_path):
    settings = replace(SETTINGS, out=str(tmp_path / "run"))
    run, _ = lockstep(2, settings, lambda r: make_model("numpy"), DATA, lambda run: failing(run, 1, {2, 3}))
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    told = [row for row in rows if row["event"] == "out_of_memory"]
    assert [(row["rank"], row["at_step"], row["size"], row["then"]) for row in told] == [(1, 2, 12, 12), (1, 2, 12, 6)]
    assert summary.record(run)["out_of_memory"]["times"] == 2 and run.recovery.ceilings == {1: 6}
    assert ("out of memory", "2 times; rank 1 uses micro-batches of at most 6") in summary.rows(run)
    assert "step 2: rank 1 ran out of memory in training with micro-batches of 12; it continues with 6" in run.notes
    assert run.ledger["samples"] == 96 and run.timeline.totals.samples == 6 * 24  # each sample counts once


def test_the_step_before_is_read_again_where_a_device_tells_late():
    class Late:
        asynchronous = True

    run = lockstep(1, SETTINGS, lambda r: make_model("numpy"), DATA, lambda run: run)[0]
    run.parts.stage = Late()
    assert run.state.outcome.local_loss([(1.0, 2.0)], True) == (0, 0)
    assert run.state.outcome.local_loss([(30.0, 3.0)], True) == (1.0, 2.0)  # of a step that is to be repeated
    run.state.outcome.unread_loss()
    assert run.state.outcome.local_loss([(3.0, 3.0)], True) == (1.0, 2.0)
    assert run.state.outcome.local_loss([], True) == (3.0, 3.0)


def test_what_the_failed_pass_held_is_free_before_anything_is_asked_for_anew():
    class Activations:
        pass

    held: list[Any] = []
    seen: list[bool] = []

    def work(run: Any) -> Any:
        def step(*_: Any) -> Any:
            mine = Activations()
            mine.itself = mine  # only the garbage collector ends it
            held.append(weakref.ref(mine))
            raise MemoryError(mine)

        run.parts.stage.run, own = step, run.parts.stage.run
        nothing = run.parts.stage.nothing

        def poison(*args: Any, **named: Any) -> None:
            seen.append(held[0]() is None)
            run.parts.stage.run = own
            nothing(*args, **named)

        run.parts.stage.nothing = poison
        return fitted(run)

    lockstep(1, SETTINGS, lambda r: make_model("numpy"), DATA, work)
    assert seen == [True]


def test_a_checkpoint_asked_for_in_a_step_that_is_repeated_is_written_once_with_its_end(tmp_path):
    class Ask(Record):
        def step_start(self, run: Any) -> None:
            if run.control.rank == 0 and run.state.cursor.step == 2:
                run.want_save()

    def work(run: Any) -> Any:
        run.callbacks.insert(0, Ask())
        return failing(run, 1, {2, 3}), run.callbacks[0].saved_at

    rows = lockstep(2, replace(SETTINGS, out=str(tmp_path / "run")), lambda r: make_model("numpy"), DATA, work)
    assert [saved for _, saved in rows] == [[3], [3]] and len(rows[0][0].shortages) == 2
