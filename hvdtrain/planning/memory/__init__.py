"""Memory forecast of a rank, and the micro-batches and recomputed blocks that fit."""
