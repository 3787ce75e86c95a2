"""Variables of a rank beside its gradients: initial weights, optimizer state, and what forward passes write.

Owns their exchange, which is collective and eager, and copies that undo a step. Reductions are
`hvdtrain.comm.reducer.written`'s.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.saving import stable_names
from hvdtrain.backends.tensorflow.graphs import PLAIN, Mark
from hvdtrain.backends.tensorflow.optim import Optimization, give_back
from hvdtrain.backends.tensorflow.state import assign, named, nbytes, seed_states, to_numpy, view
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.comm.reducer.written import combine
from hvdtrain.core.protocols import Writable

LARGE = 1 << 16
"""Elements of a variable that is not compared after every step; the first samples and a save find what is written."""

CHUNK_BYTES = 1 << 28
"""Largest single broadcast: MPI counts elements in 31 bits."""

PACK_BYTES = 1 << 22
"""Variables share a broadcast up to so many bytes; each takes several copies of them meanwhile."""


class _Entry:
    """Implements `hvdtrain.comm.reducer.written.Entry` for one variable."""

    def __init__(self, name: str, variable: keras.Variable, before: np.ndarray | None) -> None:
        self.name, self._variable, self._before = name, variable, before
        self.form = f"{variable.dtype} {tuple(variable.shape)}"

    def old(self) -> np.ndarray | None:
        return self._before

    def own(self) -> np.ndarray:
        return _array(self._variable)

    def write(self, value: np.ndarray) -> None:
        self._variable.assign(tf.cast(tf.constant(value), self._variable.dtype))


class Buffers:
    """Implements `hvdtrain.core.protocols.Buffers` for ``model`` and the optimizer's variables.

    ``kept``: copies of what forward passes change. The stage reports the begin of a step (`begin`) and its samples
    (`saw`). ``whole``: the model that ``model`` is a part of, whose variables give the names.
    """

    def __init__(self, model: keras.Model, opt: Optimization, transport: Transport,
                 whole: keras.Model | None = None) -> None:
        self._model, self._opt, self._transport = model, opt, transport
        self.kept = VariableCopies(written_in_forward(model))
        self._n_seen = self._n_seen_before = self._n_step = 0
        counted = {id(v) for v in _statistics(model)}
        written = {id(v) for v in state_variables(model)}
        weights, own = (whole or model).weights, {id(v) for v in model.weights}
        named = list(zip(stable_names(weights), weights))
        self._aliases = {v.path: name for name, v in named}
        self._names = {name: v for name, v in named if id(v) in own}
        self._counted = [name for name, v in self._names.items() if id(v) in counted]
        trained = {id(v) for v in model.trainable_variables}
        self._writable = [name for name, v in self._names.items() if id(v) not in counted and id(v) not in trained]
        self._watched = [name for name in self._writable if id(self._names[name]) in written
                         and math.prod(self._names[name].shape) < LARGE]
        self._known: set[str] = set()
        self._before: dict[str, np.ndarray] = {}

    def begin(self) -> None:
        self._n_seen_before = self._n_seen
        self.kept.forget()
        self.keep()

    def keep(self) -> None:
        self._n_step = 0
        self._before = {name: _array(self._names[name]) for name in self._watched} if self._transport.size > 1 else {}

    def saw(self, samples: int) -> None:
        """Count samples that statistics were taken over."""
        self._n_seen += samples
        self._n_step += samples

    def discard(self) -> None:
        self.kept.put_back()
        self._n_seen, self._n_step = self._n_seen_before, 0

    def undone(self) -> Callable[[], None]:
        """Return a function that undoes later writes, except to statistics: a placeholder is no sample."""
        copies = [(self._names[name], to_numpy(self._names[name])) for name in self._watched]

        def undo() -> None:
            for variable, copy in copies:
                assign(variable, copy)
        return undo

    def restart(self) -> None:
        """Forget how many samples were seen: the statistics are the same on every rank."""
        self._n_seen = self._n_seen_before = 0

    def names_of(self, variables: Iterable[Any]) -> list[str]:
        """Return the names of those of ``variables`` that are weights and no statistics."""
        ids = {id(v) for v in variables}
        return [name for name, v in self._names.items() if id(v) in ids and name not in self._counted]

    def writable(self) -> dict[str, Writable]:
        return {name: Writable(keras.backend.standardize_dtype(v.dtype), _array(v).dtype.kind, tuple(v.shape))
                for name, v in self._names.items() if name in self._writable}

    def aliases(self) -> dict[str, str]:
        return self._aliases

    def statistics(self) -> list[str]:
        return self._counted

    def noticed(self) -> list[str]:
        return [name for name, before in self._before.items() if name not in self._known
                and before.tobytes() != _array(self._names[name]).tobytes()]

    def track(self, names: Iterable[str]) -> None:
        fresh = [name for name in names if name in self._names and name not in self._known]
        self._known.update(fresh)
        self._watched += [name for name in fresh if name not in self._watched]

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        entries = [_Entry(name, self._names[name], self._before.get(name)) for name in reductions
                   if name in self._known]
        if self._transport.size > 1 and entries:
            combine(self._transport, entries, reductions, self._n_step if samples is None else samples, force)

    def share(self) -> None:
        """Give every rank rank 0's weights, optimizer state and base rate, bit by bit; seed generators stay.

        They travel as bytes, so that every dtype can. The ranks' variables were compared before. With an optimizer over
        slices each rank takes its own of rank 0's state, a variable at a time.
        """
        opt = self._opt
        opt.build()
        if self._transport.size == 1:
            return
        base_lr = tf.Variable(np.nan if opt.base_lr is None else opt.base_lr, trainable=False, dtype=tf.float64)
        alike = [v for place, v in enumerate(opt.optimizer.variables) if place not in (opt.slices or ())]
        self._from_root([*self._model.weights, *alike, base_lr], "initial")
        opt.base_lr = None if np.isnan(base_lr.numpy()) else float(base_lr.numpy())
        if opt.slices is not None:
            text = np.frombuffer("\n".join(named(opt.optimizer.variables)).encode(), np.uint8)
            n = int(self._shared(np.array([text.size]), "initial.names.length")[0])
            opt.names = self._shared(np.resize(text, n), "initial.names").tobytes().decode().split("\n")
        former, opt.former = opt.former, None
        if former is not None:
            take_over(opt, (self._shared(to_numpy(v), f"former.{i}") for i, v in enumerate(former.variables)))
            give_back(former)

    def sync(self) -> list[str]:
        """Average BatchNorm's statistics over ranks, each by its samples; collective.

        With n_r the samples of rank r since the last call and base the values of the lowest rank that saw any::

            mean = base + sum_r n_r * (own_r - base) / sum_r n_r

        Without a sample anywhere they stay. Of everything else that is not trained every rank takes base if ranks
        differ; return those names.
        """
        n_seen = self._n_seen
        self.restart()
        wire = self._transport.collectives
        if wire.size == 1:
            return []
        counts_P = np.array(self._transport.allgather(tf.constant([n_seen], tf.int64), "buffers.seen")).reshape(-1)
        ran = int(np.flatnonzero(counts_P)[0]) if counts_P.any() else 0
        found = self._equalise(ran)
        if not counts_P.any():
            return found
        averaged: dict[str, list[Any]] = {"float32": [], "float64": []}
        others: list[Any] = []
        for variable in (self._names[name] for name in self._counted):
            dtype = keras.backend.standardize_dtype(variable.dtype)
            wide = "float64" if dtype == "float64" else "float32"
            (averaged[wide] if "float" in dtype and wide in wire.dtypes else others).append(variable)
        self._from_root(others, f"buffers.others.from{ran}", ran)
        for dtype, variables in averaged.items():
            if variables:
                self._average(variables, dtype, ran, n_seen, int(counts_P.sum()))
        return found

    def _equalise(self, root: int) -> list[str]:
        """Give what is not trained, and differs between ranks, the value of rank ``root``; return the names."""
        names = [*self._writable, *sorted(self._known - set(self._writable))]
        if not names:
            return []
        own_N = np.array([zlib.crc32(view(self._names[name]).tobytes()) for name in names], np.int64)
        rows = self._transport.allgather(tf.constant(own_N), "buffers.bits")
        all_PN = np.array(rows).reshape(self._transport.size, -1)
        found = [name for name, apart in zip(names, (all_PN != all_PN[:1]).any(0)) if apart]
        self._from_root([self._names[name] for name in found], f"buffers.written.from{root}", root)
        return found

    def _average(self, variables: Sequence[Any], dtype: str, ran: int, n_seen: int, total: int) -> None:
        ops = self._transport.ops
        own_N = ops.pack([tf.cast(v.value, dtype) for v in variables])
        base_N = self._transport.broadcast(tf.identity(own_N), f"buffers.{dtype}.from{ran}", ran)
        zeros_N = tf.zeros_like(own_N)
        # Not 0 * NaN; equal infinities (an attention mask) have no difference.
        apart_N = tf.where(own_N == base_N, zeros_N, (own_N - base_N) * n_seen) if n_seen else zeros_N
        total_N = self._transport.allreduce(apart_N, f"buffers.{dtype}.sum")
        for variable, mean in zip(variables, ops.unpack(base_N + total_N / total, [v.shape for v in variables])):
            variable.assign(tf.cast(mean, variable.dtype))

    def _from_root(self, variables: Sequence[Any], name: str, root: int = 0) -> None:
        """Give ``variables`` the values of rank ``root``, as bytes, several small ones in one broadcast."""
        sizes = [nbytes([v]) for v in variables]
        begin = 0
        for end in range(1, len(sizes) + 1):
            if end < len(sizes) and sum(sizes[begin:end + 1]) <= PACK_BYTES:
                continue
            held = [to_numpy(v) for v in variables[begin:end]]
            own = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in held])
            ends = np.cumsum([a.nbytes for a in held])
            for variable, like, part in zip(variables[begin:end], held,
                                            np.split(self._shared(own, f"{name}.{begin}", root), ends[:-1])):
                assign(variable, part.view(like.dtype).reshape(like.shape))
            begin = end

    def _shared(self, own: np.ndarray, name: str, root: int = 0) -> np.ndarray:
        """Return the array of rank ``root``, which has the shape and dtype of ``own``."""
        flat = np.ascontiguousarray(own).reshape(-1).view(np.uint8)
        parts = []
        for i, begin in enumerate(range(0, flat.size, CHUNK_BYTES)):
            sent = tf.constant(flat[begin:begin + CHUNK_BYTES])
            parts.append(np.asarray(self._transport.broadcast(sent, f"{name}.{i}", root)))
        if not parts:
            return own
        return np.array(parts[0] if len(parts) == 1 else np.concatenate(parts)).view(own.dtype).reshape(own.shape)


def written_in_forward(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that layers may write to in their forward; neither frozen parameters nor random states."""
    seeds = {id(v) for v in seed_states(model).values()}
    return list({id(v): v for layer in model._flatten_layers() for v in layer._non_trainable_variables
                 if id(v) not in seeds}.values())


