"""A group of ranks that enter a collective together, and the names their collectives get (law 5).

Owns membership and naming. Does not communicate. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """``ranks``: world ranks of the members, ascending; ``rank``: this process, one of them."""

    ranks: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        assert self.ranks and list(self.ranks) == sorted(set(self.ranks)), f"ranks {self.ranks} are not ascending"
        assert self.rank in self.ranks, f"rank {self.rank} is not in the group {self.ranks}"

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's place among the members, 0 to size - 1."""
        return self.ranks.index(self.rank)

    def name(self, tag: str) -> str:
        """The name of a collective of this group: the same on every member, different for different groups.

        Ranks 0, 1, 2, 5 and "grad.0" give "g0-2,5.grad.0".
        """
        return f"g{spans(self.ranks)}.{tag}"


def world(size: int, rank: int) -> Group:
    """The group of all ranks."""
    return Group(tuple(range(size)), rank)


def spans(ranks: tuple[int, ...]) -> str:
    """Ascending ranks in short: (0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
