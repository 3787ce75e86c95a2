"""Parts without imports of other layers: errors, protocols, records, the timeline, units, groups, random numbers."""

from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).parent.parent
"""Directory of this package, as tracebacks spell it; its parent is what a child needs in ``sys.path``."""


class RunFiles:
    """Name what a run leaves in its directory; `hvdtrain.checkpoint.run_directory.RunDirectory` opens it."""

    COMPLETED = "completed.json"
    CONFIG = "config.yaml"
    LOG = "log.jsonl"
    REPORT = "report.html"
    CHECKPOINTS = "checkpoints"
    MODEL = "model"
    TRACES = (LOG, CHECKPOINTS, COMPLETED)
    """What a run that has begun has left."""
