"""PyTorch backend: tensors, models and Horovod's collectives."""

from hvdtrain.backends.torch.create import make_parts  # before the function `stage`, which has a module's name
from hvdtrain.backends.torch.collectives import collectives, stage
from hvdtrain.backends.torch.data import adapt as adapt_data
from hvdtrain.backends.torch.trial import try_samples, untouched
from hvdtrain.backends.torch.profiler import flops_of_graphs, flops_of_pass, product_type
from hvdtrain.backends.torch.memory import model_bytes, state_now, traced
from hvdtrain.backends.torch.trial import loss_evaluator
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.backends.torch.pipelined.outline import outline
from hvdtrain.backends.torch.placement import device_facts, in_host_memory, seed, setup
from hvdtrain.backends.torch.profiler import Profiler, ranges
from hvdtrain.backends.torch.memory import free_cached, hold_bytes, out_of_memory, peak_bytes, peak_so_far
from hvdtrain.backends.torch.memory import allocators, held

__all__ = ["Ops", "Profiler", "adapt_data", "allocators", "collectives", "device_facts", "flops_of_graphs",
           "flops_of_pass", "free_cached", "held", "hold_bytes", "in_host_memory", "loss_evaluator", "make_parts",
           "model_bytes", "out_of_memory", "outline", "peak_bytes", "peak_so_far", "product_type", "ranges", "seed",
           "setup", "stage", "state_now", "traced", "try_samples", "untouched"]
