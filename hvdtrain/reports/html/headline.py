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
    own = [name for name in facts.metrics if "/" not in name] or list(facts.metrics)  # not those of named sets
    score = next((name for name in own if name != "loss"), own[0] if own else "")
    if score:
        others = [f"{name} {metric(value)}" for name, value in facts.metrics.items() if name != score]
        found.append(Tile(f"test {score}", metric(facts.metrics[score]), ", ".join(others[:2])))
    if facts.loss == facts.loss:
        found.append(Tile("training loss", metric(facts.loss), "of the last recorded step"))
    speed = facts.log.steps["samples_per_s"]
    finite = speed[speed == speed]
    if len(finite):
        mean, last = short(_mean_speed(facts)), short(float(finite[-1]))
        found.append(Tile("speed", mean, f"samples/s during training; latest {last}"))
    solo = facts.log.last("meter").get("percent_of_solo")
    column = facts.log.steps["percent_of_solo"]
    latest = number(solo) if solo is not None else float(column[-1]) if len(column) else math.nan
    if latest == latest:
        found.append(
            Tile("scaling efficiency", percent(latest), "100 %: all ranks as fast as alone", min(100.0, latest))
        )
    elif facts.spent.basis == "seconds":
        useful = facts.spent.part(*USEFUL)
        found.append(Tile("compute and update", percent(useful), "of recorded time", useful))
    if facts.restarts:
        found.append(Tile("restarts", str(facts.restarts), f"{count(facts.lost_steps, 'step')} repeated"))
    peak = _peak(facts)
    if peak == peak:
        found.append(Tile("peak memory", size(peak), "of one rank"))
    return found[:8]


def _mean_speed(facts: RunFacts) -> float:
    """Return samples a second over all recorded steps: records stand for equal numbers, so times are averaged."""
    speed = facts.log.steps["samples_per_s"]
    known = speed[np.isfinite(speed) & (speed > 0)]
    return float(len(known) / np.sum(1.0 / known)) if len(known) else math.nan


def _ranks_time(facts: RunFacts) -> str:
    parts = [f"{duration(facts.rank_s)} summed over ranks"] if facts.ranks > 1 else []
    parts += [f"{duration(facts.between_s)} between attempts"] if facts.between_s >= 1.0 else []
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
                      f"In progress: step {_where(facts)}{_left(facts)}.")
    if last is None:
        return Ending(BAD, "not started", "Nothing was trained", "The run recorded no step and no reason.")
    if last.cause == "requeue" or last.cause == "done":
        why = f" ({last.words})" if last.words else ""
        return Ending(PAUSED, "stopped", f"Stopped at step {_where(facts)} after {took}{through}",
                      f"The run stopped before its last step{why}; continue with --resume auto.")
    if not last.cause:
        return Ending(BAD, "aborted", f"Aborted at step {_where(facts)} after {took}{through}",
                      "The log has no end record: the run was killed, or its host failed. No reason is "
                      f"recorded. Its last record is from {duration(facts.looked_s - facts.end_s)} before this report "
                      "was made.")
    who = f" {facts.who(last.rank)}:" if last.rank >= 0 else ""
    return Ending(BAD, "failed", f"Failed at step {_where(facts)} after {took}{through}",
                  f"The run failed: {last.fault}.{who} {last.words}".rstrip(" :.") + ".")


def _completed(facts: RunFacts) -> str:
    done, found = max(0, facts.step), facts.completed or {}
    stop, at = str(found.get("stop") or ""), found.get("weights_at", done)
    final = f"; the final model has the weights of step {at:,}" if isinstance(at, int) and at < done else ""
    if not stop or stop.startswith("max_steps"):
        return f"The run completed all {count(done, 'step')}{final}"
    verdict = f" of {facts.steps:,}" if facts.steps > done else ""
    return f"The run stopped early at step {done:,}{verdict}, by {stop.rstrip('.')}{final}"


def _where(facts: RunFacts) -> str:
    step = max(0, facts.step)
    return f"{step:,} of {facts.steps:,}" if facts.steps else f"{step:,}"


def _left(facts: RunFacts) -> str:
    last = facts.attempts[-1]
    done, left = last.step_end - max(0, last.step_begin), facts.steps - last.step_end
    ran_s = last.seen_s - last.trained_s
    if done < 2 or left <= 0 or not ran_s > 0:
        return ""
    return f"; about {duration(ran_s / done * left)} left"
