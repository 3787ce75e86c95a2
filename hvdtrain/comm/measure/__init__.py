"""Measurements of transports and compressors."""
