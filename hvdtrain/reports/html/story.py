"""The story of a run in a few sentences: result, cost, stragglers, failures, recommendations.

Owns the sentences and which of them are worth saying. Each is made from records alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdtrain.planning.batch.meter import FASTER
from hvdtrain.reports.html import headline
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.log import UNRECORDED, USEFUL, RunAttempt, TimeBreakdown
from hvdtrain.reports.html.words import begin, count, cut, duration, listed, metric, number, percent, time_of_day, whole

LITTLE = 4.0
"""Percent of the ranks' time after the start below which waiting is not worth a name."""

CAUSE_WORDS = {
    "start": "starting", "input": "waiting for data", "compute": "computing", "wait": "waiting for other ranks",
    "idle": "waiting for other stages", "channel": "sending between stages",
    "wire": "exchanging gradients", "update": "updating", "checkpoint": "saving", "evaluation": "evaluating",
    "other": "other work",
}


class Answer(NamedTuple):
    """Text of an answer, its tone ("good", "bad", "warn" or ""), one line each below it, and its question."""

    answer: str
    tone: str = ""
    points: Sequence[str] = ()
    question: str = ""


def tell(facts: RunFacts) -> list[Answer]:
    """Return the story."""
    return [_told(question, tell_it, facts) for question, tell_it in QUESTIONS.items()]


def _told(question: str, tell_it: Callable[[RunFacts], Answer], facts: RunFacts) -> Answer:
    """Return the answer; where the records are too odd for it, one that says so: a page must come of any crash."""
    try:
        answer = tell_it(facts)
    except Exception as error:  # records of any version and of others' making may hold anything
        answer = Answer(f"Cannot be read from the run's files ({type(error).__name__}: {error}).", "warn")
    return answer._replace(question=question)


def _ended(facts: RunFacts) -> Answer:
    end = headline.verdict(facts)
    told = [f"test {name} {metric(value)}" for name, value in facts.metrics.items()]
    if facts.loss == facts.loss:
        told.insert(0, f"training loss {metric(facts.loss)}")
    tone = {"good": "good", "bad": "bad"}.get(end.tone, "")
    after = f" Last measured: {listed(told)}.".replace("-", "\N{NON-BREAKING HYPHEN}") if told else ""
    return Answer(end.words + after, tone)


def _cost(facts: RunFacts) -> Answer:
    spent, ranks = facts.spent, sorted({one.ranks for one in facts.attempts if one.ranks})
    span = f"{ranks[0]} to {ranks[-1]} ranks" if len(ranks) > 1 else count(ranks[0], "rank") if ranks else "its ranks"
    said = f"{duration(facts.ran_s)} on {span}"
    if len(ranks) != 1 or ranks[0] > 1:
        said += f", {duration(facts.rank_s)} summed over ranks"
    points = []
    if spent.basis == "seconds":
        said += f". {_shares(spent)}"
        missing_s = facts.rank_s - spent.all_s
        if missing_s > 0.02 * facts.rank_s:
            said += f". {duration(missing_s)} more are not recorded: {UNRECORDED}"
    elif spent.basis:
        said += ". This log has no complete time breakdown"
    if facts.restarts:
        start_s = sum(one.trained_s - one.begin_s for one in facts.attempts[1:] if one.trained_s >= one.begin_s)
        again = f"{count(facts.lost_steps, 'step')} repeated, " if facts.lost_steps else ""
        points.append(f"{count(facts.restarts, 'restart')} cost {again}{duration(facts.between_s)} between attempts "
                      f"and {duration(start_s)} of start-up")
    return Answer(said + ".", "", points)


