"""Metrics of an evaluation, exact over uneven shards: totals that ranks add before a result is taken from them.

Owns the way from Keras' metrics to float64 vectors and back, on any backend of Keras. "loss" and what a model file or a
``module:callable`` returns are (sum, weight). Gathers nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras import compiled
from hvdtrain.backends.keras.losses import counted
from hvdtrain.backends.keras.task import Phase, Task
from hvdtrain.backends.pairs import Pair, Totals, checked_pair, of_model_file
from hvdtrain.config import Config
from hvdtrain.core import metric_entries
from hvdtrain.core.errors import UserError, nearest


class Evaluation:
    """Measures batches of a spec whose model is a `keras.Model`, and keeps the totals."""

    def __init__(self, spec: Any, config: Config, task: Task) -> None:
        self._spec, self._task, self._own = spec, task, spec.task is not None
        self._users: dict[str, Callable[[Any, Any], Any]] = {}
        named: dict[str, Any] = {}
        for entry in [] if self._own else config.metrics:
            name, found = _entry(entry)
            if name in named or name in self._users:
                raise UserError(f"two metrics are named {name}", "a name for each", "give one of them another, such as "
                                f"{name}(name='other')")
            (named if isinstance(found, (str, keras.metrics.Metric)) else self._users)[name] = found
        self._objects = {name for name, found in named.items() if isinstance(found, keras.metrics.Metric)}
        self._states = CompiledMetrics(None if self._own else spec.model, named, taken=("loss", *self._users),
                                              ignored=task.ignored)
        compiled.setup_of(spec.model).metrics = None if self._own else self._states
        self._totals = Totals()

    def build(self, batch: Sequence[Any]) -> None:
        """Make Keras' metrics with their variables, by one sample of zeros like ``batch``: no graph can make them."""
        if self._states and not self._states.built:
            x, y, weight = zeros_like_one(compiled.split(self._spec.model, batch))
            self._states.build(y, compiled.widened(self._spec.model(x, training=False)), weight)

    def variables(self) -> list[Any]:
        """Return what holds the totals of Keras' metrics, once `build` has made it."""
        return [v for metric in self._states.named.values() for v in metric.variables]

    def measure(self, batch: Sequence[Any]) -> dict[str, Pair]:
        """Run the model in inference, add a batch to Keras' metrics, and return what is (sum, weight) for `count`."""
        model = self._spec.model
        if self._own:
            measured = self._spec.metrics
            return of_model_file(lambda batch: self._task(model, batch, False),
                                 measured and (lambda batch: Phase(measured, model)(batch, training=False)), batch)
        x, y, weight = compiled.split(model, batch)
        outputs = model(x, training=False)
        pairs = self._task.pairs(model, outputs, batch)
        outputs = compiled.widened(outputs)
        for name, metric in self._users.items():
            pairs[name] = checked_pair(metric(outputs, y), f"metric {name!r}", "(sum, weight)")
        if self._states:
            self._states.build(*zeros_like_one((y, outputs, weight)))
            self._states.update(y, outputs, weight)
        return pairs

    def outputs(self, batch: Sequence[Any]) -> Any:
        """Return the model's outputs in inference for a batch, whose targets may be absent."""
        model, own = self._spec.model, self._spec.predict
        if own is not None:
            return compiled.widened(Phase(own, model)(batch, training=False))
        return compiled.widened(model(inputs_of(model, batch), training=False))

    def count(self, pairs: dict[str, Pair]) -> None:
        self._totals.add(pairs)

    def take(self) -> dict[str, np.ndarray]:
        """Return float64[k] by name since the last call, "loss" first; empty before any batch. Begin again."""
        totals, of_keras = self._totals.take(), self._states.take()
        return {**totals, **of_keras} if totals else {}

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        return self._states.results(totals)

    def undirected(self, name: str) -> bool:
        """Return whether ``name`` may be any object's, so that its name alone tells if larger values are better."""
        return name in self._objects


def _entry(entry: str) -> tuple[str, Any]:
    """Return the name of an entry of ``metrics``, and Keras' name of the metric, an object, or a user's callable."""
    if not (":" in entry or "." in entry or "(" in entry or entry.startswith("<")):
        return entry, _known(entry)
    found, (spelled, args) = metric_entries.loaded(entry, _class), metric_entries.parsed(entry)
    if not metric_entries.is_object(found):
        return metric_entries.short_name(entry), found
    if not isinstance(found, keras.metrics.Metric):
        raise UserError(f"metric {entry} is a {type(found).__name__}, and the model is of Keras",
                        "an object of keras.metrics", "correct metrics")
    if not is_additive(found):
        refuse_batch_statistics(type(found).__name__)
        raise UserError(f"metric {entry} is a {type(found).__name__}, whose variables may be no sums over samples",
                        "a class of keras.metrics, or a subclass of Mean or Sum", "set additive = True on the class if "
                        "its variables of several ranks add up to those of all samples")
    by_class = args is not None and "name" not in args or spelled.endswith(f":{type(found).__name__}")
    return metric_entries.short_name(entry) if by_class else plain_name(found), found


