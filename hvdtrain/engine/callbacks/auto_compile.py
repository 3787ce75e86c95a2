"""`compile: auto`: times the ways to compute the model at the start of a fit, and keeps those that are faster.

Owns the course of it and what is told. The times are `hvdtrain.engine.compile.timing`'s, the decision and its words
`hvdtrain.planning.compile_choice`'s. Comes before the callbacks that measure how fast ranks are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.deadline import deadline
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.compile import timing
from hvdtrain.engine.guards.kinds import kinds
from hvdtrain.planning.compile_choice import verdicts, words

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run


class AutoCompile(Callback):
    """Runs on all ranks. ``chosen``: what each kind of rank uses, by its text; a run that is resumed keeps it."""

    where = "all"
    doing = "timing ways to compile the model"
    before = ("MemoryFit", "Balance", "AutoWire", "AutoCompression")  # they measure the model as it will run
    state_key = "AutoCompile"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """With ``compile: auto``."""
        return bool(run.config.compile == "auto")

    def __init__(self) -> None:
        self.chosen: dict[str, list[str]] = {}
        self._in_use = False

    def fit_start(self, run: Run) -> None:
        """Try every option on every rank at once; the random generators are afterwards as they were."""
        if self._in_use:  # a second fit of the same run
            return
        self._in_use = True
        compile = run.parts.compile
        if compile is None or not compile.options:
            run.note("compile auto: nothing can be compiled here, the model is computed as it is")
            return
        names = kinds(run)
        kept = run.parts.state.rank_state()
        try:
            # Bounded as a whole too: each option by its compiler's time and its turns, all ranks alike.
            with deadline(run.config.control_timeout_s * (1 + len(compile.options)), "compile auto"):
                if set(names) <= set(self.chosen):
                    self._keep(run, names)
                else:
                    self._choose(run, names)
        finally:
            run.parts.state.load_rank(kept)

    def _choose(self, run: Run, names: list[str]) -> None:
        """Try one option after the other, each on top of those that a rank's kind has kept. Collective."""
        compile, own = run.parts.compile, names[run.control.rank]
        assert compile is not None
        self.chosen = {name: [] for name in names}
        for option in compile.options:
            rows = run.control.gather(timing.tried(run, compile, option, names))
            found = verdicts(rows)
            for kind, one in found.items():
                self.chosen[kind] += [option] if one.kept else []
            compile.use(tuple(self.chosen[own]))
            for text in words(option, rows, found):
                run.note(f"compile auto: {text}")
            run.record("compile", option=option, kinds={kind: vars(one) for kind, one in found.items()})

    def _keep(self, run: Run, names: list[str]) -> None:
        """Use what was chosen before the run was saved, so that it goes on as it was; collective."""
        compile, own = run.parts.compile, names[run.control.rank]
        assert compile is not None
        whys = run.control.gather(timing.prepare(run, compile, tuple(self.chosen[own]), names))
        for kind in dict.fromkeys(names):
            why = next((w for w, name in zip(whys, names) if w and name == kind), "")
            said = " and ".join(self.chosen[kind]) or "nothing"
            if why:
                self.chosen[kind] = []
            run.note(f"compile auto: {said}, as it was decided before" + (f", is left now: {why}" if why else ""))
        compile.use(tuple(self.chosen[own]))

    def state_dict(self) -> dict[str, Any]:
        """What each kind uses."""
        return {"chosen": {kind: list(options) for kind, options in self.chosen.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.chosen = {kind: list(options) for kind, options in state["chosen"].items()}
