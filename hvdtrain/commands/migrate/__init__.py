"""Moves training scripts of other distributed trainers to hvdtrain: a diff, and what is unsafe, with file and line.

Owns reading, recognising and rewriting Python sources, by their concrete syntax tree (libcst), so that comments and
formatting stay. Never runs a script and imports no framework. A rewrite is whole or is not made: what a rule cannot
prove, it leaves as it was and says what to do by hand. Loops of PyTorch are never rewritten: their numbers are read,
and code with them goes beside the findings.

``finding``: what is told; ``source``: a file; ``scan``: facts of its tree; ``edit``: pieces of trees; ``rules/``: a
kind of script each, by name in ``rules.RULES``; ``habits/``: what is unsafe whatever the kind; ``plan``: all of it.
"""
