"""The pure half of the build: facts to plan, the edits, the parsers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cluster.machine import software as detect
from hvdtrain.cluster.machine.software import BuildFacts, Cuda, Framework, Mpi
from hvdtrain.commands.build_horovod import cli as build
from hvdtrain.commands.build_horovod import plan as patches
from hvdtrain.commands.build_horovod.plan import plan
from hvdtrain.core.errors import UserError

TORCH = Framework("torch", "torch", "2.13.0+cpu")
TENSORFLOW = Framework("tensorflow", "tensorflow-cpu", "2.21.0")
MPI = Mpi("openmpi", "4.1.8", "/env/bin/mpirun", "/env/bin/mpicxx", "/env/lib")
SITE = "/env/lib/python3.11/site-packages"
FACTS = BuildFacts("cp311", "linux_x86_64", "/env", SITE, (TORCH, TENSORFLOW), MPI,
              arch_flags=("-mavx", "-mfma"), libc="glibc-2.36")
GPU = replace(FACTS, capabilities=("80", "90"),
              frameworks=(Framework("torch", "torch", "2.13.0", cuda=True),),
              cuda=Cuda("/env/nvidia/cu13", "13.0", SITE + "/nvidia/nccl", "2.29.7"))


def test_cpu_plan_is_golden() -> None:
    made = plan(FACTS)
    assert made.env == {
        "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx -mfma", "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HVDTRAIN_RPATH": "$ORIGIN/../../../..",
    }
    assert made.key.startswith("horovod-0.28.1_cp311_torch-2.13.0+cpu_tensorflow-cpu-2.21.0_openmpi-4.1.8_")
    assert made.title() == ("horovod 0.28.1 for cp311, torch 2.13.0+cpu, tensorflow-cpu 2.21.0, "
                            "openmpi 4.1.8, CPU")
    assert made.frameworks == ("torch", "tensorflow") and not made.notes and not made.cuda


def test_gpu_plan_is_golden() -> None:
    made = plan(GPU)
    assert made.cuda
    expected = {
        "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_BUILD_CUDA_CC_LIST": "80,90",
        "HOROVOD_NCCL_LINK": "SHARED", "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HVDTRAIN_RPATH": "$ORIGIN/../../../..;$ORIGIN/../../nvidia/nccl/lib",
    }
    assert expected.items() <= made.env.items()
    assert "_cuda-13.0-nccl-2.29.7-sm-80-90_" in made.key


def test_an_image_is_built_for_gpus_that_are_elsewhere(monkeypatch) -> None:
    monkeypatch.setattr(detect, "find_framework", lambda name: None)
    monkeypatch.setattr(detect, "find_capabilities", lambda: ())
    assert detect.detect(None, ("80", "90")).capabilities == ("80", "90") and detect.detect().capabilities == ()
    with pytest.raises(UserError, match="without dots"):
        build.main(["--capabilities", "8.0"])


def test_cpu_only_leaves_the_gpu_out() -> None:
    made = plan(GPU, cpu_only=True)
    assert not made.cuda and "HOROVOD_GPU_OPERATIONS" not in made.env


@pytest.mark.parametrize("only, absent", [(TORCH, "TENSORFLOW"), (TENSORFLOW, "PYTORCH")])
def test_either_framework_alone(only: Framework, absent: str) -> None:
    made = plan(replace(FACTS, frameworks=(only,)))
    assert made.env[f"HOROVOD_WITHOUT_{absent}"] == "1" and f"HOROVOD_WITH_{absent}" not in made.env


@pytest.mark.parametrize("mpi", [None, replace(MPI, mpicxx="")])
def test_without_an_mpi_compiler_gloo_alone_is_built_and_said(mpi: Mpi | None) -> None:
    made = plan(replace(FACTS, mpi=mpi))
    assert made.env["HOROVOD_WITHOUT_MPI"] == "1" and made.mpi is None
    assert "_gloo_" in made.key and "Gloo" in made.notes[0]


@pytest.mark.parametrize("change", [
    {"python_tag": "cp312"}, {"mpi": replace(MPI, version="5.0.11")}, {"mpi": replace(MPI, flavour="mpich")},
    {"mpi": None}, {"frameworks": (TORCH,)},
    {"frameworks": (replace(TORCH, version="2.12.0+cpu"), TENSORFLOW)},
    {"arch_flags": ()}, {"libc": "glibc-2.28"}, {"platform": "linux_aarch64"},
])
def test_every_fact_that_a_wheel_depends_on_changes_the_key(change: dict) -> None:
    assert plan(replace(FACTS, **change)).key != plan(FACTS).key


def test_the_key_does_not_depend_on_where_the_environment_lies() -> None:
    moved = replace(FACTS, prefix="/other", site_dir="/other/lib/python3.11/site-packages",
                    mpi=replace(MPI, mpirun="/other/mpirun", mpicxx="/other/mpicxx", lib_dir="/other/lib"))
    assert plan(moved).key == plan(FACTS).key


def test_an_mpi_outside_the_environment_keeps_its_absolute_run_path() -> None:
    outside = replace(FACTS, mpi=replace(MPI, lib_dir="/usr/lib/openmpi/lib"))
    assert plan(outside).env["HVDTRAIN_RPATH"] == "/usr/lib/openmpi/lib"


@pytest.mark.parametrize("facts, word", [
    (replace(FACTS, frameworks=()), "no framework"),
    (replace(GPU, cuda=Cuda()), "no nvcc and no NCCL"),
    (replace(GPU, frameworks=(*GPU.frameworks, TENSORFLOW)), "both with CUDA or both without"),
])
def test_impossible_builds_are_refused_in_words(facts: BuildFacts, word: str) -> None:
    with pytest.raises(UserError, match=word):
        plan(facts)


def test_cpu_frameworks_beside_a_gpu_are_noted() -> None:
    made = plan(replace(FACTS, capabilities=("90",)))
    assert not made.cuda and "CPU builds" in made.notes[0]


def _source(tmp_path: Path) -> Path:
    for edit in patches.EDITS:
        path = tmp_path / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"before\n    {edit.old}after\n")
    return tmp_path


def test_the_edits_apply(tmp_path: Path) -> None:
    patches.apply_edits(_source(tmp_path))
    whole = (tmp_path / "CMakeLists.txt").read_text()
    assert "CMAKE_CXX_STANDARD 17" in whole and "HVDTRAIN_RPATH" in whole
    assert "xla" not in (tmp_path / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "CMAKE_CXX_STANDARD 14" not in (tmp_path / "horovod/torch/CMakeLists.txt").read_text()


@pytest.mark.parametrize("text, times", [("nothing of it\n", 0), ("{0}{0}", 2)])
def test_an_edit_that_does_not_apply_once_is_named_and_nothing_is_written(
        tmp_path: Path, text: str, times: int) -> None:
    source, last = _source(tmp_path), patches.EDITS[-1]
    (source / last.path).write_text(text.format(last.old))
    before = (source / "CMakeLists.txt").read_text()
    with pytest.raises(UserError, match=rf"{last.path} with {times} occurrences of .*xla_mpi_ops"):
        patches.apply_edits(source)
    assert (source / "CMakeLists.txt").read_text() == before


@pytest.mark.parametrize("text, expected", [
    ("mpirun (Open MPI) 4.1.8\n\nReport bugs to ...", ("openmpi", "4.1.8")),
    ("mpirun (Open MPI) 5.0.11\n", ("openmpi", "5.0.11")),
    ("mpirun (Open MPI) 5.1.0a1\n", ("openmpi", "5.1.0a1")),
    ("HYDRA build details:\n    Version:                                 4.3.2\n    Release Date: ...",
     ("mpich", "4.3.2")),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", ("intel", "2021.9")),
    ("", ("unknown", "")),
])
def test_mpi_versions(text: str, expected: tuple[str, str]) -> None:
    assert detect.parse_mpi_version(text) == expected


def test_other_parsers() -> None:
    assert detect.parse_capabilities("9.0\n8.0\n9.0\nFailed to read 1.5 things\n") == ("80", "90")
    assert detect.parse_capabilities("12.0\n9.0\n") == ("90", "120")
    assert detect.parse_nvcc_version("Cuda compilation tools, release 13.0, V13.0.88") == "13.0"
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n"
    assert detect.parse_nccl_version(header) == "2.29.7"
    assert detect.parse_nccl_version("") == ""
    assert detect.parse_lib_dir("c++ -I/x/include -L/x/lib -L/y -Wl,-rpath -lmpi") == "/x/lib"
    assert detect.parse_lib_dir("c++ -lmpi") == ""
    assert detect.arch_flags("flags\t\t: fpu avx fma f16c\nflags\t\t: fpu avx\n") == ("-mavx",)
    assert detect.arch_flags("") == ()
