"""Variables that layers write to in their forward passes, under plain ``fit``: one value on all ranks after each step.

Owns which these are and their broadcast. BatchNorm's statistics, random generators and metrics stay each rank's own, as
in Horovod; reductions that a model declares are `hvdtrain.engine.written_state`'s, under `Trainer.fit`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from hvdtrain import tensorflow as hvd
from hvdtrain.backends.tensorflow.buffers import LARGE, state_variables
from hvdtrain.backends.tensorflow.state import to_numpy
from hvdtrain.keras.exchange import Exchange, tf_variable
from hvdtrain.keras.guard import EARLY
from hvdtrain.tensorflow import functions


class Written:
    """Compares before and after the first, second and eighth call and every N-th (``check_every``), to find variables
    that the call writes. What callbacks set between calls is no such variable.

    From then on every rank takes the lowest rank's values after each call, which is one step of ``fit``, or
    ``steps_per_execution`` of them. A model without such variables exchanges nothing.
    """

    def __init__(self, model: Any, exchange: Exchange) -> None:
        self._model, self._exchange = model, exchange
        self._before: dict[str, np.ndarray] = {}
        self._known: list[str] = []
        self._calls = 0

    def before(self) -> None:
        """Keep the values before a call that is compared."""
        self._calls += 1
        every = self._exchange.settings.check_every
        due = self._calls in (1, *EARLY) or every and self._calls % every == 0
        self._before = {name: to_numpy(v) for name, v in self._variables().items()} if due and self._model.built else {}

    def after(self) -> None:
        """Take the lowest rank's values of what is written; collective."""
        if not (self._before or self._known):
            return
        variables = self._variables()
        if self._before:
            self._look(variables)
        if self._known:
            process_set = self._exchange.settings.process_set
            root = (getattr(process_set, "ranks", None) or [0])[0]
            hvd.broadcast_variables([tf_variable(variables[name]) for name in self._known], root_rank=root,
                                    process_set=process_set)

    def _look(self, variables: dict[str, Any]) -> None:
        own = [name for name, before in self._before.items()
               if name not in self._known and before.tobytes() != to_numpy(variables[name]).tobytes()]
        found = functions.gathered(own, self._exchange.settings.process_set)
        fresh = [name for name in self._before if any(name in names for names in found)]
        self._known += fresh
        if fresh and hvd.rank() == 0:
            warnings.warn(f"layers write to {', '.join(fresh)} in their forward passes: every rank takes rank 0's "
                          "value after each step, so that training depends on the number of ranks", stacklevel=2)

    def _variables(self) -> dict[str, Any]:
        local = {id(v) for layer in self._exchange.settings.local_layers for v in layer.variables}
        found = [v for v in state_variables(self._model) if id(v) not in local and math.prod(v.shape) < LARGE]
        return {f"{v.path}#{i}" if any(v.path == w.path for w in found[:i]) else v.path: v
                for i, v in enumerate(found)}
