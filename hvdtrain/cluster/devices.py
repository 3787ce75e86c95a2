"""Accelerators of a rank: how many there are, which ones it uses, what they are in terms of all frameworks.

Computes the value of CUDA_VISIBLE_DEVICES and leaves setting it to `hvdtrain.cluster.boot`. Pure but for `count_gpus`
and `cpu_facts`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.errors import UserError, count
from hvdtrain.core.mesh import spans

VISIBLE = "CUDA_VISIBLE_DEVICES"

BY_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Variables of a Slurm that confines each task to GPUs of its own, which every task then numbers from 0."""


@dataclass(frozen=True)
class DeviceFacts:
    """The device that a rank computes on.

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
    """Return 16-bit types with matrix units on that architecture, the better one first. Pure.

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


def describe_difference(devices: Sequence[DeviceFacts]) -> str:
    """Describe in which way devices differ for a library that moves gradients between them; "" where they do not. Pure.

    ``devices``: by rank. Different are other kinds, and GPUs of other architectures (of other names where the driver
    reports no architecture). CPUs are alike, and so are GPUs that differ in memory or in switchable features.
    """
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(_class(device), []).append(rank)
    if len(ranks) < 2:
        return ""
    return "different devices: " + ", ".join(f"{name} (rank{'s' if len(r) > 1 else ''} {spans(tuple(r))})"
                                          for name, r in ranks.items())


def _class(device: DeviceFacts) -> str:
    """Return a class of devices that exchange gradients among themselves: "cpu", "cuda sm_80", "rocm gfx90a"."""
    if device.kind == "cpu":
        return device.kind
    return f"{device.kind} {device.arch.split(':')[0] or device.name}".strip()


def count_gpus(root: str = "/") -> int:
    """Count the NVIDIA GPUs of this host that this process could open; 0 without a driver."""
    nodes = [p for p in Path(root, "dev").glob("nvidia[0-9]*") if p.name[len("nvidia"):].isdigit()]
    if nodes:
        return len(nodes)
    listed = Path(root, "proc/driver/nvidia/gpus")
    return sum(1 for _ in listed.iterdir()) if listed.is_dir() else 0


def usable(env: Mapping[str, str], count: int) -> list[str]:
    """Return the devices CUDA would show: all ``count``, or those of CUDA_VISIBLE_DEVICES up to its first invalid
    entry.

    Valid are the number of a device and what begins as the name of one does ("GPU-", "MIG-"), not Slurm's NoDevFiles.
    """
    if VISIBLE not in env:
        return [str(i) for i in range(count)]
    found: list[str] = []
    for entry in env[VISIBLE].split(","):
        name = entry.strip()
        if not (int(name) < count if name.isdigit() else name.startswith(("GPU-", "MIG-"))):
            break
        found.append(name)
    return found if count else []


def visible_devices(env: Mapping[str, str], count: int, local_rank: int, local_size: int,
                    per_rank: int = 1) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES that gives this rank its devices; None where nothing is to change.

    A list that has ``per_rank`` entries already is kept: the launcher chose (`overlap` finds where it did not). One
    device each: with fewer than local ranks they are shared round robin (see `sharing`). Several: local rank r gets
    entries r * per_rank and on; `UserError` where they are too few for this host's ranks, and for entries that a
    process cannot see together (one device twice, MIG instances). The one rank of a host with one GPU in all keeps it.
    """
    devices = usable(env, count)
    if not devices or local_rank < 0:
        return None
    if per_rank > 1:
        if count == len(devices) == 1 and max(local_size, local_rank + 1) == 1:
            return devices[0]  # the framework has a CPU beside it, or says that it has none
        return ",".join(_several(devices, VISIBLE in env, local_rank, local_size, per_rank))
    if len(devices) == 1:
        return devices[0]
    return devices[local_rank % len(devices)]


def _several(devices: list[str], listed: bool, local_rank: int, local_size: int, per_rank: int) -> list[str]:
    """Return the rank's ``per_rank`` entries; ``listed``: they come from CUDA_VISIBLE_DEVICES."""
    _check_together(devices, per_rank)
    ranks = max(local_size, local_rank + 1)
    if listed and len(devices) == per_rank:
        return devices
    if len(devices) < ranks * per_rank:
        raise too_few(len(devices), ranks, per_rank)
    return devices[local_rank * per_rank:(local_rank + 1) * per_rank]


