"""Which keys were changed from their default and do nothing as the run is set up.

Each key has its reasons with it (`hvdtrain.config.sections.key`); `hvdtrain.engine.assemble` puts what is found among
the notes of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config import Config, schema


@dataclass(frozen=True)
class Setup:
    """What decides about keys: the configuration, and what became of it.

    ``horovod``: gradients or the control plane go over Horovod. ``own_model``, ``own_data``: given to fit as objects.
    ``own_task``, ``file_optimizer``: the model file has one. ``own_optimizer``: the model was compiled with one.
    """

    config: Config
    horovod: bool = True
    own_model: bool = False
    own_data: bool = False
    own_task: bool = False
    own_optimizer: bool = False
    file_optimizer: bool = False


def notes(setup: Setup) -> list[str]:
    """Say of each changed key that does nothing why; the first of its reasons counts. Pure."""
    values, found = dict(schema.leaves(setup.config)), []
    for key in schema.keys(type(setup.config)):
        why = [reason.why for reason in key.unused if reason.when(setup)]
        if why and values[key.name] not in (key.default, []):
            found.append(f"{key.name} has no effect: {why[0]}")
    return found


def idle(setup: Setup) -> frozenset[str]:
    """Return all keys that do nothing, changed or not. Pure."""
    return frozenset(key.name for key in schema.keys(type(setup.config))
                     if any(reason.when(setup) for reason in key.unused))


def setup_of(config: Config, spec: Any, wire: str, kind: str, model: Any, data: Any) -> Setup:
    """The `Setup` of a run: its model's ``spec``, the name of its ``wire``, the launcher's ``kind``, what fit got."""
    compiled = getattr(spec.model, "compiled", False) and getattr(spec.model, "optimizer", None) is not None
    return Setup(config, "horovod" in wire or kind == "gloo", model is not None, data is not None,
                 spec.task is not None, bool(compiled), spec.optimizer is not None)
