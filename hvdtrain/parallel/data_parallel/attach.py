"""Which compressor and which buckets a run's gradients get.

Owns the checks that compressor, optimizer and shares go together. Does not choose a wire: `hvdtrain.comm.wires` does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.topology import Topology, affinity, compute_threads
from hvdtrain.comm.compressors import create
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.buckets import plan_buckets, plan_some
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Bucket

if TYPE_CHECKING:
    from hvdtrain.parallel.data_parallel import DataParallelSetup

FIRST_MB = 1.0
"""So much is enough for a wire to begin with that works beside backward: it is still busy when more is there."""

BESIDE_MB = 2.0
"""Size of a bucket, by default, on a wire that moves pieces beside backward: only the last one is not hidden by it, and
what a call costs is hidden as well. Large ones are for wires that block, or that fuse by themselves."""


def compression_of(setup: DataParallelSetup) -> str:
    """Return the name of the compressor to begin with; what is not as asked is added to the notes."""
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
    """Return the plan for ``exchange.bucket_mb``; with Adasum, which looks at each tensor by itself, one tensor each.

    Of a model that is cut over ranks each bucket holds blocks of one group of replicas; the groups' buckets come one
    group after the other, in the order that all ranks have (`hvdtrain.core.mesh.Layout.groups`). Collective where the
    size is to be found by a sweep.
    """
    config, specs = setup.config, setup.parts.params.specs
    by_block = config.model_parallel > 1
    wire, default_mb = setup.collectives, ExchangeConfig().bucket_mb
    size_mb = 0.0 if config.exchange.adasum else config.exchange.bucket_mb
    # A compressor with a state works on whole buckets, each of which costs it several calls, one after the other; and
    # its state lies in their order, which stays for the sake of old checkpoints.
    auto = config.compression == "auto"
    compressor = create("none" if auto else config.compression, config)
    whole = not compressor.elementwise and not compressor.in_place
    if size_mb == default_mb and wire.drives and not whole:
        size_mb = BESIDE_MB
    if size_mb == "auto":
        from hvdtrain.comm.measure.sweep import pick_bucket_mb

        with deadline(config.control_timeout_s, "the sweep of exchange.bucket_mb auto"):
            size_mb, reason = pick_bucket_mb(setup.collectives, setup.ops, setup.control, specs)
        setup.notes.append(f"exchange.bucket_mb auto: {size_mb:g} MiB; {reason}")
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
    """Return which ranks' threads keep a compressor with ``same_threads`` from the same bits, or ""; collective."""
    host = topology.host_of(control.rank)
    own = compute_threads(len(affinity()), host.cores, len(host.ranks), config.threads)
    threads = control.gather(own)
    return "" if len(set(threads)) == 1 else f"ranks with {min(threads)} to {max(threads)} compute threads"


def check(setup: DataParallelSetup, name: str) -> None:
    """Raise `UserError` for what this run cannot do with compressor ``name``; collective."""
    config, size, made = setup.config, setup.collectives.size, create(name, setup.config)
    key = made.own_key or f"compression {name}"
    unlike = unlike_threads(config, setup.control, setup.topology) if made.same_threads else ""
    if unlike:
        raise UserError(f"{key} on {unlike}", "the same number on every rank: each decodes by a matrix "
                        "product of its own", "set threads to one number")
    if made.own_momentum and not setup.parts.optimizer.plain_sgd():
        raise UserError(f"{made.own_momentum} with an optimizer that has a memory of its own",
                        f"SGD without momentum, since {name} accumulates it before it sends",
                        f"set optimizer.name: SGD without momentum, or {made.own_momentum.partition(' ')[0]}: 0")
    if config.exchange.adasum and config.compression != "none":
        raise UserError(f"exchange.adasum with compression {config.compression}", "one of the two",
                        "set compression: none, or exchange.adasum: false")
    equal = "equal shares: it combines the ranks' mean gradients and knows no weights"
    if made.own_mean and len(set(config.shares)) > 1:
        raise UserError(f"{key} with shares {config.shares}", equal, f"leave shares out, or {key}")
    if made.own_mean and config.balance != "off":
        raise UserError(f"{key} with balance {config.balance}", equal, f"set balance: off, or leave out {key}")
    if made.pairs_ranks and size & (size - 1):
        raise UserError(f"{key} on {size} ranks", "1, 2, 4, 8, ... ranks", "start another number of ranks")
