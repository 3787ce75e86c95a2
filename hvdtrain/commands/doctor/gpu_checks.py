"""Checks of GPUs: driver, architectures, what frameworks see of them, how many there are for the ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hvdtrain.commands.doctor.facts import FRAMEWORKS, Facts, known
from hvdtrain.commands.doctor.problem import NOTE, SLOWS, STOPS, Problem
from hvdtrain.core.errors import count as words

INSTALL = {"torch": "pip install -r requirements/torch-cuda.txt",
           "tensorflow": "pip install -r requirements/tensorflow-cuda.txt"}

Found = Iterator[Problem]


def runs_on(capability: str, builds: Sequence[str]) -> bool:
    """Whether code built for ``builds`` ("sm_80", "sm_90a", "compute_90") runs on a device ("86" is 8.6).

    Machine code runs on devices of the same major version and the same or a later minor one, PTX (compute_) is compiled
    for any later device; a build whose name ends in a letter is for that device alone (a) or its major version (f).
    Source: CUDA C++ programming guide, binary and PTX compatibility.
    """
    device = int(capability)
    for build in builds:
        found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", build)
        if not found:
            continue
        kind, number, suffix = found[1], int(found[2]), found[3]
        near = number <= device and (number // 10 == device // 10 or (kind == "compute" and not suffix))
        if number == device or (near and suffix != "a"):
            return True
    return False


def devices(host: Facts) -> list[dict[str, object]]:
    """The NVIDIA devices of a host, [] where there are none or they are unknown."""
    facts = host["gpu"]
    return list(facts.get("devices", [])) if known(facts) else []


def frameworks(host: Facts) -> Iterator[tuple[str, Facts]]:
    """Names and facts of the frameworks that load."""
    for name in FRAMEWORKS:
        if known(host[name]) and "version" in host[name]:
            yield name, host[name]


def driver(host: Facts, parallel: bool) -> Found:
    """The driver answers, and is not older than the CUDA of a framework by a major version."""
    name, facts = (host["host"],), host["gpu"]
    if not known(facts):
        return
    if "error" in facts:
        yield Problem(SLOWS, name, f"there is a GPU that cannot be asked: {facts['at']}: {facts['error']}",
                      "run nvidia-smi there; reboot or reinstall the driver where it fails, pip install nvidia-ml-py "
                      "where only pynvml is missing")
    for framework, found in frameworks(host):
        ours, theirs = _major(facts.get("cuda", "")), _major(str(found.get("cuda", "")))
        if ours and theirs and ours < theirs:
            yield Problem(STOPS, name, f"driver {facts['driver']} is for CUDA {facts['cuda']} and older, but "
                          f"{framework} {found['version']} brings CUDA {found['cuda']}",
                          f"update the NVIDIA driver, or install a {framework} made for CUDA {ours}")


def architectures(host: Facts, parallel: bool) -> Found:
    """Every device can run the code of every framework."""
    for framework, found in frameworks(host):
        builds = found.get("arch") or []
        for device in {str(d["capability"]): d for d in devices(host)}.values():
            if builds and not runs_on(str(device["capability"]), builds):
                able = [str(i) for i, d in enumerate(devices(host)) if runs_on(str(d["capability"]), builds)]
                yield Problem(STOPS, (host["host"],), f"{framework} {found['version']} has no code for "
                              f"{device['name']} (sm_{device['capability']}), only for {', '.join(builds)}",
                              f"install a {framework} that supports it (an older release for an old device), or hide "
                              f"it: export CUDA_VISIBLE_DEVICES={','.join(able)}")


def unseen(host: Facts, parallel: bool) -> Found:
    """Frameworks use the GPUs that are there and not hidden."""
    if not devices(host) or host["visible"] in ("", "-1"):
        return
    count = len(devices(host))
    for framework, found in frameworks(host):
        if "error" in found or found.get("devices") or found.get("hip"):
            continue
        built = bool(found.get("cuda"))
        why = "sees none of them" if built else "is a build without CUDA"
        do = (f"run nvidia-smi and python -c 'import {framework}' there; a container needs docker run --gpus all"
              if built else INSTALL[framework])
        yield Problem(SLOWS, (host["host"],), f"{words(count, 'GPU')} here, but {framework} "
                      f"{found['version']} {why}", do)


def sharing(host: Facts, parallel: bool) -> Found:
    """A GPU for every rank."""
    have, count = len(devices(host)), int(host["slots"])
    if have and known(host["visible"]):
        shown = [entry for entry in host["visible"].split(",") if entry.strip()]
        have = min(have, len(shown)) if len(shown) > 1 else have  # one entry may be the launcher's choice for a rank
    if 0 < have < count:
        with_nccl = any("nccl" in f.get("horovod_built", []) for _, f in frameworks(host))
        yield Problem(STOPS if with_nccl else SLOWS, (host["host"],),
                      f"{count} ranks share {words(have, 'GPU')}" + (", which NCCL refuses" if with_nccl else ""),
                      f"start as many ranks as GPUs: -H {host['host']}:{have}; or add --exchange_device cpu")


def nccl(host: Facts, parallel: bool) -> Found:
    """With GPUs, Horovod sums by NCCL."""
    if not devices(host) or not parallel:
        return
    for framework, found in frameworks(host):
        built = found.get("horovod_built", [])
        if built and found.get("devices") and "nccl" not in built:
            yield Problem(SLOWS, (host["host"],), f"Horovod's {framework} part was built without NCCL: gradients of "
                          "GPUs go over host memory", "run python -m hvdtrain build --force there")


def mixed(hosts: Sequence[Facts]) -> Found:
    """Unlike devices in one job: allowed, and there are settings for it."""
    kinds: dict[str, list[str]] = {}
    for host in hosts:
        if known(host["gpu"]) or host["gpu"] is None:
            for kind in dict.fromkeys(str(d["name"]) for d in devices(host)) or {"no GPU": None}:
                kinds.setdefault(kind, []).append(host["host"])
    if len(kinds) > 1:
        told = "; ".join(f"{kind} on {', '.join(names)}" for kind, names in kinds.items())
        everywhere = tuple(dict.fromkeys(name for names in kinds.values() for name in names))
        yield Problem(NOTE, everywhere, f"unlike devices: {told}",
                      "train with --balance auto, which gives each its part; exchange_device auto moves gradients over "
                      "host memory where device libraries would not")


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
