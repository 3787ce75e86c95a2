"""Devices of a rank's PyTorch model, compute threads, start of PyTorch's compiler, seeds and random generators.

Blocks of a split model are placed by `hvdtrain.backends.torch.transforms.placement`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.cluster.devices import VISIBLE, DeviceFacts, cpu_facts
from hvdtrain.core import rng
from hvdtrain.core.errors import UserError


def device() -> torch.device:
    """Return this rank's device: the GPU that boot made visible to it, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def devices(n: int) -> list[torch.device]:
    """Return the devices of a model in ``n`` stages, in order: this rank's GPUs; with one, CPU and GPU.

    Errors: `UserError` where this rank has too few; also for two that are listed of which CUDA shows one.
    """
    if n == 1:
        return [device()]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= n:
        return [torch.device("cuda", i) for i in range(n)]
    listed = [entry for entry in os.environ.get(VISIBLE, "").split(",") if entry.strip()]
    if (count, n) == (1, 2) and len(listed) < 2:
        return [torch.device("cpu"), torch.device("cuda", 0)]
    shown = f" ({VISIBLE} is {os.environ[VISIBLE]})" if len(listed) > 1 else ""
    raise UserError(f"model_parallel {n}, but this rank has {count} GPU{'' if count == 1 else 's'}{shown}",
                    f"{n} GPUs for each rank" + (", or one in addition to the CPU" if n == 2 else ""),
                    f"set model_parallel: {max(1, count)}, or start this rank where it sees {n}")


def memory_bytes(where: torch.device) -> int:
    """Return the bytes that a device has left."""
    return _left_bytes(where) if where.type == "cuda" else cpu_facts().memory_bytes


def free_bytes(where: torch.device) -> int | None:
    """Return the bytes that this process can still take of a GPU, its own cache included; None of a CPU."""
    if where.type != "cuda":
        return None
    return _left_bytes(where) + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)


def _left_bytes(where: torch.device) -> int:
    """Return the free bytes of a GPU, as far as PyTorch may take them in this process."""
    free, total = torch.cuda.mem_get_info(where)
    return max(0, min(int(free), _granted(where, total) - torch.cuda.memory_reserved(where)))


def _granted(where: torch.device, total: int) -> int:
    """Return the bytes of a GPU's ``total`` that `torch.cuda.set_per_process_memory_fraction` grants this process."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # older PyTorch does not tell
    return total if ask is None else int(total * min(1.0, ask(where)))


def synchronize(where: Iterable[torch.device]) -> None:
    """Return when all of these devices have done what was queued for them."""
    for one in set(where):
        if one.type == "cuda":
            torch.cuda.synchronize(one)


def moved(value: Any, where: torch.device) -> Any:
    """Move a tensor, or tensors in tuples, lists and dicts, to a device; anything else stays."""
    if isinstance(value, torch.Tensor):
        return value.to(where, non_blocking=where.type == "cuda")  # to a CPU it would not be there yet when read
    if isinstance(value, (tuple, list)):
        return type(value)(moved(v, where) for v in value)
    return {k: moved(v, where) for k, v in value.items()} if isinstance(value, dict) else value


def further_random(where: Iterable[torch.device]) -> dict[str, np.ndarray]:
    """Return the state of the random generators of every GPU but the current one, which is in `random_arrays`."""
    others = {d for d in where if d.type == "cuda"} - {device()}
    return {f"torch.{d}": torch.cuda.get_rng_state(d).numpy().copy() for d in sorted(others, key=str)}


def load_further_random(arrays: dict[str, np.ndarray], where: Iterable[torch.device]) -> None:
    """Undo `further_random` for the devices that are here again."""
    for one in {d for d in where if f"torch.{d}" in arrays}:
        torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays[f"torch.{one}"])), one)


def in_host_memory() -> bool:
    """Return whether gradients lie in host memory outside a graph, where a host transport can sum them in place."""
    return device().type == "cpu"


def device_facts() -> DeviceFacts:
    """Return the facts of `device`, with the memory that this process may take of it."""
    if device().type == "cpu":
        return cpu_facts()
    found = torch.cuda.get_device_properties(0)
    memory = _granted(device(), found.total_memory)
    if torch.version.hip:
        return DeviceFacts("rocm", found.name, getattr(found, "gcnArchName", ""), memory)
    return DeviceFacts("cuda", found.name, f"sm_{found.major}{found.minor}", memory)


def setup(threads: int, deterministic: bool, devices: int = 1) -> None:
    """Set the compute threads of this process and, if asked, deterministic kernels; ``devices`` is not needed."""
    torch.set_num_threads(threads)
    defer_compiler()
    if deterministic:
        # Without it PyTorch refuses every matrix product on a GPU then; read when the first one is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def defer_compiler() -> None:
    """Let optimizers import `torch._dynamo` only where something is compiled.

    PyTorch imports it in each process that makes an optimizer, to exclude the optimizer's methods from compilation.
    Without a compiled function that excludes nothing, and takes 1.5 s of each process. Optimizers of other libraries,
    and of PyTorch versions that are written differently, import it as before.
    """
    if _compiler_imported() or hasattr(torch.optim.Optimizer, "_compiler_deferred"):
        return
    torch.optim.Optimizer._compiler_deferred = True  # type: ignore[attr-defined]
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        wrapper = getattr(torch.optim.Optimizer, name)
        method = getattr(wrapper, "__wrapped__", None)
        if wrapper.__code__.co_name == "inner" and method is not None:  # torch._compile._disable_dynamo
            setattr(torch.optim.Optimizer, name, _until_compiling(wrapper, method))
    for kind in [one for one in vars(torch.optim).values() if isinstance(one, type)]:
        step: Any = vars(kind).get("step")
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            setattr(kind, "step", _until_compiling(step, _with_gradients_of(step.__wrapped__)))


def _compiler_imported() -> bool:
    return "torch._dynamo" in sys.modules


def _until_compiling(wrapper: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls ``method``, and once `torch._dynamo` is imported PyTorch's ``wrapper`` of it."""
    @functools.wraps(wrapper)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (wrapper if _compiler_imported() else method)(*args, **kwargs)

    return call


