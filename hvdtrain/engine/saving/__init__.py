"""Checkpoints of a run: contents, session, final files."""
