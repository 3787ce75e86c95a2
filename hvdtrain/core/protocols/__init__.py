"""Every seam of the house as a `typing.Protocol`, a file for each kind.

Owns the contracts only. Shapes: N elements of a flat vector, P ranks of a group, K elements per rank, B samples.
`Array` is whatever one backend computes with: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`.
"""

from hvdtrain.core.protocols.model import (
    BlockCost,
    Buffers,
    Compile,
    Evaluator,
    ModelFacts,
    ModelState,
    Remat,
    Transform,
    Writable,
)
from hvdtrain.core.protocols.run import Launcher, Record, RecordedRun, Report, RunCallback, Tracker
from hvdtrain.core.protocols.stage import (
    Cargo,
    ChangesTransport,
    DataParallel,
    DividesState,
    GradientSink,
    ModelSpec,
    PipelineStage,
    Schedule,
    Stage,
    StepGradients,
)
from hvdtrain.core.protocols.tensors import Compressor, Ops, Optimizer, Params, StateCell
from hvdtrain.core.protocols.transport import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Carrier,
    Channel,
    Collectives,
    Control,
    Exchange,
    Handle,
    PendingMessage,
    Request,
    SharedCarrier,
    Spread,
)
from hvdtrain.core.protocols.types import Array, Batch, Pair, ParamSpec

__all__ = ["AllGather", "AllReduce", "AllToAll", "AllToAllV", "Array", "Batch", "BlockCost", "Buffers", "RunCallback",
           "Cargo", "Carrier", "StateCell", "ChangesTransport", "Channel", "Collectives", "PendingMessage", "Compile",
           "Compressor", "Control", "DataParallel", "DividesState", "StepGradients", "Evaluator", "Exchange",
           "GradientSink",
           "Handle", "Launcher", "ModelFacts", "ModelSpec", "ModelState", "Ops", "Optimizer", "Pair", "ParamSpec",
           "Params", "PipelineStage", "Record", "RecordedRun", "Remat", "Report", "Request", "Schedule",
           "SharedCarrier", "Spread", "Stage", "Tracker", "Transform", "Writable"]
