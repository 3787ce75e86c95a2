"""Shares of the batch over time, the probe's table, and the forecast of the run without one of its ranks."""

from __future__ import annotations

from typing import Any

from hvdtrain.reports.html.curves import along, steps_in_short
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Bars, Section, Stacked, Table, areas, bar
from hvdtrain.reports.html.words import count, duration, number, percent, short, times

MOST = 24
COLORS = 8
"""Ranks' colours, after which they begin again."""


def make(facts: RunFacts) -> Section | None:
    plans = [
        (event, samples) for event in facts.log.all("balance") if (samples := _numbers(event.values.get("samples")))
    ]
    blocks: list[Any] = []
    lead = []
    if plans:
        changes = sum(a[1] != b[1] for a, b in zip(plans, plans[1:]))
        changed = f"changed {times(changes)}" if changes else "never changed"
        lead.append(f"Shares were planned {times(len(plans))} and {changed}.")
        if len(plans) > 1:
            blocks.append(_over_steps(facts, plans))
        blocks.append(_latest(facts, plans[-1][1]))
        planned = next((e.values for e, _ in reversed(plans) if e.values.get("rows")), None)
        if planned is not None:
            lead.append(_gain(planned))
            rows = [[str(cell) for cell in row] for row in planned["rows"] if isinstance(row, list)]
            blocks.append(Table("Probe results", [str(c) for c in planned.get("columns") or ()], rows))
    without = _without(facts)
    if without is not None:
        blocks.append(without)
    if not blocks:
        return None
    return Section("shares", "Shares and balance", " ".join(one for one in lead if one), blocks)


def _numbers(values: Any) -> list[float]:
    return [max(0.0, number(one)) for one in values] if isinstance(values, list) and all(
        number(one) >= 0 for one in values) else []


def _gain(planned: dict[str, Any]) -> str:
    equal, plan = number(planned.get("equal_s")), number(planned.get("plan_s"))
    if not (equal > 0 and plan > 0):
        return ""
    if plan > 0.995 * equal:
        return f"Equal shares are optimal: the estimated step takes {duration(plan)}."
    return (f"The estimated step takes {duration(plan)} with these shares and {duration(equal)} with equal shares "
            f"({percent(100 * (1 - plan / equal))} less).")


def _over_steps(facts: RunFacts, plans: list[tuple[Any, list[float]]]) -> Stacked:
    """Each rank's part of a step as layers over steps; attempts follow each other, as their steps do."""
    steps = [float(number(event.values.get("from_step")) if event.values.get("from_step") is not None else event.step)
             for event, _ in plans]
    last = max(float(facts.step), steps[-1] + 1.0)
    axis = along(0.0, last, words=steps_in_short)
    edges, parts = [], []
    for i, (_, samples) in enumerate(plans):
        end = min(steps[i + 1:] or [last])
        if end > steps[i]:
            edges.append((axis.at(steps[i]), axis.at(end)))
            total = sum(samples) or 1.0
            parts.append({f"r{rank}": 100.0 * value / total for rank, value in enumerate(samples)})
    names = list(dict.fromkeys(name for row in parts for name in row))
    layers = [(f"k{int(name[1:]) % COLORS}", d) for name, d in areas(edges, parts, names, 100.0)]
    legend = [(f"k{int(name[1:]) % COLORS}", f"rank {name[1:]}") for name in names[:COLORS]]
    return Stacked("Shares of a step's samples, over steps", layers, axis.ticks, legend)


def _latest(facts: RunFacts, samples: list[float]) -> Bars:
    full = max(samples) or 1.0
    total = sum(samples) or 1.0
    order = (
        range(len(samples)) if len(samples) <= MOST else sorted(range(len(samples)), key=lambda r: -samples[r])[:MOST]
    )
    rows = [bar(facts.who(r), {f"k{r % COLORS}": samples[r]}, full, {f"k{r % COLORS}": facts.who(r)},
                f"{short(samples[r])} samples", percent(100 * samples[r] / total)) for r in order]
    hidden = len(samples) - len(rows)
    return Bars("Samples of a step in the latest plan", rows,
                note=f"{count(hidden, 'rank')} with fewer samples are not drawn." if hidden > 0 else "")


def _without(facts: RunFacts) -> Table | None:
    """Return the table "without rank 3: +7 %"."""
    found = facts.log.last("whatif")
    gains, without = found.get("ranks"), found.get("without_s")
    if not isinstance(gains, list) or not any(number(one) == number(one) for one in gains):
        return None
    order = sorted(range(len(gains)),
                   key=lambda r: -(number(gains[r]) if number(gains[r]) == number(gains[r]) else -1e9))
    step_s = number(found.get("step_s"))
    rows = []
    for r in order[:MOST]:
        gain = number(gains[r])
        then = number(without[r]) if isinstance(without, list) and r < len(without) else float("nan")
        said = "unknown" if gain != gain else f"{gain:+.0f} %"
        rows.append([f"without {facts.who(r)}", said, duration(then), duration(step_s)])
    marked = frozenset(i for i, r in enumerate(order[:MOST]) if number(gains[r]) >= 1.0)
    return Table("Estimated run without one of its ranks",
                 ["", "speed of the rest", "step without the rank", "step now"], rows, marked=marked,
                 note="A positive number: with the same global batch the run would be faster without the rank.")
