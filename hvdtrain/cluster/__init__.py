"""Processes and hosts of a job: start, place, agreement and end.

Moves no gradients: `hvdtrain.comm.collectives` does.
"""
