"""What can be said of a PyTorch model before it trains: what it cannot be trained with, and what depends on the cut.

Owns checks and words over modules. Changes nothing.
"""

from __future__ import annotations

import torch

from hvdtrain.backends.torch import names
from hvdtrain.core.errors import UserError


def check_model(model: torch.nn.Module) -> None:
    """Raise `UserError` for sparse gradients, and for state that no checkpoint can hold."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UserError(f"{type(module).__name__} {name!r} gives sparse gradients",
                            "dense gradients, which the exchange sums", "build it with sparse=False")
    names.check(model)
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            owner = name.rpartition(".")[0] or type(model).__name__
            raise UserError(f"module {owner!r} has extra state of type {type(value).__name__}",
                            "tensors only in the model's state_dict, as checkpoints hold nothing else",
                            "keep it in a tensor given to register_buffer, in place of get_extra_state")
        try:
            torch.empty(0, dtype=value.dtype if value.dtype != torch.bfloat16 else torch.int16).numpy()
        except TypeError:
            raise UserError(f"{name!r} is of {value.dtype}", "a type that a checkpoint can hold",
                            "keep its bits, by tensor.view(torch.uint8)") from None


def made_of(model: torch.nn.Module) -> list[str]:
    """Kind, name, dtype and shape of each parameter and buffer, in the order in which ranks exchange them."""
    def line(kind: str, name: str, tensor: torch.Tensor) -> str:
        return f"{kind} {name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    parameters = [line("parameter" if p.requires_grad else "frozen parameter", n, p)
                  for n, p in names.named_parameters(model)]
    return parameters + [line("buffer", n, b) for n, b in model.named_buffers()]


def caveats(model: torch.nn.Module, synchronised: bool = False) -> list[str]:
    """Layers in training mode whose result depends on how a batch is cut (law 2), in words.

    ``synchronised``: BatchNorm layers take their statistics over all ranks.
    """
    found = []
    active = [m for m in model.modules() if m.training]
    norms = [m for m in active if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if norms and not synchronised:  # torch's SyncBatchNorm too, for which there is no torch.distributed here
        found.append("BatchNorm takes its statistics over each rank's own samples, without sync_batchnorm: true")
    if any(_drops(m) for m in active):
        found.append("dropout draws differ with the number of ranks")
    return found


def _drops(module: torch.nn.Module) -> bool:
    """A dropout layer, or one (attention, RNN) whose attribute ``dropout`` is a rate."""
    layer = isinstance(module, torch.nn.modules.dropout._DropoutNd)
    rate = module.p if layer else getattr(module, "dropout", 0.0)
    return isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0
