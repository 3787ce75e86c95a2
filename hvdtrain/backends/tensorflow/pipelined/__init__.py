"""A Keras model partitioned over ranks: blocks kept by a rank, their graphs, values between ranks."""
