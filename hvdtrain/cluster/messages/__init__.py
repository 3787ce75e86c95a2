"""Messages between ranks without a collective: channels, shared memory, progress of MPI."""
