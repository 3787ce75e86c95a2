"""The final weights of a model that is cut over ranks, as one file that no rank ever holds the content of.

Owns who sends what: each array comes from the lowest rank that has it, in pieces, and rank 0 writes each as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import weights
from hvdtrain.checkpoint.adapters import Held
from hvdtrain.checkpoint.contents import check_shards, held_by
from hvdtrain.checkpoint.copies import view
from hvdtrain.checkpoint.stream import Stream, head, in_order
from hvdtrain.checkpoint.tensors import Spec, layout
from hvdtrain.checkpoint.transfer import arriving
from hvdtrain.cluster.exit import agreed
from hvdtrain.faults.finite import trained
from hvdtrain.protocols.state import Head, Shard
from hvdtrain.run import Run

NATIVE = {"torch": "model.pt", "tensorflow": "model.keras"}
"""What a whole model is written as besides, by framework."""


def write(run: Run, directory: Path, guarded: Callable[[], AbstractContextManager[None]]) -> list[str]:
    """Write the weights into ``directory``, which rank 0 sees, and say what is left out; return the files' names.

    Collective. ``guarded``: makes an error of the disk a `UserError`, which is raised on every rank, as is that of
    weights which are not finite.
    """
    with run.parts.state.final():
        _write(run, directory, guarded)
    run.notes += filter(None, [left_out(run.spec.framework)])
    return [weights.FILE]


def _write(run: Run, directory: Path, guarded: Callable[[], AbstractContextManager[None]]) -> None:
    control, framework = run.control, run.spec.framework
    own = agreed(control, lambda: _weights(run), "export")
    every = [Head(*row) for rows in control.gather([tuple(head(one)) for one in own]) for row in rows]
    places, codes = weights.named({one.name: Spec(np.dtype(one.dtype), one.shape) for one in every}, framework)
    names = {place: name for name, place in places.items()}
    own = in_order(replace(one, name=names[one.name]) for one in own)
    heads_P = [[Head(*row) for row in rows] for rows in control.gather([tuple(head(one)) for one in own])]
    content = Stream(heads_P, arriving(control, heads_P, own), {})

    def put() -> None:
        try:
            if control.rank == 0:
                plan = layout(content.specs()["model"], "model", codes)
                with guarded():
                    weights.put(plan, content.blocks("model", plan.names), directory / weights.FILE)
        finally:
            content.drain()  # a rank that has begun to send sends all

    agreed(control, put, "export")


def left_out(framework: str) -> str:
    """Return in words what a whole model would be written as besides, and how to have it; "" for nothing."""
    native = NATIVE.get(framework, "")
    return native and (f"{native} is left out: no rank holds all of the model. Load model.safetensors into the whole "
                       "model, on a machine that has the memory for it, and save that")


def _weights(run: Run) -> list[Shard]:
    """This rank's part of the model, as views."""
    holders = held_by(run)
    assert holders is not None
    held = Held(run.control.rank, holders, run.parts.state, among=False)
    shards = in_order(one for one in held.shards(view) if one.group == "model")
    check_shards(shards, trained(run.parts))
    return shards
