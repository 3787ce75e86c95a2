"""Checkpoints: one directory a step, written whole or not at all, verified to the last byte when read.

Owns the format on disk, the transport of shards and the run's directory; `hvdtrain.engine.saving` decides when to save.
"""

from __future__ import annotations

from hvdtrain.checkpoint.manifest import CheckpointError, FileEntry, Manifest
from hvdtrain.checkpoint.snapshot import OpenCheckpoint, Snapshot, inspect, read_snapshot, write_snapshot
from hvdtrain.checkpoint.store import CheckpointStore, StoredCheckpoint

__all__ = ["CheckpointError", "CheckpointStore", "FileEntry", "Manifest", "OpenCheckpoint", "Snapshot",
           "StoredCheckpoint", "inspect", "read_snapshot", "write_snapshot"]
