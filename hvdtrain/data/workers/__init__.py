"""Worker processes of a rank that fetch samples for it (``data.workers``).

`start` starts `server`, which forks workers, before MPI starts; `worker` runs in them; `pool` is the rank's side.
"""
