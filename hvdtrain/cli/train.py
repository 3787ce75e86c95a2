"""``python -m hvdtrain train``: configuration from file, environment and command line, then a fit.

Owns the parsing (jsonargparse) and the words for what it refuses. YAML file < environment (HVDTRAIN_*) < command line.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from hvdtrain.config import Config
from hvdtrain.errors import UserError, nearest


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; return 0."""
    config = parse(argv)
    if config is None:
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's start-up chatter, once per rank
    from hvdtrain.trainer import Trainer

    Trainer(config).fit()
    return 0


def parse(argv: list[str], env: dict[str, str] | None = None) -> Config | None:
    """Return the configuration, or None after ``--help`` or ``--print_config``; `UserError` for what is wrong."""
    known = _check_names(argv, os.environ if env is None else env)
    parser = make_parser()
    import jsonargparse

    try:
        values = parser.parse_args(argv)
    except SystemExit as stop:
        if stop.code in (0, None):
            return None
        raise
    except jsonargparse.ArgumentError as error:
        raise UserError(_plain(str(error)), _expected(str(error), known), "see python -m hvdtrain train --help") from None
    return Config(**_nested(parser.instantiate_classes(values))).check()


def make_parser() -> Any:
    """The parser, made from the dataclasses."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(prog="python -m hvdtrain train", exit_on_error=False, default_env=True,
                                         env_prefix="HVDTRAIN", description="Train a PyTorch or Keras model on every rank of this job.")
    parser.add_argument("--config", action="config", help="YAML file; the environment and the command line come after it")
    parser.add_class_arguments(Config, sub_configs=False)
    docs = dict(keys())
    for action in parser._actions:
        if action.dest in docs:
            action.help = docs[action.dest]
    return parser


def keys(cls: Any = Config, prefix: str = "") -> list[tuple[str, str]]:
    """Every key of the configuration with its meaning and unit, as (dotted name, words)."""
    out = []
    for f in dataclasses.fields(cls):
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
        if dataclasses.is_dataclass(default):
            out += keys(type(default), f"{prefix}{f.name}.")
        else:
            unit = f" [{f.metadata['unit']}]" if f.metadata.get("unit") else ""
            out.append((prefix + f.name, f.metadata.get("doc", "") + unit))
    return out


def _check_names(argv: list[str], env: Any) -> list[str]:
    """Refuse an unknown option or HVDTRAIN_ variable with the nearest name; return the known keys."""
    known = [name for name, _ in keys()]
    sections = {n.partition(".")[0] for n in known if "." in n}
    free = ("model_args.", "data.args.", "optimizer.args.", "schedule.args.", "loss.args.")
    for argument in argv:
        name = argument[2:].partition("=")[0].removesuffix("+")
        if argument.startswith("--") and not (
                name in known or name in sections or name in ("config", "help", "print_config") or name.startswith(free)):
            raise UserError(f"there is no option --{name}", nearest(name, known), "see python -m hvdtrain train --help")
    variables = {"HVDTRAIN_" + n.replace(".", "__").upper(): n for n in [*known, *sections, "config", "print_config"]}
    for variable in env:
        if variable.startswith("HVDTRAIN_") and variable not in variables:
            raise UserError(f"the environment variable {variable} names no key", nearest(variable, variables), "correct or unset it")
    return known


def _expected(text: str, known: list[str]) -> str:
    """The nearest known key for a message about an unknown one."""
    found = re.search(r"[Kk]ey ['\"]([\w.]+)['\"] is not expected|[Nn]ested key ['\"]([\w.]+)['\"]|does not accept nested key ['\"]([\w.]+)['\"]", text)
    return nearest(next(g for g in found.groups() if g), known) if found else ""


def _plain(text: str) -> str:
    """A parser's message on one line."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".")


def _nested(values: Any) -> dict[str, Any]:
    """Keys of `Config` only, with sections as dataclasses."""
    return {f.name: values[f.name] for f in dataclasses.fields(Config)}
