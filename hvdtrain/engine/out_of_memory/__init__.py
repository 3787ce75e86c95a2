"""A rank that runs out of memory: it alone makes its micro-batches smaller, and all ranks repeat the step."""
