"""CUDA and NCCL as CMake expects them, where they came as wheels: a folder of links with the missing names.

Owns the staging folder. The wheels carry libnccl.so.2 and libcudart.so.13 but not the names without a
number that a linker looks for, and put libraries under lib where torch's build helper looks under lib64.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hvdtrain.cluster.machine.software import Cuda


def stage(cuda: Cuda, into: Path) -> dict[str, str]:
    """Link toolkit and NCCL under ``into`` and return the environment that points every finder there."""
    home, nccl = into / "cuda", into / "nccl"
    home.mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        source = Path(cuda.home, name)
        if source.exists():
            (home / name).symlink_to(source)
    libs = [Path(cuda.home, d) for d in ("lib64", "lib", "targets/x86_64-linux/lib")]
    link_libraries([d for d in libs if d.is_dir()], home / "lib64")
    (home / "lib").symlink_to("lib64")
    nccl.mkdir()
    (nccl / "include").symlink_to(Path(cuda.nccl_home, "include"))
    places = [Path(cuda.nccl_home, d) for d in ("lib", "lib64", "lib/x86_64-linux-gnu")]
    link_libraries([d for d in places if d.is_dir()], nccl / "lib", only="libnccl")
    env = {
        "CUDA_HOME": str(home), "HOROVOD_CUDA_HOME": str(home), "CUDAToolkit_ROOT": str(home),
        "CUDACXX": str(home / "bin" / "nvcc"), "HOROVOD_NCCL_HOME": str(nccl),
        "LIBRARY_PATH": os.pathsep.join([str(home / "lib64"), str(nccl / "lib")]),
    }
    cccl = home / "include" / "cccl"  # CUDA 13 moved the headers that cuda_fp16.h includes
    return env | ({"CPLUS_INCLUDE_PATH": str(cccl)} if cccl.is_dir() else {})


def link_libraries(sources: list[Path], into: Path, only: str = "lib") -> None:
    """Link each library that starts with ``only`` into ``into``, also under its name without a version
    number.
    """
    into.mkdir(parents=True)
    for library in (f for d in sources for f in sorted(d.iterdir()) if f.name.startswith(only)):
        for name in {library.name, re.sub(r"\.so\.[\d.]+$", ".so", library.name)}:
            if not (into / name).is_symlink():
                (into / name).symlink_to(library)
