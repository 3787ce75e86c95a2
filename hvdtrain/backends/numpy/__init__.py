"""The numpy reference backend: what the other backends are compared with and what the lockstep tests train."""

from collections.abc import Callable

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.backends.numpy.create import make_parts
from hvdtrain.cluster.devices import DeviceFacts, cpu_facts
from hvdtrain.protocols import Collectives

__all__ = ["Ops", "adapt_data", "collectives", "device_facts", "in_host_memory",
           "hold_bytes", "make_parts", "out_of_memory", "peak_bytes", "seed", "setup", "stage",
           "try_samples"]


def adapt_data(obj: object, seed: int = 0) -> None:
    """No dataset classes of its own."""


def collectives(kind: str, control: object, exchange: object, start_horovod: object, over_host: bool = False) -> None:
    """None: the core's collectives serve it."""


def device_facts() -> DeviceFacts:
    """The CPU."""
    return cpu_facts()


def in_host_memory() -> bool:
    """Always."""
    return True


def hold_bytes(n: int) -> None:
    """Nothing: there is no device memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is of the host's memory."""
    return isinstance(error, MemoryError)


def peak_bytes(work: Callable[[], None]) -> int:
    """Run ``work``; 0, as there is no device memory."""
    work()
    return 0


def setup(threads: int, deterministic: bool, devices: int = 1) -> None:
    """Nothing to set up."""


def seed(seed: int, rank: int) -> None:
    """Nothing beyond numpy's own generator, which the core seeds."""


def stage(wire: Collectives, control: object) -> Collectives:
    """The wire itself: arrays lie in host memory."""
    return wire


def try_samples(parts: object, batch: object, training: bool) -> None:
    """Nothing: its one model and loss are the project's own."""
