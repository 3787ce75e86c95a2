"""What a run tells of a model that is cut over ranks: facts for records, words for notes and the summary. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.config import Config
from hvdtrain.core.mesh import Layout

MOST_SHOWN = 3
"""Unlike cuts that the summary names."""


def facts(layout: Layout | None, config: Config) -> dict[str, Any] | None:
    """Return who has what, JSON-able: the ranks of each copy by stage, and the blocks of each stage; None: of a whole
    model."""
    if layout is None:
        return None
    copies = range(len(layout.mesh.copies))
    return {"order": config.pipeline.order, "copies": [list(ranks) for ranks in layout.mesh.copies],
            "blocks": [stages(layout, copy) for copy in copies]}


def stages(layout: Layout, copy: int) -> list[str]:
    """Return the blocks of each stage of a copy, in words: the first and the last of each run of them."""
    depth, chunks = len(layout.mesh.copies[copy]), layout.chunks(copy)
    return [", ".join(_run(layout.names, chunk) for chunk in chunks[place::depth]) for place in range(depth)]


def role(layout: Layout | None) -> str:
    """Return which stage this rank is; "" where it has the whole model."""
    if layout is None or layout.mesh.depth == 1:
        return ""
    mesh = layout.mesh
    copy = f" of copy {mesh.copy + 1}" if len(mesh.copies) > 1 else ""
    return f"stage {mesh.place + 1} of {mesh.depth}{copy} ({stages(layout, mesh.copy)[mesh.place]})"


def _run(names: Sequence[str], chunk: range) -> str:
    first, last = names[chunk.start], names[chunk.stop - 1]
    return first if len(chunk) == 1 else f"{first}..{last}"


def ranks_of(copies: Sequence[Sequence[int]]) -> str:
    """Return how many ranks a run has and, where its model is cut over them, in what copies.

    >>> ranks_of([[0], [1]]), ranks_of([[0, 1], [2, 3]]), ranks_of([[0], [1, 2]]), ranks_of([[0, 1]])
    ('2', '4 in 2 pipelines of 2', '3 in pipelines of 1 and 2', '2 in one pipeline')
    """
    depths = [len(copy) for copy in copies]
    if max(depths) == 1:
        return str(len(depths))
    if len(depths) == 1:
        return f"{depths[0]} in one pipeline"
    if len(set(depths)) == 1:
        return f"{sum(depths)} in {len(depths)} pipelines of {depths[0]}"
    return f"{sum(depths)} in pipelines of {', '.join(map(str, depths[:-1]))} and {depths[-1]}"


def summary(found: dict[str, Any]) -> str:
    """Return the summary's row from `facts`."""
    cuts = list(dict.fromkeys(" | ".join(blocks) for blocks in found["blocks"] if len(blocks) > 1))
    more = f"; and {len(cuts) - MOST_SHOWN} other cuts" if len(cuts) > MOST_SHOWN else ""
    return f"{found['order']}, ranks {ranks_of(found['copies'])}: " + "; ".join(cuts[:MOST_SHOWN]) + more
