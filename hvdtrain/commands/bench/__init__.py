"""``python -m hvdtrain bench``: one file per benchmark, each with ``main(argv) -> int``."""
