"""What this process held when its framework had been imported and nothing of the run was there: the zero of all plans.
"""

from __future__ import annotations

from hvdtrain.cluster.machine import memory

_bytes = 0


def mark(with_model_bytes: int = 0) -> None:
    """Note what is held now; the first call counts. ``with_model_bytes``: of a model that is there already."""
    global _bytes
    _bytes = _bytes or max(0, memory.resident_bytes() - with_model_bytes)


def bytes_() -> int:
    """Return what `mark` has noted; 0 before."""
    return _bytes
