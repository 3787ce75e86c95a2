"""Liveness of ranks: progress pages, causes of an end, the watchdog."""
