"""The reference computes in the types its model was made with."""

from __future__ import annotations

from hvdtrain.core.errors import UserError


def check(own: str) -> None:
    """Raise `UserError` for anything but "fp32", which stands for the model's own types."""
    if own != "fp32":
        raise UserError(f"precision {own} with the numpy backend", "fp32, the model's own types", "set precision: fp32")
