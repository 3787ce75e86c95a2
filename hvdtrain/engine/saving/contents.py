"""What belongs into a checkpoint of a run, and what is never written.

Moves nothing and writes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from hvdtrain.checkpoint.adapters import (
    Holders,
    PartitionedModel,
    RankState,
    Replicated,
    SplitReplicated,
    WithCallbacks,
    ZeroState,
    holders_of,
    part,
    state_key_of,
)
from hvdtrain.checkpoint.manifest import encode_state
from hvdtrain.config import run_length
from hvdtrain.core import __version__
from hvdtrain.core.protocols.run import Given, Stateful
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.engine.average import WithAverage
from hvdtrain.engine.run import Run


def given_by(run: Run, holders: Holders | None) -> tuple[Given, Given]:
    """Return what this rank gives to a checkpoint: of the state of the model and its optimizer, and its own.

    ``holders``: of a model that is cut over ranks (`held_by`). Copies that another data_parallel keeps are one model
    only where they meet, their optimizers' state maybe never: parts of several would be no model at all, so the first
    copy gives the whole of its own.
    """
    control, state = run.control, run.parts.state
    shared, own = parts_of(run, holders)
    if run.config.checkpoint.layout == "sharded" and run.dp.copies_equal:
        cut: Given = SplitReplicated(partial(part, rank=control.rank, size=control.size), state.state)
        if holders is not None:
            cut = PartitionedModel(control.rank, holders, state, among=True)
        return _beside(run, ZeroState(cut, state) if run.dp.divides_state else cut), own
    return shared, own


def parts_of(run: Run, holders: Holders | None) -> tuple[Stateful, Stateful]:
    """Return the state of the model and its optimizer, and this rank's own."""
    state, rank = run.parts.state, run.control.rank
    own = RankState(rank, run.rank_state, run.load_rank)
    if holders is not None:
        held = PartitionedModel(rank, holders, state, among=False)
        return _beside(run, ZeroState(held, state, holders.mine) if run.dp.divides_state else held), own
    whole = Replicated(rank, state.state, state.load)
    return _beside(run, ZeroState(whole, state) if run.dp.divides_state else whole), own


def _beside(run: Run, shared: Any) -> Any:
    """``shared`` with the averages of the weights and the arrays of callbacks beside it, where the run has such."""
    shared = shared if run.average is None else WithAverage(shared, run.average)
    callbacks = [c for c in run.callbacks if hasattr(c, "arrays")]
    return WithCallbacks(shared, run.control.rank, callbacks) if callbacks else shared


def held_by(run: Run) -> Holders | None:
    """Return which rank has what of a model that is cut over ranks, None of a whole one. Collective."""
    if run.parts.layout is None:
        return None
    return holders_of(run.control, run.parts.state, [spec.name for spec in run.parts.params.specs])


def meta_of(run: Run, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's small state at this very step, JSON-able; nothing that the run does later changes it."""
    sharded = {"layout": "sharded"} if run.config.checkpoint.layout == "sharded" else {}
    return {
        "hvdtrain": __version__, "framework": run.spec.framework, "model": run.spec.name,
        "world_size": run.control.size, "cursor": run.state.cursor.to_dict(), "step_rest": copy.deepcopy(dict(rest)),
        "config": json_able(run.config.to_dict()), "schedule": schedule_of(run, run.state.cursor),
        "samples": run.feed.samples,
        "callbacks": callback_states(run), **sharded, **_cut_of(run),
    }


def callback_states(run: Run) -> list[list[Any]]:
    """Return (`state_key`, state as JSON) of each callback. `CheckpointError` for a state of another type."""
    return [[name, encode_state(c.state_dict(), f"callback {name}: state_dict()")]
            for c in run.callbacks for name in [state_key_of(c)]]


def schedule_of(run: Run, at: Cursor) -> dict[str, Any]:
    """Return the schedule with the arguments that follow from the run, and the run's length, at ``at``; JSON-able."""
    config, given = run.spelled, (run.feed.steps_per_epoch, at, run.feed.steps_left(at))
    own = run_length.own_of(run.parts.optimizer.own_schedule(), run_length.updates(config, *given), config.epochs)
    kept: dict[str, Any] = json_able(run_length.kept(config.schedule, run_length.length(config, *given), own))
    return kept


def _cut_of(run: Run) -> dict[str, Any]:
    """Where the model was cut over ranks; nothing of a whole one."""
    layout = run.parts.layout
    if layout is None:
        return {}
    return {"pipeline": {"copies": [list(copy) for copy in layout.mesh.copies], "blocks": list(layout.names),
                         "starts": [list(starts) for starts in layout.starts],
                         "devices": [device.name for device in run.devices]}}


def json_able(value: Any) -> Any:
    """Return ``value`` with the repr in place of what JSON cannot hold, such as an object in a free-form ``args``."""
    if isinstance(value, dict):
        return {str(k): json_able(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_able(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
