"""Configuration and manifest of a run for the other framework, so that ``--resume`` continues there. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.interchange.rule import Rule
from hvdtrain.config import Config, Named, PipelineConfig, schema
from hvdtrain.core import __version__
from hvdtrain.core.errors import UserError

_GENERATORS = ("python.", "numpy.")
"""Random generators that every framework's run has; their state goes over bit by bit."""


def config_of(plain: Mapping[str, Any]) -> Config:
    """Return the configuration in a manifest, without keys of another release."""
    deep = schema.sections(Config)
    values: dict[str, Any] = {}
    for one in fields(Config):
        if one.name in deep and isinstance(plain.get(one.name), Mapping):
            known = {f.name for f in fields(deep[one.name])}
            values[one.name] = deep[one.name](**{k: v for k, v in plain[one.name].items() if k in known})
        elif one.name in plain:
            values[one.name] = plain[one.name]
    return Config(**values).check()


def bare(config: Config) -> Config:
    """Return what decides the model and its optimizer: for a step that trains nothing, in one process on the CPU."""
    return replace(config, loss=Named(), metrics=[], precision="fp32", balance="off", shares=[], emulate_speed=[],
                   compression="none", model_parallel=1, split_micro_batches=0, devices_per_rank=0,
                   pipeline=PipelineConfig())


def require_constant_rate(config: Config, scheduled: str = "") -> None:
    """Raise `UserError` where a schedule moves the rate; ``scheduled``: the name of one that the optimizer holds."""
    name = scheduled or config.schedule.name * config.schedule.on
    if name:
        raise UserError(f"the run's rate follows {name}, which the other framework lacks by that name and state",
                        "a constant rate, with warm-up or without", "convert the weights alone: give a file as TARGET")


def config_for(config: Config, framework: str, rule: Rule, model: str, model_args: dict[str, Any],
               target: Path) -> Config:
    """Return the configuration with which the run continues in ``framework``, from its directory ``target``."""
    name, args = rule.in_torch() if framework == "torch" else rule.in_keras()
    scale = config.global_batch / config.schedule.linear_scaling_base if config.schedule.linear_scaling_base else 1.0
    schedule, lr = config.schedule, config.lr
    if not math.isclose(rule.base_lr, lr * scale, rel_tol=1e-6):  # as compiled, or as an argument of the optimizer
        schedule, lr = replace(schedule, linear_scaling_base=0), rule.base_lr
    pipeline = replace(config.pipeline, cut=[])  # the twin's blocks may have other names
    return replace(config, model=model, model_args=dict(model_args), optimizer=Named(name, args), lr=lr,
                   schedule=schedule, pipeline=pipeline, out=str(target), resume="auto")


def meta_for(meta: Mapping[str, Any], framework: str, model: str, rest: Mapping[str, Any],
             config: Config) -> dict[str, Any]:
    """Return the manifest: position, samples and callbacks unchanged, the rest of the other framework."""
    scale = {k: v for k, v in meta["step_rest"].items() if k == "loss_scale"}
    meta = {k: v for k, v in meta.items() if k != "schedule"}  # follows from the configuration
    return {**meta, "hvdtrain": __version__, "framework": framework, "model": model, "step_rest": {**rest, **scale},
            "config": config.to_dict(), "converted_from": meta["framework"]}


def rank_arrays(old: Mapping[str, np.ndarray], fresh: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return one rank's generators: Python's and numpy's unchanged, the framework's ``fresh`` from (seed, rank).

    Compressor state is left out: it belongs to the gradients' buckets of one framework.
    """
    kept = {name: array for name, array in old.items() if name.startswith(_GENERATORS)}
    return {**fresh, **kept}


def remarks(config: Config, draws: bool, compressor_state: bool, compiled_loss: str) -> list[str]:
    """Return what is not converted, as sentences."""
    found = []
    if draws:
        found.append("the frameworks draw dropout from different generators: results agree as those of two seeds do")
    if compressor_state:
        found.append("compressor state (error feedback) is left out and starts from nothing")
    if config.loss.name != "auto":
        found.append(f"loss {config.loss.name} is a name of the run's framework: set loss.name in config.yaml to its "
                     "twin if resuming does not know it")
    elif compiled_loss:
        found.append(f"the Keras model was compiled with {compiled_loss}: set loss.name in config.yaml to its twin")
    return found
