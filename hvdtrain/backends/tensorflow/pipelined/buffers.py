"""What a rank's part of a Keras model holds beside its gradients, over the ranks that have the same blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.buffers import Buffers
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.pipelined.part import Part
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core.protocols import Writable
from hvdtrain.parallel.parts import ReplicaGroup


class PartBuffers(Buffers):
    """Implements `hvdtrain.core.protocols.Buffers` for ``part``: one `Buffers` for the blocks of each group of ranks.

    ``layers``: of the whole model. ``owners``: of each of the optimizer's variables the trainable variable that it is
    of; None where it is of none (the rate).
    """

    def __init__(self, part: Part, opt: Optimization, replicas: Sequence[ReplicaGroup], layers: Sequence[Any],
                 owners: Sequence[keras.Variable | None]) -> None:
        super().__init__(part, opt, Transport(replicas[0].wire, Ops()), part.whole)
        self._owners = list(owners)
        self._groups = [Buffers(Part(part.whole, [layers[i] for i in each.blocks]), opt, Transport(each.wire, Ops()),
                                part.whole) for each in replicas]

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

    def sync(self) -> list[str]:
        """Average statistics by the ranks' samples; return what else differed; collective."""
        return [name for group in self._groups for name in group.sync()]

    def keep(self) -> None:
        """Note the values that `noticed` and `combine` compare with."""
        for group in self._groups:
            group.keep()

    def writable(self) -> dict[str, Writable]:
        """Return the variables of this rank's blocks that are neither trained nor statistics, by name."""
        return {name: one for group in self._groups for name, one in group.writable().items()}

    def noticed(self) -> list[str]:
        """Return the variables that were written to since `keep`, without those tracked."""
        return [name for group in self._groups for name in group.noticed()]

    def track(self, names: Iterable[str]) -> None:
        """Have `keep` note these always."""
        names = list(names)
        for group in self._groups:
            group.track(names)

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        """Reduce those of ``reductions`` that this rank's blocks have; collective over the ranks with a block."""
        for group in self._groups:
            group.combine(reductions, samples, force)
