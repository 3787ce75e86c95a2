"""Ways to move flat vectors between ranks that need no framework: `null`, `lockstep`, `mpi`.

Owns implementations of `hvdtrain.core.protocols.Collectives` over numpy. Horovod's are in each backend's
collectives.py.
"""
