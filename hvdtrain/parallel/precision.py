"""Compute types of the ranks, and the loss scale of float16.

Parameters, gradients and exchange keep the parameters' own type, so ranks may differ. Backends own the computing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.core.errors import UserError

LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The frameworks' names of the configuration's."""


@dataclass(frozen=True)
class Precision:
    """Compute type of every rank ("fp32", "bf16" or "fp16"), seen from rank ``rank``."""

    names: tuple[str, ...] = ("fp32",)
    rank: int = 0

    @property
    def own(self) -> str:
        """This rank's type."""
        return self.names[self.rank]

    @property
    def scaled(self) -> frozenset[int]:
        """Ranks that scale their loss: float16 holds no gradient below 6e-8, nor above 65504."""
        return frozenset(rank for rank, name in enumerate(self.names) if name == "fp16")

    def describe(self) -> dict[str, str]:
        return {"compute": words(self.names)} if set(self.names) != {"fp32"} else {}

    def caveats(self) -> list[str]:
        narrow = set(self.names) != {"fp32"}
        return [f"computing in {words(self.names)} rounds depending on the micro-batches"] if narrow else []


FP32 = Precision()


def resolve(precision: str, devices: Sequence[DeviceFacts]) -> list[str]:
    """Return "fp32", "bf16" or "fp16" for each rank. Pure.

    ``precision``: one of these for all ranks; one for each, such as "bf16:fp32"; or "auto", also among several: the
    faster 16-bit type of the rank's device, else fp32. ``devices``: by rank. Errors: `UserError` for another length.
    """
    names = precision.split(":")
    if len(names) == 1:
        names *= len(devices)
    if len(names) != len(devices):
        raise UserError(f"precision {precision} names {len(names)} types for {len(devices)} ranks", "one for each rank",
                        f"give {len(devices)} of them, one for all ranks, or auto")
    short = {long: name for name, long in LONG.items()}
    best = [short[device.fast[0]] if device.fast else "fp32" for device in devices]
    return [own if name == "auto" else name for name, own in zip(names, best)]


def remarks(names: Sequence[str], devices: Sequence[DeviceFacts]) -> list[str]:
    """Return notes about configured types that devices are not known to compute faster. Pure."""
    vain: dict[tuple[str, str], list[int]] = {}
    for rank, (name, device) in enumerate(zip(names, devices)):
        if name != "fp32" and LONG[name] not in device.fast:
            vain.setdefault((name, device.arch if device.kind == "cpu" else device.name), []).append(rank)
    return [f"{on(ranks)}: {name} on {device}, which is not known to be faster in that type than in fp32"
            for (name, device), ranks in vain.items()]


def words(names: Sequence[str]) -> str:
    """Return types and their ranks, "bf16 on ranks 0, 1, fp32 on rank 2"; the type alone if all have the same."""
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(f"{name} on {on([r for r, n in enumerate(names) if n == name])}" for name in dict.fromkeys(names))


def on(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0, 2" or, of three or more in a row, "ranks 0-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"


MOST = 2.0**24


class LossScale:
    """Factor that keeps float16 gradients off zero and infinity: halved on overflow (not below 1), doubled after
    ``growth_interval`` clean steps.

    Every rank feeds `update` the same facts, so all skip the same step without an agreement. A rank divides its
    gradients by the factor in float32 before the exchange. ``value``: the first. ``ranks``: those in float16; without
    any nothing is scaled. ``skipped``: steps discarded by overflow. Source: Micikevicius et al., Mixed Precision
    Training, ICLR 2018, section 3.2 and appendix.
    """

    def __init__(self, value: float = 1.0, ranks: Collection[int] = (), growth_interval: int = 2000) -> None:
        self.value = self._first = float(value)
        self.skipped = 0
        self._ranks = frozenset(ranks)
        self._growth_interval = growth_interval
        self._clean = 0

    @property
    def on(self) -> bool:
        """True if a rank scales, so that every rank checks gradients for finiteness."""
        return bool(self._ranks)

    def of(self, rank: int) -> float:
        """Return the factor of ``rank``'s loss."""
        return self.value if rank in self._ranks else 1.0

    def update(self, bad: Collection[int]) -> bool:
        """Note a step: ``bad`` are the ranks that were not finite (all, if the sum of gradients was not).

        Returns True for an overflow: the scale is lower now and the step discarded. False for a clean step, and if a
        lower scale would not help: only ranks that do not scale were bad, or the scale is 1 already.
        """
        if not self._ranks:
            return False
        if not bad:
            self._clean += 1
            if self._clean == self._growth_interval:
                self.value, self._clean = min(2 * self.value, MOST), 0
            return False
        if not self._ranks & set(bad) or self.value <= 1:
            return False
        self.value, self._clean = self.value / 2, 0
        self.skipped += 1
        return True

    def describe(self) -> dict[str, str]:
        if not self.on:
            return {}
        left = f", {self.skipped} step{'' if self.skipped == 1 else 's'} skipped (overflow)" if self.skipped else ""
        return {"loss scale": f"{self.value:g}{left}"}

    def state(self) -> dict[str, Any]:
        """Return JSON-able state under the key "loss_scale"; {} if no rank scales."""
        return {"loss_scale": [self.value, self._clean, self.skipped]} if self.on else {}

    def restart(self) -> None:
        """Start from the first value again, after another one was configured."""
        self.value, self._clean = self._first, 0

    def load(self, rest: dict[str, Any]) -> None:
        """Restore `state`, if a rank scales and one did when the state was made."""
        if self.on and "loss_scale" in rest:
            value, clean, skipped = rest["loss_scale"]
            self.value, self._clean, self.skipped = float(value), int(clean), int(skipped)