def _shares(spent: TimeBreakdown) -> str:
    """Return the breakdown of the recorded time, in percent that add up to 100."""
    useful = spent.part(*USEFUL)
    rest = sorted(((c, spent.part(c)) for c in spent.total if c not in (*USEFUL, "other")), key=lambda one: -one[1])
    top = [(CAUSE_WORDS.get(c, c), part) for c, part in rest if part >= 1.0][:3]
    left = 100 - round(useful) - sum(round(part) for _, part in top)
    words = [f"{name} {percent(part)}" for name, part in top]
    words += [f"other causes {left} %"] if left > 0 else []
    said = f"Of the {duration(spent.all_s)} that the ranks recorded, {percent(useful)} went to compute and update"
    return f"{said}; {listed(words)}" if words else said


def _held_up(facts: RunFacts) -> Answer:
    spent = facts.spent
    if facts.ranks == 1 and max((one.ranks for one in facts.attempts), default=1) <= 1:
        return Answer("None: there was one rank.", "good")
    wait, part = spent.after_start("wait"), percent(spent.part("wait"), 1)
    if not spent.waits:
        if spent.basis == "meter":
            return Answer("The log has mean steps only: it shows which rank waited, but not for which one. "
                          f"Recommendation of the run: {facts.log.last('meter').get('advice') or 'nothing'}.")
        if spent.basis == "seconds" and wait < LITTLE:
            return Answer(f"None: ranks waited for each other for {part} of all recorded time.", "good")
        return Answer("Not known: the log has no data about waiting.")
    held, named_s = spent.held_up(), sum(spent.waits.values())
    worst, worst_s = next(iter(held.items()))
    share = worst_s / named_s
    if wait < LITTLE:
        return Answer(f"Negligible: ranks waited for each other for {part} of all "
                      f"recorded time, most often for {facts.who(worst)}.", "good")
    took = f"Waiting took {part} of all recorded time."
    if share < max(0.5, min(0.7, 1.6 / max(1, facts.ranks))):
        return Answer("No single rank: the ranks waited for each other, most for "
                      f"{facts.who(worst)} ({percent(100 * share)} of it). {took}", "warn")
    said = (
        f"{begin(facts.who(worst))} is the straggler: {percent(100 * share)} of all attributed waiting was for "
        f"it, {duration(worst_s)} of the others' time. {took}"
    )
    return Answer(said, "warn", _about(facts, worst))


def _about(facts: RunFacts, worst: int) -> list[str]:
    """Why a rank may be awaited, and how it would be without it."""
    points, total = [], facts.spent.ranks
    own, others = total.get(worst), [row for rank, row in total.items() if rank != worst]
    if own and others:
        for cause in ("compute", "input", "checkpoint", "other"):
            mean = sum(row.get(cause, 0.0) for row in others) / len(others)
            more = own.get(cause, 0.0) - mean
            if more > 0.1 * sum(own.values()):
                points.append(
                    f"The rank spent {duration(own[cause])} {CAUSE_WORDS[cause]}; the others {duration(mean)} on "
                    "average"
                )
    gains = facts.log.last("whatif").get("ranks")
    gain = number(gains[worst]) if isinstance(gains, list) and worst < len(gains) else float("nan")
    if gain == gain:
        then = f"ithout rank {worst}, with the same global batch, the run would be"
        said = (f"W{then} {percent(gain)} faster than now" if gain > 0 else
                f"The rank is worth waiting for: w{then} {percent(-gain)} slower")
        points.append(f"{said}, as estimated from the ranks' measured steps")
    return points


