"""Names that other trainers give to keys: aliases, which work as the key, and hints for names of another meaning.

Owns their expansion, conflicts and messages; the aliases of a key stand at the key (`hvdtrain.config.sections.key`).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from hvdtrain.config import schema
from hvdtrain.config.keys import Keys
from hvdtrain.core.errors import UserError, closest

T = TypeVar("T")
C = TypeVar("C", bound=Keys)

HINTS = {
    "batch_size": "global_batch", "train_batch_size": "global_batch",
    "per_device_train_batch_size": "global_batch, of all ranks together",
    "per_device_batch_size": "global_batch, of all ranks together",
    "per_gpu_batch_size": "global_batch, of all ranks together",
    "local_batch_size": "global_batch, of all ranks together",
    "eval_batch_size": "global_batch, of evaluation, too",
    "per_device_eval_batch_size": "global_batch, of evaluation, too",
    "train_micro_batch_size_per_gpu": "micro_batch", "device_train_microbatch_size": "micro_batch",
    "backward_passes_per_step": "accumulate", "accum_steps": "accumulate", "steps": "max_steps",
    "num_epochs": "epochs", "num_train_epochs": "epochs", "max_epochs": "epochs", "max_duration": "epochs",
    "momentum": "optimizer.args.momentum", "weight_decay": "optimizer.args.weight_decay",
    "clip_grad_norm": "clip_norm",
    "fp16": "precision", "bf16": "precision", "mixed_precision": "precision", "amp": "precision",
    "zero": "data_parallel", "strategy": "data_parallel", "deepspeed": "data_parallel", "ddp": "data_parallel",
    "fsdp": "data_parallel, which does not divide parameters",
    "num_workers": "data.workers", "dataloader_num_workers": "data.workers", "save_dir": "out",
    "save_steps": "checkpoint.every_steps", "save_total_limit": "checkpoint.keep",
    "max_eval_samples": "eval_max_samples", "limit_val_batches": "eval_max_samples, in samples",
    "eval_dataset": "eval", "validation_data": "eval", "val_check_interval": "eval_steps",
    "validation_freq": "eval_every", "check_val_every_n_epoch": "eval_every",
    "logging_steps": "log_every", "log_every_n_steps": "log_every",
    "wandb": "trackers", "tensorboard": "trackers", "warmup_steps": "schedule.warmup_steps",
    "lr_scheduler": "schedule", "lr_scheduler_type": "schedule", "patience": "early_stop.patience",
    "torch_compile": "compile", "tensor_parallel": "model_parallel, which puts whole blocks on devices",
    "pipeline_parallel": "pipeline", "seed_everything": "seed",
}
"""Name elsewhere -> the key to look at, and after a comma how it differs."""

LEAST_RATIO = 0.7
"""Least similarity (`difflib`) of a suggested top-level key: fsdp and seed have 0.5, nodes and model 0.6."""


@functools.lru_cache(maxsize=None)
def of(cls: type) -> Mapping[str, schema.Key]:
    """Return the key of ``cls`` that each alias stands for."""
    return {alias: key for key in schema.keys(cls) for alias in key.aliases}


def values(key: schema.Key, value: Any) -> dict[str, Any]:
    """Return the dotted keys that ``value`` of an alias of ``key`` sets, with their values. Pure."""
    if key.alias_sets is None:
        return {key.name: value}
    section = key.name.rpartition(".")[0]
    return {f"{section}.{name}": each for name, each in key.alias_sets(value).items()}


def targets(key: schema.Key) -> set[str]:
    """Return all dotted keys that an alias of ``key`` can set. Pure."""
    return {*values(key, 0), *values(key, 1)}


def refuse_both(cls: type, given: Iterable[tuple[str, Collection[str]]], where: str = "") -> None:
    """Raise `UserError` where an alias and another name ``given`` at ``where`` set the same key."""
    known, first = of(cls), dict[str, str]()
    for name, sets in given:
        for key in sorted(sets):
            other = first.setdefault(key, name)
            if other != name and (name in known or other in known):
                alias, key_name = (name, other) if name in known else (other, name)
                raise UserError(f"{alias} is set together with {key_name}{where}",
                                f"one of them: {alias} is another name for {known[alias].name}", f"leave {alias} out")


def own(cls: type, name: str, value: Any) -> Any:
    """Return the own value of the key or section ``name`` for another spelling of it, and any other as it is."""
    section = schema.off_sections(cls).get(name)
    if section is not None and schema.is_off(value) and value != {}:
        off: dict[str, Any] = copy.deepcopy(section.OFF)  # type: ignore[attr-defined]
        bare = "name" in off and (len(off) == 1 or value == off["name"])  # schedule none: the warm-up stays
        return off["name"] if bare else off
    key = next((key for key in schema.respelled(cls) if key.name == name), None)
    return value if key is None else schema.own_value(key, value)


def sets(cls: type, name: str, value: Any) -> set[str]:
    """Return the dotted keys that ``value`` of the key or section ``name`` sets."""
    if name not in schema.sections(cls):
        return {name}
    value = own(cls, name, value)  # data_parallel: null is its name
    key = schema.bare(cls, name, value)
    return {f"{name}.{key}"} if key else {f"{name}.{each}" for each in value} if isinstance(value, dict) else set()


def file_by_key(cls: type, found: dict[str, Any], where: str, written: dict[str, str]) -> dict[str, Any]:
    """Return a file's values by the names of keys; ``written`` gets alias by key. `UserError` for alias and key."""
    known, out = of(cls), {name: value for name, value in found.items() if name not in of(cls)}
    refuse_both(cls, [(name, targets(known[name]) if name in known else sets(cls, name, value))
                      for name, value in found.items()], where)
    for name, value in out.items():
        forget(cls, name, value, written)
    for alias in (name for name in found if name in known):
        for target, value in values(known[alias], found[alias]).items():
            written[target] = alias
            section, _, last = target.rpartition(".")
            if not section:
                out[target] = value
            elif isinstance(out.setdefault(section, {}), dict):  # else refused with the section
                out[section] = {**out[section], last: value}
    return out


