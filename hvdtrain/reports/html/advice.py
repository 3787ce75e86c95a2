"""What to do about what a run's records show: rules from causes to sentences, the most valuable first. Pure."""

from __future__ import annotations

from hvdtrain.reports.html.facts import Facts
from hvdtrain.reports.html.words import begin, cut, duration, percent, time_of_day

WORTH = 5.0
"""Percent of the ranks' time that a cause has to cost before something is said to be done about it."""

LONG_START_S = 60.0
"""Seconds of a rank's start below which nothing is said about it."""

ENDS = {
    "oom": "Give steps less memory: see python -m hvdtrain plan, remat auto, or a smaller micro_batch",
    "disk": "Make room on the run's disk, or keep fewer checkpoints (checkpoint.keep)",
    "non_finite": "Look at the steps before the loss was lost: a lower lr, or clip_norm",
    "hang": "Look at the host that hung: its stacks are in the job's output",
    "unreachable": "Look at the network of the host that did not answer: python -m hvdtrain doctor -H",
    "exception": "Mend the error that ended it, then go on with --resume auto",
    "user": "Mend what the last words name, then start again",
    "interrupted": "Go on with --resume auto",
}


def give(facts: Facts) -> list[str]:
    """Return what is worth doing, one sentence each without a full stop at its end."""
    found = _about_the_end(facts)
    meter = str(facts.log.last("meter").get("advice") or "")
    if meter and not meter.startswith("nothing to do"):
        found.append(f"{meter[:1].upper()}{meter[1:]}")
        found[-1] += " of the run's speed now" if "would win" in meter and meter.endswith("%") else ""
    found += _about_deaths(facts)
    spent = facts.spent
    if spent.basis == "seconds":
        for cause, words in (("start", "Starting took {p} of the recorded time{most}: longer runs make it less, and "
                              "what was probed and built stays in its cache"),
                             ("checkpoint", "Saving held the ranks up for {p} of their time: save less often "
                              "(checkpoint.every_steps), or let each rank write its part (checkpoint.layout sharded)"),
                             ("evaluation", "Evaluation took {p} of the ranks' time: evaluate less often (eval_every)"),
                             ("input", "Waiting for data took {p} of the ranks' time: raise data.prefetch or give a "
                              "faster source")):
            part = spent.part(cause)
            said = any("data" in one for one in found) if cause == "input" else False
            most = cause == "start" and part >= max(spent.part(one) for one in spent.total)
            brief = spent.total["start"] < LONG_START_S * max(1, facts.ranks)
            short = cause == "start" and not most and brief
            if part >= WORTH and not said and not short:
                found.append(words.format(p=percent(part), most=", more than any other cause" if most else ""))
    lost_s = sum(one.lost for one in facts.attempts) * _step_s(facts)
    if lost_s > max(2.0, 0.05 * facts.busy_s):
        found.append(f"Steps that had to be computed again took {duration(lost_s)}: save more often")
    return [cut(one, 300).rstrip(".") + "." for one in dict.fromkeys(found)]


def _about_deaths(facts: Facts) -> list[str]:
    """Where to look for what killed ranks, the latest first."""
    found = []
    for one in reversed(facts.attempts):
        if one.cause == "lost" and one.rank >= 0 and ("killed" in one.words or "without a message" in one.words):
            how = "died without a message" if "without a message" in one.words else "was killed"
            host = f"rank {one.rank} on {one.host}" if one.host else facts.who(one.rank)
            found.append(f"{begin(host)} {how}: look at that host's system log (OOM killer) at "
                         f"{time_of_day(one.fault_s)}")
    return found[:3]


def _about_the_end(facts: Facts) -> list[str]:
    """What the last attempt's end asks for, where it was not a good one."""
    last = facts.attempts[-1] if facts.attempts else None
    if last is None or facts.completed is not None or facts.alive:
        return []
    if last.ended_well:
        return ["Go on with --resume auto, with the same --out"]
    steps = [step for step, _, _ in facts.checkpoints]
    back = f"; the newest checkpoint is of step {max(steps):,}" if steps else "; there is no checkpoint to go on with"
    if last.cause in ENDS:
        return [ENDS[last.cause]]
    return [f"Go on with --resume auto and the same --out{back}; launch --restarts does it by itself"]


def _step_s(facts: Facts) -> float:
    """Seconds of a mean step; 0 where too few are known."""
    times, steps = facts.log.steps["time"], facts.log.steps["step"]
    if len(times) < 2 or steps[-1] <= steps[0]:
        return 0.0
    return float(max(0.0, (times[-1] - times[0]) / (steps[-1] - steps[0])))