def _with_gradients_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` with gradients recorded only for a differentiable optimizer, as PyTorch calls it."""
    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return call


_CPU_RANDOM = threading.RLock()
"""Held while a builder draws from generators that this process seeds for it, since all threads share them; and around
`torch.get_rng_state`, which keeps the generator's mutex while it makes a Python object. If a garbage collection hands
the interpreter to another thread in that moment, which asks for the state as well, neither goes on.
"""


def cpu_random() -> torch.Tensor:
    """Return the state of PyTorch's generator of the CPU, uint8 [n]; for several threads."""
    with _CPU_RANDOM:
        return torch.default_generator.get_state()  # torch.get_rng_state is another while a builder is recorded


def set_cpu_random(state: torch.Tensor) -> None:
    """Undo `cpu_random`."""
    with _CPU_RANDOM:
        torch.set_rng_state(state)


def seed(seed: int, rank: int) -> None:
    """Give this rank its own stream of random numbers (dropout); rank 0 of seed s is `torch.manual_seed(s)`."""
    with _CPU_RANDOM:
        torch.manual_seed(seed + 1_000_003 * rank)
    forget_keras_generator()


@contextlib.contextmanager
def seeded_apart(seed: int | None) -> Iterator[None]:
    """Run the body with all generators at ``seed``, or as they are, and restore them; one thread at a time."""
    with _CPU_RANDOM:
        random = random_arrays()
        if seed is not None:
            rng.seed(seed, 0)
            torch.manual_seed(seed)
        try:
            yield
        finally:
            load_random(random)


class DeviceClock:
    """Seconds between two points of the current CUDA stream, read without waiting for the device."""

    def __init__(self) -> None:
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin: torch.cuda.Event | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Mark the begin of a step."""
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """Mark the end of its computation."""
        assert self._begin is not None
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._open.append((self._begin, end))

    def seconds(self) -> float:
        """Return the seconds of the latest step whose end the device has reached; 0 before the first."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.pop(0)
            self._seconds = begin.elapsed_time(end) / 1e3
        return self._seconds


def forget_keras_generator() -> None:
    """Let Keras seed the generator of unseeded `keras.random` calls again, from Python's ``random``.

    Layers and initializers take their seeds from that generator too. `keras.utils.set_random_seed` does the same, but
    imports TensorFlow. Without Keras in this process it does nothing.
    """
    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is not None:
        state.set_global_attribute("global_seed_generator", None)


def random_arrays() -> dict[str, np.ndarray]:
    """Return the state of every random generator of this process."""
    out = {**rng.capture(), "torch.cpu": cpu_random().numpy().copy()}
    if torch.cuda.is_available():
        out["torch.cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return out


def load_random(arrays: dict[str, np.ndarray]) -> None:
    """Undo `random_arrays`."""
    rng.restore(arrays)
    set_cpu_random(torch.from_numpy(np.array(arrays["torch.cpu"])))
    if "torch.cuda" in arrays and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays["torch.cuda"])))


class Generators:
    """All random generators, for a model on ``devices``."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._gpus = [d for d in dict.fromkeys(self._devices) if d.type == "cuda"]

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of each by name."""
        return {**random_arrays(), **further_random(self._devices)}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Undo `state`, for the devices that are here again."""
        load_random(arrays)
        load_further_random(arrays, self._devices)

    def mark(self) -> Callable[[], None]:
        """Note all states; the function returned restores them. Cheaper than `state`, for every step."""
        back, cpu = rng.mark(), cpu_random()
        states = [torch.cuda.get_rng_state(d) for d in self._gpus]

        def put_back() -> None:
            back()
            set_cpu_random(cpu)
            for gpu, found in zip(self._gpus, states):
                torch.cuda.set_rng_state(found, gpu)
        return put_back

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all states after the body."""
        before = self.state()
        try:
            yield
        finally:
            self.load(before)
