"""Run a worker: unpack the sources, then fetch samples into memory that its rank reads.

Owns the loop, the random generators and the report of errors. Samples of a user's source are fetched one at a time,
with Python's, numpy's and, if imported, PyTorch's generators seeded from (seed, epoch, sample number), so that they do
not depend on ranks and workers.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import random
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.exit_calls import called
from hvdtrain.core import rng, torchvision_parts
from hvdtrain.core.errors import UserError
from hvdtrain.data import sources
from hvdtrain.data.rows import of_data
from hvdtrain.data.stream import Arrays

HEAD = struct.Struct("<QQ")  # offset and bytes of the header within what a worker is set up with
ALIGN = 64

OWN = "hvdtrain.data."
"""Where the classes of sources are defined that draw from no generator of Python's, numpy's or PyTorch's, unless an
attribute ``of_user`` says that they call a user's object."""

_inside: list[str] = []


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker: the cause of the exception that the rank raises."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text}")


class ImportedAgain(BaseException):
    """The user's script started a training while a worker imported it."""


def refuse_inside() -> None:
    """Raise `ImportedAgain` in a worker: its import of the user's script started a training."""
    if _inside:
        raise ImportedAgain


def work(channel_fd: int, setup_fd: int, slots: Sequence[int]) -> None:
    """Serve one rank until it closes its end: (task, slot, source, indices_n, epoch) -> samples in memory ``slots``."""
    from multiprocessing.connection import Connection

    channel = Connection(channel_fd)
    _inside.append("worker")
    torchvision_parts.use()  # classes of the sources may be of torchvision
    try:
        setup = _unpack(setup_fd)
        _known(setup)
        found = pickle.loads(setup["sources"], buffers=setup["buffers"])
        channel.send(("ready", os.getpid()))
    except BaseException as error:  # told to the rank, which decides
        channel.send(("failed", _failure(error)))
        return
    memory, reported = [SharedResults(fd) for fd in slots], set[int]()
    while True:
        try:
            task, slot, number, indices_n, epoch = channel.recv()
        except (EOFError, OSError):
            return
        try:
            arrays = fetch(found[number], indices_n, epoch, setup["seed"])
            rows = None if number in reported else of_data(found[number])
            channel.send(("done", task, memory[slot].write(arrays), rows))
            reported.add(number)
        except BaseException as error:
            channel.send(("error", task, _carried(error), None))


def fetch(source: Any, indices_n: np.ndarray, epoch: int, seed: int) -> Arrays:
    """Return arrays (n, ...) of the samples, each drawn from (``seed``, ``epoch``, its number)."""
    inner = sources.innermost(source)
    if type(inner).__module__.startswith(OWN) and not getattr(inner, "of_user", False):
        return sources.fetched(source, indices_n, epoch)
    pieces = []
    for number in indices_n:
        reseed(seed, epoch, int(number))
        pieces.append(sources.fetched(source, np.array([number], np.int64), epoch))
        refuse_unlike(pieces[0], pieces[-1])
    return tuple(np.concatenate(column) for column in zip(*pieces))


