"""Buffers that forward passes write to, BatchNorm's statistics aside, and when ranks reduce them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hvdtrain.backends.model_spec import Spec, called
from hvdtrain.cluster.control import agreed
from hvdtrain.comm.reducer.written import FIRST, GATHER, KINDS, NAMES, module_of
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError, nearest, some
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Collectives, Control, Writable
from hvdtrain.core.protocols.types import Announcement
from hvdtrain.parallel.parts import ModelParts

TOPIC = "written buffers"
BENT = "not independent of the number of ranks: "
"""What a note about an exception to law 2 begins with."""
MOST = 6
"""Buffers that a note names."""


class AnnouncedState(Protocol):
    """State of a run that holds the announced messages."""

    told: list[Announcement]


class BufferedRun(Protocol):
    """Members that are needed of a `hvdtrain.engine.run.Run`, which holds a `WrittenState`."""

    config: Config
    control: Control
    collectives: Collectives
    mesh: Mesh
    spec: Spec
    parts: ModelParts
    updated: bool

    @property
    def state(self) -> AnnouncedState:
        """Return where the run stands."""

    def tell_all(self, topic: str, text: str) -> None:
        """Have every rank hear ``text`` at the next agreement."""

    def note(self, text: str) -> None:
        """Keep a remark for the summary and the log, and print it on rank 0 now."""


class WrittenState:
    """``reductions``: of each written buffer by name, the same on every rank. ``declared``: the model's."""

    def __init__(self) -> None:
        self.reductions: dict[str, str] = {}
        self.declared: dict[str, str] = {}
        self._apart = self._shared = False

    def start(self, run: BufferedRun, found: Iterable[str]) -> None:
        """Read what the model declares; ``found``: what the first samples have written to here. Collective.

        Errors: `UserError` on every rank for a declaration that does not fit the model.
        """
        control, aliases = run.control, run.parts.buffers.aliases()
        given = control.gather(agreed(control, lambda: _given(run.spec, aliases), "buffer_reduction"))

        def checked() -> dict[str, str]:
            if any(one != given[0] for one in given):
                raise UserError("buffer_reduction differs between ranks", "the same on every "
                                "rank", "make it depend on the model alone")
            if run.config.data_parallel.name not in ("replicate", "zero"):
                raise UserError("buffer_reduction with a custom data_parallel, "
                                "whose replicas may differ", "replicate or zero", "leave out buffer_reduction")
            return resolved(given[0], {name: one for row in rows for name, one in row.items()},
                            {name for row in statistics for name in row})

        if any(given):
            rows = control.gather(run.parts.buffers.writable())
            statistics = control.gather(run.parts.buffers.statistics())
            self.declared = agreed(control, checked, "buffer_reduction")
        # Without replicas, or where every rank trains its own model, a buffer has no other value elsewhere.
        self._shared = len(run.mesh.copies) > 1 and run.collectives.name != "null"
        if not self._shared:
            return
        self._know(run, [*self.declared, *(name for names in control.gather(list(found)) for name in names)])

    def caveats(self) -> list[str]:
        return _words(self.reductions, {n: how for n, how in self.declared.items() if n in self.reductions})

    def fresh(self, run: BufferedRun) -> list[str]:
        """Return the buffers that this rank has written to, and that no rank has reported yet."""
        return [n for n in run.parts.buffers.noticed() if n not in self.reductions] if self._shared else []

    def look(self, run: BufferedRun) -> None:
        """Report `fresh` to all ranks, in this step's agreement."""
        fresh = self.fresh(run)
        if fresh:
            run.tell_all(TOPIC, json.dumps(fresh))

    def hear(self, run: BufferedRun) -> None:
        """Take note of what ranks have reported in this step's agreement."""
        if run.state.told:
            self._learn(run, [name for word in run.state.told if word.topic == TOPIC for name in json.loads(word.text)])

    def combine(self, run: BufferedRun, meets: bool) -> None:
        """Reduce what the step has written; collective where the replicas synchronize in it and a buffer is known."""
        if meets and self.reductions:
            # A step whose update was left out has given back what its replicas had before they synchronized.
            run.parts.buffers.combine(self.reductions, force=self._apart or not run.updated)
        self._apart = not meets

    def evaluating(self, run: BufferedRun) -> None:
        """Note the values before an evaluation."""
        if self._shared:
            run.parts.buffers.keep()

    def evaluated(self, run: BufferedRun, samples: int, fresh: Sequence[Sequence[str]]) -> None:
        """Reduce an evaluation's writes, of ``samples`` here, ``fresh`` by rank; collective with known buffers."""
        self._learn(run, [name for names in fresh for name in names])
        if self.reductions:
            run.parts.buffers.combine(self.reductions, samples)

    def sync(self, run: BufferedRun) -> None:
        """Make all buffers equal before they are saved or evaluated; collective."""
        self._learn(run, run.parts.buffers.sync())

    def _learn(self, run: BufferedRun, names: Iterable[str]) -> None:
        fresh = sorted({name for name in names if name not in self.reductions})
        if fresh:
            self._know(run, fresh)
            for text in _words(dict.fromkeys(fresh, FIRST), {}):
                run.note(BENT + text)

    def _know(self, run: BufferedRun, names: Iterable[str]) -> None:
        known = {*self.reductions, *names}
        self.reductions = {name: self.declared.get(name, FIRST) for name in sorted(known)}
        run.parts.buffers.track(list(self.reductions))


