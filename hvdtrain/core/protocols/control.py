"""The control plane's seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.core.protocols.wire import Carrier, Channel


class Control(Protocol):
    """Moves small Python objects and decisions between the ranks of a job.

    Every method but `abort` is collective: all ranks call it in the same order. Each wait is bounded by the control's
    ``timeout_s``; when it runs out `WaitTimeout` names the wait. Objects are pickled, inside the job only. ``notes``:
    what its start found that a user should know.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    timeout_s: float
    notes: list[str]

    def bcast(self, obj: Any) -> Any:
        """Return rank 0's ``obj`` on every rank."""
        ...

    def gather(self, obj: Any) -> list[Any]:
        """Return the list of every rank's ``obj``, by rank, on every rank."""
        ...

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        """Overwrite ``target``'s ``arrays`` with ``source``'s, or every rank's where that is None; no pickling.

        ``arrays``: contiguous (n,), as many and as long on both; elsewhere not looked at. Together they should be
        small (`hvdtrain.checkpoint.stream.PIECE_BYTES`): without MPI all ranks receive them, and all but
        ``target`` drop them.
        """
        ...

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        """Return the float64[k] sum over ranks, the same bits on every rank."""
        ...

    def agree(self, flag: bool) -> bool:
        """Return True on every rank if any rank's ``flag`` is true (law 6)."""
        ...

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        """Return once every rank is here; ``tag`` names the place in the error of a wait that ran out."""
        ...

    def channel(self, longest_sleep_s: float = 200e-6) -> Channel | None:
        """Open a channel between these ranks that threads may use; None where nothing here carries one. Collective.

        ``longest_sleep_s``: how long a wait in it sleeps between two looks at most.
        """
        ...

    def carrier(self) -> Carrier | None:
        """Open what carries a pipeline's messages between these ranks; None where nothing here does. Collective."""
        ...

    def abort(self, code: int) -> None:
        """End every rank at once with exit status ``code``; does not return in a job of several ranks."""
        ...
