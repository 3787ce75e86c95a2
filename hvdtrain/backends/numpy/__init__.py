"""The numpy reference backend: the others are compared with it, and the lockstep tests train it."""

import contextlib
from collections.abc import Callable
from typing import Any

from hvdtrain.backends.loss_coupling import Evaluate, LossValue
from hvdtrain.backends.model_spec import refuse_groups
from hvdtrain.backends.numpy.model import Buffers, Evaluator, Params, State
from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.backends.numpy.stage import Chunks, Stage, estimated, keep_own
from hvdtrain.cluster.devices import DeviceFacts, cpu_facts
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Collectives, Control
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.parallel.parts import ModelParts, replicas_of
from hvdtrain.parallel.pipeline.partition import agree, measured_samples
from hvdtrain.parallel.precision import FP32, LossScale, Precision
from hvdtrain.planning.memory.forecast import Model, Slots

__all__ = ["Ops", "adapt_data", "allocators", "collectives", "device_facts", "flops_of_graphs",
           "flops_of_pass", "free_cached", "held", "hold_bytes", "in_host_memory", "loss_evaluator", "make_parts",
           "model_bytes", "out_of_memory", "peak_bytes", "product_type", "seed", "setup", "stage", "state_now",
           "traced", "try_samples", "untouched"]


def adapt_data(obj: object, seed: int = 0, rows: object = None) -> None:
    """Return None: numpy has no dataset classes of its own."""


def collectives(kind: str, control: object, exchange: object, start_horovod: object, over_host: bool = False) -> None:
    """Return None: the core's collectives serve numpy."""


def device_facts() -> DeviceFacts:
    return cpu_facts()


def in_host_memory() -> bool:
    return True


def flops_of_graphs(parts: object, dp: object) -> tuple[None, str]:
    return None, ""


def flops_of_pass(parts: object, batch: object) -> tuple[None, str]:
    return None, "numpy's operations are not counted"


def product_type(parts: object) -> str:
    """Return float32's name among peaks (`hvdtrain.engine.machine`)."""
    return "fp32"


def free_cached() -> None:
    """Do nothing: numpy caches no memory."""


def hold_bytes(n: int) -> None:
    """Do nothing: there is no device memory."""


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError)


def peak_bytes(work: Callable[[], None]) -> int:
    """Run ``work`` and return 0: there is no device memory."""
    work()
    return 0


def peak_so_far() -> int:
    return 0


def model_bytes(parts: Any) -> Model:
    specs = parts.params.specs
    return Model(specs, 0, [Slots(itemsize(spec.dtype)) for spec in specs], framework="numpy")


def state_now(parts: Any) -> int:
    """Return the bytes of the velocities, which are made with the optimizer."""
    return sum(array.nbytes for _, _, array in parts.optimizer.slots())


def held(parts: Any) -> dict[str, int | None]:
    itself = sum(spec.n * itemsize(spec.dtype) for spec in parts.params.specs)
    return {"parameters": itself, "gradients": None, "state": state_now(parts)}


def allocators() -> list[dict[str, Any]]:
    return []


def traced(parts: object, batch: object) -> None:
    """Return None: the process's memory is measured instead of a pass."""


def setup(threads: int, deterministic: bool, devices: int = 1) -> None:
    """Do nothing."""


def seed(seed: int, rank: int) -> None:
    """Do nothing: the core seeds numpy's generator."""


def stage(wire: Collectives, control: object) -> Collectives:
    """Return ``wire``: arrays lie in host memory."""
    return wire


def try_samples(parts: object, batch: object, training: bool) -> list[str]:
    """Return []: the model and loss are the project's own."""
    return []


def loss_evaluator(parts: object, pool: object) -> contextlib.AbstractContextManager[Evaluate]:
    """Yield a loss that is a mean over samples by construction."""
    return contextlib.nullcontext(lambda numbers, training: LossValue(float(len(numbers)), float(len(numbers))))


def untouched(parts: object, batch: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def make_parts(spec: Any, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
               precision: Precision = FP32, sample: Any = None, data: Any = None,
               mesh: Mesh | None = None) -> ModelParts:
    """Return parts over ``spec.model``, trained with SGD; `UserError` for what only frameworks can do."""
    if config.model_parallel > 1:
        raise UserError(f"model_parallel {config.model_parallel} with the numpy backend", "a PyTorch or Keras model",
                        "set model_parallel: 1")
    if config.optimizer.name.lower() not in ("auto", "sgd"):
        raise UserError(f"optimizer {config.optimizer.name!r} with the numpy backend", "SGD",
                        "correct optimizer.name")
    if config.freeze:
        raise UserError("freeze with the numpy backend", "a PyTorch or Keras model", "leave freeze out")
    refuse_groups(spec, "a model of the numpy backend", "leave it out")
    check(precision.own)
    model = spec.model
    momentum = config.optimizer.args.get("momentum", 0.0)
    if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise UserError(f"optimizer.args.momentum is {momentum!r}", "a number from 0 to below 1", "correct it")
    layout, replicas, evaluator = None, [], Evaluator(model)
    if mesh is not None and mesh.deepest > 1:
        layout = agree(estimated(model, measured_samples(config, mesh), int(momentum > 0)), config, control, mesh, ())
        keep_own(model, layout)
        replicas = replicas_of(layout, wire)
    params = Params(model, config.lr, float(momentum))
    optimizer = params.optimizer(params.tensors)
    stage = Stage(model) if layout is None else Chunks(model, layout, evaluator)
    wires = [Transport(r.wire, Ops()) for r in replicas] or [Transport(wire, Ops())]
    return ModelParts(model, [], stage, params, optimizer, Buffers(model, wires, [r.blocks for r in replicas]),
                      evaluator,
                 State(model, optimizer), [], precision, LossScale(), layout=layout, replicas=replicas)


def check(own: str) -> None:
    """Raise `UserError` for anything but "fp32", which stands for the model's own types."""
    if own != "fp32":
        raise UserError(f"precision {own} with the numpy backend", "fp32, the model's own types", "set precision: fp32")
