"""Tables of attempts and of checkpoints."""

from __future__ import annotations

from typing import Any

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Section, Table
from hvdtrain.reports.html.words import count, duration, moment, number, size, whole

MOST = 40


def make(facts: RunFacts) -> Section | None:
    blocks: list[Any] = []
    bad = any(not one.ended_well for one in facts.attempts) and not facts.alive
    if len(facts.attempts) > 1 or bad:
        blocks.append(_attempts(facts))
    saves = _saves(facts)
    if saves is not None:
        blocks.append(saves)
    if not blocks:
        return None
    there = [step for step, _, _ in facts.checkpoints]
    lead = "The run's directory has no checkpoint."
    if there:
        lead = f"{count(len(there), 'checkpoint')} in the run's directory, the newest from step {max(there):,}."
    return Section("attempts", "Checkpoints and restarts", lead, blocks)


def _attempts(facts: RunFacts) -> Table:
    rows, marked = [], set()
    shown = facts.attempts[-MOST:]
    for i, one in enumerate(shown):
        going = facts.alive and one is facts.attempts[-1]
        who = (
            facts.who(one.rank)
            if one.rank >= 0 and not one.host
            else f"rank {one.rank} on {one.host}" if one.rank >= 0 else ""
        )
        who = "" if one.ended_well or f"rank {one.rank}" in one.words else who
        why = "running" if going else one.fault or "without a message"
        rows.append([str(one.number), moment(one.begin_s), duration(one.end_s - one.begin_s), str(one.ranks or ""),
                     f"{max(0, one.step_begin):,} \N{EN DASH} {one.step_end:,}" if one.step_end >= 0 else "none",
                     f"{one.lost:,}", why + (f", {who}" if who else ""), one.words])
        if not one.ended_well and not going:
            marked.add(i)
    left = len(facts.attempts) - len(shown)
    return Table("Attempts", ["", "began", "lasted", "ranks", "steps", "repeated", "ended by", "details"], rows,
                 marked=frozenset(marked), words=frozenset({6, 7}),
                 note=f"{left} earlier ones are not listed." if left else "")


def _saves(facts: RunFacts) -> Table | None:
    """Return saves as recorded; in older logs what lies on the disk."""
    events = facts.log.all("saved")
    on_disk = {step for step, _, _ in facts.checkpoints}
    if not events:
        rows = [[f"{step:,}", moment(time_s), size(n_bytes)] for step, time_s, n_bytes in facts.checkpoints[-MOST:]]
        return Table("Checkpoints on disk", ["step", "written", "size"], rows, folded=len(rows) > 8) if rows else None
    rows, marked = [], set()
    for i, event in enumerate(events[-MOST:]):
        v = event.values
        error = str(v.get("error") or "")
        there = "yes" if v.get("at_step") in on_disk else "no longer" if not error else "no"
        rows.append([f"{whole(v.get('at_step')):,}", duration(number(v.get("took_s"))),
                     duration(number(v.get("blocked_s"))),
                     size(number(v.get("bytes"))) if not error else "", there, error])
        if error:
            marked.add(i)
    left = len(events) - len(rows)
    blocked = sum(max(0.0, number(e.values.get("blocked_s"))) for e in events if number(e.values.get("blocked_s")) >= 0)
    note = f"Saves blocked training for {duration(blocked)} in total." + (
        f" {left} earlier ones are not listed." if left else ""
    )
    heads = ["step", "took", "blocked training", "size", "on disk", "error"]
    used = heads if marked else heads[:-1]
    return Table("Saves", used, [row[:len(used)] for row in rows], folded=len(rows) > 8, marked=frozenset(marked),
                 words=frozenset({5}), note=note)
