"""Where a run keeps its files, chosen so that no run's files are ever overwritten.

Owns the directory's name and its two records: ``config.yaml`` when a run begins, ``completed.json`` when it has ended
well. A job has succeeded if and only if ``completed.json`` is there: an MPI launcher's exit status cannot be trusted
after a node was lost.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hvdtrain import recipe
from hvdtrain.cluster.exit import agreed
from hvdtrain.config import Config
from hvdtrain.errors import UserError

COMPLETED = "completed.json"
TRACES = ("log.jsonl", "checkpoints", COMPLETED)
"""What a run leaves in its directory."""


def ensure_out(run: Any) -> Path:
    """The run's directory, made by rank 0 on first use and told to all. Collective.

    Empty ``config.out``: a new ``runs/MODEL-NNN``; with ``resume auto`` the newest of that model. A given directory
    that holds a run already is refused unless it is resumed.
    """
    if run.out == Path():
        def choose() -> Path | None:
            return _root_choice(run.config, run.spec.name) if run.control.rank == 0 else None

        run.out = run.control.bcast(agreed(run.control, choose, "out"))
    return run.out


def _root_choice(config: Config, name: str) -> Path:
    try:
        path = Path(config.out) if config.out else _numbered(Path("runs"), name, config.resume == "auto")
        path.mkdir(parents=True, exist_ok=True)
        if config.out and not config.resume and any((path / name).exists() for name in TRACES):
            raise UserError(f"{path} holds a run already", "a new directory, so that nothing is overwritten",
                            "add --resume auto to go on with it, or choose another --out")
        _write(path / "config.yaml", _yaml(config))
        (path / COMPLETED).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the run's directory cannot be made: {error}", "a writable place",
                        "choose another --out") from None
    return path


def _numbered(root: Path, name: str, newest: bool) -> Path:
    """``root/stem-NNN``: the next free number, or the newest existing one."""
    file = Path(name.rpartition(":")[0] or name).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", file).strip("-.") or "run"
    found = (re.fullmatch(re.escape(stem) + r"-(\d+)", path.name) for path in root.glob(f"{stem}-*"))
    taken = sorted(int(match[1]) for match in found if match)
    if newest and taken:
        return root / f"{stem}-{taken[-1]:03d}"
    number = taken[-1] + 1 if taken else 1
    while True:
        path = root / f"{stem}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another job took it meanwhile
            number += 1


def _yaml(config: Config) -> str:
    return recipe.dump(json.loads(json.dumps(config.to_dict(), default=repr)))


def write_completed(path: Path, record: dict[str, Any]) -> None:
    """Write the completion record; it is there whole or not at all."""
    _write(path / COMPLETED, json.dumps(record, indent=1, default=str) + "\n")


def _write(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename."""
    handle, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temp, 0o644)
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise
