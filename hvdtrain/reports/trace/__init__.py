"""A trace of all ranks in a window of steps, as one file for Perfetto and Chrome."""
