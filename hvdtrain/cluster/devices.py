"""Which accelerator a rank uses: one device per local rank; and what a device is, in the words of all frameworks.

Owns the counting of NVIDIA devices without a framework, and the value of CUDA_VISIBLE_DEVICES. Does not set it:
`hvdtrain.cluster.boot` does, before MPI or a framework starts CUDA. Pure but for `count_gpus`, which looks at files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DeviceFacts:
    """What a rank computes on.

    ``kind``: "cpu", "cuda" or "rocm". ``name``: the driver's. ``arch``: "sm_80", "gfx90a", or a CPU's machine
    ("x86_64"). ``memory_bytes``: of the device, for a CPU what the host had to give; 0 where unknown.
    """

    kind: str
    name: str
    arch: str
    memory_bytes: int = 0

    @property
    def fast(self) -> tuple[str, ...]:
        """Names of the 16-bit types that it multiplies faster than float32; none for a CPU."""
        return fast_types(self.kind, self.arch)


def fast_types(kind: str, arch: str) -> tuple[str, ...]:
    """16-bit types with matrix units on that architecture, the better one first. Pure.

    NVIDIA: bfloat16 from sm_80 (Ampere), float16 from sm_70 (Volta, Turing). AMD: both from gfx90a, float16 on gfx908
    and gfx906. Sources: CUDA C programming guide, table of arithmetic throughput; AMD CDNA white papers.
    """
    if kind == "cuda":
        digits = arch.removeprefix("sm_").rstrip("af")
        number = int(digits) if digits.isdigit() else 0
        return ("bfloat16", "float16") if number >= 80 else ("float16",) if number >= 70 else ()
    if kind == "rocm":
        name = arch.split(":")[0]
        return ("float16",) if name in ("gfx906", "gfx908") else (
            ("bfloat16", "float16") if name[:5] in ("gfx90", "gfx94", "gfx95", "gfx11", "gfx12") else ())
    return ()


def unlike(devices: Sequence[DeviceFacts]) -> str:
    """What makes these devices unlike for a library that moves gradients between them, in words, or "". Pure."""
    kinds = list(dict.fromkeys((d.kind, d.arch if d.kind != "cpu" else "") for d in devices))
    if len(kinds) < 2:
        return ""
    return "unlike devices: " + ", ".join(f"{kind} {arch}".strip() for kind, arch in kinds)


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


def own_memory_bytes() -> int:
    """Memory of the first GPU that this process is shown, by NVIDIA's management library; 0 where it cannot tell."""
    import os

    try:
        import pynvml

        pynvml.nvmlInit()
        shown = usable(os.environ, pynvml.nvmlDeviceGetCount())
        find = pynvml.nvmlDeviceGetHandleByIndex if shown[0].isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        return int(pynvml.nvmlDeviceGetMemoryInfo(find(int(shown[0]) if shown[0].isdigit() else shown[0])).total)
    except Exception:  # noqa: BLE001 a fact for a table: no driver, no library and no permission read alike
        return 0
