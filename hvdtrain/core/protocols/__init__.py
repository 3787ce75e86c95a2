"""Every seam of the house as a `typing.Protocol`, a file for each kind.

Owns the contracts only. Shapes: N elements of a flat vector, P ranks of a group, K elements per rank, B samples.
`Array` is whatever one backend computes with: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`.
"""

from hvdtrain.core.protocols.around import Callback, Launcher
from hvdtrain.core.protocols.arrays import Array, Batch, Pair
from hvdtrain.core.protocols.compile import Compile
from hvdtrain.core.protocols.compressor import Compressor
from hvdtrain.core.protocols.control import Control
from hvdtrain.core.protocols.data_parallel import DataParallel
from hvdtrain.core.protocols.model_state import Buffers, Evaluator, ModelFacts, ModelState, Transform, Writable
from hvdtrain.core.protocols.ops import Cell, Ops
from hvdtrain.core.protocols.params import Optimizer, Params
from hvdtrain.core.protocols.pipeline import Cargo, PipelineStage
from hvdtrain.core.protocols.remat import BlockCost, Remat
from hvdtrain.core.protocols.report import Record, Report, Tracker
from hvdtrain.core.protocols.stage import Done, GradientSink, ModelSpec, Schedule, Stage
from hvdtrain.core.protocols.types import ParamSpec
from hvdtrain.core.protocols.wire import (
    AllGather, AllReduce, AllToAll, Carrier, Channel, Collectives, Coming, Exchange, Handle, Request,
)

__all__ = ["AllGather", "AllReduce", "AllToAll", "Array", "Batch", "BlockCost", "Buffers", "Callback", "Cargo",
           "Carrier", "Cell", "Channel", "Collectives", "Coming", "Compile", "Compressor", "Control", "DataParallel",
           "Done", "Evaluator", "Exchange", "GradientSink", "Handle", "Launcher", "ModelFacts", "ModelSpec",
           "ModelState", "Ops", "Optimizer", "Pair", "ParamSpec", "Params", "PipelineStage", "Record", "Remat",
           "Report", "Request", "Schedule", "Stage", "Tracker", "Transform", "Writable"]