def _words(reductions: Mapping[str, str], declared: Mapping[str, str]) -> list[str]:
    found = []
    default = [name for name in reductions if name not in declared]
    if default:
        found.append(f"forward passes write to {some(default, MOST)}, and every rank takes rank 0's values "
                     "after each step; buffer_reduction in the model file declares another reduction")
    if declared:
        words = [f"{name}: {how}" for name, how in declared.items()]
        found.append(f"buffer_reduction {some(words, MOST)} applies after each step; within a step a rank "
                     "reads its own values")
    return found


def _given(spec: Spec, aliases: Mapping[str, str]) -> dict[str, str]:
    """Return what ``buffer_reduction`` of the model's file, or the method of the model, declares; {} without one.

    Errors: `UserError` for what is no such dict, and for two reductions of one buffer by its ``aliases``.
    """
    if spec.buffer_reduction is not None:
        given = called(spec, "buffer_reduction", spec.model)
    else:
        method = getattr(spec.model, "buffer_reduction", None)
        given = method() if callable(method) else {}
    if not (isinstance(given, Mapping) and all(isinstance(x, str) for pair in given.items() for x in pair)):
        raise UserError(f"buffer_reduction returned {given!r}"[:300], f"a dict from a buffer's name to {NAMES}",
                        "correct buffer_reduction")
    found: dict[str, str] = {}
    for name, how in given.items():
        if found.setdefault(aliases.get(name, name), how) != how:
            raise UserError(f"buffer_reduction says {how} for {name!r}, and {found[aliases.get(name, name)]} for the "
                            "same buffer by another name", "one reduction", "leave one of them out")
    return found


def resolved(given: Mapping[str, str], writable: Mapping[str, Writable], statistics: Iterable[str]) -> dict[str, str]:
    """Return ``given`` once it is checked; `UserError` for an unfit name, reduction or dtype. Pure."""
    found: dict[str, str] = {}
    for name, reduction in given.items():
        if name in statistics:
            raise UserError(f"buffer_reduction names {name!r}, a statistic of BatchNorm", "another buffer",
                            "leave it out: ranks average these when the model is evaluated or saved")
        if name not in writable:
            raise UserError(f"buffer_reduction names {name!r}, and the model has no such buffer",
                            nearest(name, writable), "correct buffer_reduction")
        kind = "gather" if GATHER.fullmatch(reduction) else reduction
        if kind not in KINDS:
            raise UserError(f"buffer_reduction says {reduction!r} for {name!r}", NAMES, "correct buffer_reduction")
        if writable[name].kind not in KINDS[kind]:
            raise UserError(f"buffer_reduction says {reduction} for {name!r}, which has dtype {writable[name].dtype}",
                            f"{' | '.join(r for r, kinds in KINDS.items() if writable[name].kind in kinds)} for it",
                            "choose one of these")
        found[name] = reduction
    _check_queues({name: (how, writable[name]) for name, how in found.items() if GATHER.fullmatch(how)})
    return found


def _check_queues(gathered: Mapping[str, tuple[str, Writable]]) -> None:
    """Raise `UserError` for what is gathered and is no queue, or a position in none."""
    rows: dict[str, tuple[str, int]] = {}
    for name, (how, one) in gathered.items():
        match = GATHER.fullmatch(how)
        axis = int(match[1] or 0) if match else 0
        if one.position:
            continue
        if len(one.shape) <= axis or one.shape[axis] < 2:
            raise UserError(f"buffer_reduction says {how} for {name!r} of shape {one.shape}",
                            f"a queue of several rows along dimension {axis}, or its position, one whole number",
                            "choose another reduction")
        rows[name] = (module_of(name), one.shape[axis])
    sure = {key for name, key in rows.items() if gathered[name][1].kind == "f"}
    placed = {module_of(name) for name, (_, one) in gathered.items() if one.position}
    for name, key in rows.items():
        if key not in sure and key[0] not in placed:
            raise UserError(f"buffer_reduction gathers {name!r}, which has integers alone: a "
                            "row rewritten with the same number is not seen", "its position or a floating queue of as "
                            "many rows in the same module, gathered too",
                            "gather its position, or use a floating dtype")
    for name, (how, one) in gathered.items():
        sizes = {n for module, n in rows.values() if module == module_of(name)}
        if one.position and len(sizes) != 1:
            raise UserError(f"buffer_reduction says {how} for the position {name!r}, whose module gathers queues of "
                            f"{sorted(sizes) or 'no'} rows", "queues of one length in its module",
                            "gather its queue too, or declare sum for a count that is never wrapped")
