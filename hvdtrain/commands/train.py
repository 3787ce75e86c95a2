"""``python -m hvdtrain train``: configuration from YAML file < environment HVDTRAIN_* < command line, then a fit.

jsonargparse turns texts into typed values; `hvdtrain.config.yaml_file` reads files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from hvdtrain.cluster.exit import EXIT_REQUEUE
from hvdtrain.cluster.liveness import causes
from hvdtrain.config import Config, aliases, placed, schema
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core.errors import UserError, closest
from hvdtrain.engine.callbacks.preempt import heed

PREFIX = "HVDTRAIN_"
HELP = "see python -m hvdtrain train --help"
Option = tuple[str, str | None, str]
"""(name, value or None, where it was given)."""


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; return 0, or 75 where the run was saved because its job is about to end."""
    causes.mark("start")
    heed()
    config = parse(argv)
    if config is None:
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's start-up chatter, once per rank
    from hvdtrain.trainer import Trainer

    return EXIT_REQUEUE if Trainer(config).fit().requeue else 0


def parse(argv: list[str], env: Mapping[str, str] | None = None) -> Config | None:
    """Return the configuration, or None after ``--help`` or ``--print_config``; `UserError` for what is wrong."""
    if any(a in ("-h", "--help") for a in argv):
        make_parser().print_help()
        return None
    layers = [_environment(os.environ if env is None else env), _options(argv)]
    given = [option for layer in layers for option in layer]
    written: dict[str, str] = {}
    try:
        base = _files([v for n, v, _ in given if n == "config"], written)
        options = _spelled_out([_by_key(layer, written) for layer in layers], base)
        config = _typed(base, options)
    except UserError as error:
        raise aliases.as_written(error, written) from None
    if any(name == "print_config" for name, _, _ in given):
        print(recipe.dump(config.to_dict()), end="")
        return None
    aliases.set_only(config, {*base, *(name.partition(".")[0].removesuffix("+") for name, _, _ in options)})
    return config


def by_keys(argv: Sequence[str]) -> list[str]:
    """Return the options ``argv`` with keys in place of aliases, for a command that appends options of its own."""
    options, known = _options(list(argv)), aliases.of(Config)
    if not any(name.removesuffix("+") in known for name, _, _ in options):
        return list(argv)
    plain = [option for option in options if option[0] in ("config", "print_config")]
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value, _ in plain + _by_key(options, {})]


