"""Sets of ranks among which collectives run: Horovod's `ProcessSet`, without needing Horovod.

Owns what a set is and whether this rank is in it. `hvdtrain.tensorflow.basics` registers sets and keeps their wires.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ProcessSet:
    """Some ranks of the job, given as numbers or as an mpi4py communicator over them.

    Becomes usable when it is handed to `init` or `add_process_set`; until then ``process_set_id`` is None. The root
    of a broadcast within a set is still counted over all ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            own = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
            if not isinstance(ranks_or_comm, Iterable) or any(not isinstance(r, int) for r in own):
                raise ValueError(f"ProcessSet got {ranks_or_comm!r}; expected a list of rank numbers, or an mpi4py "
                                 "communicator")
            self.ranks = sorted(own)
        self.here = 0

    def size(self) -> int | None:
        """Number of ranks in the set; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks or [])

    def rank(self) -> int | None:
        """This process's place within the set, None while it is not registered; `ValueError` where it is not in it."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {self.here} is not part of {self}")
        return (self.ranks or []).index(self.here)

    def included(self) -> bool | None:
        """Whether this process is in the set; None while that is not known."""
        if self.ranks is None or self.process_set_id is None:
            return None
        return self.here in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks of the job."""
global_process_set.process_set_id = 0
