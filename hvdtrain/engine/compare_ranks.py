"""Compare configuration, devices and model of the ranks, and resolve keys with hosts or devices to ranks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.topology import Topology, affinity, compute_threads
from hvdtrain.config import Config, schema
from hvdtrain.config.placed import RankPlace, absent, by_rank
from hvdtrain.core.comparison import plain_name
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.mesh import Group, Mesh, depths_of, spans
from hvdtrain.core.protocols import Control
from hvdtrain.engine.run import Run
from hvdtrain.parallel.parts import ModelParts


def check_config(config: Config, control: Control) -> None:
    """Raise `UserError` where ranks read different configurations, before the model is made; collective."""
    digests = control.gather(config.digest())
    other = next((r for r, d in enumerate(digests) if d != digests[0]), None)
    if other is not None:
        raise UserError(f"rank {other} read a configuration that differs from rank 0's", "the same on every rank",
                        "compare the config file, environment and arguments on their hosts")


def check_world(config: Config, control: Control) -> None:
    """Raise `UserError` where shares or other keys by rank do not fit the number of ranks."""
    copies = len(depths_of(config.pipeline.stages, config.pipeline.depths, control.size))
    if config.shares and not isinstance(config.shares, Mapping) and len(config.shares) != copies:
        raise UserError(f"shares has {count(len(config.shares), 'entry', 'entries')} for {copies} "
                        + ("ranks" if copies == control.size else "replicas of the model"),
                        "one per " + ("rank" if copies == control.size else "replica"), f"give {copies} numbers")
    for name, given in schema.per_rank(config).items():
        if name != "shares" and isinstance(given, (list, tuple)) and given and len(given) != control.size:
            raise UserError(f"{name} has {count(len(given), 'entry', 'entries')} for "
                            f"{count(control.size, 'rank')}", "one per rank",
                            f"give {control.size} numbers")


def check_alike(control: Control, group: Group, lines: Sequence[str]) -> None:
    """Compare what this rank's model is made of with that of the other ranks of ``group``; collective over all ranks.

    ``lines``: one for each parameter and buffer, in the order in which they are exchanged, such as
    "parameter fc.weight float32[5, 16]"; what else must be alike (optimizer, schedule) comes last.
    Errors: `UserError` on every rank, naming the first line that differs and the ranks that stand apart.
    """
    _compare(control, {group.ranks: list(lines)})


def check_parts(control: Control, parts: ModelParts, group: Group) -> None:
    """Compare what ``parts`` are made of with those of the ranks that hold the same, as `check_alike` does.

    ``group``: the ranks that hold all that this one does. Of copies of different depth, where a rank shares some of its
    blocks with one rank and some with another, it is the trainable tensors of each block that are compared.
    """
    layout = parts.layout
    if layout is not None:  # of the stages of a model, which have other tensors, one optimizer is asked for
        own = [line for line in parts.params.made_of() if line.startswith("optimizer ")]
        check_alike(control, Group(tuple(range(control.size)), control.rank), own)
    if layout is None or len(set(r for ranks in layout.groups() for r in ranks)) == sum(map(len, layout.groups())):
        check_alike(control, group, parts.params.made_of())
        return
    specs = parts.params.specs
    _compare(control, {replicas.group.ranks: [f"parameter {_plain(s.name)} {s.dtype}{list(s.shape)}"
                                              for s in map(specs.__getitem__, replicas.params(specs))]
                       for replicas in parts.replicas})


def _plain(name: str) -> str:
    return re.sub(r"_\d+(?=/)", "", plain_name(name))


def _compare(control: Control, lines_of: dict[tuple[int, ...], list[str]]) -> None:
    found = control.gather({ranks: zlib.crc32("\n".join(lines).encode()) for ranks, lines in lines_of.items()})
    groups = sorted({ranks for digests in found for ranks in digests})
    if all(len({found[rank].get(ranks) for rank in ranks}) == 1 for ranks in groups):
        return
    rows = control.gather(lines_of)
    for ranks in groups:
        _refuse_unlike({rank: rows[rank].get(ranks, []) for rank in ranks})


def _refuse_unlike(lines_of: dict[int, list[str]]) -> None:
    """Raise `UserError` unless all ranks' lines are equal. The most ranks are right, or those with the lowest rank."""
    holders: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in lines_of.items():
        holders.setdefault(tuple(lines), []).append(rank)
    if len(holders) == 1:
        return
    right = max(holders, key=lambda lines: (len(holders[lines]), -holders[lines][0]))
    columns = list(zip_longest(*holders, fillvalue="nothing else"))
    first = dict(zip(holders, next(column for column in columns if len(set(column)) > 1)))
    found = [f"{_ranks(holders[lines])} {_has(holders[lines])} {line}" for lines, line in first.items()
             if line != first[right]]
    apart = sorted(rank for lines, ranks in holders.items() if lines != right for rank in ranks)
    more = f" ({_ranks(apart)} differ)" if len(holders) > 2 else ""
    raise UserError(f"the ranks' models differ: {', '.join(found)} where {_ranks(holders[right])} "
                    f"{_has(holders[right])} {first[right]}{more}",
                    "the same parameters, buffers, optimizer and schedule in one order on every rank",
                    "build, load and compile the model on every rank in the same way")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(tuple(ranks))}"


def _has(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def kinds(run: Run) -> list[str]:
    """Return a text for each rank: ranks with the same one have like devices, libraries and threads; collective.

    A GPU computes alike whatever the host's threads; kernels on CPUs add up by threads and by the processor's model.
    """
    device = run.devices[run.control.rank]
    text = f"{device.kind} {device.name} {device.arch}"
    if device.kind == "cpu":
        host = run.topology.host_of(run.control.rank)
        text += f", {compute_threads(len(affinity()), host.cores, len(host.ranks), run.config.threads)} threads"
    return run.control.gather(text)


def resolved_config(config: Config, topology: Topology, devices: Sequence[DeviceFacts],
                notes: list[str]) -> Config:
    """Return ``config`` with a value per rank where it has names, for the ranks that there are. Pure.

    ``notes``: gets a remark for names that mean no rank; a host may be away.
    Errors: as `by_rank`, the same on every rank.
    """
    places = [RankPlace(topology.host_of(rank).node, device.kind, device.name) for rank, device in enumerate(devices)]

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

    Errors: `UserError` for a copy whose ranks are given different shares.
    """
    if mesh.deepest == 1 or not isinstance(given.shares, Mapping) or not spelled.shares:
        return spelled
    shares: list[Any] = list(spelled.shares)
    for copy, ranks in enumerate(mesh.copies):
        if len({shares[rank] for rank in ranks}) > 1:
            told = ", ".join(f"rank {rank} {shares[rank]}" for rank in sorted(ranks))
            raise UserError(f"shares names hosts or devices by which the ranks of replica {copy} of the "
                            f"model have different shares ({told})", "one share of the batch for each replica",
                            f"give a list of {len(mesh.copies)} numbers, one for each replica, or balance: static")
    return replace(spelled, shares=[shares[ranks[0]] for ranks in mesh.copies])
