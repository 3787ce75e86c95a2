"""Building Horovod for this machine: facts -> plan -> wheel -> verification -> record.

Owns everything behind ``python -m hvdtrain build``. Imports the standard library only, and neither Horovod
nor a framework: those are looked at from outside (package metadata, files) or run in child processes.
"""

from __future__ import annotations

from hvdtrain.commands.build_horovod.record import BuildRecord, installed, mismatch

__all__ = ["BuildRecord", "installed", "mismatch"]
