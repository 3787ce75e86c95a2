"""What SOURCE and TARGET of a conversion are: a run's checkpoint, or a file of weights, known by its name.

Owns the kinds of files and the refusals that need no framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint import CheckpointStore, inspect
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.core.errors import UserError

ENDINGS = {".weights.h5": "weights", ".keras": "keras", ".safetensors": "safetensors", ".pt": "state_dict",
           ".pth": "state_dict"}
FRAMEWORKS = {"weights": "tensorflow", "keras": "tensorflow", "state_dict": "torch"}
"""The framework that a kind of file belongs to; .safetensors and checkpoints are of either."""

_KINDS = "a run's directory, one of its checkpoints, or a file that ends in " + ", ".join(ENDINGS)


@dataclass(frozen=True)
class Place:
    """A path and its kind: "checkpoint" (of a run), "safetensors", "state_dict", "keras" or "weights"."""

    path: Path
    kind: str

    def require(self, framework: str, key: str) -> None:
        """Raise `UserError` where this kind of file is not one of ``framework``; ``key`` names the model's option."""
        own = FRAMEWORKS.get(self.kind, framework)
        if own != framework:
            raise UserError(f"{self.path} is a file of {own} and {key} names a {framework} model", f"a {own} model",
                            f"correct {key}, or the ending of the file")


def kind_of_file(path: Path) -> str:
    """The kind that a file's ending says; "" for none."""
    return next((kind for ending, kind in ENDINGS.items() if path.name.endswith(ending)), "")


def source_of(text: str, log: Callable[[str], None]) -> Place:
    """What is to be converted; of a run's directory its newest whole checkpoint, the damaged ones told to ``log``.

    Errors: `UserError` for a path that is not there or holds no such thing.
    """
    path = Path(text)
    if not path.exists():
        raise UserError(f"there is no {text}", _KINDS, "correct SOURCE")
    if path.is_dir():
        for root in RunDirectory(path).roots:
            if root.is_dir() and any(root.glob("step-*")):
                found = CheckpointStore(root, 1).latest_whole(log)
                if found is None:
                    raise UserError(f"{root} holds no whole checkpoint", "at least one that verifies", "correct SOURCE")
                return Place(found[0], "checkpoint")
        inspect(path)
        return Place(path, "checkpoint")
    kind = kind_of_file(path)
    if not kind:
        raise UserError(f"SOURCE is {text}", _KINDS, "correct SOURCE, or save it as one of these")
    return Place(path, kind)


def target_of(text: str) -> Place:
    """What is to be made: a file by its ending, else a run's directory. `UserError` if it is there already."""
    path = Path(os.path.abspath(text))
    kind = kind_of_file(path)
    if os.path.lexists(path) and not (not kind and path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{text} is there already", "a new name, so that nothing is overwritten",
                        "choose another TARGET")
    if not kind and path.suffix in (".h5", ".hdf5", ".pb", ".onnx", ".bin", ".ckpt", ".npz"):
        raise UserError(f"TARGET is {text}", "a new directory, or a file that ends in " + ", ".join(ENDINGS),
                        "correct TARGET")
    return Place(path, kind or "checkpoint")
