"""Processes beside a rank that fetch samples for it (``data.workers``).

`start` runs in the rank and starts `server`, a small process that forks the workers, before MPI starts; `worker` is
what a worker does; `pool` is the rank's side of a fetch, `choose` how many there are.
"""
