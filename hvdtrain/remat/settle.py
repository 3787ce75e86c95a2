"""Choose a run's blocks to recompute, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError
from hvdtrain.remat.names import wanted

if TYPE_CHECKING:
    from hvdtrain.run import Run


def settle(run: Run, backend: Any) -> None:
    """Have the model of this rank recompute the blocks that the configuration asks for. Not collective.

    Errors: `UserError` for names that the model does not have, and for a block that cannot be recomputed exactly.
    """
    text, remat = run.config.remat, run.parts.remat
    names = wanted(text, [] if remat is None else remat.names)
    if remat is None or not names:
        return
    for name in names:
        why = remat.refusal(name)
        if why:
            raise UserError(f"remat: block {name} cannot be recomputed exactly: {why}", "blocks without that",
                            "leave it out of remat, or set remat: auto, which does")
    remat.choose(names)
