"""Reductions and sets of ranks, as Horovod's scripts name them; `hvdtrain.job` registers a set."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from hvdtrain.core.errors import WrongValue

Average, Sum, Adasum, Min, Max, Product = range(6)
"""Reductions, numbered as Horovod's are."""
KINDS = {Average: "sum", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}
"""Reduction -> what a transport calls it; an average is a sum, divided."""

SHARED_HOME = dict.fromkeys("Adasum Average Max Min ProcessSet Product Sum global_process_set".split(), __name__) | \
    dict.fromkeys("add_process_set cross_rank cross_size get_process_set_ids_and_ranks is_homogeneous is_initialized "
                  "local_rank local_size mpi_threads_supported rank remove_process_set shutdown size start_timeline "
                  "stop_timeline".split(), "hvdtrain.job")
"""Name that `hvdtrain.torch` and `hvdtrain.tensorflow` both have as it is -> its module."""


class ProcessSet:
    """Some ranks of the job, given as numbers or as an mpi4py communicator over them; Horovod's, without Horovod.

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
        """Return the number of ranks in the set; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks or [])

    def rank(self) -> int | None:
        """Return this process's place within the set, None while it is not registered; `ValueError` outside of it."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {self.here} is not part of {self}")
        return (self.ranks or []).index(self.here)

    def included(self) -> bool | None:
        """Return whether this process is in the set; None while that is not known."""
        if self.ranks is None or self.process_set_id is None:
            return None
        return self.here in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks of the job."""
global_process_set.process_set_id = 0


def reduction(op: int | None, average: bool | None) -> int:
    """Return the reduction of ``op`` and the old ``average``; `ValueError` if both are given."""
    if average is None:
        if op is not None and op not in KINDS:
            raise ValueError(f"op is {op!r}; expected hvd.Average, Sum, Adasum, Min, Max or Product")
        return Average if op is None else op
    if op is not None:
        raise ValueError("average is the old form of op; pass op alone")
    warnings.warn("average is the old form of op=hvd.Average and op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def check_ranks(process_set: ProcessSet, size: int) -> None:
    """Raise `UserError` for ranks that the job does not have, or none."""
    ranks = process_set.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= size or len(set(ranks)) < len(ranks):
        raise WrongValue(f"a process set of ranks {ranks} in a job of {size}", f"different ranks from 0 to {size - 1}",
                         "use ranks of the job, or start more ranks")
