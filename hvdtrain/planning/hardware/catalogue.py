"""Devices of a plan: memory, peak FLOP/s by type, bandwidth and power, from the catalogue or an inventory. Pure.

The figures stand in `config/devices.yaml`; reading files is left to `hvdtrain.commands.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.config.inventory import InventoryDevice
from hvdtrain.core.errors import UserError, nearest

CPU = "CPU"
GB = 1e9
"""Bytes of a data sheet's GB: decimal, which no device falls below."""

TYPES = {"fp32": ("fp32",), "tf32": ("tf32", "fp32"), "bf16": ("bf16",), "fp16": ("fp16",)}
"""Types of peak FLOP/s that products in a precision run at, the first one that a device has."""


@dataclass(frozen=True)
class Device:
    """A device that one rank computes on. Figures of 0, and types that lack, are unknown.

    ``room_bytes``: that a rank may hold; None: unknown. ``host_link_Bps``: PCIe in one direction. ``ranks``: devices
    per module; figures are of one. ``source``: of the figures; ``sources``: second ones, by type.
    """

    name: str
    memory_bytes: int = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_Bps: float = 0.0
    power_w: float = 0.0
    host_link_Bps: float = 0.0
    ranks: int = 1
    source: str = ""
    room_bytes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Return "cpu" or "gpu"."""
        return "cpu" if self.name == CPU or self.name.startswith(CPU + " ") else "gpu"

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of products in ``precision``; 0: unknown."""
        return next((self.flops[kind] for kind in TYPES.get(precision, ()) if kind in self.flops), 0.0)


@dataclass(frozen=True)
class Catalogue:
    """Devices by name, and other names of them. ``usable``: fraction of a device's memory that a plan may use."""

    devices: Mapping[str, Device]
    also: Mapping[str, str]
    usable: float = 1.0

    def find(self, name: str) -> Device | None:
        """Return the device called ``name`` in an inventory or by its driver; None for an unknown one.

        >>> made = made_of({"RTX-3090": {"memory_gb": 24}, "V100-16GB": {"also": ["V100-SXM2-16GB"]}})
        >>> made.find("NVIDIA GeForce RTX 3090").memory_bytes, made.find("Tesla V100-SXM2-16GB").name
        (24000000000, 'V100-16GB')
        """
        key = _plain(name)
        return self.devices.get(self.also.get(key, ""))

    def known(self, name: str, own: Mapping[str, InventoryDevice]) -> Device:
        """Return the device ``name`` with the figures that the inventory has ``own`` of; `UserError` for an unknown."""
        facts = own.get(name) or next((one for key, one in own.items() if _plain(key) == _plain(name)), None)
        found = self.find(name)
        if facts is None and found is None:
            raise UserError(f"the inventory has the device {name!r}", nearest(name, [*self.devices, *own]),
                            "name one of these, or describe the device under devices: in the inventory")
        found = found or Device(name)
        if facts is None:
            return found
        n = found.ranks  # figures of a module are of all its devices
        memory = int(GB * facts.memory_gb) // n if facts.memory_gb else found.memory_bytes
        return replace(found, memory_bytes=memory, room_bytes=int(self.usable * memory) or None,
                       flops={**found.flops, **{kind: peak / n for kind, peak in facts.flops.items()}},
                       power_w=facts.power_w / n if facts.power_w else found.power_w,
                       bandwidth_Bps=GB * facts.bandwidth_GBps / n if facts.bandwidth_GBps else found.bandwidth_Bps,
                       source="the inventory")


def made_of(data: Mapping[str, Mapping[str, Any]], usable: float = 1.0) -> Catalogue:
    """Return the catalogue that ``data``, the content of devices.yaml, describes. Figures of a module are divided."""
    devices, also = {}, {}
    for name, row in data.items():
        n = int(row.get("ranks", 1))
        memory = int(GB * row.get("memory_gb", 0)) // n
        devices[name] = Device(name, memory,
                               {kind: float(peak) / n for kind, peak in row.get("flops", {}).items()},
                               GB * row.get("bandwidth_GBps", 0) / n, float(row.get("power_w", 0)) / n,
                               GB * row.get("host_link_GBps", 0), n, row.get("source", ""),
                               int(usable * memory) or None, row.get("sources", {}))
        also.update({_plain(other): name for other in (name, *row.get("also", ()))})
    return Catalogue(devices, also, usable)


_VENDORS = {"nvidia", "geforce", "tesla", "amd", "instinct", "quadro"}


def _plain(name: str) -> str:
    """Return a name without vendor, case and separators."""
    return "-".join(word for word in re.split(r"[\s_-]+", name.strip().lower()) if word not in _VENDORS)