def make_parser() -> Any:
    """Return the parser of typed values and the help, made from the dataclasses."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog="python -m hvdtrain train",
        usage="python -m hvdtrain train [--config FILE] [--print_config] [--KEY VALUE ...]",
        exit_on_error=False,
        print_config=None,
        description="Train a PyTorch or Keras model on every rank of this job. A key is set by a YAML file, by the "
        f"environment ({PREFIX} and the key in capitals, two underscores for a dot: {PREFIX}OPTIMIZER__NAME), or here; "
        "the later of these wins. A bare text is a section's name: --optimizer SGD. Entries of "
        "a model_args or args are set one by one as --model_args.width 64.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with any of the keys below, or hvdtrain:NAME (a recipe, such as hvdtrain:cifar100); several "
        "are laid over each other",
    )
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and stop")
    parser.add_class_arguments(Config, sub_configs=False)
    docs = {k.name: k.help + (f" [{k.unit}]" if k.unit else "") + "".join(f"; also --{alias}" for alias in k.aliases)
            for k in schema.keys(Config)}
    for action in parser._actions:
        if action.dest in docs:
            action.help = docs[action.dest]
    return parser


def _environment(env: Mapping[str, str]) -> list[Option]:
    names = {PREFIX + n.replace(".", "__").upper(): n for n in [*_hints(), *aliases.of(Config), "config"]}
    found: list[Option] = []
    for variable in sorted(v for v in env if v.startswith(PREFIX)):
        if variable not in names:
            bare = variable.removeprefix(PREFIX).lower()
            key = aliases.HINTS.get(bare, "").partition(",")[0].replace(".", "__").upper()
            found_name = PREFIX + key if PREFIX + key in names else closest(bare, [n[len(PREFIX):] for n in names], 0.7)
            raise UserError(f"the environment variable {variable} names no key", "a known name" + (
                f" (did you mean {PREFIX + found_name.removeprefix(PREFIX)!r}?)" if found_name else ""),
                "correct or unset it")
        found.append((names[variable], env[variable], variable))
    return sorted(found, key=lambda option: option[0].count("."))


def _options(argv: list[str]) -> list[Option]:
    """Return the options on the command line, in order; `UserError` for an unknown one, with the nearest name."""
    found: list[Option] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"{word!r} is no option", "options such as --lr 0.01", HELP)
        name, equals, value = word[2:].partition("=")
        bare = name.removesuffix("+")
        key, dot, entry = bare.partition(".")
        own = key.replace("-", "_") + dot + entry  # --emulate-speed is --emulate_speed
        known = {*_hints(), *aliases.of(Config), "config", "print_config"}
        if own in known or _free(own) is not None:
            bare, name = own, own + name[len(bare):]
        if bare not in known and _free(bare) is None:
            raise UserError(f"there is no option --{name}", _meant(bare), HELP)
        if not equals and bare != "print_config":
            if not rest or rest[0].startswith("--"):
                key = aliases.of(Config)[bare].name if bare in aliases.of(Config) else bare
                wants = schema.in_words(_hints()[key]) if key in _hints() else "a value"
                raise UserError(f"--{name} has no value", wants, f"write --{name} VALUE")
            value = rest.pop(0)
        found.append((name, value if equals or bare != "print_config" else None, f"--{name}"))
    return found


def _by_key(layer: list[Option], written: dict[str, str]) -> list[Option]:
    """Return the options of a layer by the names of keys, in their own values; ``written`` gets alias by key."""
    found: list[Option] = []
    given: list[tuple[str, set[str]]] = []
    for name, value, where in (o for o in layer if o[0] not in ("config", "print_config")):
        bare, text = name.removesuffix("+"), value or ""
        key = aliases.of(Config).get(bare)
        if key is None:
            text = _listed(bare, text)
            own = recipe.load(text, where) if bare in schema.sections(Config) else text
            aliases.forget(Config, bare, own, written)
            given.append((bare, aliases.sets(Config, bare, own)))
            found.append((name, text, where))
            continue
        given.append((bare, aliases.targets(key)))
        for target, each in aliases.values(key, text).items():
            written[target] = bare
            found.append((target + name[len(bare):], _listed(target, each), where))
    place = " in the environment" if found and found[0][2].startswith(PREFIX) else " on the command line"
    aliases.refuse_both(Config, given, place)
    return found


def _listed(name: str, text: str) -> str:
    """Return 3:3:1:1 and 1,0.4 as the lists of numbers, and fast=3,old=1 as the mapping, that a key may mean by them.

    A bare item of a list becomes a list, and a spelling of off the key's own.
    """
    if name == "collectives" and not text.strip():  # of an unset shell variable: ranks would train without an exchange
        raise UserError("collectives is empty", "one of its values; null exchanges no gradients", "leave it out")
    own = aliases.own(Config, name, text)
    if own is not text:
        return own if isinstance(own, str) else json.dumps(own)
    if schema.by_name(_hints().get(name)):
        text = placed.as_yaml(text)
    if schema.lists_numbers(_hints().get(name)) and re.fullmatch(r"[\d.eE+-]+(?:[:,][\d.eE+-]+)+", text):
        return f"[{', '.join(re.split('[:,]', text))}]"
    if schema.lists_numbers(_hints().get(name)) and re.fullmatch(r"[\d.eE+-]*\d[\d.eE+-]*", text):
        return f"[{text}]"
    return text


@lru_cache(maxsize=1)
def _hints() -> dict[str, Any]:
    return {**{k.name: k.hint for k in schema.keys(Config)}, **schema.sections(Config)}


def _meant(name: str) -> str:
    section, _, last = name.rpartition(".")
    if section in schema.sections(Config):
        own = [k.name for k in schema.keys(schema.sections(Config)[section])]
        close = closest(last, own, 0.6)
        if close is None and "args" in own:
            return f"{section}.args.{last}, if it is an argument of the {section}'s own, or {section}.name"
        hint = f" (did you mean '{section}.{close}'?)" if close else ""
        return "one of " + ", ".join(f"{section}.{key}" for key in own) + hint
    found = aliases.hint(Config, name)
    return f"a known name (did you mean {found}?)" if found else "a known name"


def _free(name: str) -> str | None:
    """Return the key with free-form entries that ``name`` lies below (model_args.width: model_args), or None."""
    return next((k for k, hint in _hints().items() if hint is dict and name.startswith(f"{k}.") and name != f"{k}."),
                None)


def _files(paths: list[str | None], written: dict[str, str]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for path in paths:
        found = aliases.file_by_key(Config, recipe.read(path or ""), f" in {path}", written)
        if type(found.get("time_limit")) in (int, float):  # YAML reads 1:30:00, too, as a number of seconds
            found["time_limit"] = str(found["time_limit"])
        _respell(found, Config)
        _check_tree(found, Config, "", f"in {path}")
        for name, value in found.items():
            before = whole.get(name, {})
            key = schema.bare(Config, name, value)
            if key:
                kept = {k: v for k, v in before.items()
                        if k != "args" or key != "name" or not _another(before.get("name"), value)}
                whole[name] = {**kept, key: value}
            else:
                whole[name] = {**before, **value} if name in schema.sections(Config) else value
    return whole


def _respell(found: dict[str, Any], cls: type, prefix: str = "") -> None:
    """Replace the spellings of off, bare items of lists and the like by the keys' own values, in place."""
    for name, value in found.items():
        if isinstance(value, dict) and name in schema.sections(cls):
            _respell(value, schema.sections(cls)[name], f"{name}.")
        else:
            found[name] = aliases.own(Config, f"{prefix}{name}", value)


def _another(before: Any, name: str) -> bool:
    return before is not None and str(before).lower() != name.lower()