def forget(cls: type, name: str, value: Any, written: dict[str, str]) -> None:
    """Remove from ``written``, alias by key, what ``value`` of the key or section ``name`` sets instead."""
    for key in sets(cls, name, value):
        written.pop(key, None)


def as_written(error: UserError, written: Mapping[str, str]) -> UserError:
    """Return ``error`` about a key with the alias that the user wrote; ``written``: alias by key."""
    for key, alias in written.items():
        if re.match(rf"{re.escape(key)} ", error.got):
            do = re.sub(rf"\b(correct|set) {re.escape(key)}(?![\w.])", rf"\1 {alias}", error.do)
            return UserError(alias + error.got[len(key):], error.expected, do).of_kind(error.kind)
    return error


def hint(cls: type, name: str) -> str:
    """Return what ``name`` may mean, as ``'global_batch', of all ranks together``; "" where no key is alike."""
    section, _, last = name.rpartition(".")
    known = [*(key.name for key in schema.keys(cls)), *schema.sections(cls)]
    meant = closest(name, ["name"], LEAST_RATIO) or name  # nmae, which four sections have
    alike = [key for key in known if key.endswith(f".{meant}")]
    if alike and name not in HINTS:
        return "'" + "' or '".join(alike) + "'"
    found, comma, how = HINTS.get(name, "").partition(",")
    top = [*(key for key in known if "." not in key), *of(cls)]
    found = found or closest(name, top, LEAST_RATIO) or closest(name, known, LEAST_RATIO) or ""
    return f"'{found}'{comma}{how}" if found else ""


def accepting(cls: type[T]) -> type[T]:
    """Have the dataclass ``cls`` take the aliases of its keys as arguments. A decorator.

    An alias together with its key is refused by ``check``, like every other value that cannot be.
    """
    init: Any = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **given: Any) -> None:
        for name in ("_unset", "_written", "_refused"):  # of Config(**vars(other))
            given.pop(name, None)
        own = {name: given.pop(name) for name in list(given) if name in of(cls)}  # type: ignore[arg-type]
        for name in given:
            if name not in known and (found := hint(cls, name)):
                raise TypeError(f"{cls.__name__} has no key {name!r}: did you mean {found}?")
        init(self, *args, **given)
        set_only(self, {*known[:len(args)], *given, *own})
        if own:  # beside all keys, as `dataclasses.replace` gives them, an alias is the change
            set_by_alias(self, own, given if len(given) < len(known) else {})

    cls.__init__ = accept  # type: ignore[method-assign]
    return cls


def set_only(config: Keys, names: Iterable[str]) -> None:
    """Record that of the top-level keys of ``config`` the user has set ``names``, by key or alias, and no others."""
    cls: Any = type(config)
    own = {of(cls)[name].name.partition(".")[0] if name in of(cls) else name for name in names}
    object.__setattr__(config, "_unset", frozenset(field.name for field in fields(cls)) - own)


def overridden(config: C, changes: Mapping[str, Any]) -> C:
    """Return a copy of the configuration ``config`` with other values of top-level keys, by name or by alias."""
    cls = type(config)
    if config._refused is not None:
        raise config._refused
    known = {field.name for field in fields(cls)}
    for name in changes:
        if name not in known and name not in of(cls):  # type: ignore[arg-type]
            found = hint(cls, name)
            raise UserError(f"Config has no key {name!r}", f"a known name (did you mean {found}?)" if found else
                            "a known name", "correct it")
    plain = {name: value for name, value in changes.items() if name in known}
    made = replace(config, **plain)
    kept = {key: alias for key, alias in config._written.items() if key.partition(".")[0] not in plain}
    object.__setattr__(made, "_written", kept)
    set_only(made, {*(known - config._unset), *changes})
    own = {name: value for name, value in changes.items() if name not in known}
    if own:
        set_by_alias(made, own, plain)
    return made


def set_by_alias(config: C, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Set keys of ``config``, which is being made, by their aliases ``own``; ``given``: values of keys set by name."""
    cls, written = type(config), dict(config._written)
    defaults = {key.name: key.default for key in schema.keys(cls)}
    names: list[tuple[str, Collection[str]]] = []
    for name, value in given.items():  # a section is given whole: those of its keys that are not at their defaults
        holder = getattr(config, name)
        by_name = not is_dataclass(value)  # data_parallel="replicate"
        names.append((name, {name} if not is_dataclass(holder) else {
            f"{name}.{f.name}" for f in fields(holder)
            if by_name and f.name == "name" or getattr(holder, f.name) != defaults[f"{name}.{f.name}"]}))
    for alias, value in own.items():
        key = of(cls)[alias]  # type: ignore[arg-type]
        names.append((alias, targets(key)))
        for name, each in values(key, value).items():
            section, _, last = name.rpartition(".")
            holder = getattr(config, section) if section else None
            written[name] = alias
            if not section:
                object.__setattr__(config, name, each)
            elif is_dataclass(holder) and not isinstance(holder, type):
                object.__setattr__(config, section, replace(holder, **{last: each}))
    object.__setattr__(config, "_written", written)
    try:
        refuse_both(cls, names)
    except UserError as error:
        object.__setattr__(config, "_refused", error)
    config.__post_init__()
