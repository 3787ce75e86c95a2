"""Metrics of an evaluation that keep states, as torchmetrics' objects do: measured on each rank, combined over all.

Owns the states' way from ranks to one result, by each state's own reduction and in the order of the data. Calls no
collective, and not those of torchmetrics. Knows objects by attributes: torchmetrics is the user's import.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hvdtrain.backends.torch.transforms import precision
from hvdtrain.core.errors import UserError
from hvdtrain.core.metric_entries import COLLECTION, STATES

CHILDREN = ("ClasswiseWrapper", "CompositionalMetric", "MultitaskWrapper")
"""Classes of torchmetrics whose whole state is that of the metrics within them."""

Piece = tuple[int, Any]
"""Number of a batch among a rank's, and what the batch added to a state that grows."""


@dataclass
class RankStates:
    """States of one metric on one rank since the last reset; a total of an evaluation.

    ``states``: by place of a (sub-)metric and name; of a state that grows its pieces. ``updates``: batches that were
    added. ``samples``: in these. ``places``: the global batch of each batch of this rank, which the engine gives.
    """

    states: dict[tuple[int, str], Any]
    updates: int
    samples: int
    places: tuple[int, ...] = ()


@dataclass
class StateMetric:
    """A metric of ``name`` with states, a copy of the given object, and its result from all ranks' states."""

    name: str
    metric: Any
    _parts: list[Any] = field(init=False)
    _lengths: dict[tuple[int, str], list[Piece]] = field(init=False)
    _updates: int = field(default=0, init=False)
    _samples: int = field(default=0, init=False)
    _tried: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.metric = copy.deepcopy(self.metric)
        self._parts = [part for part in self.metric.modules() if _has(part, STATES)]
        for part in self._parts:
            inner = [one for one in part.modules() if one is not part and _has(one, STATES)]
            if inner and type(part).__name__ not in CHILDREN:
                raise UserError(f"metric {self.name}: {type(part).__name__} keeps more than the states of its metrics, "
                                "which ranks cannot combine", f"metrics themselves, or one of {', '.join(CHILDREN)}",
                                "correct metrics")
            part._to_sync, part.sync_on_compute = False, False
        self._reset()

    def update(self, batch: int, samples: int, inputs: Sequence[Any]) -> None:
        """Add the rank's batch number ``batch``."""
        tensors = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor)]
        if tensors and not self._updates:
            self.metric.to(tensors[0].device)
        try:
            with precision.full(tensors[0]) if tensors else contextlib.nullcontext():
                self.metric.update(*inputs)
        except (IndexError, ValueError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in ("CUDA error", "memory")):
                raise  # of the machine, not of the data
            kinds = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors[:4])
            raise UserError(f"metric {self.name} refused its inputs, {kinds}: {error}", "what the metric takes",
                            "correct metrics, or name a callable of your file that adapts them") from error
        self._updates, self._samples = self._updates + 1, self._samples + samples
        for key, value in self._states():
            if self._grows(key, value):
                self._lengths.setdefault(key, []).append((batch, len(value)))
        if not self._tried:
            self._try()

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo the updates of a body that fails."""
        counts, noted = (self._updates, self._samples), {key: list(lengths) for key, lengths in self._lengths.items()}
        kept = [(key, value, len(value)) if self._grows(key, value) else (key, value.detach().clone(), -1)
                for key, value in self._states()]
        try:
            yield
        except BaseException:
            (self._updates, self._samples), self._lengths = counts, noted
            for (place, name), value, length in kept:
                setattr(self._parts[place], name, value if length < 0 else value[:length])
            raise

    @property
    def known(self) -> bool:
        """Return whether this rank has ever measured with it: some metrics learn from samples what they compute."""
        return self._tried

    def _try(self) -> None:
        """Refuse a result of several numbers after the first batch; what fails for few samples passes."""
        self._tried = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # few samples may lack a class
                found = self._computed()
        except (ValueError, RuntimeError, IndexError, TypeError, ZeroDivisionError):
            return
        self._numbers(found)

    def take(self) -> RankStates | None:
        """Return the states since the last call, on the host; None before any batch. They start again."""
        if not self._updates:
            return None
        states = {key: self._pieces(key, value) if self._grows(key, value) else _on_host(value)
                  for key, value in self._states()}
        found = RankStates(states, self._updates, self._samples)
        self._reset()
        return found

    def _reset(self) -> None:
        for part in self._parts:
            for name, default in part._defaults.items():
                setattr(part, name, [] if isinstance(default, list) else default.detach().clone().to(part.device))
            part._update_count, part._computed = 0, None
        self._lengths, self._updates, self._samples = {}, 0, 0

    def _states(self) -> list[tuple[tuple[int, str], Any]]:
        return [((place, name), getattr(part, name)) for place, part in enumerate(self._parts)
                for name in part._defaults]

    def _reduction(self, key: tuple[int, str]) -> tuple[Any, str]:
        function = self._parts[key[0]]._reductions[key[1]]
        plain = str(getattr(function, "__module__", "")).startswith("torchmetrics.")
        name = getattr(function, "__name__", "") if plain else ""
        return function, name.removeprefix("dim_zero_") if name.startswith("dim_zero_") else ""

    def _grows(self, key: tuple[int, str], value: Any) -> bool:
        return isinstance(value, list) or self._reduction(key)[1] == "cat" and value.dim() > 0

    def _pieces(self, key: tuple[int, str], value: Any) -> list[Piece]:
        """Return what each batch added to a state that grows; in one piece where the metric has shortened it."""
        lengths, start, found = self._lengths.get(key, []), 0, list[Piece]()
        if [length for _, length in lengths] != sorted(length for _, length in lengths):
            return [(lengths[0][0], _on_host(value))]
        for batch, length in lengths:
            found.append((batch, _on_host(value[start:length])))
            start = length
        return found

    def result(self, ranks: Sequence[RankStates]) -> dict[str, float]:
        """Return numbers by name from the states of the ranks that have measured samples, in rank order."""
        try:
            for key, default in [(key, self._parts[key[0]]._defaults[key[1]]) for key in ranks[0].states]:
                combined = self._combined(key, default, ranks)
                setattr(self._parts[key[0]], key[1], tree_map(self._to_device, combined))
            for part in self._parts:
                part._update_count, part._computed = sum(one.updates for one in ranks), None
            return self._numbers(self._computed())
        finally:
            self._reset()

    def _to_device(self, value: Any) -> Any:
        return value.to(self._parts[0].device) if isinstance(value, torch.Tensor) else value

    def _computed(self) -> Any:
        with torch.no_grad():
            return self.metric.compute()

    def _combined(self, key: tuple[int, str], default: Any, ranks: Sequence[RankStates]) -> Any:
        """Return one state of all ranks' own; ranks that measured nothing are not among them."""
        function, kind = self._reduction(key)
        values = [one.states[key] for one in ranks]
        if isinstance(default, list) or isinstance(values[0], list):
            ordered = _in_order(key, ranks)
            if function is None or kind == "cat":
                return ordered if isinstance(default, list) else torch.cat(ordered)
            self._refuse_uneven(key, ranks)
            return function(ordered)
        if len(values) == 1:
            return values[0]
        if kind == "sum" and values[0].dtype != torch.bool:
            return _sum(values, default.detach().cpu())
        stacked = torch.stack(values)
        if function is None or kind in ("max", "min", "sum"):
            return stacked if function is None else function(stacked)
        if kind == "mean" and all(torch.equal(value, values[0]) for value in values):  # a setting, kept as a state
            return values[0]
        self._refuse_uneven(key, ranks)
        return function(stacked)

    def _refuse_uneven(self, key: tuple[int, str], ranks: Sequence[RankStates]) -> None:
        """Raise `UserError` for a mean or a function over ranks that have not measured equally many samples."""
        counts = [one.samples for one in ranks]
        if len(set(counts)) > 1:
            function, kind = self._reduction(key)
            how = "its mean" if kind == "mean" else f"the function {getattr(function, '__name__', 'given')}"
            raise UserError(f"metric {self.name}: state {key[1]} is combined over ranks by {how}, and the ranks have "
                            f"measured {', '.join(map(str, counts))} samples", "equally many samples on each rank, or "
                            "a state that is summed or concatenated", "add the state with dist_reduce_fx 'sum' or "
                            "'cat', or evaluate on one rank")

    def _numbers(self, found: Any) -> dict[str, float]:
        """Return a result as numbers by name; `UserError` where there is no single number."""
        if isinstance(found, Mapping):
            numbers = {str(name): float(value) for name, value in found.items() if _is_number(value)}
        else:
            numbers = {self.name: float(found)} if _is_number(found) else {}
        if not numbers:
            shape = f" of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else ""
            raise UserError(f"metric {self.name} returns a {type(found).__name__}{shape}", "a number, or a dict of "
                            "numbers by name", "set an average, or put torchmetrics.ClasswiseWrapper around it, whose "
                            "numbers have names")
        return numbers


