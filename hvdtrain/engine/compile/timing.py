"""Time a model with and without an option, in turns, on samples of the run's data.

Owns the turns and the bounds of it. Nothing is exchanged meanwhile and nothing remains (`Stage.trial`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.planning.compile_choice import Tried, shortened

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Compile
    from hvdtrain.engine.run import Run

COMPILE_S = 120.0
"""Most seconds that a rank compiles for one option; what is not compiled by then stays as it is."""

TURNS = 7
"""Turns of either way at least."""

MOST_TURNS = 30

TIMED_S = 3.0
"""Seconds after which no more turns are begun."""


def tried(run: Run, compile: Compile, option: str, kinds: Sequence[str]) -> Tried:
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
    """Use ``options`` as they were chosen before, without timing; return why not, in words, or "". Not collective."""
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
    """Seconds of ``work`` after ``base`` and after ``option``, in turns, whose order changes; the first does not count.
    """
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
