"""Plain single-device PyTorch models, each the twin of the file of the same name in `tf_models`.

Owns: the checks of arguments that the model files share. Does not own: training, the losses a run configures,
anything distributed. No framework is imported here; `torch_models.cnn` and its siblings import torch.

Every model file offers `build(**args)`, `blocks(model)` and `example(B)`; one whose loss is not a mean over
samples (gpt) also offers `task(model, batch)` and `weight(batch)`.
"""
from __future__ import annotations

from typing import Any


def require(ok: bool, name: str, got: Any, expected: str) -> None:
    """Raise ValueError in the form "name: got ...; expected ..." unless `ok`."""
    if not ok:
        raise ValueError(f"{name}: got {got!r}; expected {expected}")


def is_count(value: Any) -> bool:
    """Return whether `value` is a whole number of at least 1 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def counts(name: str, value: Any, lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return `value`, a non-empty list or tuple of whole numbers >= 1, as a tuple.

    `lengths`: the numbers of entries allowed; empty allows any but zero. Raises ValueError otherwise.
    """
    how_many = " or ".join(map(str, lengths)) or "one or more"
    ok = (isinstance(value, (list, tuple)) and len(value) > 0 and all(is_count(item) for item in value)
          and (not lengths or len(value) in lengths))
    require(ok, name, value, f"a list of {how_many} whole numbers, each at least 1")
    return tuple(value)
