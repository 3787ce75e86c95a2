"""BatchNorm over the samples of all ranks (the key ``sync_batchnorm``): Keras' own layers, with joint moments.

Owns the moments, their gradient and the two collectives of a layer; all else (scale, offset, moving statistics,
renormalisation, serialisation) stays Keras'.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.core.errors import UserError, through_trace
from hvdtrain.core.protocols import Collectives

_PLAIN = keras.layers.BatchNormalization
Map = Callable[[tf.Tensor], tf.Tensor]


class Across:
    """Implements `hvdtrain.core.protocols.Transform`: BatchNorm layers take their moments over the ranks of ``wire``.

    Its collectives are nodes of the graph of forward and backward, which Horovod pairs by name: every rank runs the
    same graphs the same number of times (`hvdtrain.data.feed`, ``even_micros``). While this rank has no samples, its
    dummy batch counts for nothing (`hvdtrain.data.weighting`). ``several``: a step may have several micro-batches.
    ``active``: there are such layers and ranks. ``local``: graphs traced meanwhile take own moments only.
    """

    collective = True

    def __init__(self, wire: Collectives, several: bool = False) -> None:
        self.local = False
        self._wire, self._several, self._trains = wire, several, False
        self.active = False
        self._unscale = tf.Variable(1.0, trainable=False, dtype=tf.float64, name="bn_unscale")
        self._waited_s = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="bn_waited_s")
        self._present = tf.Variable(True, trainable=False, name="bn_present")
        self._opened = (1.0, True)
        self._uses: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

    def install(self, model: keras.Model, blocks: Sequence[Any] = ()) -> None:
        """Have every BatchNorm layer of ``model`` take its moments over the ranks; nothing on one rank.

        Errors: `UserError` for a layer with a call of its own, and for a transport outside TensorFlow's graphs.
        """
        release(model)
        layers = norms(model)
        self._trains = any(layer.trainable for layer in layers)
        self.active = self._wire.size > 1 and bool(layers)
        if not self.active:
            return
        if not self._wire.in_graph:
            raise UserError(f"sync_batchnorm with Keras over {self._wire.name}, which graphs cannot call",
                            "collectives horovod", "set collectives: horovod (see `python -m hvdtrain build`), "
                            "or sync_batchnorm: false")
        for layer in layers:
            plain = type(layer)
            if plain.call is not _PLAIN.call or plain._moments is not _PLAIN._moments:
                raise UserError(f"sync_batchnorm with {plain.__name__} {layer.name!r}, which overrides call",
                                "keras.layers.BatchNormalization", "use it, or set sync_batchnorm: false")
        for i, layer in enumerate(layers):
            object.__setattr__(layer, "_moments", partial(self._moments, layer, f"bn.{i}"))

    def remove(self, model: keras.Model) -> None:
        release(model)

    def describe(self) -> dict[str, str]:
        return {}

    def caveats(self) -> list[str]:
        return ["BatchNorm computes its statistics over each micro-batch of all "
                "ranks"] * (self._several and self._trains)

    def begin(self, loss_scale: float, present: bool) -> None:
        """Open a micro-batch, whose loss is multiplied by ``loss_scale``; ``present``: it has samples."""
        if (loss_scale, present) != self._opened:
            self._opened = loss_scale, present
            self._unscale.assign(1.0 / loss_scale)
            self._present.assign(present)

    def waited_s(self) -> float:
        """Return the seconds that the layers waited for other ranks since the last call."""
        seconds = float(self._waited_s.numpy())
        if seconds:
            self._waited_s.assign(0.0)
        return seconds

    def _moments(self, layer: Any, name: str, x: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        if self.local:
            return type(layer)._moments(layer, x, mask)
        graph = tf.compat.v1.get_default_graph()
        if hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
            raise through_trace(UserError(
                f"sync_batchnorm with {layer.name!r} in a loop, a condition or a separate tf.function",
                "BatchNorm layers that each step calls a fixed number of times",
                "call the layer outside of it, or set sync_batchnorm: false"))
        uses = self._uses.setdefault(graph, Counter())
        uses[name] += 1
        name = f"{name}.{uses[name] - 1}"  # a layer may be called several times in a graph

        def gather(own_K: tf.Tensor) -> tf.Tensor:
            return self._timed(own_K, lambda: self._wire.allgather(own_K, f"{name}.forward").wait())

        def total(own_K: tf.Tensor) -> tf.Tensor:
            unscaled_K = own_K * self._unscale.read_value()
            sum_K = self._timed(unscaled_K, lambda: self._wire.allreduce(unscaled_K, f"{name}.backward").wait())
            return sum_K / self._unscale.read_value()

        def if_present(t: tf.Tensor) -> tf.Tensor:
            return tf.where(self._present.read_value(), t, tf.zeros_like(t))  # not 0 * NaN

        return joint_moments(x, mask, layer._reduction_axes, self._wire.size, gather, total, if_present)

    def _timed(self, x: tf.Tensor, collective: Callable[[], tf.Tensor]) -> tf.Tensor:
        with tf.control_dependencies([x]):
            begin_s = tf.timestamp()
        result = collective()
        with tf.control_dependencies([result]):
            self._waited_s.assign_add(tf.maximum(tf.timestamp() - begin_s, 0.0))
        return result


def joint_moments(x: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int], ranks: int, gather: Map, total: Map,
                  own: Map = lambda t: t) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and biased variance over all ranks, (C,) each, of x (B, ...), B = 0 included, where ``mask`` is true.

    With n_r, m_r, s_r the number, mean and sum of squared deviations of rank r's values of a channel, N = sum n_r::

        mean = sum n_r m_r / N        var = sum (s_r + n_r (m_r - mean)^2) / N

    (Chan, Golub, LeVeque 1979), so a rank counts by its samples. Every rank's loss depends on both, so their gradients
    are summed over ranks before they continue to x, as dmean / N + 2 (x - mean) dvar / N.
    ``gather``: (K,) -> (P, K) over ``ranks``; ``total``: the sum over ranks (K,) -> (K,). ``own``: of what this rank
    contributes and of its gradient.
    """
    counted = None if mask is None else tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(x)), x.dtype)

    @tf.custom_gradient
    def joint(x: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        own_K = own(_moments_of(x, counted, axes))
        rows_PK = tf.ensure_shape(gather(own_K), [ranks, own_K.shape[0]])
        n_PC, mean_PC, squares_PC = tf.split(rows_PK, 3, axis=1)
        n_C = tf.maximum(_sum_rows(n_PC), 1)
        mean_C = _sum_rows(n_PC * mean_PC) / n_C
        var_C = _sum_rows(squares_PC + n_PC * tf.square(mean_PC - mean_C)) / n_C
        shape = [x.shape[i] if i not in axes else 1 for i in range(x.shape.rank)]

        def gradient(dmean_C: tf.Tensor, dvar_C: tf.Tensor) -> tf.Tensor:
            sum_K = total(own(tf.cast(tf.concat([dmean_C, dvar_C], 0), tf.float64)))
            dmean_C, dvar_C = (tf.reshape(tf.cast(g / n_C, x.dtype), shape) for g in tf.split(sum_K, 2))
            dx = dmean_C + 2 * dvar_C * (x - tf.reshape(tf.cast(mean_C, x.dtype), shape))
            return own(dx if counted is None else tf.where(counted > 0, dx, tf.zeros_like(dx)))

        return (tf.cast(mean_C, x.dtype), tf.cast(var_C, x.dtype)), gradient

    mean_C, var_C = joint(x)
    return mean_C, var_C


@contextlib.contextmanager
def local_statistics(across: Across | None) -> Iterator[None]:
    """Have graphs that are traced within take moments as Keras does: what one rank does alone (`Stage.trial`)."""
    if across is None:
        yield
        return
    before, across.local = across.local, True
    try:
        yield
    finally:
        across.local = before


def norms(model: keras.Model) -> list[Any]:
    """Return the BatchNorm layers of ``model``, in its own order."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, _PLAIN)]


def release(model: keras.Model) -> None:
    """Make every layer Keras' own again: a model may come from a run with other ranks."""
    for layer in norms(model):
        layer.__dict__.pop("_moments", None)


def _moments_of(x: tf.Tensor, counted: tf.Tensor | None, axes: Sequence[int]) -> tf.Tensor:
    """Return numbers, means and sums of squared deviations, float64 (3 C,); ``counted``: 0 for what is masked."""
    if counted is None:
        total_C = tf.reduce_sum(x, axes, keepdims=True)
        n_C = tf.fill(tf.shape(total_C), tf.cast(tf.size(x, tf.int64) // total_C.shape.num_elements(), tf.float64))
    else:
        x = tf.where(counted > 0, x, tf.zeros_like(x))  # what is masked may be no number
        total_C = tf.reduce_sum(x, axes, keepdims=True)
        n_C = tf.cast(tf.reduce_sum(counted, axes, keepdims=True), tf.float64)
    mean_C = total_C / tf.cast(tf.maximum(n_C, 1), x.dtype)
    apart = x - mean_C if counted is None else (x - mean_C) * counted
    moments = n_C, mean_C, tf.reduce_sum(tf.square(apart), axes)
    return tf.concat([tf.reshape(tf.cast(each, tf.float64), [total_C.shape.num_elements()]) for each in moments], 0)


def _sum_rows(x_PC: tf.Tensor) -> tf.Tensor:
    """Sum (P, C) -> (C,), the second half of the rows added to the first until one is left: one order on all ranks."""
    rows = x_PC.shape[0]
    while rows > 1:
        half = (rows + 1) // 2
        x_PC, rows = tf.concat([x_PC[:rows - half] + x_PC[half:], x_PC[rows - half:half]], 0), half
    return x_PC[0]
