"""Changes of the computation of a Keras model for the time of a run, a file for each."""
