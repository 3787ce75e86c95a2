"""Which accelerator a rank uses: one device per local rank.

Owns the counting of NVIDIA devices without a framework, and the value of CUDA_VISIBLE_DEVICES. Does not set it:
`hvdtrain.cluster.boot` does, before MPI or a framework starts CUDA. Pure but for `count_gpus`, which looks at files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(root: str = "/") -> int:
    """Number of NVIDIA GPUs of this host that this process could open; 0 without a driver."""
    nodes = [p for p in Path(root, "dev").glob("nvidia[0-9]*") if p.name[len("nvidia"):].isdigit()]
    if nodes:
        return len(nodes)
    listed = Path(root, "proc/driver/nvidia/gpus")
    return sum(1 for _ in listed.iterdir()) if listed.is_dir() else 0


def usable(env: Mapping[str, str], count: int) -> list[str]:
    """The devices CUDA would show: all ``count``, or those of CUDA_VISIBLE_DEVICES up to its first invalid entry."""
    if VISIBLE not in env:
        return [str(i) for i in range(count)]
    found: list[str] = []
    for entry in env[VISIBLE].split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        found.append(name)
    return found if count else []


def visible_devices(env: Mapping[str, str], count: int, local_rank: int, local_size: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES that gives this rank its device; None where there is nothing to change.

    A list that has one entry already is kept: the launcher chose. With fewer devices than local ranks they are
    shared round robin (see `sharing`).
    """
    devices = usable(env, count)
    if not devices or local_rank < 0:
        return None
    if len(devices) == 1:
        return devices[0]
    return devices[local_rank % len(devices)]


def sharing(env: Mapping[str, str], count: int, local_size: int) -> str:
    """A sentence for the summary when ranks must share devices; empty when each has its own."""
    n = len(usable(env, count))
    if not n or n >= local_size or (VISIBLE in env and n == 1):
        return ""
    return (f"{local_size} ranks of this host share {n} GPU{'s' if n > 1 else ''} round robin; "
            "NCCL refuses two ranks on one GPU, so gradients must go another way, or start fewer ranks")
