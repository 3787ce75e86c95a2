"""How a rank makes its part of a step fit its memory: its micro-batch, and the blocks that it recomputes."""
