"""What the reference model holds beside its gradients: initial values, metrics, and what a checkpoint keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.numpy.model import Model
from hvdtrain.backends.numpy.params import Sgd
from hvdtrain.backends.pairs import Totals, means
from hvdtrain.checkpoint import weights
from hvdtrain.checkpoint.tensors import FileLayout, Spec, layout
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core import rng
from hvdtrain.core.protocols import Batch, Writable
from hvdtrain.core.protocols.state import Head, Place, Shard, Window


class Buffers:
    """`hvdtrain.core.protocols.Buffers`: there are none, only initial values."""

    def __init__(self, model: Model, transports: Sequence[Transport], blocks: Sequence[Sequence[int]] = ()) -> None:
        self._model, self._transports, self._blocks = model, transports, blocks

    def share(self) -> None:
        """Broadcast the parameters of the first rank that has them."""
        for i, transport in enumerate(self._transports):
            for name, p in self._model.params.items():
                if not self._blocks or int(name[1:]) in self._blocks[i]:
                    p[...] = transport.broadcast(p.reshape(-1).copy(), f"initial.{name}").reshape(p.shape)

    def sync(self) -> list[str]:
        """Return nothing: there are no buffers."""
        return []

    def keep(self) -> None:
        """Nothing."""

    def discard(self) -> None:
        """Nothing."""

    def writable(self) -> dict[str, Writable]:
        """Return nothing."""
        return {}

    def statistics(self) -> list[str]:
        """Return nothing."""
        return []

    def aliases(self) -> dict[str, str]:
        """Return nothing."""
        return {}

    def noticed(self) -> list[str]:
        """Return nothing."""
        return []

    def track(self, names: Iterable[str]) -> None:
        """Nothing."""

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        """Nothing."""


class Evaluator:
    """`hvdtrain.core.protocols.Evaluator`: loss and accuracy."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._totals = Totals()

    def add(self, batch: Batch) -> None:
        """Add (sum, weight) of each."""
        self.add_outputs(self._model.forward(batch[0])[-1], batch)

    def add_outputs(self, logits: np.ndarray, batch: Batch) -> None:
        """Add those of a batch whose logits are known."""
        right = (logits.argmax(axis=1) == batch[1]).sum()
        self._totals.add({"loss": (self._model.loss(logits, batch[1])[0], len(logits)),
                          "accuracy": (right, len(logits))})

    def totals(self) -> dict[str, np.ndarray]:
        """(sum, weight) of each metric; they start anew."""
        return self._totals.take()

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Weighted means."""
        return means(totals)


def _copied(group: str, name: str, array: np.ndarray, place: Place | None) -> np.ndarray:
    memory = np.empty(array.shape, array.dtype) if place is None else place(group, name, array.shape, array.dtype)
    if isinstance(memory, Window):
        begin, memory = memory
        array = array.reshape(-1)[begin:begin + memory.size]
    if memory is None:
        return array
    memory[...] = array
    return memory


class State:
    """`hvdtrain.core.protocols.ModelState`: parameters and velocities."""

    def __init__(self, model: Model, optimizer: Sgd) -> None:
        self._model, self._optimizer = model, optimizer
        self._spans: Sequence[tuple[int, int]] | None = None

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Copies."""
        params = self._model.params
        groups = {"model": params}
        if self._spans is None:
            groups["optimizer"] = dict(zip(params, self._optimizer.velocity))
        return {group: {n: _copied(group, n, a, place) for n, a in arrays.items()}
                for group, arrays in groups.items()}, {}

    def state_bytes(self) -> int:
        """Parameters and velocities."""
        return sum(p.nbytes for p in (*self._model.params.values(), *self._optimizer.velocity))

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`."""
        for name, p in self._model.params.items():
            p[...] = groups["model"][name]
        for name, v in zip(self._model.params, self._optimizer.velocity if self._spans is None else ()):
            v[...] = groups["optimizer"][name]

    def take(self, optimizer: Any, spans: Sequence[tuple[int, int]]) -> None:
        """Keep the velocities of slices."""
        self._optimizer, self._spans = optimizer, spans

    def slices(self, place: Place | None = None) -> Iterator[Shard]:
        """This rank's velocities."""
        assert self._spans is not None
        for (name, p), v, (begin, end) in zip(self._model.params.items(), self._optimizer.velocity, self._spans):
            if begin < end:
                yield Shard("optimizer", name, p.shape, begin, _copied("optimizer", name, v, place))

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        """Those of its slices."""
        assert self._spans is not None
        return [(name, *span) for name, span in zip(self._model.params, self._spans) if span[0] < span[1]]

    def load_slices(self, values: Mapping[str, np.ndarray]) -> None:
        """Undo `slices`."""
        for name, v in zip(self._model.params, self._optimizer.velocity):
            if name in values:
                v[...] = values[name]

    def rank_state(self) -> dict[str, np.ndarray]:
        """Random generators."""
        return rng.capture()

    def load_rank(self, own: dict[str, np.ndarray]) -> None:
        """Undo `rank_state`."""
        rng.restore(own)

    def final(self) -> contextlib.AbstractContextManager[None]:
        """As they are trained."""
        return contextlib.nullcontext()

    def export(self, directory: Path) -> list[str]:
        """Write model.safetensors."""
        plan = self._plan()
        weights.put(plan, (self._model.params[name].reshape(-1).view(np.uint8).data for name in plan.names),
                    Path(directory) / weights.FILE)
        return [weights.FILE]

    def try_export(self) -> str:
        """Return "": all arrays can be written."""
        self._plan()
        return ""

    def _plan(self) -> FileLayout:
        return layout({name: Spec(p.dtype, p.shape) for name, p in self._model.params.items()}, "model")
