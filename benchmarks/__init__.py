"""Benchmarks of hvdtrain against itself and other trainers, and chaos: faults on purpose. Run from a checkout.

One file per bench, each with ``main(argv) -> int``; `__main__` lists them. What users run on clusters is in
`hvdtrain.commands.bench`: wire and compressors, with the tables and records that all share.
"""
