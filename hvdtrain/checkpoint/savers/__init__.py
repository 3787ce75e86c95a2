"""Ways to write a checkpoint, a file for each."""
