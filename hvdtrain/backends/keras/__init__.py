"""Parts that Keras models need on each of their backends."""
