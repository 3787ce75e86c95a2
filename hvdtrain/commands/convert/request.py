"""What a conversion is asked to do, and which model is the twin of which where the user does not say.

Owns the request and its JSON form, in which a child gets it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import inspect
from hvdtrain.commands.convert.places import Place
from hvdtrain.core.errors import UserError

TOLERANCE = 1e-5
"""Largest difference of outputs that passes, as a part of the largest output."""

_TWINS = {"torch_models.": "tf_models.", "tf_models.": "torch_models."}


@dataclass(frozen=True)
class Request:
    """A conversion of ``source``, made with ``model``, to ``target``, made with ``twin``.

    ``model``, ``twin``: module:callable; ``model_args``, ``twin_args``: their keyword arguments. ``pairs``: torch layer
    -> Keras layer. ``flats``: torch Linear -> the (C, ...) that torch flattens. ``input_shape``: of one sample, where
    the model's file has no example. ``check``: whether outputs are compared, within ``tolerance``.
    """

    source: Place
    target: Place
    model: str = ""
    twin: str = ""
    model_args: dict[str, Any] = field(default_factory=dict)
    twin_args: dict[str, Any] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    flats: dict[str, list[int]] = field(default_factory=dict)
    input_shape: list[int] = field(default_factory=list)
    tolerance: float = TOLERANCE
    check: bool = True

    @property
    def with_state(self) -> bool:
        """Whether the optimizer's state and the run's position are converted too."""
        return self.target.kind == "checkpoint"

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        """Undo `write`."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        for key in ("source", "target"):
            plain[key] = Place(Path(plain[key]["path"]), plain[key]["kind"])
        return cls(**plain)


def completed(request: Request) -> Request:
    """``request`` with what a checkpoint knows of its model, and the twin of a model of this project.

    Errors: `UserError` where either model is not known, or a whole run is asked for and SOURCE is none.
    """
    if request.with_state and request.source.kind != "checkpoint":
        raise UserError(f"{request.source.path} holds weights alone and TARGET {request.target.path} would be a run",
                        "a file as TARGET, or a run's directory as SOURCE", "correct one of them")
    if request.source.kind == "checkpoint":
        meta = inspect(request.source.path).meta
        config = meta.get("config", {})
        known = next((str(name) for name in (config.get("model"), meta.get("model")) if ":" in str(name)), "")
        if request.model in ("", known):
            request = replace(request, model=known, model_args={**config.get("model_args", {}), **request.model_args})
    if not request.model:
        raise UserError("it is not known which model SOURCE is of", "module:callable or path/file.py:callable",
                        "say --model torch_models.cnn:build")
    if not request.twin:
        for mine, other in _TWINS.items():
            if request.model.startswith(mine):
                request = replace(request, twin=other + request.model.removeprefix(mine))
    if not request.twin:
        raise UserError(f"the twin of {request.model} is not known", "module:callable or path/file.py:callable",
                        "say --twin tf_models.cnn:build")
    return replace(request, twin_args={**request.model_args, **request.twin_args})
