"""Each callback that decides something, alone, driven by a made-up run."""

import contextlib
import importlib
import json
import math
import pkgutil

import pytest
from fake_run import all_of, make_run, walk

import hvdtrain.engine.callbacks
from hvdtrain.checkpoint.adapters import state_key_of
from hvdtrain.config import EarlyStopConfig as EarlyStopSettings
from hvdtrain.core.errors import UserError
from hvdtrain.core.events import Event
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.core.timeline import StepTotals, active, blocked
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.early_stop import EarlyStop
from hvdtrain.engine.callbacks.nan_guard import NanGuard
from hvdtrain.engine.run_parts import RunState


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


# --- base ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("every, seen", [("", list(range(1, 11))), ("1 step", list(range(1, 11))), ("4 step", [4, 8]),
                                         ("1 epoch", [5, 10]), ("2 epoch", [10]), ("3 epoch", [])])
def test_every_thins_out_steps_only(run, every, seen):
    class Seer(Callback):
        def __init__(self):
            self.steps, self.evals, self.every = [], 0, every

        def step_end(self, run):
            self.steps.append(run.state.cursor.step)

        def eval_end(self, run):
            self.evals += 1

    seer = Seer()
    all_of(walk(run, seer))
    assert seer.steps == seen and seer.evals == 2


STATE_KEYS = {"AutoCompile", "AutoCompression", "AutoWire", "Balance", "EarlyStop", "EvalSteps", "History", "KeepBest",
              "Ledger", "MemoryFit", "NanGuard"}
"""Names of states in the checkpoints of released versions. Beside them "Bridge", of Keras' callbacks."""


def test_states_in_checkpoints_keep_their_names():
    """A renamed class would lose its state when a checkpoint of an earlier release is resumed."""
    found = {member for module in pkgutil.iter_modules(hvdtrain.engine.callbacks.__path__)
             for member in vars(importlib.import_module(f"hvdtrain.engine.callbacks.{module.name}")).values()
             if isinstance(member, type) and issubclass(member, Callback) and "state_dict" in vars(member)}
    assert {cls.state_key for cls in found - {Callback}} == STATE_KEYS


def test_a_callback_of_the_user_is_stored_by_the_name_of_its_class():
    class Own(EarlyStop):
        pass

    class Renamed(EarlyStop):
        state_key = "Own"

    class Without:
        where = "all"

    settings = EarlyStopSettings("loss", 1)
    keys = [state_key_of(made) for made in (Own(settings), Renamed(settings), Without(), EarlyStop(settings))]
    assert keys == ["Own", "Own", "Without", "EarlyStop"]


def test_every_so_many_seconds(run, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("hvdtrain.core.records.time.monotonic", lambda: clock[0])

    class Seer(Callback):
        every, count = "2.5 s", 0

        def step_end(self, run):
            self.count += 1

    seer, counts = Seer(), []
    for _ in range(8):  # one step a second
        seer.on(Event.STEP_END, run)
        counts.append(seer.count)
        clock[0] += 1.0
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3]


def test_an_epoch_of_a_stream_is_never_seen_coming(tmp_path):
    class Seer(Callback):
        every, count = "1 epoch", 0

        def step_end(self, run):
            self.count += 1

    seer = Seer()
    seer.on(Event.STEP_END, make_run(tmp_path, steps=None))
    assert seer.count == 0


@pytest.mark.parametrize(
    "every, where",
    [
        ("5 s", "all"),
        ("x step", "root"),
        ("0 step", "root"),
        ("-1 step", "root"),
        ("1.5 step", "root"),
        ("5", "root"),
        ("5 hours", "root"),
        ("0 s", "root"),
        ("nan s", "root"),
        ("step", "root"),
    ],
)
def test_impossible_intervals_are_refused(run, every, where):
    class Seer(Callback):
        def step_end(self, run):
            raise AssertionError("not its turn")

    seer = Seer()
    seer.every, seer.where = every, where
    with pytest.raises(UserError, match="Seer.every is"):
        seer.on(Event.STEP_END, run)


