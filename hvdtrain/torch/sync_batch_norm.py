"""`SyncBatchNorm`: batch normalization over the samples of all ranks, on CPUs and GPUs.

The statistics and their gradient are `hvdtrain.backends.torch.transforms.sync_batchnorm`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain import job
from hvdtrain.backends.torch.transforms.sync_batchnorm import Moments, Synchronised
from hvdtrain.core.process_sets import Sum
from hvdtrain.torch import ops


class _AllRanks:
    """Moves what `Synchronised` asks for between all ranks of the job."""

    @property
    def present(self) -> bool:
        """Return whether this rank's values count: not those of a placeholder that `hvdtrain.torch.shard` gives."""
        data = sys.modules.get("hvdtrain.torch.data")
        return data is None or not data.at_placeholder()

    def moments(self, take: Callable[[], Moments]) -> Moments:
        return take()

    def gather(self, x_K: torch.Tensor, name: str) -> torch.Tensor:
        return ops.allgather(x_K[None])

    def sum(self, x_K: torch.Tensor, name: str) -> torch.Tensor:
        return ops.allreduce(x_K, op=Sum)


class SyncBatchNorm(Synchronised):
    """BatchNorm of any dimension whose statistics in training are those of all ranks' samples.

    Every rank calls it equally often, in the same order; ranks may have different numbers of samples, and the single
    one that `hvdtrain.torch.shard` gives to a rank without samples does not count. Gradients of weight and bias are
    this rank's own, which the optimizer exchanges.
    """

    wire_name = "bn.SyncBatchNorm"
    across = _AllRanks()

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm got {input.dim()} dimensions; expected samples x channels, or more")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        whole = self.training or self.running_mean is None
        return self.jointly(input) if whole and job.size() > 1 else _BatchNorm.forward(self, input)
