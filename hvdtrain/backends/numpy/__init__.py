"""The numpy reference backend: what the other backends are compared with and what the lockstep tests train."""

from collections.abc import Callable

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.backends.numpy.step import create_step
from hvdtrain.cluster.devices import DeviceFacts

__all__ = ["Ops", "adapt_data", "collectives", "create_step", "device_facts", "in_host_memory",
           "out_of_memory", "peak_bytes", "seed", "setup"]


def adapt_data(obj: object, seed: int = 0) -> None:
    """No dataset classes of its own."""


def collectives(kind: str, control: object, exchange: object, start_horovod: object) -> None:
    """None: the core's collectives serve it."""


def device_facts() -> DeviceFacts:
    """The CPU."""
    import platform

    return DeviceFacts("cpu", platform.processor() or platform.machine(), platform.machine())


def in_host_memory() -> bool:
    """Always."""
    return True


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is of the host's memory."""
    return isinstance(error, MemoryError)


def peak_bytes(work: Callable[[], None]) -> int:
    """Run ``work``; 0, as there is no device memory."""
    work()
    return 0


def setup(threads: int, deterministic: bool) -> None:
    """Nothing to set up."""


def seed(seed: int, rank: int) -> None:
    """Nothing beyond numpy's own generator, which the core seeds."""
