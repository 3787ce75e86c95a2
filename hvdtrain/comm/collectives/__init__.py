"""Collectives over numpy, without a framework: null, lockstep, mpi, shared.

Horovod's are in each backend's collectives.py.
"""
