"""Follow what a user's callbacks change of the model while it trains, on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError, count, some
from hvdtrain.engine.run import Run
from hvdtrain.parallel.data_parallel.reducing import UnusedParameters
from hvdtrain.planning.freezing import unfreezing


def may_change(run: Run) -> bool:
    """Return whether the run unfreezes, or any rank has callbacks that are not the trainer's own; collective."""
    own = all(type(callback).__module__.startswith("hvdtrain.engine.callbacks.") for callback in run.callbacks)
    return run.control.agree(run.parts.facts is not None and (not own or bool(unfreezing(run.config.freeze))))


def follow(run: Run) -> None:
    """Go along with what callbacks changed of the model since the step before; collective where ``watched``.

    Before a fit's first step (``starts``) it looks in any case, for what changed since the run was assembled.
    Errors: `UserError` on every rank for changes on some ranks only, and for changes that the run cannot follow.
    """
    facts, looks = run.parts.facts, run.services.changes
    starts, looks.starts = looks.starts, False
    if facts is None or not (looks.watched or starts):
        return
    changes = facts.changes()
    if not run.control.agree(bool(changes)):
        return
    rows = run.control.gather(changes)
    if run.parts.layout is not None:
        found = next(row for row in rows if row)
        raise UserError(f"a callback changed a model that is partitioned over ranks: {some(found)}",
                        "the model as it was at the start", "make the change before the run, or leave pipeline out")
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if other is not None:
        raise UserError(f"a callback changed the model on some ranks only: {some(rows[0]) or 'no change'} on rank 0, "
                        f"{some(rows[other]) or 'no change'} on rank {other}", "the same change on every rank",
                        'set where = "all" in the callback, and decide by values that all ranks have')
    begin = agreed(run.control, lambda: facts.follow(changes, run.note), "model")
    if any(change.endswith(("evaluation mode", "is frozen")) for change in changes):
        run.written.sync(run)  # normalisation may compute with its running statistics from now on, which ranks made
    if begin is not None:
        _extend(run, begin)
        names = [spec.name for spec in run.parts.params.specs[begin:]]
        run.note(f"step {run.state.cursor.step}: {count(len(names), 'unfrozen parameter')} "
                 f"({some(names)}) join training")


def check_late(run: Run, late: str) -> None:
    """Raise `UserError` on all ranks for ``late``, a parameter unfrozen while a step computed; collective."""
    name = next(name for name in run.control.gather(late) if name)
    raise UserError(f"parameter {name} was unfrozen in the model's forward pass or task: its gradient of this step was "
                    "not exchanged", "requires_grad that changes only between steps",
                    'set it in a callback with where = "all", at step_start or before')


def resume(run: Run, rest: Mapping[str, Any]) -> None:
    """Bring the model to what a checkpoint's run had made of it, before the checkpoint is loaded; collective.

    ``rest``: the JSON-able part of the checkpoint, the same on every rank.
    """
    facts = run.parts.facts
    if facts is None or run.parts.layout is not None:
        return
    for names in agreed(run.control, lambda: facts.resume(rest), "restore"):
        first = agreed(run.control, lambda: facts.take_in(names), "restore")
        if first is not None:
            _extend(run, first)


def _extend(run: Run, first: int) -> None:
    """Exchange, update, average and save the parameters from index ``first`` on too."""
    parts, facts = run.parts, run.parts.facts
    assert facts is not None

    def extend() -> None:
        facts.extend(first, run.dp.extend(parts.params.specs, first))
        parts.stage.connect(run.dp)
        if run.average is not None:
            run.average.extend(first)

    agreed(run.control, extend, "exchange")
    run.unused = UnusedParameters(parts, run.control)
