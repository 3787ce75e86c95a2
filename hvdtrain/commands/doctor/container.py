"""Facts of the container around this process, and of what it may use: files and variables that are looked at.

Owns how a container and its limits are found; judges nothing (``container_checks`` does).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.cluster.machine.memory import groups_limits
from hvdtrain.cluster.topology import cpu_quota

UNLIMITED = 1 << 60
"""Version 1 tells no limit as a number near 2 ** 63."""

NAMED = (("APPTAINER_CONTAINER", "Apptainer"), ("SINGULARITY_CONTAINER", "Singularity"),
         ("KUBERNETES_SERVICE_HOST", "Kubernetes"), ("ENROOT_ROOTFS", "enroot"))
FILES = (("run/.containerenv", "Podman"), (".dockerenv", "Docker"))
GROUPS = (("kubepods", "Kubernetes"), ("docker", "Docker"), ("libpod", "Podman"), ("lxc", "LXC"),
          ("containerd", "containerd"))


def container(env: Mapping[str, str], root: str = "/") -> dict[str, Any] | None:
    """Which container this is and by what that is known: {"kind", "by", "namespaced"}; None outside of one.

    ``namespaced``: in a user namespace of its own, as rootless engines and Apptainer make one.
    """
    found = next(((kind, name) for name, kind in NAMED if env.get(name)), None)
    found = found or next(((kind, f"/{name}") for name, kind in FILES if Path(root, name).exists()), None)
    found = found or next(((kind, "/proc/self/cgroup") for word, kind in GROUPS
                           if re.search(rf"[/\-.]{word}\b", _text(root, "proc/self/cgroup"))), None)
    if found is None and env.get("container"):  # what systemd-nspawn, LXC and Podman tell their first process
        found = (env["container"], "the variable container")
    return None if found is None else {"kind": found[0], "by": found[1], "namespaced": namespaced(root)}


def namespaced(root: str = "/") -> bool:
    """Whether user ids here are mapped: the whole range onto itself is the first namespace."""
    rows = _text(root, "proc/self/uid_map").split()
    return bool(rows) and rows[:3] != ["0", "0", "4294967295"]


def ptrace_scope(root: str = "/") -> int | None:
    """Yama's rule of who may read whose memory, 0 to 3; None where the kernel has no Yama."""
    text = _text(root, "proc/sys/kernel/yama/ptrace_scope").strip()
    return int(text) if text.isdigit() else None


def limits(root: str = "/") -> dict[str, Any]:
    """What the control groups around this process allow: {"cores", "memory_bytes"}, None where there is no limit."""
    memory = [limit for limit, _ in groups_limits(f"{root}/proc", f"{root}/sys/fs/cgroup") if limit < UNLIMITED]
    cores = cpu_quota(f"{root}/sys/fs/cgroup", f"{root}/proc")
    return {"cores": None if cores == float("inf") else cores, "memory_bytes": min(memory, default=None)}


def _text(root: str, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(root, name).read_text(errors="replace")
    return ""