def test_events_without_a_method_and_state_are_nothing(run):
    callback = Callback()
    for event in Event:
        callback.on(event, run)
    assert callback.state_dict() == {}
    callback.load_state_dict({})


def test_root_callbacks_run_on_rank_0_only(tmp_path):
    class Seer(Callback):
        def __init__(self, where):
            self.where, self.count = where, 0

        def epoch_end(self, run):
            self.count += 1

    for rank, want in ((0, (1, 1)), (1, (0, 1))):
        run = make_run(tmp_path, rank)
        run.callbacks = [Seer("root"), Seer("all")]
        run.emit(Event.EPOCH_END)
        assert tuple(c.count for c in run.callbacks) == want


# --- nan_guard -----------------------------------------------------------------------------------------------------

def hit(guard, run, step, ranks=(1,)):
    run.state.cursor = Cursor(step=step, epoch_step=step)
    run.state.outcome.bad_ranks = list(ranks)
    guard.on(Event.NON_FINITE, run)


def test_nan_guard_stops_with_rank_and_step(run):
    with pytest.raises(
        UserError, match=r"not finite at step 7 on rank 1, 3; that step's update was not made; .*nan_guard: skip"
    ):
        hit(NanGuard("stop", 20), run, 7, (1, 3))


def test_nan_guard_skips_some_in_a_row(run, capsys):
    guard = NanGuard("skip", 2)
    for step in (3, 4, 6, 7):
        hit(guard, run, step)
    assert (guard.in_a_row, guard.skipped) == (2, 4)
    assert capsys.readouterr().out.count("update skipped on every rank") == 4
    resumed = NanGuard("skip", 2)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    hit(resumed, run, 20)
    for step in (8,):
        with pytest.raises(UserError, match="3 steps in a row"):
            hit(guard, run, step)


# --- early_stop ----------------------------------------------------------------------------------------------------

def watch(run, values, **settings):
    """Return the number of evaluations after which the callback wants to stop (None: never)."""
    stop = EarlyStop(EarlyStopSettings(**{"metric": "loss", **settings}))
    for i, value in enumerate(values):
        run.state.metrics = {"loss": value, "accuracy": value}
        stop.on(Event.EVAL_END, run)
        if run.state.wishes.stop:
            return i + 1
    return None


@pytest.mark.parametrize("values, settings, after", [
    ([5, 4, 3, 2, 1], {"patience": 1}, None),
    ([5, 4, 4, 4], {"patience": 2}, 4),
    ([5, 4, 4, 3, 3, 3], {"patience": 2}, 6),
    ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max", "metric": "accuracy"}, 5),
    ([5, 4.95, 4.9], {"patience": 2, "min_delta": 0.2}, 3),
    ([5, 4.95, 4.7], {"patience": 2, "min_delta": 0.2}, None),
    ([math.nan, math.nan, 1, 0.5, 0.4], {"patience": 3}, None),
    ([math.nan, math.nan], {"patience": 2}, 2),
    ([1, math.inf, math.nan], {"patience": 2, "mode": "max"}, 3)], ids=str)
def test_early_stop(run, values, settings, after):
    assert watch(run, values, **settings) == after


def test_early_stop_only_wishes(run):
    watch(run, [1, 1], patience=1)
    assert run.state.wishes.stop == "early stop: loss not better than 1 for 1 evaluation" and not run.stopping()
    run.settle()
    assert run.stopping()


def test_early_stop_continues_after_a_resume(run):
    first = EarlyStop(EarlyStopSettings("loss", patience=2))
    run.state.metrics = {"loss": 1.0}
    first.on(Event.EVAL_END, run)
    first.on(Event.EVAL_END, run)
    second = EarlyStop(EarlyStopSettings("loss", patience=2))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.on(Event.EVAL_END, run)
    assert run.state.wishes.stop and second.best == 1.0
    other = EarlyStop(EarlyStopSettings("accuracy", patience=2))
    other.load_state_dict(first.state_dict())
    assert other.best is None and other.waited == 0, "of another metric"


