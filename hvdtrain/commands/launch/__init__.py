"""python -m hvdtrain launch: start a job on a list of hosts, watch over it, start it again."""
