"""Short programs that look at one package each, in processes of their own, with a deadline.

A framework that crashes or hangs takes only its own process with it, and no process loads two frameworks (law 3).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from hvdtrain.core.processes import CapturedChild

MARK = "hvdtrain-doctor "
"""Begins each line of a program that is an answer: whatever else a package prints is not one."""

_TELL = """
import json, os
def tell(**facts):
    os.write(1, b"\\n" + {mark!r}.encode() + json.dumps(facts).encode() + b"\\n")
def libmpi():
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {{line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}}
    return sorted(p for p in paths if os.path.basename(p).startswith("libmpi.") or "libmpi_abi." in p)
"""

_HOROVOD = """
tell(at="importing horovod.{name}")
import horovod.{name} as hvd
tell(at="asking horovod.{name} how it was built", libmpi=libmpi() if os.path.exists("/proc/self/maps") else [])
tell(horovod_built=[k for k in ("mpi", "gloo", "nccl", "cuda", "rocm") if getattr(hvd, k + "_built")()])
"""

_TORCH = """
tell(at="importing torch")
import torch
version = torch.version
tell(at="asking torch for its CUDA", version=torch.__version__, cuda=version.cuda or "", hip=version.hip or "")
if version.cuda:
    flags = torch.cuda.get_arch_list() or (torch._C._cuda_getArchFlags() or "").split()
    tell(arch=flags)
    tell(nccl=".".join(map(str, torch.cuda.nccl.version())))
tell(at="asking torch for its devices")
count = torch.cuda.device_count()
tell(devices=["%d%d" % torch.cuda.get_device_capability(i) for i in range(count)])
"""

_TENSORFLOW = """
tell(at="importing tensorflow")
import tensorflow as tf
built = tf.sysconfig.get_build_info()
tell(at="asking tensorflow for its devices", version=tf.__version__, cuda=str(built.get("cuda_version", "")),
     arch=[str(a) for a in built.get("cuda_compute_capabilities", [])])
found = [tf.config.experimental.get_device_details(d) for d in tf.config.list_physical_devices("GPU")]
tell(devices=["%d%d" % tuple(d.get("compute_capability", (0, 0))) for d in found])
"""

_MPI = """
tell(at="importing mpi4py")
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
tell(version=mpi4py.__version__, library=MPI.Get_library_version().split("\\n")[0].strip(" \\0"),
     libmpi=libmpi() if os.path.exists("/proc/self/maps") else [])
"""

_GPU = """
tell(at="importing pynvml")
import pynvml
tell(at="asking the NVIDIA driver")
pynvml.nvmlInit()
def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)
cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
tell(driver=text(pynvml.nvmlSystemGetDriverVersion()), cuda="%d.%d" % (cuda // 1000, cuda % 1000 // 10))
devices = []
for i in range(pynvml.nvmlDeviceGetCount()):
    one = pynvml.nvmlDeviceGetHandleByIndex(i)
    devices.append({"name": text(pynvml.nvmlDeviceGetName(one)),
                    "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(one).total,
                    "capability": "%d%d" % tuple(pynvml.nvmlDeviceGetCudaComputeCapability(one))})
tell(devices=devices)
"""

_BODIES = {"torch": _TORCH, "tensorflow": _TENSORFLOW, "mpi4py": _MPI, "gpu": _GPU}


def program(name: str, horovod: bool = False) -> str:
    """Return a program: "torch", "tensorflow" (each with its part of Horovod if asked), "mpi4py" or "gpu"."""
    tail = _HOROVOD.format(name=name) if horovod else ""
    return _TELL.format(mark=MARK) + _BODIES[name] + tail + 'tell(at="")\n'


def run_all(programs: Mapping[str, str], env: Mapping[str, str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Run the programs side by side; return by name what each reported before its end or ``timeout_s``.

    Of a program that did not finish, ``error`` is how it ended, ``at`` the last thing it began.
    """
    ends_at = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(CapturedChild([sys.executable, "-c", text],
                                                            {**env, "TF_CPP_MIN_LOG_LEVEL": "3"}))
                    for name, text in programs.items()}
        return {name: _answer(child, ends_at, timeout_s) for name, child in children.items()}


def _answer(child: CapturedChild, ends_at: float, timeout_s: float) -> dict[str, Any]:
    code = child.process.returncode if child.ends_within(ends_at - time.monotonic()) else None
    child.end(0.0)
    output, errors = child.texts()
    answer = merged(output)
    at = answer.pop("at", "starting python")
    return answer | {"error": how_it_ended(code, errors, timeout_s), "at": at} if at else answer


def merged(text: str) -> dict[str, Any]:
    """Return the answers in a program's output laid over each other; a line that was cut off is none. Pure."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                found |= json.loads(line[len(MARK):])
            except ValueError:
                continue
    return found


def how_it_ended(code: int | None, stderr: str, timeout_s: float) -> str:
    """Return words for an exit status other than 0 (None: still running), with the last line of its output. Pure."""
    if code is None:
        return f"took more than {timeout_s:g} s"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"ended by {name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit status {code}"
