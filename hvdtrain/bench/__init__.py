"""``python -m hvdtrain bench``: measures the wire, the compressors, whole steps and accuracy.

One file per sub-command, each with ``main(argv) -> int``. What they share: `record` (JSONL records) and `table`.
"""