def fetch_seeded(source: Any, indices_n: np.ndarray, seed: int, epoch: int) -> Arrays:
    """Fetch samples of ``epoch`` as a worker does, and restore this process's generators."""
    with generators_kept():
        return fetch(source, indices_n, epoch, seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[Callable[[], bool]]:
    """Restore user code's generators after the body; yields a function: were they drawn from (GPUs: no)?"""
    torch = sys.modules.get("torch")
    put_back, before = rng.mark(), _generators(torch)
    state = None if torch is None else torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else []
    try:
        yield lambda: _generators(torch) != before
    finally:
        put_back()
        if torch is not None:
            torch.set_rng_state(state)
            if gpus:
                torch.cuda.set_rng_state_all(gpus)


def _generators(torch: Any) -> list[bytes]:
    states = [*rng.capture().values(), *([] if torch is None else [torch.get_rng_state().numpy()])]
    return [state.tobytes() for state in states]


def refuse_unlike(some: Sequence[Any], others: Sequence[Any]) -> None:
    """Raise `UserError` where samples (n, ...) of one batch differ in shape or type from others (m, ...)."""
    kinds = [[(np.shape(array)[1:], np.asarray(array).dtype) for array in arrays] for arrays in (some, others)]
    if kinds[0] != kinds[1]:
        # In one order, whichever worker was first.
        first, second = sorted(", ".join(f"{dtype}{list(shape)}" for shape, dtype in each) for each in kinds)
        raise UserError(f"samples of one batch have the shapes and types {first} and {second}",
                        "one shape and type for all samples", "pad, crop or cast them in the dataset")


def reseed(seed: int, epoch: int, number: int) -> None:
    """Seed the generators that user code draws from."""
    first, second, third = (int(word) for word in np.random.SeedSequence([seed, epoch, number]).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch = sys.modules.get("torch")
    if torch is not None and (_inside or torch.cuda.is_initialized()):
        torch.manual_seed(third)
    elif torch is not None:  # in a rank: the GPUs' generators are to start as they were seeded
        torch.default_generator.manual_seed(third)


class SharedResults:
    """Anonymous memory that a worker and its rank share; grows to the largest result."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def write(self, arrays: Arrays) -> list[tuple[Any, ...]]:
        """Write arrays end to end; return (offset, shape, dtype) of each, or the array itself if it holds objects."""
        ends_k = np.cumsum([0, *(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)]).tolist()
        held = self._mapped(ends_k[-1])
        rows: list[tuple[Any, ...]] = []
        for at, array in zip(ends_k, arrays):
            if array.dtype.hasobject:
                rows.append((array,))
                continue
            np.ndarray(array.shape, array.dtype, held, at)[...] = array
            rows.append((at, array.shape, array.dtype))
        return rows

    def read(self, rows: Sequence[tuple[Any, ...]]) -> Arrays:
        """Return views of the arrays written last, valid until the next write."""
        need = max((at + math.prod(shape) * dtype.itemsize for at, shape, dtype in (r for r in rows if len(r) == 3)),
                   default=0)
        held = self._mapped(need, grow=False)
        return tuple(row[0] if len(row) == 1 else np.ndarray(row[1], row[2], held, row[0]) for row in rows)

    def _mapped(self, n_bytes: int, grow: bool = True) -> Any:
        if self._map is None or len(self._map) < n_bytes:
            size = os.fstat(self._fd).st_size
            if grow and size < n_bytes:
                size = n_bytes + n_bytes // 4
                os.posix_fallocate(self._fd, 0, size)  # says here that there is no room, where writing would kill
            self._map = mmap.mmap(self._fd, max(size, 1)) if size else None
        return self._map if self._map is not None else b""


def pack(header: dict[str, Any], found: Sequence[Any]) -> tuple[int, bytes]:
    """Return a descriptor of memory with ``header``, sources and arrays, once for all workers, and the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(list(found), protocol=5, buffer_callback=buffers.append)
    fd = nameless("hvdtrain-sources")
    try:
        places, at = [], HEAD.size + 48
        raws: list[Any] = [text, *(buffer.raw() for buffer in buffers)]
        for raw in raws:
            view = memoryview(raw).cast("B")
            os.ftruncate(fd, at + len(view))
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:done + (1 << 30)], at + done)
            places.append((at, len(view)))
            at += -(-len(view) // ALIGN) * ALIGN
        head = pickle.dumps({**header, "places": places})
        os.pwrite(fd, head, at)
        os.pwrite(fd, HEAD.pack(at, len(head)), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd, text


def nameless(name: str) -> int:
    """Return a descriptor of shared memory outside file systems, which no size of /dev/shm limits."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile

    with tempfile.TemporaryFile() as file:  # systems other than Linux
        return os.dup(file.fileno())


def _unpack(fd: int) -> dict[str, Any]:
    mapped: Any = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held = memoryview(mapped)
    at, n = HEAD.unpack_from(held)
    setup: dict[str, Any] = pickle.loads(held[at:at + n])
    text, *buffers = (held[at:at + n] for at, n in setup["places"])
    return {**setup, "sources": text, "buffers": buffers}


def _known(setup: dict[str, Any]) -> None:
    """Import the modules of the sources' classes: files, and the user's script if needed."""
    from multiprocessing import spawn

    os.chdir(setup["folder"])
    sys.argv = setup["argv"]
    for where in setup["files"]:
        from hvdtrain.core.resolve import load_module

        load_module(where, "data.name")
    if setup["main"]:
        spawn.prepare(setup["main"])


def _failure(error: BaseException) -> str:
    if isinstance(error, ImportedAgain):
        return ("the script trains when imported, but a worker must import the script to find its "
                "classes: put the training under if __name__ == \"__main__\":, or the dataset into a file of its own")
    return "".join(traceback.format_exception_only(error)).strip()


def _carried(error: BaseException) -> tuple[bytes, str]:
    text = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, SystemExit):
        error = called(error)
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an exception may hold anything
        packed = pickle.dumps(RuntimeError("".join(traceback.format_exception_only(error)).strip()))
    return packed, text