def state_variables(model: keras.Model) -> list[keras.Variable]:
    """Return those of `written_in_forward` that are no statistics of BatchNorm."""
    counted = {id(v) for v in _statistics(model)}
    return [v for v in written_in_forward(model) if id(v) not in counted]


def _statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving statistics of BatchNorm layers with Keras' own call, which reads them in evaluation only."""
    plain = keras.layers.BatchNormalization
    return [v for layer in model._flatten_layers() if isinstance(layer, plain) and type(layer).call is plain.call
            for name in ("moving_mean", "moving_variance") if (v := getattr(layer, name, None)) is not None]


def _array(variable: keras.Variable) -> np.ndarray:
    """Return a copy on the host, float64 for a dtype that numpy lacks."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    narrow = dtype == "bfloat16" or dtype.startswith("float8")
    return np.array((tf.cast(variable.value, tf.float64) if narrow else variable.value).numpy())


def take_over(opt: Optimization, arrays: Iterable[np.ndarray]) -> None:
    """Give the optimizer over slices its shard of the values of all variables of one over whole variables."""
    assert opt.slices is not None
    for place, (variable, array) in enumerate(zip(opt.optimizer.variables, arrays, strict=True)):
        part = opt.slices.get(place)
        assign(variable, array if part is None else np.array(array.reshape(-1)[part.begin:part.end]))


class VariableCopies:
    """Copies of ``variables``, to undo what a step did to them."""

    def __init__(self, variables: Iterable[keras.Variable]) -> None:
        groups: dict[tuple[Any, str], list[tf.Variable]] = {}
        for v in variables:
            groups.setdefault((v.value.dtype, v.value.device), []).append(v.value)
        # One vector for each type and device: as many small variables would take longer than what they hold.
        self._groups = [(own, _vector(own, device)) for (_, device), own in groups.items()]
        self._copies, self._known = Mark() if groups else None, 0
        self._held = False
        self._keep, self._put_back = _once(self.copy), _once(self._copy_back)

    def copy(self) -> list[tf.Operation]:
        """Copy them as they are now; also while a graph is traced, which is followed by `hold` at each run.

        In a graph, return what every operation that changes them has to depend on.
        """
        copied = []
        for own, vector in self._groups:
            with tf.device(vector.device):
                flat = tf.concat([tf.reshape(v.read_value(), [-1]) for v in own], 0)
                copied.append(vector.assign(flat, read_value=False))
        if self._copies is None:
            return []
        return [self._copies.after(copied if tf.inside_function() else [])]

    def _copy_back(self) -> None:
        for own, vector in self._groups:
            with tf.device(vector.device):
                parts = tf.split(vector.read_value(), [v.shape.num_elements() for v in own])
                for v, part in zip(own, parts):
                    v.assign(tf.reshape(part, v.shape), read_value=False)

    def keep(self) -> None:
        if self._groups:
            self._keep()
            self.hold()

    def hold(self) -> None:
        """Note that a graph with `copy` in it has run."""
        self._held = bool(self._groups)
        self._known += 1

    def failed(self) -> None:
        """Note that a graph with `copy` in it has failed, perhaps after the copy."""
        if self._copies is not None:
            found = self._copies.count()
            self._held, self._known = found > self._known, found

    def forget(self) -> None:
        self._held = False

    def put_back(self) -> None:
        """Undo every change since the copy, if there is one."""
        if self._held:
            self._put_back()


@contextlib.contextmanager
def holding(kept: Sequence[VariableCopies]) -> Iterator[None]:
    """Run a graph with `VariableCopies.copy` of ``kept`` in it; one that fails holds what it had copied by then."""
    try:
        yield
    except BaseException:
        for each in kept:
            each.failed()
        raise
    for each in kept:
        each.hold()


def _vector(own: Sequence[tf.Variable], device: str) -> tf.Variable:
    n = sum(v.shape.num_elements() for v in own)
    with tf.init_scope(), tf.device(device):
        return tf.Variable(tf.zeros([n], own[0].dtype), trainable=False)


def _once(graph: Callable[[], Any]) -> Callable[[], None]:
    """Return ``graph`` as one call; eager assignments of each variable would take milliseconds in a deep model."""
    def once() -> None:
        graph()

    return tf.function(once, input_signature=[], **PLAIN)
