"""Shares of the global batch by speed and memory."""
