"""PyTorch backend: tensors, models and Horovod's collectives."""

# isort: off
# First, as it imports the module `stage`, whose name the function takes over.
from hvdtrain.backends.torch.create import make_parts
# isort: on
from hvdtrain.backends.torch.collectives import collectives, stage
from hvdtrain.backends.torch.data import adapt as adapt_data
from hvdtrain.backends.torch.memory import (
    Profiler,
    allocators,
    flops_of_graphs,
    flops_of_pass,
    free_cached,
    held,
    hold_bytes,
    model_bytes,
    out_of_memory,
    peak_bytes,
    peak_so_far,
    product_type,
    ranges,
    state_now,
    traced,
)
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.backends.torch.pipelined.outline import outline
from hvdtrain.backends.torch.placement import device_facts, in_host_memory, seed, setup
from hvdtrain.backends.torch.trial import loss_evaluator, try_samples, untouched

__all__ = ["Ops", "Profiler", "adapt_data", "allocators", "collectives", "device_facts", "flops_of_graphs",
           "flops_of_pass", "free_cached", "held", "hold_bytes", "in_host_memory", "loss_evaluator", "make_parts",
           "model_bytes", "out_of_memory", "outline", "peak_bytes", "peak_so_far", "product_type", "ranges", "seed",
           "setup", "stage", "state_now", "traced", "try_samples", "untouched"]
