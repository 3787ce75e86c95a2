"""What a rank's part of a Keras model holds beside its gradients, over the ranks that have the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.buffers import Buffers
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.pipelined.part import Part
from hvdtrain.exchange.transport import Transport
from hvdtrain.pipeline.replicas import Replicas


class PartBuffers(Buffers):
    """Implements `hvdtrain.protocols.Buffers` for ``part``: one `Buffers` for the blocks of each group of ranks.

    ``layers``: of the whole model. ``owners``: of each of the optimizer's variables the trainable variable that it is
    of; None where it is of none (the rate).
    """

    def __init__(self, part: Part, opt: Optimization, replicas: Sequence[Replicas], layers: Sequence[Any],
                 owners: Sequence[keras.Variable | None]) -> None:
        super().__init__(part, opt, Transport(replicas[0].wire, Ops()))
        self._owners = list(owners)
        self._groups = [Buffers(Part(part.whole, [layers[i] for i in each.blocks]), opt, Transport(each.wire, Ops()))
                        for each in replicas]

    def begin(self) -> None:
        """Open a step."""
        super().begin()
        for group in self._groups:
            group.begin()

    def saw(self, samples: int) -> None:
        """Count samples that statistics were taken over."""
        for group in self._groups:
            group.saw(samples)

    def discard(self) -> None:
        """Undo what the step did to the statistics."""
        super().discard()
        for group in self._groups:
            group.discard()

    def restart(self) -> None:
        """Forget how many samples were seen."""
        for group in self._groups:
            group.restart()

    def share(self) -> None:
        """Give every rank the weights and the optimizer's state of the lowest that has them; seed generators stay."""
        opt = self._opt
        opt.build()
        base_lr = tf.Variable(np.nan if opt.base_lr is None else opt.base_lr, trainable=False, dtype=tf.float64)
        for group in self._groups:
            if group._transport.size == 1:
                continue
            mine = {id(v) for v in group._model.weights}
            alike = [v for place, (v, owner) in enumerate(zip(opt.optimizer.variables, self._owners))
                     if place not in (opt.slices or ()) and (owner is None or id(owner) in mine)]
            group._from_root([*group._model.weights, *alike, base_lr], "initial")
        opt.base_lr = None if np.isnan(base_lr.numpy()) else float(base_lr.numpy())

    def sync(self) -> None:
        """Average what ranks changed on their own since the last time, by their samples; collective."""
        for group in self._groups:
            group.sync()
