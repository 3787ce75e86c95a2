"""``python -m hvdtrain plan``: shares of the batch, memory, and plans for other hardware."""
