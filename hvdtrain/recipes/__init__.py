"""Recipes: the YAML files that ``--config hvdtrain:NAME`` names, and models for them (`groups`, `groups_keras`).

Owns the names of the files. Reading YAML is up to `hvdtrain.config.yaml_file`.
"""

from __future__ import annotations

from pathlib import Path

from hvdtrain.core.errors import UserError, nearest

PREFIX = "hvdtrain:"
FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def path_of(text: str) -> str:
    """Return the file that ``hvdtrain:NAME`` names, any other ``text`` as it is; `UserError` for an unknown NAME."""
    if not text.startswith(PREFIX):
        return text
    name = text.removeprefix(PREFIX).removesuffix(".yaml")
    if name not in names():
        raise UserError(f"there is no recipe {text!r}", nearest(name, names()), "correct --config")
    return str(FOLDER / f"{name}.yaml")
