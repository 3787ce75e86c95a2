"""Puts a run's exchange together: buckets, compressor and reducer, attached to its step.

Owns the checks that compressor, optimizer and shares go together. Does not choose a wire: `hvdtrain.cluster.wire` does.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.topology import affinity, compute_threads
from hvdtrain.errors import UserError
from hvdtrain.exchange.buckets import Bucket, plan_buckets
from hvdtrain.exchange.compressors import create
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.protocols import Ops


def exchange(run: Any, ops: Ops) -> None:
    """Plan the buckets of ``run`` and attach a reducer as its configuration says; collective.

    A rank alone compresses nothing, unless topk stands in for the optimizer's momentum. compression auto begins with
    none: the callback of that name measures and then calls `use_compressor`.
    Errors: `UserError` for a compression that does not go with the optimizer, the shares or the ranks.
    """
    asked = run.config.compression
    needless = run.collectives.size == 1 and not (asked == "topk" and run.config.exchange.topk_momentum)
    name = "none" if asked == "auto" or needless else asked
    if name != asked and asked != "auto":
        run.notes.append(f"compression {asked} is off: one rank sends nothing")
    if run.config.exchange.adasum and run.collectives.size > 1:
        name = "adasum"
    _check(run, name)
    _attach(run, name, _buckets(run, ops), ops)
    if name not in ("none", "adasum"):
        run.notes.append(f"gradients are approximated by {run.reducer.compressor.describe()}")


def use_compressor(run: Any, name: str) -> None:
    """Exchange by compressor ``name`` from the next step on, with fresh state; every rank calls it between steps."""
    if name != run.reducer.compressor.name:
        _attach(run, name, run.reducer.buckets, run.reducer.ops)


def _attach(run: Any, name: str, buckets: list[Bucket], ops: Ops) -> None:
    run.reducer = Reducer(buckets, create(name, run.config), run.collectives, ops, run.group.name("grad"))
    run.step.attach(run.reducer)


def _buckets(run: Any, ops: Ops) -> list[Bucket]:
    """The plan for ``exchange.bucket_mb``; with Adasum, which looks at each tensor by itself, one tensor each."""
    options = run.config.exchange
    if options.adasum:
        return plan_buckets(run.step.params(), 0)
    size_mb = options.bucket_mb
    if size_mb == "auto":
        from hvdtrain.exchange.sweep import pick_bucket_mb

        with deadline(run.config.control_timeout_s, "the sweep of exchange.bucket_mb auto"):
            size_mb, reason = pick_bucket_mb(run.collectives, ops, run.control, run.step.params())
        run.notes.append(f"exchange.bucket_mb auto: {size_mb:g} MiB; {reason}")
    return plan_buckets(run.step.params(), size_mb)


def unlike_threads(run: Any) -> str:
    """What keeps ranks from decoding powersgd to the same bits, in words, or ""; collective.

    Each rank multiplies the factors by itself, and a matrix product rounds by the number of threads it runs on.
    """
    host = run.topology.host_of(run.control.rank)
    own = compute_threads(len(affinity()), host.cores, len(host.ranks), run.config.threads)
    threads = run.control.gather(own)
    return "" if len(set(threads)) == 1 else f"ranks with {min(threads)} to {max(threads)} compute threads"


def _check(run: Any, name: str) -> None:
    """Raise `UserError` for what this run cannot do with compressor ``name``."""
    config, size = run.config, run.collectives.size
    unlike = unlike_threads(run) if name == "powersgd" else ""
    if unlike:
        raise UserError(f"compression powersgd on {unlike}", "the same number on every rank: each decodes by a matrix "
                        "product of its own", "set threads to one number")
    if name == "topk" and config.exchange.topk_momentum > 0 and not run.step.plain_sgd():
        raise UserError(f"exchange.topk_momentum {config.exchange.topk_momentum:g} with an optimizer that has a memory "
                        "of its own", "SGD without momentum, since topk accumulates it before it sends",
                        "set optimizer.name: SGD without momentum, or exchange.topk_momentum: 0")
    if config.exchange.adasum and config.compression != "none":
        raise UserError(f"exchange.adasum with compression {config.compression}", "one of the two",
                        "set compression: none, or exchange.adasum: false")
    if name == "adasum" and config.shares and len(set(config.shares)) > 1:
        raise UserError(f"exchange.adasum with shares {config.shares}", "equal shares: it combines the ranks' mean "
                        "gradients and knows no weights", "leave shares out, or exchange.adasum")
    if name == "adasum" and config.balance != "off":
        raise UserError(f"exchange.adasum with balance {config.balance}", "equal parts: it combines the ranks' mean "
                        "gradients and knows no weights", "set balance: off, or exchange.adasum: false")
    if name == "adasum" and size & (size - 1):
        raise UserError(f"exchange.adasum on {size} ranks", "1, 2, 4, 8, ... ranks", "start another number of ranks")