def _class(name: str) -> Any:
    """Return the class of keras.metrics of that name; None for a dotted one. Errors: `UserError`."""
    classes = {n.lower(): c for n, c in vars(keras.metrics).items() if _is_metric(c)}
    key = name.lower().replace("_", "")
    return None if "." in name else classes.get(key) or getattr(keras.metrics, _known(name))


def _known(name: str) -> str:
    """Return ``name`` as Keras spells it; `UserError` if keras.metrics lacks it."""
    if name.lower() in ("accuracy", "acc"):
        return "accuracy"
    refuse_batch_statistics(name)
    known = {n.lower().replace("_", ""): n for n, c in vars(keras.metrics).items()
             if _is_metric(c) or _is_function(n, c)}
    key = name.lower().replace("_", "")
    if key not in known:
        with contextlib.suppress(ValueError):  # Keras' short names, such as mse
            keras.metrics.get(name.lower())
            return name.lower()
        raise UserError(f"metric {name!r} is not in keras.metrics",
                        nearest(name, ["accuracy", *(n for n in known.values() if n[0].isupper() and n != "Accuracy")])
                        + " or module:callable", "correct metrics")
    return str(known[key])


def _is_metric(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, keras.metrics.Metric) and found is not keras.metrics.Metric


def _is_function(name: str, found: Any) -> bool:
    return callable(found) and not isinstance(found, type) and name not in ("get", "serialize", "deserialize")


def inputs_of(model: Any, batch: Sequence[Any]) -> Any:
    """Return x of a flat batch, which may lack y, packed as the data had it."""
    layout = compiled.setup_of(model).layout
    return batch[0] if layout is None else layout.inputs(batch)


NOT_ADDITIVE = ("PearsonCorrelation", "ConcordanceCorrelation")
"""Metrics that take statistics of one batch, so that their sums depend on how the samples were cut."""
SHAPES = "shapes of targets and outputs"
"""Name of the total [1, k, k characters of the structure, dimensions]: over c ranks its sum is c times that."""


def vector(metric: Any) -> np.ndarray:
    """Return the state of a metric: float64[k], its variables end to end."""
    arrays = [np.asarray(v.numpy(), np.float64).reshape(-1) for v in metric.variables]
    return np.concatenate(arrays) if arrays else np.zeros(0)


def result_of(metric: Any, total_k: np.ndarray) -> Any:
    """Return the metric's result for a state, which it does not keep; a float, or arrays of several numbers."""
    if type(metric).result is keras.metrics.Mean.result:
        # (sum, weight), divided in float64: Keras would divide in float32.
        return float(total_k[0] / total_k[1]) if total_k[1] else math.nan
    saved = [np.array(v.numpy()) for v in metric.variables]
    ends = np.cumsum([v.size for v in saved])
    assert len(total_k) == (ends[-1] if saved else 0), f"a total of {len(total_k)} numbers for {metric.name}"
    for variable, part, like in zip(metric.variables, np.split(total_k, ends[:-1]), saved):
        variable.assign(part.reshape(like.shape).astype(like.dtype))
    try:
        found = keras.tree.map_structure(keras.ops.convert_to_numpy, metric.result())
    finally:
        for variable, value in zip(metric.variables, saved):
            variable.assign(value)
    leaves = keras.tree.flatten(found)
    return float(leaves[0]) if len(leaves) == 1 and np.size(leaves[0]) == 1 else found


def is_additive(metric: Any) -> bool:
    """Return whether the metric's states may be added: Keras' own but `NOT_ADDITIVE`, a subclass that leaves a counting
    class's state as it is, or one with ``additive = True``.
    """
    said = getattr(metric, "additive", None)
    if said is not None:
        return bool(said)
    if type(metric).__name__ in NOT_ADDITIVE:
        return False
    counting = (keras.metrics.Mean, keras.metrics.Sum)
    return type(metric).__module__.startswith("keras.") or isinstance(metric, counting)


def plain_name(metric: Any) -> str:
    """Return a metric's name without Keras' counter (auc_3), which is not the same in every process."""
    name = str(getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__))
    stem, _, counter = name.rpartition("_")
    return stem if counter.isdigit() and stem.replace("_", "") == type(metric).__name__.lower() else name