def _check_together(devices: Sequence[str], per_rank: int) -> None:
    """Raise `UserError` for entries of which CUDA would show one process fewer than are listed."""
    mig = next((d for d in devices if d.startswith("MIG-")), None)
    if mig:
        raise UserError(f"{VISIBLE} lists MIG instances ({mig}) for {count(per_rank, 'device')} of each rank",
                        "whole GPUs: a process sees one MIG instance at most",
                        "set model_parallel: 1 and devices_per_rank: 1, or list whole GPUs")
    plain = [str(int(d)) if d.isdigit() else d for d in devices]
    twice = next((d for i, d in enumerate(plain) if d in plain[:i]), None)
    if twice is not None:
        raise UserError(f"{VISIBLE} lists GPU {twice} twice ({','.join(devices)}) for "
                        f"{count(per_rank, 'device')} of each rank",
                        "each GPU once", f"fix {VISIBLE}")


def too_few(shown: int, ranks: int, per_rank: int) -> UserError:
    """Return the error of a host that shows fewer GPUs than its ranks own together."""
    fits = shown // per_rank
    do = (f"start at most {count(fits, 'rank')} on this host (-H HOST:{fits})" if fits
          else f"take a host with {count(per_rank, 'GPU')} for each rank")
    gpus, of_ranks = count(shown, "GPU"), count(ranks, "rank")
    return UserError(f"this host shows {gpus} for {of_ranks} x {per_rank} devices",
                     f"{ranks * per_rank}, so that no two ranks share a device",
                     f"{do}, lower model_parallel and devices_per_rank, or use CPUs only with "
                     f"{VISIBLE}= (empty)")


def overlap(owned: Sequence[tuple[str, Sequence[str]]]) -> UserError | None:
    """Return the error of ranks of one host that own the same device, or None. Pure.

    ``owned``: (host, entries of CUDA_VISIBLE_DEVICES) of each rank, no entries where they cannot be compared.
    """
    owner: dict[tuple[str, str], int] = {}
    for rank, (host, entries) in enumerate(owned):
        for entry in entries:
            first = owner.setdefault((host, entry), rank)
            if first != rank:
                alike = [r for r, (h, _) in enumerate(owned) if h == host]
                shown = len({e for h, own in owned if h == host for e in own})
                return UserError(f"ranks {first} and {rank} on host {host} both use GPU {entry}: it shows "
                                 f"{count(shown, 'GPU')} for {count(len(alike), 'rank')} x "
                                 f"{count(len(entries), 'device')}",
                                 f"{len(alike) * len(entries)}, so that no two ranks share a device",
                                 f"list them all in {VISIBLE} for every rank, or start fewer ranks on this host")
    return None


def sharing(env: Mapping[str, str], count: int, local_size: int) -> str:
    """Return a sentence for the summary where ranks must share devices, else ""."""
    n = len(usable(env, count))
    if not n or n >= local_size or (VISIBLE in env and n == 1):
        return ""
    return (f"{local_size} ranks of this host share {n} GPU{'s' if n > 1 else ''} round robin; "
            "NCCL refuses two ranks on one GPU, so set exchange_device: cpu, or start fewer ranks")


def cpu_model(cpuinfo: str) -> str:
    """Return the processor's name from the text of /proc/cpuinfo, "" where it has none. Pure."""
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


def cpu_facts() -> DeviceFacts:
    """Return this host's processor, by the name that the kernel knows, and its available memory."""
    import platform

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        name = cpu_model(Path("/proc/cpuinfo").read_text()) or name
    return DeviceFacts("cpu", name, platform.machine(), meminfo().get("MemAvailable", 0))


def meminfo(proc: str = "/proc") -> dict[str, int]:
    """Return what the kernel tells of the host's memory, in bytes by its names; {} where it does not."""
    with contextlib.suppress(OSError):
        rows = re.findall(r"^(\w+):\s+(\d+) kB", Path(proc, "meminfo").read_text(), re.MULTILINE)
        return {name: int(kib) * 1024 for name, kib in rows}
    return {}
