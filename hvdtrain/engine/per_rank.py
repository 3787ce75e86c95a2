"""Spell out the keys that name hosts or devices: a value per rank, or per replica, of the ranks that there are. Pure.

Owns what is done with those keys; how names are matched is `hvdtrain.config.placed`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Config
from hvdtrain.config.placed import Place, absent, by_rank
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh


def spelled_out(config: Config, topology: Topology, devices: Sequence[DeviceFacts],
                notes: list[str]) -> Config:
    """Return ``config`` with a value per rank where it has names, for the ranks that there are. Pure.

    ``notes``: gets a remark for names that mean no rank; a host may be away.
    Errors: as `by_rank`, the same on every rank.
    """
    places = [Place(topology.host_of(rank).node, device.kind, device.name) for rank, device in enumerate(devices)]

    def values(key: str, given: Any, empty: Any, rest: Any = None) -> Any:
        if not isinstance(given, Mapping):
            return given
        if not given:
            return empty
        away = absent(given, places)
        made = by_rank(key, given, places, rest)
        if away:
            notes.append(f"{key}: {', '.join(map(repr, away))} mean{'s' if len(away) == 1 else ''} no rank of this run")
        return made

    precision = values("precision", config.precision, "fp32")
    limits = values("rebalance.max_micro_batch", config.rebalance.max_micro_batch, [], 0)
    return replace(config, shares=values("shares", config.shares, []),
                   peak_tflops=values("peak_tflops", config.peak_tflops, [], 0.0),
                   precision=precision if isinstance(precision, str) else ":".join(precision),
                   rebalance=replace(config.rebalance, max_micro_batch=limits))


def of_copies(given: Config, spelled: Config, mesh: Mesh) -> Config:
    """Return ``spelled`` with a share for each copy of a model where ``given`` names hosts or devices. Pure.

    Errors: `UserError` for a copy whose ranks are given unlike shares.
    """
    if mesh.deepest == 1 or not isinstance(given.shares, Mapping) or not spelled.shares:
        return spelled
    shares: list[Any] = list(spelled.shares)
    for copy, ranks in enumerate(mesh.copies):
        if len({shares[rank] for rank in ranks}) > 1:
            told = ", ".join(f"rank {rank} {shares[rank]}" for rank in sorted(ranks))
            raise UserError(f"shares names hosts or devices by which the ranks of copy {copy} of the model have unlike "
                            f"shares ({told})", "one share of the batch for each copy",
                            f"give a list of {len(mesh.copies)} numbers, one for each copy, or balance: static")
    return replace(spelled, shares=[shares[ranks[0]] for ranks in mesh.copies])
