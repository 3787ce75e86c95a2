"""Compressor, buckets and shards of a run's gradients and state. `comm.wires` chooses the transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.machine import memory
from hvdtrain.cluster.topology import Topology, affinity, compute_threads
from hvdtrain.comm.compressors import create
from hvdtrain.config import Config
from hvdtrain.core.buckets import plan_buckets, plan_some
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.units import GIB, MIB, format_bytes
from hvdtrain.parallel.data_parallel import DataParallelSetup
from hvdtrain.planning import shards
from hvdtrain.planning.memory.forecast import Sharding, forecast

FIRST_MB = 1.0
"""So much is enough for a transport to begin with that overlaps with backward: it is still busy when more is there."""

BESIDE_MB = 2.0
"""Size of a bucket, by default, on a transport that overlaps pieces with backward: only the last one is not
hidden by it, and what a call costs is hidden as well. Large ones are for transports that block or fuse."""

FORMER_MB = 16.0
"""Default before it was auto: files that --print_config wrote then have this number and mean auto by it."""


def compression_of(setup: DataParallelSetup) -> str:
    """Return the name of the compressor to begin with; add a note if another one was configured."""
    asked, exchange, size = setup.config.compression, setup.config.exchange, setup.collectives.size
    if exchange.adasum and size > 1:
        return "adasum"
    if asked == "auto":
        return "none"
    made = create(asked, setup.config)
    if size == 1 and made.approximates and not made.own_momentum:
        setup.notes.append(f"compression {asked} is off: one rank sends nothing")
        return "none"
    return asked


def buckets_of(setup: DataParallelSetup) -> list[Bucket]:
    """Return the buckets for ``exchange.bucket_mb``; with Adasum, which looks at each tensor by itself, one for each
    tensor.

    With a model partitioned over ranks a bucket holds blocks of one group of replicas; groups follow each other in the
    order of `hvdtrain.core.mesh.Layout.groups`. Collective if a sweep finds the size.
    """
    config, specs = setup.config, setup.parts.params.specs
    by_block = config.model_parallel > 1
    wire, asked = setup.collectives, config.exchange.bucket_mb
    size_mb = 0.0 if config.exchange.adasum else config.exchange.unmeasured_mb
    # A compressor with a state works on whole buckets, each of which costs it several calls, one after the other; and
    # its state lies in their order, which stays for the sake of old checkpoints.
    auto = config.compression == "auto"
    compressor = create("none" if auto else config.compression, config)
    whole = not compressor.elementwise and not compressor.in_place
    small = wire.drives and not whole and not config.exchange.adasum
    if asked == "auto" and small:
        size_mb = BESIDE_MB
    if asked == FORMER_MB and small:
        setup.notes.append(f"exchange.bucket_mb is {asked:g} MiB, which overlaps less of the "
                           f"exchange than the {BESIDE_MB:g} of auto; files of --print_config had {asked:g} for auto "
                           "before")
    if asked == "sweep" and not config.exchange.adasum:
        from hvdtrain.comm.sweep import pick_bucket_mb

        with deadline(config.control_timeout_s, "the sweep of exchange.bucket_mb"):
            size_mb, reason = pick_bucket_mb(setup.collectives, setup.ops, setup.control, specs)
        setup.notes.append(f"exchange.bucket_mb sweep: {size_mb:g} MiB; {reason}")
    aligned = setup.collectives.host and compressor.in_place and not auto
    early = wire.overlaps and not wire.in_graph and not config.exchange.adasum and not whole
    first_mb = FIRST_MB if early else math.inf
    if not setup.parts.replicas:
        return plan_buckets(specs, size_mb, setup.group.name("grad"), by_block, aligned, first_mb)
    found: list[Bucket] = []
    for replicas in setup.parts.replicas:
        found += plan_some(specs, replicas.params(specs), size_mb, replicas.group.name("grad"), aligned, len(found))
    return found


def unlike_threads(config: Config, control: Control, topology: Topology) -> str:
    """Return why ranks cannot decode powersgd to the same bits, or ""; collective.

    Each rank multiplies the factors by itself, and a matrix product rounds by its number of threads.
    """
    host = topology.host_of(control.rank)
    own = compute_threads(len(affinity()), host.cores, len(host.ranks), config.threads)
    threads = control.gather(own)
    return "" if len(set(threads)) == 1 else f"ranks with {min(threads)} to {max(threads)} compute threads"


def check(setup: DataParallelSetup, name: str) -> None:
    """Raise `UserError` for settings that compressor ``name`` does not support; collective."""
    config, size, made = setup.config, setup.collectives.size, create(name, setup.config)
    key = made.own_key or f"compression {name}"
    unlike = unlike_threads(config, setup.control, setup.topology) if made.same_threads else ""
    if unlike:
        raise UserError(f"{key} on {unlike}", "the same number on every rank, as each "
                        "decodes with its own matrix product", "set threads to one number")
    if made.own_momentum and not setup.parts.optimizer.plain_sgd():
        raise UserError(f"{made.own_momentum} with an optimizer that has its own momentum",
                        f"SGD without momentum, since {name} accumulates it before it sends",
                        f"set optimizer.name: SGD without momentum, or {made.own_momentum.partition(' ')[0]}: 0")
    if config.exchange.adasum and config.compression != "none":
        raise UserError(f"exchange.adasum with compression {config.compression}", "one of the two",
                        "set compression: none, or exchange.adasum: false")
    equal = "equal shares: it combines the ranks' mean gradients without weights"
    if made.own_mean and len(set(config.shares)) > 1:
        raise UserError(f"{key} with shares {config.shares}", equal, f"leave shares out, or {key}")
    if made.own_mean and config.balance != "off":
        raise UserError(f"{key} with balance {config.balance}", equal, f"set balance: off, or leave out {key}")
    if made.pairs_ranks and size & (size - 1):
        raise UserError(f"{key} on {size} ranks", "1, 2, 4, 8, ... ranks", "start another number of ranks")


MOST_NAMED = 8
"""Ranks whose numbers are written out."""


def parts_of(setup: DataParallelSetup) -> tuple[list[float], str]:
    """Return each rank's share of the state, in sum 1, by free memory, and the reason; collective.

    Free is what the device, or the rank's share of its host, has left once each rank holds the parameters. Activations
    do not count: set ``data_parallel.shards`` if ranks need different amounts for them.
    """
    on_device = setup.ops.free_bytes()
    found_P = setup.control.gather((on_device is not None, memory.host_room_bytes(1) if on_device is None
                                    else int(memory.DEVICE_PART * on_device)))
    rooms_P = divided(found_P, [host.ranks for host in setup.topology.hosts])
    if not all(rooms_P):
        return [1 / len(rooms_P)] * len(rooms_P), "equally: free memory is not known on every rank"
    parts_P = shards.by_room(rooms_P)
    free = f"by free memory: {listed([room / GIB for room in rooms_P])} GiB"
    return parts_P, free if len(set(parts_P)) > 1 else f"equally {free}"


def divided(found_P: Sequence[tuple[bool, int | None]], hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes that each rank may take, from (on a device, bytes free) of each; 0 if unknown. Pure.

    The ranks of a host that compute in its memory divide the largest reading of them: a control group of one rank may
    allow that one less, and ranks read at different moments.

    >>> divided([(False, 12), (False, 11), (False, 4), (True, 80)], [[0, 1, 2, 3]])
    [4, 4, 4, 80]
    >>> divided([(False, 12), (False, 3), (False, None)], [[0, 1], [2]])
    [6, 3, 0]
    """
    rooms_P = [found or 0 for _, found in found_P]
    for ranks in hosts:
        together = [rank for rank in ranks if not found_P[rank][0]]
        for rank in together:
            rooms_P[rank] = min(rooms_P[rank], max(found_P[r][1] or 0 for r in together) // len(together))
    return rooms_P


def owners(sizes_BP: Sequence[Sequence[int]], itemsizes_B: Sequence[int], why: str) -> str:
    """Return the note about MiB of parameters that each rank updates and keeps the state of.

    >>> owners([[3 << 18, 1 << 18]], [4], "by free memory: 3, 1 GiB")
    'ranks own 3, 1 MiB of parameters with their optimizer state, by free memory: 3, 1 GiB'
    """
    bytes_P = [sum(k * itemsize for k, itemsize in zip(of_rank, itemsizes_B)) for of_rank in zip(*sizes_BP)]
    return owned(bytes_P, why)


def owned(bytes_P: Sequence[float], why: str) -> str:
    """Return `owners` of ranks that own ``bytes_P`` of parameters."""
    return f"ranks own {listed([b / MIB for b in bytes_P])} MiB of parameters with their optimizer state, {why}"


def listed(numbers: Sequence[float]) -> str:
    """Format numbers; of many ranks the first and the range of all.

    >>> listed([3.14159, 100]), listed([1.0] * 6 + [2, 3, 4])
    ('3.14, 100', '1, 1, 1, 1, 1, 1, 2, 3, ... (1 to 4 on 9 ranks)')
    """
    said = ", ".join(f"{x:.3g}" for x in numbers[:MOST_NAMED])
    more = f", ... ({min(numbers):.3g} to {max(numbers):.3g} on {len(numbers)} ranks)"
    return said + (more if len(numbers) > MOST_NAMED else "")


def stage_needed(setup: DataParallelSetup) -> int:
    """Return the lowest stage 0, 1 or 2 that lets the model fit, from a few samples, with notes; collective."""
    scene, control = setup.scene, setup.control
    if not setup.parts.optimizer.elementwise:
        setup.notes.append("data_parallel.stage auto shards nothing: the optimizer needs whole tensors")
        return 0
    facts = agreed(control, scene.facts_of_replica, "memory")
    free_P = control.gather(facts.rank.free_bytes)
    parts_P = setup.config.data_parallel.shards or parts_of(setup)[0]
    way = Sharding(0, scene.buckets(), parts_P, scene.wire.name, compression_of(setup))
    needs_PS = control.gather([forecast(replace(facts, way=replace(way, stage=stage))).total for stage in (0, 1, 2)])
    stage, words = least_stage(needs_PS, free_P)
    setup.notes.append(words)
    return stage


def least_stage(needs_PS: Sequence[Sequence[int]], free_P: Sequence[int | None]) -> tuple[int, str]:
    """Return the lowest of stages 0, 1, 2 that fits every rank, and why; pure. Without one: the better of 1 and 2.

    ``needs_PS``: bytes of each rank by stage. ``free_P``: memory of each; None (unknown) counts as enough.

    >>> least_stage([[15_200, 9_000, 6_400], [15_200, 9_000, 6_400]], [11_900, 20_000])[0]
    1
    """
    loads_S = [[0.0 if free is None else need_S[s] / max(1, free) for need_S, free in zip(needs_PS, free_P)]
               for s in range(3)]
    fitting = [s for s in range(3) if max(loads_S[s]) <= 1]
    stage = fitting[0] if fitting else min((2, 1), key=lambda s: max(loads_S[s]))
    rank = max(range(len(free_P)), key=lambda r: (loads_S[0][r], needs_PS[r][0]))
    free = free_P[rank]
    room = "whose free memory is unknown" if free is None else f"which has {format_bytes(free)} free"
    words = f"unsharded needs {format_bytes(needs_PS[rank][0])} on rank {rank}, {room}"
    if stage == 0:
        return 0, f"data_parallel.stage auto shards nothing: {words}"
    tight = max(range(len(free_P)), key=lambda r: loads_S[stage][r])
    where = "" if tight == rank else f" on rank {tight}, which has {format_bytes(free_P[tight] or 0)} free"
    fits = "" if fitting else ": no stage fits, and this one is closest"
    return stage, (f"zero stage {stage}: {words}; stage {stage} needs {format_bytes(needs_PS[tight][stage])}{where}"
                   f"{fits}")
