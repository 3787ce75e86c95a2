"""Alternatives to a set-up: changes of hosts and settings, ranked, each with its reason and options. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hvdtrain.config.inventory import InventoryHost
from hvdtrain.core.errors import UserError
from hvdtrain.core.units import format_bytes, format_number
from hvdtrain.planning.hardware.catalogue import Catalogue, Device
from hvdtrain.planning.hardware.estimate import (
    Estimate,
    SiteHost,
    TrainingSettings,
    estimate,
    memory_text,
    precision_on,
)
from hvdtrain.planning.hardware.rates import CASTS, Rates
from hvdtrain.planning.memory.forecast import MemoryFacts
from hvdtrain.planning.memory.options import in_bf16

MOST_STAGES, MOST_HALVINGS = 8, 6
"""Stages of a pipeline that are tried, and times that a micro-batch is halved."""

MOST_NAMED = 16
"""Hosts that a command line names; more stand in a host file."""

LEAST = 0.01
"""A difference below this fraction is no reason."""

Hosts = Sequence[SiteHost]


@dataclass(frozen=True)
class Candidate:
    """A change to try. ``options``: to add to the command. ``device``: of the catalogue, in place of all others."""

    name: str
    hosts: Hosts
    settings: TrainingSettings
    options: tuple[str, ...] = ()
    note: str = ""
    device: str = ""


@dataclass(frozen=True)
class Alternative:
    """A change with its estimate, and the reason for it or against it."""

    name: str
    reason: str
    hosts: Hosts
    settings: TrainingSettings
    options: tuple[str, ...]
    outcome: Estimate
    device: str = ""


@dataclass(frozen=True)
class PlanLimits:
    """``budget``: in the inventory's currency; ``deadline``: in hours. None: no limit."""

    budget: float | None = None
    deadline: float | None = None

    def met(self, found: Estimate) -> bool:
        """Return whether an outcome is known to keep both limits, and does not exceed a memory."""
        within = self.budget is None or found.cost is not None and found.cost <= self.budget
        in_time = self.deadline is None or found.hours is not None and found.hours <= self.deadline
        return within and in_time and found.fits is not False


def explored(base: Estimate, hosts: Hosts, settings: TrainingSettings, rates: Rates, catalogue: Catalogue, samples: int,
             wishes: PlanLimits, currency: str = "") -> tuple[list[Alternative], dict[str, str]]:
    """Return (the alternatives, best first; why others were left out, by name)."""
    found: list[Alternative] = []
    left_out: dict[str, str] = {}
    others = _devices(hosts, settings, catalogue) if rates.assumptions else ()
    for candidate in (*_candidates(hosts, settings, rates, base), *others):
        try:
            outcome = estimate(candidate.hosts, candidate.settings, rates, samples)
        except UserError as error:
            left_out[candidate.name] = error.got
            continue
        words = "; ".join(part for part in (_reason(base, outcome, currency), candidate.note) if part)
        found.append(Alternative(candidate.name, words, candidate.hosts, candidate.settings, candidate.options,
                                 outcome, candidate.device))
    if not rates.assumptions:
        left_out["other devices of the catalogue"] = "they were not calibrated, and there is no --assume"
    return sorted(found, key=lambda one: rank_of(one.outcome, wishes)), left_out


def rank_of(found: Estimate, wishes: PlanLimits) -> tuple[bool, bool, float, float]:
    """Return the key to sort by: fits and keeps the limits, then fastest, or cheapest where time alone is limited."""
    cost = math.inf if found.cost is None else found.cost
    cheapest = wishes.deadline is not None and wishes.budget is None
    return (found.fits is False, not wishes.met(found), *((cost, -found.samples_per_s) if cheapest
                                                          else (-found.samples_per_s, cost)))


def _candidates(hosts: Hosts, settings: TrainingSettings, rates: Rates, base: Estimate) -> Iterator[Candidate]:
    yield from _fewer_or_more(hosts, settings)
    yield from _settings(hosts, settings, rates)
    yield from _smaller(hosts, settings, rates, base)


