"""`compile: auto`: time the ways to compute the model at the start of a fit, and keep those that are faster.

The decision and its text are left to `hvdtrain.planning.compile_choice`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.cluster.deadline import deadline
from hvdtrain.core.protocols import Compile
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.compare_ranks import kinds
from hvdtrain.engine.run import Run
from hvdtrain.planning.compile_choice import Tried, shortened, verdicts, words


class AutoCompile(Callback):
    """Runs on all ranks. ``chosen``: what each kind of rank uses, by its text; a run that is resumed keeps it."""

    where = "all"
    doing = "timing the compiled model"
    before = ("MemoryFit", "Balance", "AutoWire", "AutoCompression")  # they measure the model as it will run
    state_key = "AutoCompile"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.config.compile == "auto")

    def __init__(self) -> None:
        self.chosen: dict[str, list[str]] = {}
        self._in_use = False

    def fit_start(self, run: Run) -> None:
        """Try every option on every rank at once; the random generators are afterwards as they were."""
        if self._in_use:  # a second fit of the same run
            return
        self._in_use = True
        compile = run.parts.compile
        if compile is None or not compile.options:
            run.note("compile auto: nothing can be compiled here, the model runs uncompiled")
            return
        names = kinds(run)
        # Bounded as a whole too: each option by its compiler's time and its turns, all ranks alike.
        limit_s = run.config.control_timeout_s * (1 + len(compile.options))
        with run.parts.draws_kept(), deadline(limit_s, "compile auto"):
            if set(names) <= set(self.chosen):
                self._keep(run, names)
            else:
                self._choose(run, names)

    def _choose(self, run: Run, names: list[str]) -> None:
        """Try one option after the other, each on top of those that a rank's kind has kept. Collective."""
        compile, own = run.parts.compile, names[run.control.rank]
        assert compile is not None
        self.chosen = {name: [] for name in names}
        for option in compile.options:
            rows = run.control.gather(time_option(run, compile, option, names))
            found = verdicts(rows)
            for kind, one in found.items():
                self.chosen[kind] += [option] if one.kept else []
            compile.use(tuple(self.chosen[own]))
            for text in words(option, rows, found):
                run.note(f"compile auto: {text}")
            run.record("compile", option=option, kinds={kind: vars(one) for kind, one in found.items()})

    def _keep(self, run: Run, names: list[str]) -> None:
        """Use what was chosen before the run was saved, so that it continues as it was; collective."""
        compile, own = run.parts.compile, names[run.control.rank]
        assert compile is not None
        whys = run.control.gather(prepare(run, compile, tuple(self.chosen[own]), names))
        for kind in dict.fromkeys(names):
            why = next((w for w, name in zip(whys, names) if w and name == kind), "")
            said = " and ".join(self.chosen[kind]) or "nothing"
            if why:
                self.chosen[kind] = []
            run.note(f"compile auto: {said}, as decided before" + (f", is not compiled now: {why}" if why else ""))
        compile.use(tuple(self.chosen[own]))

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": {kind: list(options) for kind, options in self.chosen.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chosen = {kind: list(options) for kind, options in state["chosen"].items()}


COMPILE_S = 120.0
"""Most seconds that a rank compiles for one option; what is not compiled by then stays as it is."""

TURNS = 7
"""Turns of either way at least."""

MOST_TURNS = 30

TIMED_S = 3.0
"""Seconds after which no more turns are begun."""


def time_option(run: Run, compile: Compile, option: str, kinds: Sequence[str]) -> Tried:
    """Compile ``option`` on top of what is in use, and time both; what was in use is in use again. Not collective.

    ``kinds``: what each rank computes on. Errors of compiler and model are told in the result.
    """
    before, kind = compile.chosen, kinds[run.control.rank]
    why = compile.refusal(option)
    batches = micro_batches(run, kinds)
    if why or not batches:
        return Tried(kind, why=why)
    until = time.monotonic() + bound_s(run)
    try:
        compile.use((*before, option))
        left = "; ".join(dict.fromkeys(filter(None, (compile.prepare(_work(run, batch), until) for batch in batches))))
        work = _work(run, batches[0])
        base_s, tried_s = _turns(lambda: compile.use(before), lambda: compile.use((*before, option)), work)
    except Exception as error:  # whatever a compiler or a layout raises: the model trains without it
        return Tried(kind, why=shortened(error))
    finally:
        compile.use(before)
    return Tried(kind, base_s, tried_s, left=left)


def prepare(run: Run, compile: Compile, options: tuple[str, ...], kinds: Sequence[str]) -> str:
    """Use ``options`` as they were chosen before, without timing; return why not, as text, or "". Not collective."""
    why = next(filter(None, map(compile.refusal, options)), "")
    batches = micro_batches(run, kinds) if options else []
    if why:
        return why
    compile.use(options)
    try:
        for batch in batches:
            compile.prepare(_work(run, batch), time.monotonic() + bound_s(run))
    except Exception as error:
        compile.use(())
        return shortened(error)
    return ""


def micro_batches(run: Run, kinds: Sequence[str]) -> list[Any]:
    """Return samples like the largest micro-batch of the ranks of this rank's kind; none where they have no samples.

    With a second size where those of a run differ or change (balance): a compiler then makes code for any. All ranks of
    a kind compile for the same sizes in the same order, and so compute a micro-batch of any size alike.
    """
    cursor, feed, rank = run.state.cursor, run.feed, run.control.rank
    n = run.config.global_batch if feed.samples is None else min(run.config.global_batch, feed.samples)
    cut = feed.cut_at(cursor.step)
    offsets = cut.offsets(n)
    counts = {r: int(offsets[r + 1] - offsets[r]) for r, kind in enumerate(kinds) if kind == kinds[rank]}
    sizes = sorted({stop - start for r, count in counts.items() for start, stop in cut.bounds(count, r)}, reverse=True)
    if len(sizes) == 1 and run.config.balance != "off":
        sizes.append(sizes[0] // 2 + 1)
    wanted = [size for size in dict.fromkeys(sizes) if size > 1] or sizes  # code for 1 is code for 1 alone
    return [feed.sample(size, cursor) for size in wanted[:2]]


def bound_s(run: Run) -> float:
    """Return the most seconds that one option may be compiled: the other ranks wait that long, and not in vain."""
    return min(COMPILE_S, run.config.control_timeout_s / 2)


def _work(run: Run, batch: Any) -> Callable[[], None]:
    return lambda: run.parts.stage.trial(batch)


def _turns(base: Callable[[], None], option: Callable[[], None],
           work: Callable[[], None]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of ``work`` after ``base`` and ``option``, interleaved in changing order, without the first."""
    times: dict[Callable[[], None], list[float]] = {base: [], option: []}
    begin = time.perf_counter()
    for turn in range(MOST_TURNS + 1):
        for way in (base, option) if turn % 2 else (option, base):
            way()
            start = time.perf_counter()
            work()
            times[way].append(time.perf_counter() - start)
        if turn >= TURNS and time.perf_counter() - begin > TIMED_S:
            break
    return tuple(times[base][1:]), tuple(times[option][1:])
