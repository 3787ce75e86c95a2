"""A run: assembly, loop, callbacks, guards, saving, memory and balance."""