def _wrong(facts: RunFacts) -> Answer:
    log = facts.log
    ends = [one for one in facts.attempts
            if not one.ended_well and (one.cause or one is not facts.attempts[-1] or not facts.alive)]
    points = [_fault(one) for one in ends] if len(ends) != 1 else []
    if len(points) > 5:
        points = [
            *points[:2],
            f"{len(points) - 4} more failures; the table of attempts below lists all of them",
            *points[-2:],
        ]
    bad = log.all("non_finite")
    if bad:
        by = Counter(rank for event in bad for rank in event.values.get("ranks") or ())
        who = f", first on {listed([f'rank {r}' for r, _ in by.most_common(3)])}" if by else ""
        points.append(f"{count(len(bad), 'step')} skipped, because a loss or gradient was not finite{who}")
    short = Counter(whole(event.values.get("rank")) for event in log.all("out_of_memory"))
    points += [
        f"{begin(facts.who(rank))} ran out of memory {count(n, 'time')}" for rank, n in short.most_common(3)
    ]
    for event in log.all("ledger"):
        if event.values.get("whole") is False:
            points.append(
                f"Epoch {event.values.get('epoch')}: {cut(event.values.get('words') or 'not every sample came once')}"
            )
    unsaved = [event for event in log.all("saved") if event.values.get("error")]
    if unsaved:
        points.append(
            f"{count(len(unsaved), 'checkpoint')} could not be written: {cut(unsaved[-1].values['error'], 160)}"
        )
    for event in log.all("system")[-1:]:
        points += _throttled(facts, event.values.get("ranks"))
    if log.passed:
        points.append(
            f"{count(log.passed, 'line')} of the log could not be read and {'is' if log.passed == 1 else 'are'} "
            "missing here"
        )
    if not points and not ends:
        return Answer("No problem was recorded.", "good")
    said = f"{count(len(ends), 'attempt')} failed." if ends else "The run trained, with problems."
    if len(ends) == 1:
        said = _bad_end(facts, ends[0])
    return Answer(said, "bad" if ends and facts.completed is None and not facts.alive else "warn", points)


def _bad_end(facts: RunFacts, one: RunAttempt) -> str:
    where = f"At step {one.step_end:,}" if one.step_end >= 0 else "Before the first step"
    who = f" ({facts.who(one.rank)})" if one.rank >= 0 and f"rank {one.rank}" not in one.words else ""
    what = "failed" if one.cause else "ended without a message"
    what += f" after {duration(one.end_s - one.begin_s)}"
    if one.cause:
        known = cut(one.words, 260).rstrip(".")
        what += f": {known}" if one.cause == "lost" and known else f": {one.fault}" + (f": {known}" if known else "")
    on = "."
    if one is not facts.attempts[-1]:
        on = f"; the run was restarted from step {max(0, one.step_end - one.lost):,}."
    return f"{where} attempt {one.number} {what}{who}{on}"


def _fault(one: RunAttempt) -> str:
    after = f"after {duration(one.end_s - one.begin_s)}"
    where = f" at step {one.step_end:,}" if one.step_end >= 0 else " before its first step"
    what = f"{one.fault}: {one.words}" if one.cause else "the attempt ended without a message"
    back = f" Resumed from step {one.step_end - one.lost:,}." if one.lost else ""
    return f"Attempt {one.number} ended{where} {after}: {cut(what, 260).rstrip('.')}.{back}"


def _throttled(facts: RunFacts, rows: object) -> list[str]:
    found = []
    for rank, row in enumerate(rows if isinstance(rows, list) else ()):
        reasons = row.get("throttled") if isinstance(row, dict) else None
        if reasons and isinstance(reasons, list):
            found.append(f"The GPU of {facts.who(rank)} was slowed down: {listed([str(one) for one in reasons])}")
    return found[:4]


def _do(facts: RunFacts) -> Answer:
    points = give(facts)
    if not points:
        return Answer("Nothing: no cause costs enough to justify a change.", "good")
    return Answer(points[0], "", points[1:])


QUESTIONS = {"Result": _ended, "Recommendations": _do, "Stragglers": _held_up, "Failures": _wrong, "Cost": _cost}
"""The chapters, in order: what a reader can act on comes before what explains it."""


WORTH = 5.0
"""Percent of the ranks' time that a cause has to cost before something is said to be done about it."""

LONG_START_S = 60.0
"""Seconds of a rank's start below which nothing is said about it."""

