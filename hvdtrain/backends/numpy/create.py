"""How the parts of the reference model are made."""

from __future__ import annotations

from typing import Any

from hvdtrain.backends.model_spec import refuse_groups
from hvdtrain.backends.numpy.chunks import Chunks, keep_own, reckoned
from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.backends.numpy.params import Params
from hvdtrain.backends.numpy.stage import Stage
from hvdtrain.backends.numpy.state import Buffers, Evaluator, State
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Collectives, Control
from hvdtrain.parallel.parts import ModelParts, replicas_of
from hvdtrain.parallel.pipeline.partition import agree, measured_samples
from hvdtrain.parallel.precision.policy import FP32, Precision
from hvdtrain.parallel.precision.scaler import LossScale


def make_parts(spec: Any, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
               precision: Precision = FP32, sample: Any = None, data: Any = None,
               mesh: Mesh | None = None) -> ModelParts:
    """Parts over ``spec.model``, trained with SGD; `UserError` for what only frameworks can do."""
    if config.model_parallel > 1:
        raise UserError(f"model_parallel {config.model_parallel} with the numpy backend", "a PyTorch or Keras model",
                        "set model_parallel: 1")
    if config.optimizer.name.lower() not in ("auto", "sgd"):
        raise UserError(f"optimizer {config.optimizer.name!r} with the numpy backend", "SGD",
                        "correct optimizer.name")
    refuse_groups(spec, "a model of the numpy backend", "leave it out")
    check(precision.own)
    model = spec.model
    momentum = config.optimizer.args.get("momentum", 0.0)
    if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise UserError(f"optimizer.args.momentum is {momentum!r}", "a number from 0 to below 1", "correct it")
    layout, replicas, evaluator = None, [], Evaluator(model)
    if mesh is not None and mesh.deepest > 1:
        layout = agree(reckoned(model, measured_samples(config, mesh), int(momentum > 0)), config, control, mesh, ())
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
