"""TensorFlow with Keras 3: how tensors, steps and Horovod's collectives look there."""

from hvdtrain.backends.tensorflow.collectives import collectives, stage
from hvdtrain.backends.tensorflow.data import adapt as adapt_data
from hvdtrain.backends.tensorflow.first_sample import try_samples
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.placement import building, device_facts, in_host_memory, seed, setup
from hvdtrain.backends.tensorflow.step import create_step
from hvdtrain.backends.tensorflow.trial import hold_bytes, out_of_memory, peak_bytes

__all__ = ["Ops", "adapt_data", "building", "collectives", "create_step", "device_facts", "in_host_memory",
           "hold_bytes", "out_of_memory", "peak_bytes", "seed", "setup", "stage", "try_samples"]
