"""Facts of this host: memory, processes, GPUs, peak rates."""
