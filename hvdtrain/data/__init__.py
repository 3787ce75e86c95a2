"""The data room: which samples form a step (`sampler`), where they come from (`sources`, `stream`), where a
run stands in them (`cursor`), how they are read in global batches (`walk`, `prefetch`) and how one rank gets its part
(`feed`).

Imports the standard library and numpy only; the backends' ``data.py`` adapt what the frameworks call a
dataset.
"""
