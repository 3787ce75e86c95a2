"""Samples of a run: sources and streams, global batches, one rank's share of them, and workers that read ahead."""
