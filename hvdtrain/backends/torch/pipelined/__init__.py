"""A PyTorch model that is cut over ranks: how a rank's part is built, measured and computed, and what it sends."""