def _fewer_or_more(hosts: Hosts, settings: TrainingSettings) -> Iterator[Candidate]:
    """Yield one host less and one more of each kind, and half of all."""
    kinds: dict[tuple[object, ...], SiteHost] = {}
    for host in hosts:
        kinds[(tuple(d.name for d in host.devices), host.price_per_hour)] = host
    equal, settings = _equal(settings), replace(settings, shares=())
    for host in kinds.values():
        left = [one for one in hosts if one is not host]
        if left:
            yield Candidate(f"without host {host.name}", left, settings, equal)
        yield Candidate(f"one more host like {host.name}", [*hosts, replace(host, name=f"{host.name}-more")], settings,
                        equal)
    if len(hosts) >= 4:
        yield Candidate("half of the hosts", hosts[:len(hosts) // 2], settings, equal)


def _equal(settings: TrainingSettings) -> tuple[str, ...]:
    """Return the options that replace the shares of a command, which are by rank or name, by equal ones."""
    return ("--shares", "[]") if settings.shares else ()


def _settings(hosts: Hosts, settings: TrainingSettings, rates: Rates) -> Iterator[Candidate]:
    """Yield balance, bf16, compression and a pipeline."""
    devices = [device for host in hosts for device in host.devices]
    size = len(devices)
    kinds = {(device.name, len(host.devices)) for host in hosts for device in host.devices}
    if len(kinds) > 1 and not settings.balance and settings.stages == 1:
        yield Candidate("balance", hosts, replace(settings, balance=True, shares=()),
                        (*_equal(settings), "--balance", "static"))
    if settings.precision in ("fp32", "tf32") and all("bf16" in device.flops for device in devices):
        yield Candidate("bf16", hosts, replace(settings, precision="bf16", change=_both(settings.change, in_bf16)),
                        ("--precision", "bf16"), "rounds activations to bf16; their memory is estimated")
    if size > 1 and settings.compression == "none":
        names = {name for c in rates.calibrations for name in c.codecs} or set(CASTS)
        for name in sorted(names):
            if name == "bf16" and "fp16" in names:
                continue
            note = "gradients are rounded" if name in CASTS else "gradients are no longer exact"
            yield Candidate(f"compression {name}", hosts, replace(settings, compression=name),
                            ("--compression", name), note)
    stages = 2
    while stages <= min(size, rates.workload.blocks, MOST_STAGES) and settings.stages == 1:
        if size % stages == 0:
            yield Candidate(f"pipeline of {stages} stages", hosts, replace(
                settings, stages=stages, zero=0, balance=False, shares=()), (
                *_equal(settings), *(("--balance", "off") if settings.balance else ()),
                *(("--data_parallel.name", "replicate") if settings.zero else ()), "--pipeline.stages", str(stages)))
        stages *= 2


def _smaller(hosts: Hosts, settings: TrainingSettings, rates: Rates, base: Estimate) -> Iterator[Candidate]:
    """Yield what reduces memory: ZeRO, activation checkpointing, both, more micro-batches where it does not fit."""
    size = sum(len(host.devices) for host in hosts)
    remat = rates.workload.recomputing() if not settings.recompute else None
    again = remat and replace(settings, recompute=remat[1], recompute_timed=False,
                              change=_both(settings.change, remat[0]))
    divides = size > 1 and rates.workload.facts.model.elementwise and settings.stages == 1
    for stage in range(settings.zero + 1, 3) if divides else ():
        if stage == 2 and settings.accumulate > 1:
            continue
        zero = ("--data_parallel.name", "zero", "--data_parallel.stage", str(stage))
        yield Candidate(f"ZeRO stage {stage}", hosts, replace(settings, zero=stage), zero)
        if again and stage == 2:
            yield Candidate("ZeRO stage 2 and activation checkpointing", hosts, replace(again, zero=stage),
                            (*zero, "--remat", "every:1"))
    if again:
        yield Candidate("activation checkpointing", hosts, again, ("--remat", "every:1"))
    if base.fits is False:
        least = settings.global_batch // size
        for times in (2 ** power for power in range(1, MOST_HALVINGS + 1)):
            if settings.accumulate * times > least or settings.zero == 2:
                break
            yield Candidate(f"accumulate {settings.accumulate * times}", hosts, replace(
                settings, accumulate=settings.accumulate * times), ("--accumulate", str(settings.accumulate * times)))


def _devices(hosts: Hosts, settings: TrainingSettings, catalogue: Catalogue) -> Iterator[Candidate]:
    """Yield each other device of the catalogue in place of all of this set-up's."""
    own = {device.name for host in hosts for device in host.devices}
    for name, device in catalogue.devices.items():
        if name in own or not device.flops:
            continue
        wanted = settings.precision if device.peak(precision_on(device, settings.precision)) else "auto"
        swapped = [SiteHost(host.name, tuple(device for _ in host.devices)) for host in hosts]
        note = "no price in the inventory" if any(host.price_per_hour is not None for host in hosts) else ""
        if device.ranks > 1:
            note = "; ".join(part for part in (f"a rank on each of {device.ranks} devices per module", note) if part)
        if wanted != settings.precision:
            note = "; ".join(part for part in (f"in {precision_on(device, wanted)}", note) if part)
        yield Candidate(f"{name} in place of {', '.join(sorted(own))}", swapped, replace(
            settings, precision=wanted, shares=()), (*_equal(settings), *(("--precision", wanted)
                                                                         if wanted != settings.precision else ())),
            note, name)


def _both(first: Callable[[MemoryFacts], MemoryFacts] | None, second: Callable[[MemoryFacts], MemoryFacts]
          ) -> Callable[[MemoryFacts], MemoryFacts]:
    return second if first is None else lambda facts: second(first(facts))


def _reason(base: Estimate, found: Estimate, currency: str) -> str:
    """Return what changes against ``base``, as text."""
    words = []
    if found.fits is not base.fits and found.fits is not None:
        words.append("fits" if found.fits else "does not fit")
    if found.fits is False or base.fits is False:
        words.append(memory_text(found.memory))
    elif abs(found.memory.need.total / max(1, base.memory.need.total) - 1) > LEAST:
        words.append(f"memory {format_bytes(found.memory.need.total)} instead of "
                     f"{format_bytes(base.memory.need.total)}")
    ratio = found.samples_per_s / base.samples_per_s
    if ratio > 1 + LEAST:
        words.append(f"{ratio:.3g}x faster")
    elif ratio < 1 - LEAST:
        words.append(f"{1 / ratio:.3g}x slower")
    else:
        words.append("as fast")
    if found.cost is not None and base.cost is not None and abs(found.cost - base.cost) > LEAST * base.cost:
        words.append(f"costs {format_number(found.cost)} instead of {format_number(base.cost)} {currency}".rstrip())
    return ", ".join(words)


def chosen(base: Estimate, found: Sequence[Alternative], wishes: PlanLimits) -> Alternative | None | bool:
    """Return the best that keeps the limits: an alternative, True for the set-up itself, None: none does."""
    if wishes.budget is None and wishes.deadline is None and base.fits is not False:
        return True
    keeping = [one for one in found if wishes.met(one.outcome)]
    best = min(keeping, key=lambda one: rank_of(one.outcome, wishes), default=None)
    if wishes.met(base) and (best is None or rank_of(base, wishes) <= rank_of(best.outcome, wishes)):
        return True
    return best


def line_of(hosts: Hosts, words: Sequence[str]) -> list[str]:
    """Return the words of the command that trains on ``hosts`` with the options ``words``."""
    train = ["train", *words]
    if len(hosts) == 1 and len(hosts[0].devices) == 1:
        return ["python", "-m", "hvdtrain", *train]
    slots = ",".join(f"{host.name}:{len(host.devices)}" for host in hosts)
    where = ["-H", slots] if len(hosts) <= MOST_NAMED else ["--hostfile", f"hosts-{len(hosts)}.txt"]
    return ["python", "-m", "hvdtrain", "launch", *where, "--", *train]


_NO_PATTERN = str.maketrans("", "", "*?[]!")


def expanded(name: str, count: int) -> list[str]:
    """Return names of ``count`` hosts of an entry, whose name may be a pattern.

    >>> expanded("a", 1), expanded("gpu", 2), expanded("gpu-*", 2), expanded("*", 1)
    (['a'], ['gpu1', 'gpu2'], ['gpu-1', 'gpu-2'], ['host1'])
    """
    plain = name.translate(_NO_PATTERN) or "host"
    return [name] if count == 1 and plain == name else [f"{plain}{number}" for number in range(1, count + 1)]


def site(entries: Sequence[tuple[InventoryHost, Sequence[tuple[int, Device]]]]) -> list[SiteHost]:
    """Return hosts from their entries and devices by number; modules of several devices count as such.

    Errors: `UserError` for entries whose numbered names are those of other entries.
    """
    found = [SiteHost(own, tuple(device for number, device in devices for _ in range(number * device.ranks)),
                      host.price_per_hour, host.power_w, host.mtbf_hours)
             for host, devices in entries for own in expanded(host.name, host.count)]
    names = Counter(host.name for host in found)
    name, times = names.most_common(1)[0]
    if times > 1:
        raise UserError(f"{times} entries of the inventory mean the host {name!r}", "each host once", "rename one of "
                        "them: an entry with a count stands for hosts with numbers")
    return found