ENDS = {
    "oom": "Reduce the memory of a step: see python -m hvdtrain plan, remat auto, or a smaller micro_batch",
    "disk": "Free space on the run's disk, or keep fewer checkpoints (checkpoint.keep)",
    "non_finite": "Check the steps before the loss became non-finite; lower lr, or set clip_norm",
    "hang": "Check the host that hung: its stacks are in the job's output",
    "unreachable": "Check the network of the host that did not answer: python -m hvdtrain doctor -H",
    "exception": "Fix the error that ended the run, then continue with --resume auto",
    "user": "Fix the problem that the last message names, then start again",
    "interrupted": "Continue with --resume auto",
}


def give(facts: RunFacts) -> list[str]:
    """Return what is worth doing, one sentence each without a full stop at its end."""
    found = _about_the_end(facts)
    meter = str(facts.log.last("meter").get("advice") or "")
    if meter and not meter.startswith("nothing to do"):
        found.append(f"{meter[:1].upper()}{meter[1:]}")
        gain = "would gain" in meter or "would win" in meter  # in logs of releases before 0.2
        found[-1] += " of the run's speed now" if gain and meter.endswith("%") else ""
    found += _about_deaths(facts)
    spent = facts.spent
    if spent.basis == "seconds":
        for cause, words in (("start", "Start-up took {p} of the recorded time{most}: longer "
                              "runs reduce its share, and probes and builds are cached"),
                             ("checkpoint", "Saving blocked the ranks for {p} of their time: save "
                              "less often (checkpoint.every_steps), or let each rank write its shard "
                              "(checkpoint.layout sharded)"),
                             ("evaluation", "Evaluation took {p} of the ranks' time: evaluate less often (eval_every)"),
                             ("input", f"Waiting for data took {{p}} of the ranks' time: {FASTER}")):
            part = spent.part(cause)
            said = any("data" in one for one in found) if cause == "input" else False
            most = cause == "start" and part >= max(spent.part(one) for one in spent.total)
            brief = spent.total["start"] < LONG_START_S * max(1, facts.ranks)
            short = cause == "start" and not most and brief
            if part >= WORTH and not said and not short:
                found.append(words.format(p=percent(part), most=", more than any other cause" if most else ""))
    lost_s = sum(one.lost for one in facts.attempts) * _step_s(facts)
    if lost_s > max(2.0, 0.05 * facts.busy_s):
        found.append(f"Repeated steps took {duration(lost_s)}: save more often")
    return [cut(one, 300).rstrip(".") + "." for one in dict.fromkeys(found)]


def _about_deaths(facts: RunFacts) -> list[str]:
    """Say where to look for what killed ranks, the latest first."""
    found = []
    for one in reversed(facts.attempts):
        if one.cause == "lost" and one.rank >= 0 and ("killed" in one.words or "without a message" in one.words):
            how = "died without a message" if "without a message" in one.words else "was killed"
            host = f"rank {one.rank} on {one.host}" if one.host else facts.who(one.rank)
            found.append(f"{begin(host)} {how}: look at that host's system log (OOM killer) at "
                         f"{time_of_day(one.fault_s)}")
    return found[:3]


def _about_the_end(facts: RunFacts) -> list[str]:
    """Say what to do about the last attempt's failure."""
    last = facts.attempts[-1] if facts.attempts else None
    if last is None or facts.completed is not None or facts.alive:
        return []
    if last.ended_well:
        return ["Continue with --resume auto and the same --out"]
    steps = [step for step, _, _ in facts.checkpoints]
    back = f"; the newest checkpoint is of step {max(steps):,}" if steps else "; there is no checkpoint to resume from"
    if last.cause in ENDS:
        return [ENDS[last.cause]]
    return [f"Continue with --resume auto and the same --out{back}; launch --restarts 3 does this automatically"]


def _step_s(facts: RunFacts) -> float:
    times, steps = facts.log.steps["time"], facts.log.steps["step"]
    if len(times) < 2 or steps[-1] <= steps[0]:
        return 0.0
    return float(max(0.0, (times[-1] - times[0]) / (steps[-1] - steps[0])))
