"""Choose which ranks read a stream, and whether hosts divide its files (``data.readers``): `choose`.

Owns the samples that all ranks receive to try their model on. `hvdtrain.data.stream_walk` reads steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import spans
from hvdtrain.core.protocols import Control
from hvdtrain.data.host_reader import MOST_AHEAD, HostReader
from hvdtrain.data.stream import Arrays, between, divides, fingerprint, joined
from hvdtrain.data.stream_reading import HEAD_ROWS, StreamReading, first_rows
from hvdtrain.data.workers.worker import generators_kept

MOST_TRIED = 256
"""Samples that all ranks receive to try their model on, where hosts read different ones."""


class Readers:
    """Choice of the ranks that read a stream; each reads all of it unless `choose` finds other ones.

    ``host``: messages among the ranks of this host, where one of them reads; else None. ``groups``: places in the cut
    of the ranks of each host, where there are several hosts; ``group``: of this rank's host. ``shards``: parts into
    which an epoch divides the stream's files, one of each host, or 1. ``counts``: this rank reports what its host has
    read. ``checks``: whether several ranks read the same batches. ``tried``: the samples to try a model on, if given.
    """

    def __init__(self, everyone: Control) -> None:
        self.host: HostReader | None = None
        self.groups: list[list[int]] = []
        self.group, self.shards = 0, 1
        self.counts, self.checks = everyone.rank == 0, everyone.size > 1
        self.tried: Arrays = ()

    @property
    def reads(self) -> bool:
        """Return whether this rank reads, and does not receive its rows."""
        return self.host is None or self.host.reads


class _Facts(NamedTuple):
    reading: StreamReading
    everyone: Control
    batch: int
    auto: bool

    def start(self, index: int, of: int, rows: int = 0) -> tuple[list[Arrays], bool]:
        """Return the first batch of the run, or ``rows`` of it, in pieces, none where there are no samples; and whether
        it is drawn from the global random generators, which are restored, if ``auto``.
        """
        n = min(rows or self.batch, self.batch)
        with generators_kept() if self.auto else contextlib.nullcontext(bool) as drew:
            chunks = self.reading.start(index, of, 0, 0, n)
            return between(chunks, 0, n) if chunks else [], drew()

    def identical(self) -> bool:
        """Return whether all ranks have the same stream by its ``identity``, without reading it. Collective."""
        found = self.everyone.gather(agreed(self.everyone, lambda: getattr(self.reading.data, "identity", ""), "data"))
        return found[0] != "" and all(isinstance(one, str) and one == found[0] for one in found)


def choose(reading: StreamReading, everyone: Control, place: int, global_batch: int, key: str, ahead: int,
           ordered: bool) -> tuple[Readers, str]:
    """Return which ranks read, and a note about it, "" for none. Collective.

    ``place``: this rank's in the cut. ``key``: ``data.readers``, auto or host. ``ahead``: batches that a rank fetches
    before they are computed. ``ordered``: do not divide the stream's files.
    """
    each, facts = Readers(everyone), _Facts(reading, everyone, global_batch, key == "auto")
    carrier = everyone.shared_carrier()
    own = [everyone.rank] if carrier is None else sorted(carrier.ranks)
    rows = everyone.gather((place, own))
    hosts = sorted({tuple(ranks) for _, ranks in rows})
    shared = [ranks for ranks in hosts if len(ranks) > 1]
    groups = grouped([{rows[rank][0] for rank in ranks} for ranks in hosts])
    divided = key == "auto" and len(groups) > 1 and not ordered and all(everyone.gather(
        agreed(everyone, lambda: divides(reading.data, len(groups)), "data")))
    if not shared and not divided:
        return each, ""
    because = (f"data.prefetch is above {MOST_AHEAD}" if shared and ahead > MOST_AHEAD
               else _rank_dependent(facts) if facts.auto and not facts.identical() else "")
    if because:
        return each, _EACH + because
    chosen = Readers(everyone)
    if carrier is not None:
        places = {rank: rows[rank][0] for rank in own}
        chosen.host = HostReader(carrier, everyone.rank, places, everyone.timeout_s, ahead)
    chosen.groups = groups if len(groups) > 1 else []
    chosen.group = next(i for i, group in enumerate(groups) if place in group)
    chosen.counts = everyone.rank == min(ranks[0] for ranks in hosts if rows[ranks[0]][0] in groups[chosen.group])
    note = ""
    if divided:
        whole = _try_shards(facts, chosen)
        if whole == _DRAWS:
            return each, _EACH + whole
        if not whole:
            chosen.shards, chosen.checks = len(groups), False
            return chosen, _exception(len(groups), int(reading.data.num_shards))
        note = f"data.readers: the hosts do not divide the stream's files: {whole}"
        if not shared:
            return each, note
    chosen.checks = len(hosts) > 1
    if _try_out(facts, chosen):
        return each, _EACH + _DRAWS
    who = ", ".join(f"rank {ranks[0]} for rank{'s' * (len(ranks) > 2)} {spans(ranks[1:])}" for ranks in shared[:8])
    readers = f"data.readers: one rank of a host reads the stream for the others: {who}"
    return chosen, f"{note}; {readers}" if note else readers


def _exception(hosts: int, files: int) -> str:
    each, more = divmod(files, hosts)
    most = f" to {each + 1}" if more else ""
    return (f"data.readers: {hosts} hosts divide the stream's {files} files, {each}{most} for each, so each sample is "
            "read once; exception to law 2: the order of samples depends on the number of hosts, and batches are "
            "smaller once a host has no samples left (data.readers: host keeps the order: each host reads all files)")


def grouped(places: Sequence[set[int]]) -> list[list[int]]:
    """Return the places in the cut of each host, those of hosts that share a replica together, in order."""
    groups: list[set[int]] = []
    for host in places:
        apart = [group for group in groups if not group & host]
        groups = [*apart, host.union(*(group for group in groups if group & host))]
    return sorted(map(sorted, groups))


_EACH = "data.readers: each rank reads the whole stream: "
_DRAWS = "it draws from the global random generators, which are the rank's"


def _rank_dependent(facts: _Facts) -> str:
    """Return why the ranks may not read the same stream, by its start; "" where they do. Collective."""
    def drawn() -> tuple[int, bool]:
        parts, drew = facts.start(0, 1, HEAD_ROWS)
        if not parts:
            raise no_samples(0)
        return fingerprint(first_rows(parts)[0]), drew

    starts = facts.everyone.gather(agreed(facts.everyone, drawn, "data"))
    if any(drew for _, drew in starts):
        return _DRAWS
    return "the ranks read different samples at its start" if len({start for start, _ in starts}) > 1 else ""


def _try_shards(facts: _Facts, chosen: Readers) -> str:
    """Read the start of each host's shard, and give all ranks samples to try; return why not, else "". Collective."""
    of, everyone = len(chosen.groups), facts.everyone

    def begun() -> tuple[int, int, list[tuple], bool]:
        parts, drew = facts.start(chosen.group, of) if chosen.reads else ([], False)
        rows, n = first_rows(parts)
        return n, fingerprint(rows), [(array.shape[1:], str(array.dtype)) for array in (parts or [()])[0]], drew

    rows = everyone.gather((chosen.reads, chosen.group, agreed(everyone, begun, "data")))
    found = {group: start[:3] for reads, group, start in rows if reads}
    if any(drew for *_, (*_, drew) in rows):
        return _DRAWS
    if not all(n for n, _, _ in found.values()):
        return "a host would have no samples"
    if len({check for _, check, _ in found.values()}) < of:
        return "those of two hosts begin with the same samples"
    if any(layout != found[0][2] for _, _, layout in found.values()):
        return "their samples have different shapes or types"
    mine = between(facts.start(chosen.group, of)[0], 0, MOST_TRIED) if everyone.rank == 0 else []
    chosen.tried = everyone.bcast(joined(mine) if mine else ())
    if not chosen.reads:
        facts.reading.close()
    return ""


def _try_out(facts: _Facts, chosen: Readers) -> bool:
    """Give the ranks that do not read the first batch, to try their model on. Collective.

    Returns whether a reader drew it from the global random generators; then no rank gets it.
    """
    host = chosen.host

    def begun() -> tuple[list[Arrays], bool]:
        parts, drew = facts.start(0, 1) if chosen.reads else ([], False)
        if chosen.reads and not parts:
            raise no_samples(0)
        return parts, drew

    parts, drew = agreed(facts.everyone, begun, "data")
    if any(facts.everyone.gather(drew)):
        return True
    if host is None:
        return False
    if host.reads:
        n = sum([len(part[0]) for part in parts])
        chosen.tried = joined(parts)
        host.send(0, parts, n, 0, lambda place: (0, n))
        return False
    chosen.tried = next(iter(host.rows(0))).arrays
    facts.reading.close()
    return False


def no_samples(epoch: int) -> UserError:
    return UserError(f"the stream has no samples in epoch {epoch}", "samples in every epoch",
                     "give a dataset that can be iterated again, not an exhausted generator")
