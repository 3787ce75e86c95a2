"""A trace of all ranks in a window of steps, as one file for Perfetto and Chrome.

The callback that takes it is `hvdtrain.engine.callbacks.trace`.
"""
