"""What changes how a Keras model computes for the time of a run, a file for each."""
