"""Builds the model of a run from what the configuration or the caller gives.

Owns frameworks' set-up and seeds before a model file runs, and where the model is built. `hvdtrain.engine.assemble`
decides when.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

from hvdtrain import backends
from hvdtrain import config as settings
from hvdtrain.backends.model_spec import Spec, build_spec, spec_of
from hvdtrain.cluster.control import agreed, in_turn
from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.machine import memory
from hvdtrain.cluster.topology import affinity, compute_threads, survey
from hvdtrain.config import Config, cut_over_ranks
from hvdtrain.core import rng
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.core.protocols import Control


def model_of(config: Config, model: Any, facts: LaunchFacts, control: Control | None) -> Spec:
    """Return the model with its file's functions; all ranks have one, or all fail alike. Collective."""
    threads = 1 if model is not None else _threads(config, facts, control)  # collective: before anybody takes turns

    def make() -> Spec:
        if model is not None:
            return spec_of(model)
        text = backends.built_in_model() if config.model == "auto" else config.model
        return build_spec(text, config.model_args, partial(_prepare, config, threads),
                          partial(_building, config), partial(_outline, config))
    pulse.at("model")
    if control is None:
        return make()
    return in_turn(control, make, "model") if cut_over_ranks(config) else agreed(control, make, "model")


def _building(config: Config) -> Any:
    """Where a model is built: in host memory, if no one device may hold all of it."""
    over_ranks = settings.cut_over_ranks(config)
    if (config.model_parallel > 1 or over_ranks) and "tensorflow" in backends.imported():
        return backends.load("tensorflow").building(config.model_parallel, over_ranks)
    return contextlib.nullcontext()


def _outline(config: Config) -> Any:
    """What builds a model without its values, which no rank holds all of where it is cut over ranks; or None."""
    if cut_over_ranks(config) and "torch" in backends.imported():
        return backends.load("torch").outline
    return None


def _threads(config: Config, facts: LaunchFacts, control: Control | None) -> int:
    """Compute threads of this rank. Collective where there is a control plane."""
    if control is None:
        return compute_threads(len(affinity()), os.cpu_count() or 1, max(1, facts.local_size), config.threads)
    host = survey(control).host_of(control.rank)
    return compute_threads(len(affinity()), host.cores, len(host.ranks), config.threads)


def _prepare(config: Config, threads: int) -> None:
    """Set up and seed each framework that has been imported, before the model is built: the same seed on all ranks."""
    rng.seed(config.seed, 0)
    for name in backends.imported():
        backend = backends.load(name)
        backend.setup(threads, config.deterministic, devices_of(config))
        backend.seed(config.seed, 0)
        memory.mark_imported()


def devices_of(config: Config) -> int:
    """Devices that each rank owns."""
    return config.devices_per_rank or config.model_parallel


def seed_all(config: Config, backend: Any, rank: int) -> None:
    """Every generator, from (seed, rank)."""
    rng.seed(config.seed, rank)
    backend.seed(config.seed, rank)
