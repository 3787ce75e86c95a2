"""Every seam of the house as a `typing.Protocol`, a file for each kind.

Owns the contracts only. Shapes: N elements of a flat vector, P ranks of a group, K elements per rank, B samples.
`Array` is whatever one backend computes with: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`.
"""

from hvdtrain.core.protocols.control import Control
from hvdtrain.core.protocols.data_parallel import ChangesTransport, DataParallel, DividesState
from hvdtrain.core.protocols.model_state import (
    BlockCost, Buffers, Compile, Evaluator, ModelFacts, ModelState, Remat, Transform, Writable)
from hvdtrain.core.protocols.ops import Cell, Compressor, Ops
from hvdtrain.core.protocols.params import Optimizer, Params
from hvdtrain.core.protocols.report import Callback, Launcher, Record, RecordedRun, Report, Tracker
from hvdtrain.core.protocols.stage import Cargo, Done, GradientSink, ModelSpec, PipelineStage, Schedule, Stage
from hvdtrain.core.protocols.types import Array, Batch, Pair, ParamSpec
from hvdtrain.core.protocols.wire import (
    AllGather, AllReduce, AllToAll, AllToAllV, Carrier, Channel, Collectives, Coming, Exchange, Handle, Request,
    Spread)

__all__ = ["AllGather", "AllReduce", "AllToAll", "AllToAllV", "Array", "Batch", "BlockCost", "Buffers", "Callback",
           "Cargo", "Carrier", "Cell", "ChangesTransport", "Channel", "Collectives", "Coming", "Compile",
           "Compressor", "Control", "DataParallel", "DividesState", "Done", "Evaluator", "Exchange", "GradientSink",
           "Handle", "Launcher", "ModelFacts", "ModelSpec", "ModelState", "Ops", "Optimizer", "Pair", "ParamSpec",
           "Params", "PipelineStage", "Record", "RecordedRun", "Remat", "Report", "Request", "Schedule", "Spread",
           "Stage", "Tracker", "Transform", "Writable"]
