"""Parameters and normalisation layers of a PyTorch model that the key ``freeze`` keeps from training.

The patterns are `hvdtrain.planning.freezing`'s. What joins training later goes the way of any unfrozen parameter
(`hvdtrain.backends.torch.params.TorchFacts`).
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase

from hvdtrain.backends.torch.modules import PlainNames
from hvdtrain.planning.freezing import ALWAYS, Freeze, epochs_frozen


class TorchFreezing:
    """The tensors of ``model`` that ``freeze`` names; the constructor freezes them.

    A layer with running statistics is frozen with its last tensor: it then normalises with these statistics and leaves
    them as they are (evaluation mode), as Keras does. ``norms``: such layers.
    """

    def __init__(self, model: torch.nn.Module, freeze: Freeze) -> None:
        plain = PlainNames(model)
        named = [(plain(name), param) for name, param in model.named_parameters(remove_duplicate=False)]
        buffers = [plain(name) for name, _ in model.named_buffers()]
        epochs = epochs_frozen(freeze, [name for name, _ in named], buffers)
        longest: dict[torch.nn.Parameter, float] = {}  # of a shared parameter any name that is frozen counts
        for name, param in named:
            longest[param] = max(epochs[name], longest.get(param, 0))
        self._params = [(param, least) for param, least in longest.items() if least]
        self._norms = [(module, least) for path, module in model.named_modules()
                       if isinstance(module, _NormBase) and module.track_running_stats
                       and (least := _least(plain(path), epochs))]
        self.norms = [module for module, _ in self._norms]
        for param, _ in self._params:
            param.requires_grad_(False)
        for module in self.norms:
            module.training = False

    def set_epoch(self, epoch: int) -> None:
        """Freeze and unfreeze for the epoch that begins what is not frozen for the whole run."""
        for param, epochs in self._params:
            if epochs < ALWAYS:
                param.requires_grad_(epoch >= epochs)
        for module, epochs in self._norms:
            if epochs < ALWAYS:
                module.training = epoch >= epochs


def _least(path: str, epochs: dict[str, float]) -> float:
    """Return for how many epochs all tensors of the module ``path`` are frozen."""
    return min((e for name, e in epochs.items() if name.rpartition(".")[0] == path), default=0)
