"""Check of the installed Horovod: a 2-rank allreduce in each framework, each with a deadline."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdtrain.cluster.machine.software import Mpi, search_path
from hvdtrain.commands.build_horovod.child_log import SILENT_S, ChildFailed, Display, logged
from hvdtrain.commands.build_horovod.plan import BuildPlan
from hvdtrain.core import whole_file

RANKS = 2
CHECK_TIMEOUT_S = 180.0

# Each program says "hvdtrain-sum-ok" once per rank, in one write, so that ranks do not mix. The sum of
# n*(rank+1) over ranks is n*P*(P+1)/2: whole numbers below 2**24, so that fp32 holds them and the comparison
# is exact. A GPU is used where each rank can have its own.
_TORCH = """
import os, torch, horovod.torch as hvd
hvd.init()
P, r = hvd.size(), hvd.local_rank()
assert P == {ranks}, f"{{P}} ranks instead of {ranks}"
device = torch.device("cuda", r) if {gpu} and torch.cuda.device_count() >= P else torch.device("cpu")
base = torch.arange(1000, dtype=torch.float32, device=device)
got = hvd.allreduce(base * (hvd.rank() + 1), op=hvd.Sum, name="hvdtrain.check")
assert torch.equal(got, base * (P * (P + 1) // 2)), "the sum is wrong"
os.write(1, f"hvdtrain-sum-ok {{device.type}}\\n".encode())
hvd.shutdown()
"""
_TENSORFLOW = """
import os, tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
P, r = hvd.size(), hvd.local_rank()
assert P == {ranks}, f"{{P}} ranks instead of {ranks}"
gpus = tf.config.list_physical_devices("GPU")
use = gpus[r:r + 1] if {gpu} and len(gpus) >= P else []
tf.config.set_visible_devices(use, "GPU")
with tf.device("/GPU:0" if use else "/CPU:0"):
    base = tf.range(1000, dtype=tf.float32)
    got = hvd.allreduce(base * (hvd.rank() + 1.0), op=hvd.Sum, name="hvdtrain.check")
assert bool(tf.reduce_all(got == base * (P * (P + 1) // 2))), "the sum is wrong"
os.write(1, f"hvdtrain-sum-ok {{'cuda' if use else 'cpu'}}\\n".encode())
hvd.shutdown()
"""
_PROGRAMS = {"torch": _TORCH, "tensorflow": _TENSORFLOW}


@dataclass(frozen=True)
class Check:
    """``ranks``: how many have to report."""

    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    ranks: int


def program(framework: str, ranks: int, gpu: bool) -> str:
    return _PROGRAMS[framework].format(ranks=ranks, gpu=gpu).strip()


def launch_argv(mpi: Mpi | None, ranks: int, horovodrun: str) -> list[str]:
    """Return the words that start ``ranks`` local processes: MPI's own mpirun, or horovodrun over Gloo without MPI."""
    if mpi is None:
        return [horovodrun, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    if mpi.flavour == "openmpi":
        return [mpi.mpirun, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return [mpi.mpirun, "-np", str(ranks)]


def launch_env(mpi: Mpi | None, root: bool) -> dict[str, str]:
    """Return variables for the launcher; as root, Open MPI's two, for this child only."""
    env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_STALL_CHECK_TIME_SECONDS": "20"}
    if mpi is not None and mpi.flavour == "openmpi":
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if root:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def checks(plan: BuildPlan, python: str, horovodrun: str, root: bool) -> list[Check]:
    """Return the checks of a plan: 2 ranks per framework, and one rank on the GPU where there is a single GPU."""
    mpi = plan.mpi
    wire = "Gloo" if mpi is None else f"{mpi.flavour} {mpi.version}"
    found = []
    for framework in plan.frameworks:
        for ranks in (1, RANKS) if plan.cuda else (RANKS,):
            argv = [*launch_argv(mpi, ranks, horovodrun), python, "-c", program(framework, ranks, plan.cuda)]
            word = "rank" if ranks == 1 else "ranks"
            found.append(Check(f"{framework} allreduce, {ranks} {word}, {wire}", tuple(argv),
                               tuple(launch_env(mpi, root).items()), ranks))
    return found


def run(check: Check, log: Path, env: dict[str, str]) -> str:
    """Run one check and return where the sum was computed ("cpu" or "cuda"). Errors: `ChildFailed`."""
    before = log.stat().st_size if log.exists() else 0
    logged(f"the check ({check.name})", list(check.argv), log, env | dict(check.env), CHECK_TIMEOUT_S,
           Display(f"checking {check.name}", after_s=SILENT_S))
    with log.open(errors="replace") as handle:
        handle.seek(before)
        said = re.findall(r"hvdtrain-sum-ok (cpu|cuda)", handle.read())
    if len(said) != check.ranks:
        raise ChildFailed(f"the check ({check.name})",
                          f"got the right sum from {len(said)} of {check.ranks} ranks", log)
    return said[0]


def run_all(plan: BuildPlan, log: Path, env: dict[str, str], say) -> list[str]:
    """Run every check of ``plan`` and return their names. Errors: `ChildFailed` at the first that fails."""
    horovodrun = shutil.which("horovodrun", path=search_path()) or "horovodrun"
    passed = []
    for check in checks(plan, sys.executable, horovodrun, os.geteuid() == 0):
        device = run(check, log, env)
        say(f"verified: {check.name} ({device})")
        passed.append(check.name)
    return passed


@dataclass(frozen=True)
class BuildRecord:
    """``key`` of the plan, ``wheel_sha256``, and the names of the checks it passed in ``verified``.

    ``frameworks``: version by distribution. ``mpi``: "flavour version", or "" for Gloo alone.
    """

    key: str
    wheel_sha256: str
    horovod: str
    python: str
    frameworks: dict[str, str]
    mpi: str
    cuda: bool
    verified: list[str] = field(default_factory=list)


def path() -> Path:
    return Path(sys.prefix, "share", "hvdtrain", "horovod-build.json")


def write(record: BuildRecord) -> None:
    path().parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path()) as draft:
        draft.write_text(json.dumps(asdict(record), indent=2) + "\n")


def read() -> BuildRecord | None:
    """Return the record, or None where there is none or it cannot be read."""
    try:
        return BuildRecord(**json.loads(path().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def installed() -> BuildRecord | None:
    """Return the record of the Horovod installed here; None without one that this tool installed."""
    record = read()
    if record is None:
        return None
    try:
        dist = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    return record if record.wheel_sha256 == _source_sha256(dist) else None


def _source_sha256(dist: importlib.metadata.Distribution) -> str:
    """Return the digest of the wheel that pip installed ``dist`` from, "" where pip noted none."""
    try:
        archive = json.loads(dist.read_text("direct_url.json") or "{}").get("archive_info", {})
    except ValueError:
        return ""
    return str(archive.get("hashes", {}).get("sha256", "") or archive.get("hash", "").removeprefix("sha256="))
