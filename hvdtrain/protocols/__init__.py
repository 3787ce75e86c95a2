"""Every seam of the house as a `typing.Protocol`, a file for each kind.

Owns the contracts only. Shapes: N elements of a flat vector, P ranks of a group, K elements per rank, B samples.
`Array` is whatever one backend computes with: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`.
"""

from hvdtrain.protocols.around import Callback, Launcher
from hvdtrain.protocols.arrays import Array, Batch, Pair
from hvdtrain.protocols.compressor import Compressor
from hvdtrain.protocols.control import Control
from hvdtrain.protocols.ops import Cell, Ops
from hvdtrain.protocols.step import ModelSpec, ParamSpec, Step
from hvdtrain.protocols.wire import AllGather, AllReduce, AllToAll, Collectives, Exchange, Handle, Request

__all__ = ["AllGather", "AllReduce", "AllToAll", "Array", "Batch", "Callback", "Cell", "Collectives", "Compressor",
           "Control", "Exchange", "Handle", "Launcher", "ModelSpec", "Ops", "Pair", "ParamSpec", "Request", "Step"]