def test_early_stop_on_an_unknown_metric(run):
    with pytest.raises(UserError, match=r"early_stop.metric 'acuracy' is not evaluated; .*did you mean 'accuracy'"):
        watch(run, [1], metric="acuracy")


# --- the state that callbacks see ----------------------------------------------------------------------------------

def test_phases_leave_the_first_step_out_of_the_speed():
    phases = StepTotals()
    assert math.isnan(phases.samples_per_s())
    phases.step(100.0, 8)
    assert math.isnan(phases.samples_per_s())
    phases.step(1.0, 8)
    phases.step(1.0, 6)
    phases.add("data", 2.0)
    phases.add("wait", -1e-9)
    assert phases.samples_per_s() == 14 / 4.0 and phases.seconds == {
        "data": 2.0,
        "compute": 0.0,
        "wait": 0.0,
        "update": 0.0,
    }


@pytest.mark.parametrize("event, refused", [
    (event, event not in (Event.STEP_END, Event.EVAL_END, Event.EPOCH_END)) for event in Event
    if event is not Event.TOLD])
def test_a_checkpoint_is_requested_where_that_of_the_step_follows(run, event, refused):
    class Saves(Callback):
        where = "all"

        def on(self, event, run):
            run.state.save_due = True

    run.callbacks = [Saves()]
    with pytest.raises(UserError, match=f"save_due in {event.value}") if refused else contextlib.nullcontext():
        run.emit(event)
    assert run.state.save_due is not refused
    run.state.save_due = True  # of the loop


def test_what_ranks_announce_may_request_a_checkpoint_in_a_step_or_with_a_stop(run):
    class Saves(Callback):
        where = "all"

        def told(self, run):
            run.state.save_due = True

    run.callbacks = [Saves()]
    run.emit(Event.TOLD)
    assert not run.state.save_due and run.state.wishes.save, "between two steps it is a wish for the next"
    run.state.stop = "requeue: SIGTERM (rank 0)"
    run.emit(Event.TOLD)
    assert run.state.save_due


def test_a_callback_of_rank_0_alone_requests_no_checkpoint(run):
    class Saves(Callback):
        def step_end(self, run):
            run.state.save_due = True

    run.callbacks, run.control.size = [Saves()], 2
    with pytest.raises(UserError, match="rank 0 alone set run.state.save_due in step_end"):
        run.emit(Event.STEP_END)


def test_a_users_callback_may_get_a_method_later(run):
    class Grows(Callback):
        where = "all"

        def epoch_start(self, run):
            self.step_end = seen.append

    seen = []
    run.callbacks = [Grows()]
    for event in (Event.STEP_END, Event.EPOCH_START, Event.STEP_END):
        run.emit(event)
    assert seen == [run]


@pytest.mark.parametrize("where, size", [("root", 2), ("root", 1), ("all", 2)])
def test_a_callback_of_rank_0_alone_enters_no_exchange(run, where, size):
    class Sums(Callback):
        def step_end(self, run):
            with blocked("sum"):
                pass

    callback, run.control.size = Sums(), size
    callback.where, run.callbacks = where, [callback]
    with active(run.timeline):
        hangs = (where, size) == ("root", 2)
        with pytest.raises(UserError, match="step_end of Sums entered") if hangs else contextlib.nullcontext():
            run.emit(Event.STEP_END)
        for method in ("saving", "close"):
            setattr(Sums, method, Sums.step_end)
            with pytest.raises(UserError, match=f"{method} of Sums ent") if hangs else contextlib.nullcontext():
                run.call(method)
        with blocked("sum"):  # of the loop
            pass


def test_the_first_reason_to_stop_counts(run):
    run.settle()
    assert not run.stopping() and RunState().stop == ""
    run.want_stop("a")
    run.want_stop("b")
    run.settle()
    assert run.state.stop == "a"
