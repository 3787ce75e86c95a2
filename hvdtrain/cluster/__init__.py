"""How a job of one or more processes starts, finds its place, agrees and ends.

Owns the control plane, the topology and the ways a process may end. Does not move gradients:
`hvdtrain.comm.collectives` does.
"""