def _spelled_out(layers: list[list[Option]], base: dict[str, Any]) -> list[Option]:
    """Return the options of all layers in order, ``--optimizer SGD`` spelled out as ``--optimizer.name SGD``.

    A bare name other than an earlier layer's comes without that layer's args; args of its own layer stay.
    """
    deep, sections = schema.sections(Config), schema.named_sections(Config)
    names = {name: base[name].get("name") for name in sections if name in base}
    out: list[Option] = []
    for layer in layers:
        cleared: list[Option] = []
        spelled: list[Option] = []
        now = dict(names)
        for name, value, where in layer:
            found = recipe.load(value or "", where) if name in deep else None
            key = schema.bare(Config, name, found)
            if key:
                if key == "name" and f"{name}.args" in _hints() and _another(names.get(name), str(found)):
                    cleared.append((f"{name}.args", "{}", where))
                name, value = f"{name}.{key}", str(found)
            section, _, key = name.partition(".")
            if section in sections and key == "name":
                now[section] = value
            elif isinstance(found, dict) and "name" in found:
                now[section] = found["name"]
            spelled.append((name, value, where))
        names = now
        out += cleared + spelled
    return out


def _check_tree(found: Any, cls: type, prefix: str, where: str) -> None:
    deep = schema.sections(cls)
    hints = {k.name: k.hint for k in schema.keys(cls) if "." not in k.name} | deep
    for name, value in found.items():
        if name not in hints:
            text = f"{prefix}{name}"
            below = f"a section: {text.partition('.')[0]}: with {text.partition('.')[2]}: below it"
            raise UserError(f"there is no key {text!r} {where}", below if text in _hints() else _meant(text), HELP)
        if not prefix and schema.bare(cls, name, value):
            continue
        if name in deep and isinstance(value, dict):
            _check_tree(value, deep[name], f"{prefix}{name}.", where)
        elif name in deep or value is None:
            raise UserError(f"{prefix}{name} is {schema.shown(value)} {where}", schema.in_words(hints[name]),
                            f"correct {prefix}{name}")


@lru_cache(maxsize=1)
def _value_parser() -> Any:
    """Return the parser of all parses of this process; the help needs its own, since a parse adds --print_shtab."""
    return make_parser()


def _typed(base: dict[str, Any], options: list[Option]) -> Config:
    import jsonargparse

    entries = [o for o in options if _free(o[0]) is not None]
    words = []
    for name, value, where in options:
        if _free(name) is None:
            _check_value(name, value or "", where)
            words.append(f"--{name}={value}")
    parser = _value_parser()
    try:
        values = parser.parse_object(base, env=False) if base else None
        values = parser.parse_args(words, namespace=values, env=False)
    except jsonargparse.ArgumentError as error:
        raise _refusal(str(error), base, options) from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"a value cannot be read: {_line(str(error))}", "values of the keys' types", HELP) from None
    for name, value, where in entries:
        _set_entry(values, name, recipe.load(value or "", where), where)
    return _build(values)


def _check_value(name: str, text: str, where: str) -> None:
    section = schema.sections(Config).get(name)
    if section is None and _hints().get(name) is not dict:
        return
    found = recipe.load(text, where)
    if not isinstance(found, dict):
        raise UserError(f"{where} is {schema.shown(found)}", schema.in_words(_hints()[name]), HELP)
    if section is not None:
        _check_tree(found, section, f"{name}.", f"in {where}")


def _set_entry(values: Any, name: str, value: Any, where: str) -> None:
    key = _free(name)
    assert key is not None
    *path, last = name[len(key) + 1:].split(".")
    values[key] = at = dict(values[key])
    for part in path:
        at[part] = dict(at.get(part) or {}) if isinstance(at.get(part), dict) or at.get(part) is None else None
        if at[part] is None:
            raise UserError(f"{where} sets an entry of {part}, which is not a mapping", "one or the other",
                            f"correct {key}")
        at = at[part]
    at[last] = value


def _build(values: Any) -> Config:
    deep = schema.sections(Config)
    plain: dict[str, Any] = {}
    for name in [k.name for k in schema.keys(Config)]:
        section, _, rest = name.rpartition(".")
        if values[name] is None:
            raise UserError(f"{name} is empty (null)", schema.in_words(_hints()[name]), f"correct {name}")
        (plain.setdefault(section, {}) if section else plain)[rest] = values[name]
    return Config(**{n: deep[n](**v) if n in deep else v for n, v in plain.items()}).check()


def _refusal(text: str, base: dict[str, Any], options: list[Option]) -> UserError:
    found = re.search(r'key "([\w.]+)"', text)
    key = found[1] if found else ""
    if key not in _hints():
        return UserError(_line(text), "", HELP)
    section, _, last = key.rpartition(".")
    given = [o for o in options if o[0].removesuffix("+") in (key, section)]
    value = given[-1][1] if given else (base[section] if section else base)[last]
    return UserError(f"{key} is {schema.shown(value)}", schema.in_words(_hints()[key]),
                     f"correct {given[-1][2]}" if given else f"correct {key} in the config file")


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")[:300]
