"""Computing a block of a PyTorch model once more in backward, with everything that its forward pass read as it was."""
