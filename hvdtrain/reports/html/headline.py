"""The top of the page: model and ranks, the few numbers that everybody asks for, and how the run ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.log import USEFUL
from hvdtrain.reports.html.words import count, duration, metric, moment, number, percent, short, size

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "numpy": "NumPy"}


@dataclass(frozen=True)
class Tile:
    """A number with its name; ``small``: a line below it; ``meter``: percent of a small bar, -1 without one."""

    name: str
    value: str
    small: str = ""
    meter: float = -1.0


def title_parts(facts: RunFacts) -> list[str]:
    """Return what ran: model, framework, ranks and hosts, when."""
    model = str(facts.start.get("model") or facts.config.get("model") or "").strip()
    parts = [model, FRAMEWORKS.get(str(facts.start.get("framework") or ""), str(facts.start.get("framework") or ""))]
    hosts = [host for host in dict.fromkeys(facts.hosts) if host]
    if facts.ranks:
        where = (
            f" on {hosts[0]}"
            if len(hosts) == 1
            else f" on {count(len(hosts), 'host')} ({', '.join(hosts[:6])})" if hosts else ""
        )
        cut = f" in {count(len(facts.copies), 'pipeline')}" if any(len(one) > 1 for one in facts.copies) else ""
        parts.append(f"{count(facts.ranks, 'rank')}{cut}{where}")
    batch = facts.config.get("global_batch")
    parts += [f"global batch {batch:,}"] if isinstance(batch, int) else []
    parts += [f"began {moment(facts.begin_s)}"] if math.isfinite(facts.begin_s) else []
    return [part for part in parts if part]


def tiles(facts: RunFacts) -> list[Tile]:
    """Return the numbers of the top."""
    ratio = 100.0 * max(0, facts.step) / facts.steps if facts.steps else -1.0
    found = [Tile("steps", f"{max(0, facts.step):,}", f"of {facts.steps:,}" if facts.steps else "", ratio),
             Tile("time", duration(facts.ran_s), _ranks_time(facts))]
    score = next((name for name in facts.metrics if name != "loss"), "loss" if facts.metrics else "")
    if score:
        others = [f"{name} {metric(value)}" for name, value in facts.metrics.items() if name != score]
        found.append(Tile(f"test {score}", metric(facts.metrics[score]), ", ".join(others[:2])))
    if facts.loss == facts.loss:
        found.append(Tile("training loss", metric(facts.loss), "of the last recorded step"))
    speed = facts.log.steps["samples_per_s"]
    finite = speed[speed == speed]
    if len(finite):
        mean, last = short(_mean_speed(facts)), short(float(finite[-1]))
        found.append(Tile("speed", mean, f"samples/s while it trained; {last} recorded last"))
    solo = facts.log.last("meter").get("percent_of_solo")
    column = facts.log.steps["percent_of_solo"]
    latest = number(solo) if solo is not None else float(column[-1]) if len(column) else math.nan
    if latest == latest:
        found.append(
            Tile("of solo speeds", percent(latest), "100 %: all as fast as alone, nobody waits", min(100.0, latest))
        )
    elif facts.spent.basis == "seconds":
        useful = facts.spent.part(*USEFUL)
        found.append(Tile("time that trained", percent(useful), "compute and update", useful))
    if facts.restarts:
        found.append(Tile("restarts", str(facts.restarts), f"{count(facts.lost_steps, 'step')} computed again"))
    peak = _peak(facts)
    if peak == peak:
        found.append(Tile("most memory", size(peak), "of one rank"))
    return found[:8]


def _mean_speed(facts: RunFacts) -> float:
    """Return samples a second over all recorded steps: records stand for equal numbers, so times are averaged."""
    speed = facts.log.steps["samples_per_s"]
    known = speed[np.isfinite(speed) & (speed > 0)]
    return float(len(known) / np.sum(1.0 / known)) if len(known) else math.nan


def _ranks_time(facts: RunFacts) -> str:
    parts = [f"{duration(facts.rank_s)} of all ranks"] if facts.ranks > 1 else []
    parts += [f"{duration(facts.between_s)} more between attempts"] if facts.between_s >= 1.0 else []
    return ", ".join(parts)


def _peak(facts: RunFacts) -> float:
    memory = facts.log.last("end").get("memory")
    peaks = memory.get("peak") if isinstance(memory, dict) else None
    values = [number(one) for one in peaks] if isinstance(peaks, list) else []
    return max((one for one in values if one > 0), default=math.nan)


GOOD, BAD, GOING, PAUSED = "good", "bad", "going", "paused"


@dataclass(frozen=True)
class Ending:
    """``tone``: `GOOD`, `BAD`, `GOING` or `PAUSED`; ``pill``: in a word or two; ``headline``: in a sentence;
    ``words``: how it ended in full."""

    tone: str
    pill: str
    headline: str
    words: str


def verdict(facts: RunFacts) -> Ending:
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


def _completed(facts: RunFacts) -> str:
    done, stop = max(0, facts.step), str((facts.completed or {}).get("stop") or "")
    if not stop or stop.startswith("max_steps"):
        return f"It came to its end: all {count(done, 'step')} are done"
    verdict = f" of {facts.steps:,}" if facts.steps > done else ""
    return f"It stopped early at step {done:,}{verdict}, by {stop.rstrip('.')}"


def _where(facts: RunFacts) -> str:
    step = max(0, facts.step)
    return f"{step:,} of {facts.steps:,}" if facts.steps else f"{step:,}"


def _left(facts: RunFacts) -> str:
    last = facts.attempts[-1]
    done, left = last.step_end - max(0, last.step_begin), facts.steps - last.step_end
    ran_s = last.seen_s - last.trained_s
    if done < 2 or left <= 0 or not ran_s > 0:
        return ""
    return f"; about {duration(ran_s / done * left)} to go at its pace"
