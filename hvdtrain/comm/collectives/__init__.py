"""Collectives over numpy: null, lockstep, mpi, shared. Horovod's are in each backend's collectives.py."""
