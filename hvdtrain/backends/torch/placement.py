"""Where a rank's PyTorch model lives, how many threads it computes with, and its random seeds."""

from __future__ import annotations

import torch

from hvdtrain.cluster.devices import DeviceFacts, cpu_facts


def device() -> torch.device:
    """This rank's device: the GPU that boot made visible to it, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def in_host_memory() -> bool:
    """Whether gradients lie in host memory outside a graph, where a wire of the host can sum them in place."""
    return device().type == "cpu"


def device_facts() -> DeviceFacts:
    """What `device` is."""
    if device().type == "cpu":
        return cpu_facts()
    found = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return DeviceFacts("rocm", found.name, getattr(found, "gcnArchName", ""), found.total_memory)
    return DeviceFacts("cuda", found.name, f"sm_{found.major}{found.minor}", found.total_memory)


def setup(threads: int, deterministic: bool) -> None:
    """Set the compute threads of this process and, if asked, deterministic kernels."""
    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed(seed: int, rank: int) -> None:
    """Give this rank its own stream of random numbers (dropout); rank 0 of seed s is `torch.manual_seed(s)`."""
    torch.manual_seed(seed + 1_000_003 * rank)


class DeviceClock:
    """Seconds between two places of the current CUDA stream, read without waiting for the device."""

    def __init__(self) -> None:
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin: torch.cuda.Event | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Mark the begin of a step."""
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """Mark the end of its computing."""
        assert self._begin is not None
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._open.append((self._begin, end))

    def seconds(self) -> float:
        """Of the latest step whose end the device has reached; 0 before the first."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.pop(0)
            self._seconds = begin.elapsed_time(end) / 1e3
        return self._seconds