def refuse_batch_statistics(name: str) -> None:
    """Raise `UserError` for a metric of `NOT_ADDITIVE`."""
    if name.lower().replace("_", "") in {n.lower() for n in NOT_ADDITIVE}:
        raise UserError(f"metric {name} computes its statistics over one batch",
                        "a metric whose state is a sum over samples",
                        "choose another metric, or give module:callable(outputs, targets) -> (sum, weight)")


def in_order(compile_metrics: Any) -> list[tuple[str, Any, str, bool]]:
    """Return (Keras' name, metric, output's name or "", takes sample weights?) of a built `CompileMetrics`."""
    found = [(metric, group.output_name or "", weighted)
             for groups, weighted in ((compile_metrics._flat_metrics, False),
                                      (compile_metrics._flat_weighted_metrics, True))
             for group in groups if group for metric in group.metrics]
    names = list(compile_metrics.result())
    assert len(names) == len(found)
    return [(name, *each) for name, each in zip(names, found)]


class CompiledMetrics:
    """The metrics of `model.compile`, for each output, and ``more`` of one output by name.

    A total is a metric's variables end to end. Sums of totals over any shares of the data give the metric of the whole,
    because Keras' metrics count. One more total, `SHAPES`, tells ranks without samples the metrics' shapes. ``taken``:
    names that are others'. ``keras_names``: Keras' name of a metric by its name in the totals, which lacks Keras'
    counter. ``ignored``: the label that the run's loss does not count, and so neither does ``more``; compiled metrics
    count what Keras itself does.
    """

    def __init__(self, model: Any, more: dict[str, Any] | None = None, taken: Iterable[str] = ("loss",),
                 ignored: int | None = None) -> None:
        own = getattr(model, "_compile_metrics", None) if getattr(model, "compiled", False) else None
        self._compiled: Any = None
        if own is not None:
            for metric in keras.tree.flatten([own._user_metrics or [], own._user_weighted_metrics or []]):
                refuse_batch_statistics(metric if isinstance(metric, str) else type(metric).__name__)
            self._compiled = own  # the model's own, because Keras' callbacks look there for what a metric means
        self._more, self._taken, self._ignored = dict(more or {}), set(taken), ignored
        self._shapes_k: np.ndarray | None = None
        self._more_made: dict[str, Any] = {}
        self.named: dict[str, Any] = {}
        self.keras_names: dict[str, str] = {}
        self.built = False

    def __bool__(self) -> bool:
        return self._compiled is not None or bool(self._more)

    def build(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Make every metric with its variables by a sample, such as zeros (1, ...), and reset them; in no graph."""
        if self.built:
            return
        self._shapes_k = _written((y, outputs, sample_weight))
        if self._compiled is not None:
            self._compiled.update_state(y, outputs, sample_weight)
            for keras_name, metric, output, weighted in in_order(self._compiled):
                name = self._free(f"{output}_{plain_name(metric)}" if output else plain_name(metric), weighted)
                self.named[name], self.keras_names[name] = metric, keras_name
        for name, given in self._more.items():
            if name in self.named and not isinstance(given, str):
                raise UserError(f"metric {name} of metrics has the name of a compiled metric", "a name for each",
                                "give one of them another name")
            if name not in self.named:
                self._more_made[name] = self.named[name] = _of_one_output(given, name, y, outputs)
        for metric in self.named.values():
            metric.reset_state()
        self.built = True

    def _free(self, name: str, weighted: bool) -> str:
        taken = self._taken | self.named.keys()
        if weighted and name in taken and f"weighted_{name}" not in taken:
            return f"weighted_{name}"
        stem, n = name, 0
        while name in taken:
            n, name = n + 1, f"{stem}_{n + 1}"
        return name

    def update(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Add a batch of tensors; no gradient flows through it."""
        outputs = keras.tree.map_structure(keras.ops.stop_gradient, outputs)
        if self._compiled is not None:
            self._compiled.update_state(y, outputs, sample_weight)
        for metric in self._more_made.values():
            labels, counts = keras.tree.flatten(y)[0], None
            if self._ignored is not None and _of_class_numbers(metric):
                counts = counted(labels, self._ignored)
                labels = keras.ops.where(keras.ops.cast(counts, "bool"), labels, keras.ops.zeros_like(labels))
            metric.update_state(labels, keras.tree.flatten(outputs)[0], counts)

    def take(self, reset: bool = True) -> dict[str, np.ndarray]:
        """Return float64[k] by name since the last call that reset the metrics, and `SHAPES`; {} before any batch."""
        if not self.built:
            return {}
        totals = {name: vector(metric) for name, metric in self.named.items()}
        for metric in self.named.values() if reset else ():
            metric.reset_state()
        assert self._shapes_k is not None
        return {**totals, SHAPES: self._shapes_k}

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Return each metric from its total: the mean of several numbers, the quotient of a foreign (sum, weight)."""
        if not self.built and SHAPES in totals:
            self.build(*_read(totals[SHAPES] / totals[SHAPES][0]))
        return {name: self._result(name, total_k) for name, total_k in totals.items() if name != SHAPES}

    def _result(self, name: str, total_k: np.ndarray) -> float:
        if name not in self.named:
            assert len(total_k) == 2, f"a total of {len(total_k)} numbers for {name}"
            return float(total_k[0] / total_k[1]) if total_k[1] else math.nan
        return float(np.mean(keras.tree.flatten(result_of(self.named[name], total_k))[0]))


def _of_class_numbers(metric: Any) -> bool:
    return type(metric).__name__.startswith("Sparse") or \
        getattr(getattr(metric, "_fn", None), "__name__", "").startswith("sparse")


def zeros_like_one(tree: Any) -> Any:
    """Return one sample of zeros (1, ...) for every tensor; dimensions that a graph leaves open are 1."""
    def zeros(t: Any) -> Any:
        return keras.ops.zeros([1, *(n or 1 for n in tuple(t.shape)[1:])], keras.backend.standardize_dtype(t.dtype))
    return keras.tree.map_structure(lambda t: None if t is None else zeros(t), tree)


def _of_one_output(metric: Any, name: str, y: Any, outputs: Any) -> Any:
    """Return a fresh metric for a name, class instance or function, made on the only output."""
    ys, outs = keras.tree.flatten(y), keras.tree.flatten(outputs)
    if len(ys) != 1 or len(outs) != 1:
        raise UserError(f"metric {name} by name, but the model has {len(outs)} outputs", "one output",
                        "give metrics to model.compile by output, or a task and metrics(model, batch)")
    made = accuracy(ys[0], outs[0]) if metric in ("accuracy", "acc") else _object(metric, name)
    made.update_state(ys[0], outs[0])
    return made


def _object(metric: Any, name: str) -> Any:
    if isinstance(metric, keras.metrics.Metric):
        return metric
    try:
        found = keras.metrics.get(metric)
    except (TypeError, ValueError) as error:  # a class whose constructor wants arguments
        raise UserError(f"metric {name} cannot be made from its name alone: {error}",
                        "a metric without required arguments",
                        "compile the model with the metric object, or give module:callable(outputs, targets)") from None
    return found if isinstance(found, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(found, name=name)


def accuracy(y: Any, outputs: Any) -> Any:
    """Return Keras' reading of "accuracy": binary for one output, sparse for class numbers, else categorical."""
    if outputs.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy(name="accuracy")
    if len(y.shape) < len(outputs.shape) or y.shape[-1] == 1:
        return keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    return keras.metrics.CategoricalAccuracy(name="accuracy")


def _written(parts: Any) -> np.ndarray:
    """Return structure, types and shapes as one vector, `SHAPES`."""
    leaves: list[Any] = []

    def told(part: Any) -> Any:
        if isinstance(part, dict):
            return {"dict": [[str(k), told(v)] for k, v in part.items()]}
        if isinstance(part, (list, tuple)):
            return {"list" if isinstance(part, list) else "tuple": [told(p) for p in part]}
        if part is None:
            return None
        leaves.append(part)
        return [keras.backend.standardize_dtype(part.dtype), len(part.shape)]

    text = json.dumps(told(tuple(parts))).encode()
    dims = [n if i else 1 for leaf in leaves for i, n in enumerate(tuple(leaf.shape))]
    return np.array([1, len(text), *text, *dims], np.float64)


def _read(shapes_k: np.ndarray) -> Any:
    """Undo `_written`: tensors of zeros. If ranks had sequences of other lengths, those are near their mean."""
    numbers = [round(n) for n in shapes_k[1:].tolist()]
    text, dims = bytes(numbers[1:numbers[0] + 1]), iter(numbers[numbers[0] + 1:])

    def made(part: Any) -> Any:
        if isinstance(part, dict):
            (container, inner), = part.items()
            if container == "dict":
                return {k: made(v) for k, v in inner}
            return [made(p) for p in inner] if container == "list" else tuple(made(p) for p in inner)
        return None if part is None else keras.ops.zeros([next(dims) for _ in range(part[1])], part[0])

    with contextlib.suppress(StopIteration):
        return made(json.loads(text))
    raise AssertionError("a total of shapes that is cut short")
