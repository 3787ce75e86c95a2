"""Which ways of computing a model are the fastest here: what is timed (`timing`), and what is kept of it (`choice`)."""
