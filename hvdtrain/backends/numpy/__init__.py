"""The numpy reference backend: what the other backends are compared with and what the lockstep tests train."""

import contextlib
from collections.abc import Callable
from typing import Any

from hvdtrain.backends.loss_coupling import Evaluate, LossValue
from hvdtrain.backends.numpy.create import make_parts
from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.cluster.devices import DeviceFacts, cpu_facts
from hvdtrain.core.protocols import Collectives
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.planning.memory.facts import Model, Slots

__all__ = ["Ops", "adapt_data", "allocators", "collectives", "device_facts", "flops_of_graphs",
           "flops_of_pass", "free_cached", "held", "hold_bytes", "in_host_memory", "loss_evaluator", "make_parts",
           "model_bytes", "out_of_memory", "peak_bytes", "product_type", "seed", "setup", "stage", "state_now",
           "traced", "try_samples", "untouched"]


def adapt_data(obj: object, seed: int = 0, rows: object = None) -> None:
    """No dataset classes of its own."""


def collectives(kind: str, control: object, exchange: object, start_horovod: object, over_host: bool = False) -> None:
    """None: the core's collectives serve it."""


def device_facts() -> DeviceFacts:
    """The CPU."""
    return cpu_facts()


def in_host_memory() -> bool:
    """Always."""
    return True


def flops_of_graphs(parts: object, dp: object) -> tuple[None, str]:
    """Return nothing: there are no graphs."""
    return None, ""


def flops_of_pass(parts: object, batch: object) -> tuple[None, str]:
    """Return nothing: nobody counts numpy's operations."""
    return None, "numpy's operations are not counted"


def product_type(parts: object) -> str:
    """Return float32's name among peaks (`hvdtrain.engine.machine.flops`)."""
    return "fp32"


def free_cached() -> None:
    """Nothing: numpy keeps no memory for itself."""


def hold_bytes(n: int) -> None:
    """Nothing: there is no device memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is of the host's memory."""
    return isinstance(error, MemoryError)


def peak_bytes(work: Callable[[], None]) -> int:
    """Run ``work``; 0, as there is no device memory."""
    work()
    return 0


def peak_so_far() -> int:
    """Return 0, as there is no device memory."""
    return 0


def model_bytes(parts: Any) -> Model:
    """Return the model's tensors, each with a velocity."""
    specs = parts.params.specs
    return Model(specs, 0, [Slots(itemsize(spec.dtype)) for spec in specs], framework="numpy")


def state_now(parts: Any) -> int:
    """Return the bytes of the velocities, which are made with the optimizer."""
    return sum(array.nbytes for _, _, array in parts.optimizer.slots())


def held(parts: Any) -> dict[str, int | None]:
    """Return the bytes of parameters and velocities; gradients lie in their buckets."""
    itself = sum(spec.n * itemsize(spec.dtype) for spec in parts.params.specs)
    return {"parameters": itself, "gradients": None, "state": state_now(parts)}


def allocators() -> list[dict[str, Any]]:
    """Return [], as there is no device memory."""
    return []


def traced(parts: object, batch: object) -> None:
    """Nothing: a pass is measured by what the process holds."""


def setup(threads: int, deterministic: bool, devices: int = 1) -> None:
    """Nothing to set up."""


def seed(seed: int, rank: int) -> None:
    """Nothing beyond numpy's own generator, which the core seeds."""


def stage(wire: Collectives, control: object) -> Collectives:
    """The wire itself: arrays lie in host memory."""
    return wire


def try_samples(parts: object, batch: object, training: bool) -> list[str]:
    """Return nothing: its one model and loss are the project's own."""
    return []


def loss_evaluator(parts: object, pool: object) -> contextlib.AbstractContextManager[Evaluate]:
    """Return nothing to be judged: its one loss is a mean over samples."""
    return contextlib.nullcontext(lambda numbers, training: LossValue(float(len(numbers)), float(len(numbers))))


def untouched(parts: object, batch: object) -> contextlib.AbstractContextManager[None]:
    """Nothing is to be put back."""
    return contextlib.nullcontext()
