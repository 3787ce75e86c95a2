"""Conversion between a PyTorch model and its Keras twin: layers, layouts, pairing."""
