"""The file of ``plan --assume``: efficiencies, links and a described model, as typed, checked data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.config import yaml_file
from hvdtrain.config.inventory import Inventory
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.planning.hardware.catalogue import TYPES, Catalogue
from hvdtrain.planning.hardware.rates import AssumedDevice, Assumptions
from hvdtrain.planning.hardware.workload import Workload, assumed

KEYS = ("efficiency", "peak", "overhead_ms", "link_efficiency", "latency_us", "overlaps", "devices", "model")
OF_DEVICE = ("efficiency", "peak")
MOST_MS, MOST_US, LEAST_FRACTION = 1e6, 1e9, 1e-6


@dataclass(frozen=True)
class Assumed:
    """The file: ``rates``, and ``model`` where the model is described instead of built."""

    rates: Assumptions
    model: Mapping[str, Any] | None = None

    def for_devices(self, catalogue: Catalogue, given: Inventory) -> Assumed:
        """Return the assumptions under the devices' names in the catalogue; `UserError` for an unknown device."""
        found = {}
        for name, one in self.rates.devices.items():
            if catalogue.find(name) is None and name not in given.devices:
                raise UserError(f"{self.rates.path!r}, devices, has the device {name!r}",
                                nearest(name, [*catalogue.devices, *given.devices]), "correct or remove it")
            found[catalogue.known(name, given.devices).name] = one
        return replace(self, rates=replace(self.rates, devices=found))

    def workload(self, name: str, bucket_mb: float) -> Workload:
        """Return the described model as a workload."""
        assert self.model is not None
        return assumed(name, self.model, bucket_mb)


def read(path: str) -> Assumed:
    """Return the assumptions in the file ``path``; `UserError` names the first value that is not possible."""
    given = yaml_file.read(path, "--assume")
    where = repr(path)
    _known(given, where, KEYS)
    devices = {str(name): _device(one, f"{where}, devices.{name}")
               for name, one in _mapping(given.get("devices", {}), f"{where}, devices").items()}
    if "peak" in given and devices:
        raise UserError(f"{where} has peak beside devices", "one of them", "move peak under each device")
    overlaps = given.get("overlaps", True)
    if not isinstance(overlaps, bool):
        raise UserError(f"{where}: overlaps is {overlaps!r}", "true or false", "correct it")
    overhead_s = _amount(given, "overhead_ms", where, MOST_MS) / 1e3
    latency_s = _amount(given, "latency_us", where, MOST_US) / 1e6
    rates = Assumptions(path, _fraction(given, "efficiency", where), overhead_s,
                        _fraction(given, "link_efficiency", where) or 1.0, latency_s, overlaps, devices,
                        _peaks(given.get("peak", {}), where))
    model = given.get("model")
    return Assumed(rates, None if model is None else _mapping(model, f"{where}, model"))


def _device(given: Any, where: str) -> AssumedDevice:
    found = _mapping(given, where)
    _known(found, where, OF_DEVICE)
    return AssumedDevice(_fraction(found, "efficiency", where), _peaks(found.get("peak", {}), where))


def _peaks(given: Any, where: str) -> dict[str, float]:
    """Return FLOP/s by type; a single number is for all types."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = dict.fromkeys(TYPES, given)
    found = _mapping(given, f"{where}, peak")
    _known(found, f"{where}, peak", tuple(TYPES))
    for kind, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e6 < value < 1e24:
            raise UserError(f"{where}: peak {kind} is {value!r}", "FLOP/s such as 312e12", "correct it")
    return {kind: float(value) for kind, value in found.items()}


def _fraction(given: Mapping[str, Any], key: str, where: str) -> float | None:
    if key not in given:
        return None
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST_FRACTION <= value <= 1:
        raise UserError(f"{where}: {key} is {value!r}", f"a fraction from {LEAST_FRACTION:g} to 1", "correct it")
    return float(value)


def _amount(given: Mapping[str, Any], key: str, where: str, most: float) -> float:
    value = given.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise UserError(f"{where}: {key} is {value!r}", f"a number from 0 to {most:g}", "correct it")
    return float(value)


def _mapping(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise UserError(f"{where} is {given!r}", "a mapping, one key: value a line", "correct it")
    return given


def _known(given: Mapping[str, Any], where: str, names: tuple[str, ...]) -> None:
    for key in given:
        if key not in names:
            raise UserError(f"{where} has the key {key!r}", nearest(str(key), names), "correct or remove the key")
