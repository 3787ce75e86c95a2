"""A YAML text that a user wrote, as plain data: strict, bounded, and never code.

Owns reading and writing of YAML. Knows no key: `hvdtrain.commands.train` says which names a recipe may hold. Refused
with a `UserError`: what is not YAML or not UTF-8, a key twice in one mapping, tags, more than one document, and texts
that are small on disk but huge in memory (aliases of aliases) or nested beyond reason.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvdtrain import recipes
from hvdtrain.core.errors import UserError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 50
MAX_VALUES = 20_000
"""Limits of a text (bytes), of its nesting, and of its values after aliases are written out."""

_FLOAT = re.compile(r"""^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+
                        |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$""", re.X)
"""YAML 1.2's floats: PyYAML alone reads 1e-3, without a point, as text."""


def read(path: str, option: str = "--config") -> dict[str, Any]:
    """Return the mapping in ``path`` or the recipe ``hvdtrain:NAME``, named by ``option``, or `UserError`."""
    file = Path(recipes.path_of(path))
    try:
        if not file.exists():
            raise UserError(f"there is no file {path!r}", "a YAML file", f"correct {option}")
        if not file.is_file():
            raise UserError(f"{path!r} is not a file", "a YAML file", f"correct {option}")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path!r} cannot be read: {reason}", "a readable YAML file", f"correct {option}") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path!r} has over {MAX_BYTES // 1024} KiB", "a recipe of a few keys", f"correct {option}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path!r} is not a text file in UTF-8", "a YAML file", f"correct {option}") from None
    found = load(text, repr(path))
    if found is None:
        raise UserError(f"{path!r} is empty", "a mapping such as lr: 0.01",
                        f"write a key into it, or leave {option} out")
    if not isinstance(found, dict):
        raise UserError(f"{path!r} holds a {type(found).__name__}", "a mapping such as lr: 0.01",
                        "write one key: value a line")
    return found


def load(text: str, where: str) -> Any:
    """Return the plain data that YAML ``text`` means; `UserError` names ``where`` it came from."""
    import yaml

    loader, _ = _yaml()
    try:
        _check(text, where)
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}{place}: {' '.join((error.problem or error.context or 'not YAML').split())}", "YAML",
                        "correct it there") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{where} cannot be read as YAML: {' '.join(str(error).split())[:100]}", "YAML",
                        "correct it") from None


def dump(data: Any) -> str:
    """YAML of plain data that `load` reads back as it is."""
    import yaml

    _, dumper = _yaml()
    return yaml.dump(data, Dumper=dumper, sort_keys=False)  # ASCII: PyYAML writes some line ends of Unicode unescaped


def _check(text: str, where: str) -> None:
    """Look at the text's parts before anything is built from them."""
    import yaml

    depth = deepest = values = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        deepest, values = max(deepest, depth), values + 1
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if deepest > MAX_DEPTH:
            raise UserError(f"{where} nests values {MAX_DEPTH} deep and more", "a flat recipe", "correct it")
        if getattr(event, "tag", None) not in (None, "!"):
            raise UserError(f"{where}, line {event.start_mark.line + 1}: the tag {event.tag}",
                            "plain values, without tags", "remove the tag")


@lru_cache(maxsize=1)
def _yaml() -> tuple[Any, Any]:
    """Return a loader and a dumper of plain data, which agree on what a float looks like."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key twice and what grows when aliases are written out."""

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if node is not None and _written_out(node, {}, set()) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES} values")
            return node

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Writes shared objects out instead of as aliases."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    for cls in (Loader, Dumper):
        cls.yaml_implicit_resolvers = {  # type: ignore[attr-defined]
            first: [(tag, regexp) for tag, regexp in rules if tag.rpartition(":")[2] not in ("float", "timestamp")]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()}
        first_letters = list("-+0123456789.")
        cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, first_letters)  # type: ignore[attr-defined]
    return Loader, Dumper


def _written_out(node: Any, sizes: dict[int, int], above: set[int]) -> int:
    """Values below ``node`` if every alias were written out; refuses a key twice and a value that holds itself."""
    from yaml.constructor import ConstructorError

    if isinstance(node.value, str):
        return 1
    if id(node) in above:
        raise ConstructorError(None, None, "a value that holds itself", node.start_mark)
    if id(node) not in sizes:
        above.add(id(node))
        seen = set()
        for key in (pair[0] for pair in node.value if isinstance(pair, tuple)):
            if not isinstance(key.value, str):
                raise ConstructorError(None, None, "a key that is no text", key.start_mark)
            if (key.tag, key.value) in seen:
                raise ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add((key.tag, key.value))
        parts = [part[1] if isinstance(part, tuple) else part for part in node.value]
        sizes[id(node)] = 1 + sum(_written_out(part, sizes, above) for part in parts)
        above.discard(id(node))
    return sizes[id(node)]
