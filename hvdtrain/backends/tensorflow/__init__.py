"""TensorFlow with Keras 3: how tensors, steps and Horovod's collectives look there."""

# isort: off
# First, as it imports the module `stage`, whose name the function takes over.
from hvdtrain.backends.tensorflow.create import make_parts
# isort: on
from hvdtrain.backends.tensorflow.collectives import collectives, stage
from hvdtrain.backends.tensorflow.data import adapt as adapt_data
from hvdtrain.backends.tensorflow.footprint import (
    Profiler,
    allocators,
    flops_of_graphs,
    flops_of_pass,
    held,
    model_bytes,
    product_type,
    ranges,
    state_now,
    traced,
)
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.pipelined.deferred import building
from hvdtrain.backends.tensorflow.placement import device_facts, in_host_memory, seed, setup
from hvdtrain.backends.tensorflow.trial import (
    free_cached,
    hold_bytes,
    loss_evaluator,
    out_of_memory,
    peak_bytes,
    peak_so_far,
    try_samples,
    untouched,
)

SYNCS_OVER_HOST = False
"""Whether BatchNorm's moments can be taken over a transport outside of TensorFlow's graphs."""

__all__ = ["Ops", "Profiler", "SYNCS_OVER_HOST", "adapt_data", "allocators", "building", "collectives",
           "device_facts", "flops_of_graphs", "flops_of_pass", "free_cached", "held", "hold_bytes", "in_host_memory",
           "loss_evaluator", "make_parts", "model_bytes", "out_of_memory", "peak_bytes", "peak_so_far", "product_type",
           "ranges", "seed", "setup", "stage", "state_now", "traced", "try_samples", "untouched"]
