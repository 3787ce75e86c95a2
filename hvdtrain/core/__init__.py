"""Parts without imports of other layers: errors, protocols, records, the timeline, units, groups, random numbers."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__version__ = "0.2.0"

ROOT = Path(__file__).parent.parent
"""Directory of this package, as tracebacks spell it; its parent is what a child needs in ``sys.path``."""


class RunFiles:
    """Name what a run leaves in its directory; `hvdtrain.checkpoint.run_directory.RunDirectory` opens it."""

    COMPLETED = "completed.json"
    CONFIG = "config.yaml"
    FORECAST = "forecast.json"
    LOG = "log.jsonl"
    REPORT = "report.html"
    CHECKPOINTS = "checkpoints"
    MODEL = "model"
    TRACES = (LOG, CHECKPOINTS, COMPLETED)
    """What a run that has begun has left."""


def user_cache(kind: str = "") -> Path:
    """Return $XDG_CACHE_HOME/hvdtrain/``kind``, or that of ``~/.cache``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "hvdtrain", kind)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the body another name to write a file by; then it replaces ``path``, and none is left after an error."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
