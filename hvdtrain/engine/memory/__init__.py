"""Memory of training on a rank: estimated before it starts, and fitted by the micro-batch and recomputed blocks."""
