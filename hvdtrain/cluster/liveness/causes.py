"""Causes: why each rank of an attempt ended, written by the rank for the supervisor outside of MPI.

Owns the files in the attempt's folder (HVDLAUNCH_DIR): ``cause-RRRR.json``, ``marks-RRRR.jsonl`` (moments of a start)
and rank 0's ``step``. Imports no framework; nothing here raises, since it is called where a process already fails.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cluster.allocation import scheduler_ends_at
from hvdtrain.core.launcher import launch_facts

DIRECTORY, ATTEMPT, JOB = "HVDLAUNCH_DIR", "HVDLAUNCH_ATTEMPT", "HVDLAUNCH_JOB"
"""Set by the supervisor: the attempt's folder, its number, a random token of the supervisor's run."""

ENDS_AT = "HVDLAUNCH_ENDS_AT"
"""Unix seconds at which a known wall limit ends the whole run; set only where there is one."""

STARTED_AT = "HVDLAUNCH_STARTED_AT"
"""Unix seconds at which the supervisor began: from then on the hosts cost money."""

PRICES = "prices.jsonl"
"""Beside the attempts' folders: what the hosts of each attempt cost, a line for each."""

KINDS = ("user", "exception", "oom", "non_finite", "disk", "lost", "hang", "unreachable", "interrupted", "requeue",
         "done", "echo")
"""Kinds of causes; "echo": this rank only saw that another one went away."""

REQUEUE = "requeue"
"""A file of this name in the attempt's folder asks the ranks to save and to end with status 75."""

MOST_TEXT = 4000
"""Characters of a cause's text that are kept."""

_OOM_NAMES = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}
_OOM_WORDS = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|alloc(?:ate|ation).{0,20}failed",
                        re.IGNORECASE)

_step = -1
_descriptor = -1
_left: set[int] = set()
_marked: set[str] = set()


def folder() -> Path | None:
    text = os.environ.get(DIRECTORY, "")
    return Path(text) if text else None


def kind_of(error: BaseException) -> str:
    """Return the kind of cause that an exception is, by its names and text: no framework is imported for it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "UserError" in names:
        return str(getattr(error, "kind", "user"))
    if names & _OOM_NAMES or "RuntimeError" in names and _OOM_WORDS.search(str(error)):
        return "oom"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if "WaitTimeout" in names:
        return "hang"
    return "exception"


def leave(kind: str, text: str, *, rank: int | None = None, step: int | None = None, host: str = "") -> bool:
    """Write why a rank ends, whole or not at all; return whether it was written. The first cause of a rank stays.

    ``rank``: this process' own where None. ``step``: steps finished; that of the last `progress` where None.
    """
    try:
        where = folder()
        if where is None:
            return False
        who = launch_facts(os.environ).rank if rank is None else rank
        if who in _left:
            return False
        record = {"kind": kind, "text": text[-MOST_TEXT:], "rank": who, "host": host or socket.gethostname(),
                  "step": _step if step is None else step, "time": time.time()}
        _left.add(who)
        where.mkdir(parents=True, exist_ok=True)  # on a host without a shared file system
        return _once(where / f"cause-{who:04d}.json", json.dumps(record) + "\n")
    except Exception:  # a rank that ends must not stumble over its last words
        return False


def withdraw() -> None:
    """Remove this rank's cause: the process continues, and another cause may come."""
    with contextlib.suppress(Exception):
        where, who = folder(), launch_facts(os.environ).rank
        _left.discard(who)
        if where is not None:
            (where / f"cause-{who:04d}.json").unlink(missing_ok=True)


def leave_error(error: BaseException, *, echo: bool = False) -> bool:
    """Write an exception as this rank's cause; ``echo``: it only says that another rank went away."""
    try:
        kind = kind_of(error)
        words = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
        return leave("echo" if echo and kind == "exception" else kind, words)
    except Exception:
        return False


def leave_done_at_exit() -> None:
    """Have this rank leave "done" when Python ends without another cause; for scripts that nothing of ours wraps."""
    if folder() is not None:
        atexit.register(_done, os.getpid())


def _done(pid: int) -> None:
    if pid == os.getpid():  # a forked child's end is not the rank's
        leave("done", "")


