"""PyTorch models partitioned over ranks, or over the devices of one."""
