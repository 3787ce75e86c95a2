"""Check that a model's weights are finite, and find the ranks that brought in what is not. Numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.core.comparison import Origin, finite, has_nan, spoken
from hvdtrain.core.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Control
    from hvdtrain.core.protocols.types import StepBatch
    from hvdtrain.parallel.parts import ModelParts
    from hvdtrain.parallel.recovery.recovery import Recovery


def check_trainable(parts: ModelParts) -> None:
    """Raise `UserError` naming the first parameter or buffer that is not finite: such a model is not trained on.

    What is not trained may be infinite, as attention masks are, but no NaN. Statistics of BatchNorm hold one after a
    fit that a NaN has stopped: only the update of such a step is not made.
    """
    name = not_finite(parts)
    if name:
        raise UserError(f"{name} of the model is not finite before the first step", "finite weights and statistics",
                        "look at what builds or loads the model, or resume from a checkpoint")


def not_finite(parts: ModelParts) -> str:
    """Return the first trainable parameter that is not finite or other weight that is NaN, by name; "" if none is."""
    names = trained(parts)
    model: Mapping[str, Any] = parts.state.state()[0]["model"]
    return next((spoken(n) for n, a in model.items()
                 if has_nan(n, np.asarray(a)) or spoken(n) in names and not finite(n, np.asarray(a))), "")


def trained(parts: ModelParts) -> set[str]:
    """Return the names of the trainable parameters."""
    return {spoken(spec.name) for spec in parts.params.specs}


def blame(parts: ModelParts, batch: StepBatch, suspects: list[int], control: Control, recovery: Recovery,
          origin: Callable[[], Origin | None] | None = None) -> dict[int, str]:
    """Return the ranks that brought a gradient which is not finite -> where it is first, in words; collective.

    Each of ``suspects`` (ranks; the same list on every rank) computes its part of the step once more, alone. Where the
    weights are not finite any more, that is said instead. {} where nobody finds anything: finite gradients, whose sum
    or exchange overflowed. Where memory lacks for that computation, a rank finds nothing.
    ``origin``: of a model that is cut over ranks, computes the step once more together with the copy's other ranks and
    tells what began on this one; of each copy the rank is named where it began first.
    """
    if parts.layout is not None and origin is not None:
        return _first_of_copies(parts.layout.mesh.copies, control.gather(_began(parts, origin())))
    found = recovery.attempt(lambda: _look(parts, batch))[0] if control.rank in suspects else ""
    return {rank: where for rank, where in enumerate(control.gather(found)) if where}


def _began(parts: ModelParts, found: Origin | None) -> tuple[int, str] | None:
    """When and where on this rank of a pipeline a number was first not finite out of finite ones."""
    parts.buffers.discard()
    weight = not_finite(parts)
    if weight in trained(parts):
        return -1, f"parameter {weight} itself, since an update before"
    return None if found is None else (found.when, found.what)


def _first_of_copies(copies: Sequence[Sequence[int]], rows: Sequence[tuple[int, str] | None]) -> dict[int, str]:
    """The rank of each copy that was the first to find something -> what. Pure.

    >>> _first_of_copies([(0, 1), (2, 3)], [None, None, (5, "x"), (1, "y")])
    {3: 'y'}
    """
    found = {}
    for ranks in copies:
        told = [(row, rank) for rank in ranks if (row := rows[rank]) is not None]
        if told:
            (_, what), rank = min(told)
            found[rank] = what
    return dict(sorted(found.items()))


def _look(parts: ModelParts, batch: StepBatch) -> str:
    """Where this rank's own part of the step is not finite, or ""."""
    names = trained(parts)
    weight = not_finite(parts)
    if weight in names:
        return f"parameter {weight} itself, since an update before"
    name = next(filter(None, (parts.stage.culprit(micro) for micro in batch.micros)), "")
    return f"the gradient of {spoken(name)}" if name else ""
