"""Trial of whether processes of one host reach each other's memory, by CMA and by files in memory.

CMA is process_vm_readv, by which Open MPI moves large messages; ranks share gradients in files in memory, opened under
/proc. Containers forbid both: by seccomp, by a user or a PID namespace for each rank. The standard library only; also a
program: ``peers.py offer`` and ``peers.py reach OFFER``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)
"""prctl's PR_SET_PTRACER and PR_SET_PTRACER_ANY: Open MPI lets its neighbours read it where Yama's scope is 1."""

TOKEN_BYTES = 16
TRIAL_S = 20.0


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Offer:
    """Memory of this process that a neighbour may try to reach, until `close`; ``facts`` locates it."""

    def __init__(self) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        self._buffer = ctypes.create_string_buffer(token, TOKEN_BYTES)
        self._fd = os.memfd_create("hvdtrain-doctor")
        os.pwrite(self._fd, token, 0)
        ctypes.CDLL(None).prctl(PTRACER, ANY, 0, 0, 0)
        self.facts: dict[str, Any] = {"pid": os.getpid(), "address": ctypes.addressof(self._buffer), "fd": self._fd,
                                      "token": token.hex()}

    def close(self) -> None:
        os.close(self._fd)


def reach(offer: Mapping[str, Any]) -> dict[str, str]:
    """Try a neighbour's offer; return {"cma", "files"}, each "ok", the name of an error, or "other process"."""
    return {"cma": _told(_read_vm, offer), "files": _told(_read_file, offer)}


def worst(found: list[dict[str, str]]) -> dict[str, str] | None:
    """Return the answer of a host: the first of its ranks' that is not "ok"; None where nothing was tried. Pure."""
    if not found:
        return None
    return {key: next((one[key] for one in found if one[key] != "ok"), "ok") for key in ("cma", "files")}


def between_processes(timeout_s: float = TRIAL_S) -> dict[str, str]:
    """Try it between two processes that are no parent and child, as ranks are. Errors: OSError, ValueError."""
    words = [sys.executable, "-S", os.path.abspath(__file__)]
    with subprocess.Popen([*words, "offer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as offering:
        try:
            assert offering.stdout is not None
            offer = offering.stdout.readline().strip()
            done = subprocess.run([*words, "reach", offer], capture_output=True, text=True, timeout=timeout_s,
                                  stdin=subprocess.DEVNULL)
        finally:
            offering.kill()
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["the trial failed"])[-1])
    return json.loads(done.stdout)


def _told(read: Any, offer: Mapping[str, Any]) -> str:
    try:
        return "ok" if read(offer) == bytes.fromhex(offer["token"]) else "other process"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except AttributeError:  # a C library without the call
        return "ENOSYS"


def _read_vm(offer: Mapping[str, Any]) -> bytes:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    into = ctypes.create_string_buffer(TOKEN_BYTES)
    own, other = _Vector(ctypes.addressof(into), TOKEN_BYTES), _Vector(offer["address"], TOKEN_BYTES)
    size = call(offer["pid"], ctypes.byref(own), ctypes.c_ulong(1), ctypes.byref(other), ctypes.c_ulong(1),
                ctypes.c_ulong(0))
    if size < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    return into.raw


def _read_file(offer: Mapping[str, Any]) -> bytes:
    fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return os.pread(fd, TOKEN_BYTES, 0)
    finally:
        os.close(fd)


def _main(argv: list[str]) -> int:
    if argv[0] == "offer":
        offer = Offer()
        print(json.dumps(offer.facts), flush=True)
        sys.stdin.read()  # until the parent ends this
    else:
        print(json.dumps(reach(json.loads(argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
