"""``python -m hvdtrain bench``: measures transports and compressors.

One file per sub-command, each with ``main(argv) -> int``. What they share: `record` (JSONL records) and `table`.
"""
