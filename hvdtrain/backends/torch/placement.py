"""Where a rank's PyTorch model lives, how many threads it computes with, and its random seeds."""

from __future__ import annotations

import torch


def device() -> torch.device:
    """This rank's device: the GPU that boot made visible to it, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def in_host_memory() -> bool:
    """Whether gradients lie in host memory outside a graph, where a wire of the host can sum them in place."""
    return device().type == "cpu"


def setup(threads: int, deterministic: bool) -> None:
    """Set the compute threads of this process and, if asked, deterministic kernels."""
    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed(seed: int, rank: int) -> None:
    """Give this rank its own stream of random numbers (dropout); rank 0 of seed s is `torch.manual_seed(s)`."""
    torch.manual_seed(seed + 1_000_003 * rank)
