"""How a run ended, as far as its files tell: the one verdict of a page."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.reports.html.facts import Facts
from hvdtrain.reports.html.words import count, duration

GOOD, BAD, GOING, PAUSED = "good", "bad", "going", "paused"


@dataclass(frozen=True)
class Ending:
    """``tone``: `GOOD`, `BAD`, `GOING` or `PAUSED`; ``pill``: in a word or two; ``headline``: in a sentence;
    ``words``: how it ended in full."""

    tone: str
    pill: str
    headline: str
    words: str


def of(facts: Facts) -> Ending:
    """Say how the run in ``facts`` ended."""
    last = facts.attempts[-1] if facts.attempts else None
    through = f", through {count(facts.restarts, 'restart')}" if facts.restarts else ""
    took = duration(facts.ran_s)
    if facts.completed is not None:
        return Ending(GOOD, "completed", f"Trained {count(max(0, facts.step), 'step')} in {took}{through}",
                      f"{_completed(facts)}{through}.")
    if facts.alive:
        return Ending(GOING, "running", f"Training: step {_where(facts)} after {took}{through}",
                      f"It goes on: step {_where(facts)} so far{_left(facts)}.")
    if last is None:
        return Ending(BAD, "never began", "Nothing was trained", "It left no record of a step, nor of why.")
    if last.cause == "requeue" or last.cause == "done":
        why = f" ({last.words})" if last.words else ""
        return Ending(PAUSED, "stopped", f"Stopped at step {_where(facts)} after {took}{through}",
                      f"It ended in order before its last step{why}, and can go on with --resume auto.")
    if not last.cause:
        return Ending(BAD, "cut off", f"Cut off at step {_where(facts)} after {took}{through}",
                      "Its last record is of no end: it was killed, or its machine went away. Nobody has written down "
                      f"why. It was heard of last {duration(facts.looked_s - facts.end_s)} before this page was made.")
    who = f" {facts.who(last.rank)}:" if last.rank >= 0 else ""
    return Ending(BAD, "failed", f"Failed at step {_where(facts)} after {took}{through}",
                  f"It failed: {last.fault}.{who} {last.words}".rstrip(" :.") + ".")


def _completed(facts: Facts) -> str:
    """Say how far a completed run came, and what stopped it before its last step."""
    done, stop = max(0, facts.step), str((facts.completed or {}).get("stop") or "")
    if not stop or stop.startswith("max_steps"):
        return f"It came to its end: all {count(done, 'step')} are done"
    of = f" of {facts.steps:,}" if facts.steps > done else ""
    return f"It stopped early at step {done:,}{of}, by {stop.rstrip('.')}"


def _where(facts: Facts) -> str:
    step = max(0, facts.step)
    return f"{step:,} of {facts.steps:,}" if facts.steps else f"{step:,}"


def _left(facts: Facts) -> str:
    """What is left, at the pace of the latest attempt."""
    last = facts.attempts[-1]
    done, left = last.step_end - max(0, last.step_begin), facts.steps - last.step_end
    ran_s = last.seen_s - last.trained_s
    if done < 2 or left <= 0 or not ran_s > 0:
        return ""
    return f"; about {duration(ran_s / done * left)} to go at its pace"