def mark(name: str, step: int = -1) -> None:
    """Note once that this rank has begun "start", "imported", "loaded", "fit" or "step"; ``step``: finished by then."""
    with contextlib.suppress(Exception):
        where = folder()
        if where is None or name in _marked:
            return
        _marked.add(name)
        rank = launch_facts(os.environ).rank
        row = {"name": name, "rank": rank, "time": started_at() if name == "start" else time.time(),
               "pid": os.getpid(), "host": socket.gethostname(), "step": step}
        with (where / f"marks-{rank:04d}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def progress(step: int, root: bool) -> None:
    """Note that ``step`` steps are finished; ``root`` writes it down, where it survives the process."""
    global _step, _descriptor
    _step = step
    with contextlib.suppress(Exception):
        where = folder() if root else None
        if where is None:
            return
        if _descriptor < 0:
            _descriptor = os.open(where / "step", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.pwrite(_descriptor, f"{step:<20d} {time.time():<20.6f}\n".encode(), 0)


def requeue_asked() -> bool:
    """Return whether the supervisor asks this run to save and to end with status 75."""
    try:
        where = folder()
        return where is not None and (where / REQUEUE).exists()
    except Exception:
        return False


def ends_at(limit_s: float) -> float:
    """Return when the wall limit ends the run, unix seconds, 0 without one.

    The supervisor's limit counts; without a supervisor the earlier of ``limit_s`` and the batch scheduler's, for which
    only rank 0 asks.
    """
    with contextlib.suppress(ValueError):
        return float(os.environ.get(ENDS_AT, ""))
    own = started_at() + limit_s if limit_s else 0.0
    scheduler = scheduler_ends_at() if launch_facts(os.environ).rank == 0 else 0.0
    return min(own or scheduler, scheduler or own)


def spent(per_s: float) -> float:
    """Note that this attempt costs ``per_s`` a second; return what the supervised run, or this job, has cost by now.

    Between two attempts the hosts cost what they did in the earlier one. Rank 0's part, once.
    """
    now, begun = time.time(), started_at()
    with contextlib.suppress(OSError, ValueError):
        where = folder()
        if where is not None:
            begun = float(os.environ.get(STARTED_AT, begun))
            job = os.environ.get(JOB, "")
            own = {"job": job, "time": now, "per_s": per_s}
            with (where.parent / PRICES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(own) + "\n")
            return cost(_prices(where.parent, job), begun, now)
    return per_s * (now - begun)


def spent_at(attempts: Path, job: str, budget: float, begun: float) -> float:
    """Return when the run of supervisor ``job``, begun then, has spent ``budget``; 0 where no attempt noted a price."""
    rows = _prices(attempts, job)
    if not rows or not rows[-1][1]:
        return 0.0
    last, per_s = rows[-1]
    return last + (budget - cost(rows, begun, last)) / per_s


def cost(rows: Sequence[tuple[float, float]], begun: float, now: float) -> float:
    """Return the cost from ``begun`` to ``now``; ``rows``: (unix seconds, price a second), the first from ``begun``."""
    starts = [begun, *(start for start, _ in rows[1:]), now]
    return sum(max(0.0, end - start) * per_s for (_, per_s), start, end in zip(rows, starts, starts[1:]))


def _prices(attempts: Path, job: str) -> list[tuple[float, float]]:
    return [(row["time"], row["per_s"]) for row in _rows(attempts / PRICES) if row.get("job") == job
            and all(isinstance(row.get(key), (int, float)) for key in ("time", "per_s"))]


def started_at() -> float:
    """Return when this process began, in unix seconds, as the system reports it; now where it does not."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except Exception:  # a system without /proc
        return time.time()


def _once(path: Path, text: str) -> bool:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temp.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if path.exists():
                return False
            os.replace(temp, path)
        return True
    finally:
        with contextlib.suppress(OSError):
            temp.unlink()


def read(where: Path) -> list[dict[str, Any]]:
    """Return the causes that lie in an attempt's folder, by rank; what cannot be read is left out."""
    return [row for path in sorted(where.glob("cause-*.json")) for row in _rows(path) if is_cause(row)]


def read_marks(where: Path) -> list[dict[str, Any]]:
    """Return the marks that lie in an attempt's folder, in the order of their time."""
    rows = [row for path in sorted(where.glob("marks-*.jsonl")) for row in _rows(path)
            if isinstance(row.get("time"), (int, float)) and isinstance(row.get("name"), str)]
    return sorted(rows, key=lambda row: row["time"])


def read_progress(where: Path) -> tuple[int, float]:
    """Return (steps finished in the run, when the last of them was); (-1, 0.0) where none was."""
    try:
        step, when = (where / "step").read_text(encoding="utf-8").split()[:2]
        return int(step), float(when)
    except (OSError, ValueError):
        return -1, 0.0


def is_cause(row: dict[str, Any]) -> bool:
    """Return whether a record is a cause as `leave` writes it."""
    return (row.get("kind") in KINDS and isinstance(row.get("text"), str) and isinstance(row.get("rank"), int)
            and isinstance(row.get("host"), str) and isinstance(row.get("step"), int)
            and isinstance(row.get("time"), (int, float)))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one a line; a torn last line is left out."""
    found = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                found.append(row)
    return found


PARTS = ("notice", "kill", "start", "import", "load", "first step")
"""From the last finished step to the launcher's end; to the end of what it left; to the new process; to its imports'
end; to the restored run; to its first finished step."""

STARTS = (("start", "start"), ("import", "imported"), ("load", "loaded"), ("first step", "step"))


def start_parts(launched: float, marks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase of a start, as far as it came. ``launched``: unix seconds of the launcher's
    start.

    Of each name rank 0's first mark counts, or the first one where rank 0 has left none.
    """
    parts: dict[str, float] = {}
    before = launched
    for part, name in STARTS:
        found = [row for row in marks if row["name"] == name]
        own = [row for row in found if row.get("rank") == 0] or found
        if not own:
            break
        at = float(own[0]["time"])
        parts[part] = round(max(0.0, at - before), 3)
        before = max(before, at)
    return parts


def in_words(parts: Mapping[str, float]) -> str:
    """Return the phases of a recovery in one line, with their sum."""
    known = {name: parts[name] for name in PARTS if name in parts}
    return f"{sum(known.values()):.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in known.items())
