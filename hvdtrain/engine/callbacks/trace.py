"""Take a trace of a window of steps on all ranks and write it into the run's directory."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from hvdtrain import backends
from hvdtrain.config.sections import TraceConfig as Settings
from hvdtrain.config.texts import window_of
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.timeline.spans import Span, SpanRecorder, longest
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run
from hvdtrain.reports.trace import chrome, summary
from hvdtrain.reports.trace.chrome import Alignment, ClockOffset


class Trace(Callback):
    """On all ranks, alike: steps are counted alike, so all begin and end at one step (law 6)."""

    where = "all"
    setting = "trace"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.config.trace.steps)

    def __init__(self, settings: Settings) -> None:
        window = window_of(settings.steps)
        assert window is not None
        self.window, self._profiled = window, settings.profiler
        self._taken: SpanRecorder | None = None
        self._done = False
        self._clock_names: list[str] = []
        self._before: list[ClockOffset] = []
        self._begin = 0
        self._step_began_s = 0.0
        self._profiler: Any = None
        self._problem, self._profiler_within_s = "", 0.0

    def fit_start(self, run: Run) -> None:
        """Refuse a window that this run does not reach; ask all ranks which clock they read."""
        steps = run.feed.steps_left(run.state.cursor)
        if steps is not None:
            left = run.config.epochs - run.state.cursor.epoch - 1
            total = run.state.cursor.step + (steps + left * (run.feed.steps_per_epoch or 0) if left >= 0 else 0)
            total = min(total, run.config.max_steps or total)
            if self.window.first >= total > run.state.cursor.step:
                raise UserError(f"trace.steps is {self.window.first}:{self.window.last}, and the run has "
                                f"{count(total, 'step')}",
                                "a window within the run", f"for example trace.steps: {total // 2}:{total // 2 + 10}")
        self._clock_names = run.control.gather(chrome.clock_name())

    def step_start(self, run: Run) -> None:
        """Begin here where no step has ended before: the run starts, or continues, within the window.

        A step before it what is traced for the window alone (TensorFlow's graphs) is made ready.
        """
        if run.state.cursor.step == self.window.first - 1:
            run.timeline.closely = True
        if self._taken is None and not self._done and self.window.first <= run.state.cursor.step < self.window.last:
            self._start(run)

    def step_end(self, run: Run) -> None:
        step = run.state.cursor.step
        if self._taken is not None:
            now_s = time.perf_counter()
            self._taken.take(f"step {step}", "step", self._step_began_s, now_s, {})
            self._step_began_s = now_s
            if step >= self.window.last:
                self._finish(run)
        elif step == self.window.first and not self._done:
            self._start(run)

    def fit_end(self, run: Run) -> None:
        """Write what there is of a window that the run ends in; say where it was not reached."""
        if self._taken is not None:
            self._finish(run)
        elif not self._done:
            run.note(f"no trace: steps {self.window.first} to {self.window.last} are not part of this fit")

    def close(self, run: Run) -> None:
        run.timeline.taker, run.timeline.closely, self._taken = None, False, None
        if self._profiler is not None:
            with suppress(Exception):  # the fit has ended, and may have by an error of the device
                self._profiler.stop()
            self._profiler = None

    def _start(self, run: Run) -> None:
        self._begin, self._problem = run.state.cursor.step, ""
        self._before = chrome.clocks(run.control, self._clock_names)
        if self._profiled:
            try:
                self._profiler = backends.load(run.spec.framework).Profiler()
                self._profiler.start()
            except Exception as error:  # whatever a profiler's library raises: a trace ends no run
                self._profiler, self._problem = None, f"{type(error).__name__}: {error}"
            run.control.barrier("start of the profilers")  # which takes them different times
        self._taken = SpanRecorder(chrome.room(run.control.size))
        self._step_began_s = time.perf_counter()
        run.timeline.taker, run.timeline.closely = self._taken, True

    def _finish(self, run: Run) -> None:
        """Bring all together on rank 0, and write it there; collective."""
        taken, self._taken, self._done = self._taken, None, True
        assert taken is not None
        run.timeline.taker, run.timeline.closely = None, False
        own, dropped = longest(self._profiles(), chrome.room(run.control.size) - len(taken.spans))
        after = chrome.clocks(run.control, self._clock_names)
        rows = chrome.to_root(run.control, [*taken.spans, *own], {
            "host": run.control.node, "dropped": taken.dropped + dropped, "problem": self._problem,
            "profiler_within_s": self._profiler_within_s})
        if run.control.rank == 0:
            ranks = [chrome.RankTrace(told["host"], Alignment(before, later), spans, told["dropped"],
                                      told["profiler_within_s"])
                     for (spans, told), before, later in zip(rows, self._before, after)]
            self._write(run, ranks)
            problems = [f"rank {rank}: {told['problem']}" for rank, (_, told) in enumerate(rows) if told["problem"]]
            if problems:
                run.note(f"the trace lacks events of the framework's profiler ({problems[0]})")

    def _profiles(self) -> list[Span]:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return []
        try:
            found: list[Span] = profiler.stop()
            self._profiler_within_s = profiler.within_s
        except Exception as error:  # whatever a profiler's library raises: a trace ends no run
            self._problem = f"{type(error).__name__}: {error}"
            return []
        return found

    def _write(self, run: Run, ranks: list[chrome.RankTrace]) -> None:
        steps, path = [self._begin, run.state.cursor.step], run.out / chrome.NAME
        courses = [summary.course_of(trace) for trace in ranks]
        zero_s = min((t.alignment.shared_s(s.begin_s) for t in ranks for s in t.spans), default=0.0)
        about = {"steps": steps, "framework": run.spec.framework, "model": run.spec.name, "wire": run.collectives.name,
                 "overlap_percent": summary.overlaps(courses),
                 "critical": summary.critical(courses, max(1, steps[1] - steps[0]))}
        try:
            n = chrome.write(path, ranks, zero_s, about)
            size = path.stat().st_size
        except OSError as error:
            run.note(f"the trace was not written: {error}")
            return
        within_s, dropped = max(t.alignment.within_s for t in ranks), sum(t.dropped for t in ranks)
        run.record("trace", path=chrome.NAME, steps=steps, within_s=within_s, events=n, dropped=dropped, bytes=size,
                   overlap_percent=about["overlap_percent"], critical=about["critical"])
        lost = f", {dropped} dropped for its size" if dropped else ""
        run.note(f"trace of steps {steps[0]} to {steps[1]}: {path}, {n} events of {count(len(ranks), 'rank')}{lost}; "
                 f"{_clocks_in_words(within_s)}")


def _clocks_in_words(within_s: float) -> str:
    return f"their clocks agree within {within_s * 1e6:.0f} us" if within_s else "all use one clock"
