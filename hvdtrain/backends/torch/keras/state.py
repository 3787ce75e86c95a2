"""What a checkpoint holds of a Keras model on PyTorch, and its final files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.backends.keras import saving
from hvdtrain.backends.torch import export, resuming, state
from hvdtrain.backends.torch.keras.alone import without_tensorflow
from hvdtrain.backends.torch.keras.optim import Adopted
from hvdtrain.checkpoint import weights


class KerasState(state.TorchState):
    """`TorchState`, with all state of a compiled optimizer and with Keras' files."""

    def __init__(self, keras_model: keras.Model, *args: Any) -> None:
        super().__init__(*args)
        self._keras_model, self.finalized = keras_model, False
        self._adopted = self.optimizer.optimizer if isinstance(self.optimizer.optimizer, Adopted) else None

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`; a checkpoint that does not fit changes nothing."""
        resuming.check(self.optimizer, rest)
        if self._adopted is not None:
            own = state.optimizer_arrays(self.optimizer, self.names)
            alone = set(map(_slot, own)) ^ set(map(_slot, groups["optimizer"]))  # by the settings of one of the runs
            kept = [{name: array for name, array in side.items() if _slot(name) not in alone}
                    for side in (own, groups["optimizer"])]
            state.check_names("optimizer", *kept)
            groups = {**groups, "optimizer": kept[1]}
        super().load(groups, rest)

    def try_export(self) -> str:
        """Raise `UserError` for a tensor that no file can hold; return what Keras cannot write, or ""."""
        with without_tensorflow():
            return super().try_export() or saving.left_out(self._keras_model)

    def export(self, directory: Path) -> list[str]:
        """Write model.safetensors and Keras' own file; return their names.

        The latter is model.keras, or model.weights.h5 for a model whose class Keras cannot describe. With use_ema the
        averaged weights are written, as `keras.Model.fit` leaves them.
        """
        use_ema = self._adopted is not None and self._adopted.own.use_ema and not self.finalized
        averaged = self._adopted if use_ema else None
        kept = [tensor.detach().clone() for tensor in self.optimizer.tensors] if averaged else []
        if averaged:
            averaged.own.finalize_variable_values(averaged.own._trainable_variables)
        try:
            return _write(self.model, self._keras_model, Path(directory))
        finally:
            with torch.no_grad():
                for tensor, value in zip(self.optimizer.tensors, kept):
                    tensor.copy_(value)


def _write(module: torch.nn.Module, model: keras.Model, directory: Path) -> list[str]:
    export.write_safetensors(module, directory / weights.FILE)
    with without_tensorflow():
        return [weights.FILE, *saving.write(model, directory)]


def _slot(name: str) -> str:
    """Return the word of an optimizer's array by its name in a checkpoint, such as momentum."""
    return name.rpartition("/")[2]
