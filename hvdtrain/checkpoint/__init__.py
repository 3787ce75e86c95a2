"""Checkpoints: one directory a step, there whole or not at all, checked to the last byte when read.

Owns the format on disk and the order of writing. Knows no framework, no rank and no network: one process
calls it with named numpy arrays and JSON-able facts; who gathers them, and when, is decided elsewhere.
"""

from __future__ import annotations

from hvdtrain.checkpoint.manifest import CheckpointError, FileEntry, Manifest
from hvdtrain.checkpoint.snapshot import Kept
from hvdtrain.checkpoint.snapshot import Snapshot, inspect, read_snapshot, write_snapshot
from hvdtrain.checkpoint.store import CheckpointStore, Stored

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "FileEntry",
    "Kept",
    "Manifest",
    "Snapshot",
    "Stored",
    "inspect",
    "read_snapshot",
    "write_snapshot",
]
