"""Groups of ranks and the layout of a model on them: replicas, each a list of ranks, and the blocks of each rank.

Owns `Group`, with the names of collectives (law 5), `Mesh`, known before anything is built, and `Layout`, known once
the model is partitioned. Pure: nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hvdtrain.core.errors import UserError, count


@dataclass(frozen=True)
class Before:
    """Partition of the checkpoint being resumed: ranks of each replica, first block of each chunk, block names."""

    copies: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """``copies[c][i]``: the rank that is at place ``i`` of copy ``c`` of the model; ``rank``: this process.

    Every rank is in one copy. A copy of several ranks is a pipeline, and its places are the order in which samples pass
    them; a copy may be deeper than another. What is fed (`copy`) does not depend on the order of the places.
    """

    copies: tuple[tuple[int, ...], ...]
    rank: int
    before: Before | None = None
    """What a run continues with: the same cut has the same bits, where it still fits."""

    def __post_init__(self) -> None:
        ranks = sorted(r for copy in self.copies for r in copy)
        assert ranks == list(range(len(ranks))), f"replicas {self.copies} do not hold each rank once"

    @classmethod
    def of(cls, depths: Sequence[int], rank: int) -> Mesh:
        """Return copies of the given depths, of ranks in order: depths [1, 2] give ((0,), (1, 2))."""
        ends = list(accumulate(depths))
        return cls(tuple(tuple(range(end - n, end)) for n, end in zip(depths, ends)), rank)

    @property
    def copy(self) -> int:
        return self.copy_of(self.rank)

    @property
    def place(self) -> int:
        return self.copies[self.copy].index(self.rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's copy, by place."""
        return self.copies[self.copy]

    @property
    def depth(self) -> int:
        """Number of ranks of this rank's copy."""
        return len(self.ranks)

    @property
    def deepest(self) -> int:
        """Number of ranks of the deepest copy; 1 where no model is partitioned over ranks."""
        return max(map(len, self.copies))

    @property
    def leads(self) -> tuple[int, ...]:
        """The lowest rank of each copy, which speaks for it where each sample is to count once."""
        return tuple(min(copy) for copy in self.copies)

    @property
    def leading(self) -> bool:
        """Return whether this rank represents its replica."""
        return self.rank == min(self.ranks)

    def copy_of(self, rank: int) -> int:
        return next(c for c, copy in enumerate(self.copies) if rank in copy)

    def ordered(self, copies: Sequence[Sequence[int]]) -> Mesh:
        """Return the same copies with their ranks at other places."""
        assert [sorted(copy) for copy in copies] == [sorted(copy) for copy in self.copies]
        return replace(self, copies=tuple(tuple(copy) for copy in copies))


@dataclass(frozen=True)
class Layout:
    """The blocks of a model on the ranks of ``mesh``.

    ``names``: of the model's blocks, in the order of its forward pass. ``starts[c]``: the first block of each chunk of
    copy ``c``, ascending from 0. Chunk k of a copy of p ranks is at place k % p: where a copy has as many chunks as
    ranks each rank has one, with more (interleaved) a rank has every p-th.
    """

    mesh: Mesh
    names: tuple[str, ...]
    starts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for copy, starts in zip(self.mesh.copies, self.starts, strict=True):
            assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(self.names), starts
            assert len(starts) % len(copy) == 0, f"{len(starts)} chunks on {len(copy)} ranks"

    def chunks(self, copy: int | None = None) -> list[range]:
        """Return the block numbers of each chunk of a copy, this rank's own by default."""
        starts = self.starts[self.mesh.copy if copy is None else copy]
        return [range(a, b) for a, b in zip(starts, (*starts[1:], len(self.names)))]

    @property
    def mine(self) -> list[range]:
        """The chunks of this rank, in the order of the forward pass."""
        return self.chunks()[self.mesh.place::self.mesh.depth]

    @property
    def blocks(self) -> list[int]:
        """The block numbers of this rank, ascending."""
        return [b for chunk in self.mine for b in chunk]

    @property
    def first(self) -> bool:
        """Return whether this rank has the model's first block."""
        return self.mesh.place == 0

    @property
    def last(self) -> bool:
        """Return whether this rank has the model's last block, and so the loss."""
        return self.mesh.place == self.mesh.depth - 1

    def holder(self, block: int, copy: int) -> int:
        """Return the rank of ``copy`` that has ``block``."""
        k = next(k for k, chunk in enumerate(self.chunks(copy)) if block in chunk)
        return self.mesh.copies[copy][k % len(self.mesh.copies[copy])]

    def holders(self, block: int) -> tuple[int, ...]:
        """Return the ranks that have ``block``, one of each copy, ascending."""
        return tuple(sorted(self.holder(block, copy) for copy in range(len(self.mesh.copies))))

    def owner(self, block: int) -> int:
        """Return the rank that speaks for ``block`` where it is to be told once: its lowest holder."""
        return self.holders(block)[0]

    def groups(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """All groups of ranks that hold the same blocks, each with those blocks, in one order on every rank.

        By the last block of each, the model's last first. Where every rank enters the collectives of its groups in
        this order, none waits for one that waits for it.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for block in reversed(range(len(self.names))):
            found.setdefault(self.holders(block), []).append(block)
        return {ranks: tuple(sorted(blocks)) for ranks, blocks in found.items()}

    def replicas(self) -> list[tuple[Group, tuple[int, ...]]]:
        """Return this rank's blocks by group of holders: (group, block numbers), in the order of `groups`."""
        return [(Group(ranks, self.mesh.rank), blocks) for ranks, blocks in self.groups().items()
                if self.mesh.rank in ranks]


def depths_of(stages: int, depths: Sequence[int], size: int) -> list[int]:
    """Return each copy's depth in a job of ``size`` ranks, by ``depths`` or ``stages``; `UserError` if unfit."""
    if depths:
        if sum(depths) != size:
            raise UserError(f"pipeline.depths {list(depths)} make up {count(sum(depths), 'rank')} in a job of {size}",
                            "depths that add up to the number of ranks", f"start {count(sum(depths), 'rank')}, or "
                            "correct them")
        return list(depths)
    if size % stages:
        raise UserError(f"pipeline.stages is {stages} in a job of {count(size, 'rank')}",
                        f"a multiple of {count(stages, 'rank')}, or "
                        "pipeline.depths for replicas of different depth",
                        f"start {count(size // stages * stages or stages, 'rank')}")
    return [stages] * (size // stages)


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
        """Return the name of a collective of this group: ranks 0, 1, 2, 5 and "grad.0" give "g0-2,5.grad.0"."""
        return f"g{spans(self.ranks)}.{tag}"


def world(size: int, rank: int) -> Group:
    """Return the group of all ranks."""
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
