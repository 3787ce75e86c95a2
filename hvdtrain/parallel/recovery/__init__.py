"""Recovery from a shortage of memory: the step is repeated in smaller micro-batches."""
