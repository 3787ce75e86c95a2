"""A trace of all ranks: what each did in a window of steps, on one time axis, as one file for Perfetto and Chrome.

``window``: which steps. ``taken``: a rank's spans while the window lasts, bounded. ``profiler``: what a framework's own
adds. ``align``: ranks' clocks on one axis, and how far they may be off. ``gather``: spans and clocks on their way to
rank 0. ``lanes``, ``chrome``: the file. ``summary``: what it says of exchange and critical path. The callback that does
all this in a run is `hvdtrain.engine.callbacks.trace`.
"""
