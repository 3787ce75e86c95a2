"""``python -m hvdtrain build``: build, install and check Horovod. Imports neither Horovod nor a framework."""

from __future__ import annotations

from hvdtrain.commands.build_horovod.record import BuildRecord, installed, mismatch

__all__ = ["BuildRecord", "installed", "mismatch"]
