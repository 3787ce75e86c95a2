"""Transforms of a PyTorch model, taken back when a run ends (`hvdtrain.core.protocols.Transform`)."""
