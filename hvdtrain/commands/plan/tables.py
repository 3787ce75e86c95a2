"""Tables and commands that ``plan --inventory`` prints, and its JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.units import format_bytes, format_ms, format_number
from hvdtrain.planning.hardware import alternatives
from hvdtrain.planning.hardware.alternatives import Alternative, PlanLimits
from hvdtrain.planning.hardware.estimate import Estimate, SiteHost, TrainingSettings, memory_text
from hvdtrain.planning.hardware.workload import Workload

MOST_DEVICES = 5
"""Other devices of the catalogue that are printed; the JSON has all."""


def command(one: Alternative, words: Sequence[str]) -> str:
    """Return the command of an alternative; ``words``: the options of the training."""
    return shlex.join(alternatives.line_of(one.hosts, [*words, *one.options]))


def show(base: Estimate, hosts: Sequence[SiteHost], workload: Workload, settings: TrainingSettings, samples: int,
         currency: str, line: str, launched: bool) -> None:
    """Print the estimate of the set-up, its assumptions and its command ``line``. ``launched``: under mpirun."""
    ranks = sum(len(host.devices) for host in hosts)
    label = "ASSUMED" if base.assumed else "calibrated"
    fits = {True: "yes", False: "no", None: "unknown"}[base.fits]
    step = format_ms(base.mid_s)
    if base.low_s is not None and base.high_s is not None:
        step += f" ({format_ms(base.low_s)} to {format_ms(base.high_s)})"
    parts = ", ".join(f"{name} {format_ms(seconds)}" for name, seconds in base.parts.items() if seconds > 0)
    rows = [["fits", f"{fits}: rank {base.memory.rank} {memory_text(base.memory)}"],
            ["step", f"{step}: {parts}"],
            ["samples/s", f"{base.samples_per_s:.4g}, scaling efficiency {100 * base.efficiency:.1f} %"],
            [f"{samples:,} samples", f"{format_number(base.hours)} hours"],
            *([["failures", f"{format_number(base.failures)} expected; hours have restarts and repeated work"]]
              if base.failures is not None else []),
            ["cost", "unknown: no price of each host" if base.cost is None
             else f"{format_number(base.cost)} {currency}"],
            ["energy", "unknown: no power of each host" if base.energy_kwh is None
             else f"{format_number(base.energy_kwh)} kWh at rated power"]]
    title = (f"{label} plan: {workload.name}, {count(ranks, 'rank')} on {count(len(hosts), 'host')}, global batch "
             f"{settings.global_batch}, {format_bytes(workload.gradient_bytes)} of gradients")
    terminal.show(title, ("", "predicted"), rows, launched=launched)
    for text in base.assumptions:
        terminal.note(f"ASSUMED: {text}")
    terminal.say(f"  {line}")
    if len(hosts) > alternatives.MOST_NAMED:
        terminal.note("files of hosts in these commands are yours to write, a line such as "
                      f"{hosts[0].name} slots={len(hosts[0].devices)} for each host")


def show_alternatives(every: Sequence[Alternative], left_out: Mapping[str, str], currency: str,
                      words: Sequence[str]) -> None:
    """Print the alternatives, best first, their commands, and why others were left out."""
    devices = [one for one in every if one.device]
    found = [one for one in every if not one.device or one in devices[:MOST_DEVICES]]
    rows = [[str(number), one.name + (" (ASSUMED)" if one.outcome.assumed else ""), {
        True: "yes", False: "no", None: "unknown"}[one.outcome.fits], format_number(1e3 * one.outcome.mid_s),
             format_number(one.outcome.samples_per_s), format_number(one.outcome.hours),
             format_number(one.outcome.cost), one.reason] for number, one in enumerate(found, 1)]
    terminal.show("alternatives, best first", ("", "change", "fits", "step ms", "samples/s", "hours",
                                               f"cost {currency}".strip(), "reason"), rows, launched=True)
    for number, one in enumerate(found, 1):
        if one.outcome.fits is not False:
            terminal.say(f"  {number}: {command(one, words)}")
    for name, why in left_out.items():
        terminal.note(f"{name}: not estimated, {why}")


def show_choice(best: Alternative | bool | None, wishes: PlanLimits, currency: str, words: Sequence[str]) -> None:
    """Print what keeps the limits, or fits where the set-up does not."""
    if wishes.budget is None and wishes.deadline is None and best is True:
        return
    limits = " and ".join(text for text in (
        f"{wishes.budget:g} {currency}" if wishes.budget is not None else "",
        f"{wishes.deadline:g} hours" if wishes.deadline is not None else "") if text) or "the memory of each device"
    if best is None:
        terminal.note(f"nothing above is within {limits}")
    elif isinstance(best, bool):
        terminal.say(f"within {limits}: the set-up as given")
    else:
        terminal.say(f"within {limits}: {best.name}\n  {command(best, words)}")


def check_target(target: str) -> None:
    """Raise `UserError` where the file of ``--json`` cannot be written."""
    path = Path(target)
    if target not in ("", "-") and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise UserError(f"the plan cannot be written to {target!r}", "a writable file", "correct --json")


def write(target: str, record: Mapping[str, Any]) -> None:
    """Write the plan to a file, or to standard output for -."""
    if target == "-":
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
    elif target:
        try:
            Path(target).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"the plan could not be written: {error}", "a writable file", "correct --json") from None