def members(name: str, metric: Any) -> dict[str, Any]:
    """Return the metrics of a collection by their names in it, or a metric alone by ``name``."""
    if not _has(metric, STATES):
        return dict(copy.deepcopy(metric).items())
    return {name: metric}


def is_state_metric(thing: Any) -> bool:
    """Return whether ``thing`` is an object of torchmetrics, or one with the same attributes."""
    return isinstance(thing, torch.nn.Module) and (_has(thing, STATES) or _has(thing, COLLECTION))


def merged(results: Sequence[tuple[str, dict[str, float]]], taken: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of all metrics by name; a name that is ``taken`` gets its metric's in front."""
    found = dict(taken)
    for metric, numbers in results:
        for name, value in numbers.items():
            found[f"{metric}_{name}" if name in found else name] = value
    return found


def _has(thing: Any, names: Sequence[str]) -> bool:
    return all(hasattr(thing, name) for name in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or isinstance(value, torch.Tensor) and value.numel() == 1


def _on_host(value: Any) -> Any:
    return tree_map(lambda one: one.detach().cpu() if isinstance(one, torch.Tensor) else one, value)


def _sum(values: Sequence[torch.Tensor], default: torch.Tensor) -> torch.Tensor:
    """Add what the ranks have added to the default, in rank order; floats in float64. Keeps the type of the states."""
    kind = values[0].dtype
    wide = torch.float64 if kind.is_floating_point else kind
    total = default.to(wide)
    for value in values:
        total = total + (value.to(wide) - default.to(wide))
    return total.to(kind)


def _in_order(key: tuple[int, str], ranks: Sequence[RankStates]) -> list[Any]:
    """Return the pieces of a state of all ranks in the order of the data: by global batch, and within one by rank."""
    def place(rank: int, batch: int) -> int:
        return ranks[rank].places[batch] if batch < len(ranks[rank].places) else batch

    pieces = [((place(rank, batch), rank, batch), piece) for rank, one in enumerate(ranks)
              for batch, piece in one.states[key]]
    found: list[Any] = []
    for _, piece in sorted(pieces, key=lambda row: row[0]):
        found.extend(piece if isinstance(piece, list) else [piece])
    return found
