"""``python -m hvdtrain migrate``: rewrite scripts of other trainers, by their concrete syntax trees, and report
hazards.

Never runs a script and imports no framework. A rewrite is whole or is not made.
"""
