"""What a build depends on, as plain data: Python, frameworks, MPI, CUDA, compiler flags.

Owns the dataclasses. Does not look at the machine (``detect`` does) and decides nothing (``plan`` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Framework:
    """An installed framework: ``dist`` is the name of its distribution, ``cuda`` whether it was built with
    CUDA.
    """

    name: str
    dist: str
    version: str
    cuda: bool = False


@dataclass(frozen=True)
class Mpi:
    """An MPI: ``flavour`` is openmpi, mpich, intel or unknown; ``lib_dir`` holds the libmpi that mpicxx
    links.
    """

    flavour: str
    version: str
    mpirun: str
    mpicxx: str = ""
    lib_dir: str = ""


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit with NCCL: ``home`` holds bin/nvcc; "" stands for a part that was not found."""

    home: str = ""
    version: str = ""
    nccl_home: str = ""
    nccl_version: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that ``plan`` needs; two machines with equal facts can share one wheel.

    ``capabilities`` are the compute capabilities of the GPUs present ("90" for 9.0), empty without a GPU.
    ``arch_flags`` are the compiler flags among -mf16c -mavx -mfma that this processor has.
    """

    python_tag: str
    platform: str
    prefix: str
    site_dir: str
    frameworks: tuple[Framework, ...] = ()
    mpi: Mpi | None = None
    capabilities: tuple[str, ...] = ()
    cuda: Cuda = field(default_factory=Cuda)
    arch_flags: tuple[str, ...] = ()
    libc: str = ""
