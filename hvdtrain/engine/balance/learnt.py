"""Sizes that ran out of memory, remembered between runs in the probe's cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hvdtrain.cluster.machine import memory
from hvdtrain.config import Config
from hvdtrain.engine.balance import cache
from hvdtrain.engine.run import Run


def ceiling(run: Run, sample: Any) -> int:
    """Return the largest micro-batch that an earlier run of the same went on with on this rank; 0: none ran out.

    ``sample``: arrays (1, ...).
    """
    return cache.ceiling(cache.key(run, sample), _holds(run), _room(run)) if remembers(run.config) else 0


def keep(run: Run, sample: Any, micro_batch: int) -> None:
    """Remember that this rank goes on with ``micro_batch`` samples after it ran out of memory."""
    if remembers(run.config):
        cache.save_ceiling(cache.key(run, sample), _holds(run), _room(run), micro_batch)


def remembers(config: Config) -> bool:
    """Return whether sizes are found by measurement in this run, and are to be remembered."""
    return bool(config.rebalance.probe_cache and (config.balance != "off" or config.micro_batch == "auto"))


def _holds(run: Run) -> str:
    """What takes memory beside what the cache's key names."""
    config, remat = run.config, run.parts.remat
    return json.dumps([asdict(config.optimizer), asdict(config.data_parallel), config.compression,
                       config.model_parallel, config.split_micro_batches, config.compile, run.control.size,
                       list(remat.chosen) if remat is not None else []], default=repr)


def _room(run: Run) -> int:
    """Bytes that this rank may hold; 0 where nobody knows."""
    rank = run.control.rank
    device = run.devices[rank]
    if device.kind != "cpu":
        return int(device.memory_bytes)
    return memory.host_budget_bytes(len(run.topology.host_of(rank).ranks))
