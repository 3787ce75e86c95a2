"""Every seam of the house as a `typing.Protocol`, a file for each kind.

Owns the contracts only. Shapes: N elements of a flat vector, P ranks of a group, K elements per rank, B samples.
`Array` is whatever one backend computes with: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`.
"""

from hvdtrain.protocols.around import Callback, Launcher
from hvdtrain.protocols.arrays import Array, Batch, Pair
from hvdtrain.protocols.compile import Compile
from hvdtrain.protocols.compressor import Compressor
from hvdtrain.protocols.control import Control
from hvdtrain.protocols.data_parallel import DataParallel
from hvdtrain.protocols.model_state import Buffers, Evaluator, ModelFacts, ModelState, Transform, Writable
from hvdtrain.protocols.ops import Cell, Ops
from hvdtrain.protocols.params import Optimizer, Params
from hvdtrain.protocols.pipeline import Cargo, PipelineStage
from hvdtrain.protocols.remat import BlockCost, Remat
from hvdtrain.protocols.report import Record, Report, Tracker
from hvdtrain.protocols.stage import Done, GradientSink, ModelSpec, Schedule, Stage
from hvdtrain.protocols.types import ParamSpec
from hvdtrain.protocols.wire import (AllGather, AllReduce, AllToAll, Carrier, Channel, Collectives, Coming, Exchange,
                                     Handle, Request)

__all__ = ["AllGather", "AllReduce", "AllToAll", "Array", "Batch", "BlockCost", "Buffers", "Callback", "Cargo",
           "Carrier", "Cell", "Channel", "Collectives", "Coming", "Compile", "Compressor", "Control", "DataParallel",
           "Done", "Evaluator", "Exchange", "GradientSink", "Handle", "Launcher", "ModelFacts", "ModelSpec",
           "ModelState", "Ops", "Optimizer", "Pair", "ParamSpec", "Params", "PipelineStage", "Record", "Remat",
           "Report", "Request", "Schedule", "Stage", "Tracker", "Transform", "Writable"]
