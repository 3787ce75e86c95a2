"""Processes and hosts of a job: start, place, agreement, end. `hvdtrain.comm.collectives` moves gradients."""
