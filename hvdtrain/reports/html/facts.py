"""Everything a page needs to know of a run, from the files in its directory alone.

Owns which file says what, and whether a run is still under way. It works after any crash: no file has to be there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.manifest import MANIFEST_NAME
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.records import flat
from hvdtrain.reports import jsonl as history
from hvdtrain.reports.html.log import Log, RunAttempt, TimeBreakdown, add_up, find, read
from hvdtrain.reports.html.words import cut, number, whole

FRESH_S = 60.0
"""A run on another machine, which cannot be asked, counts as under way if its log is not older than this."""


@dataclass
class RunFacts:
    """A run as its files tell it. ``alive``: whether it is under way. ``looked_s``: when the files were read."""

    path: Path
    log: Log
    attempts: list[RunAttempt]
    config: dict[str, Any]
    completed: dict[str, Any] | None
    checkpoints: list[tuple[int, float, int]]
    alive: bool
    looked_s: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def start(self) -> dict[str, Any]:
        """Values of the latest "start" record."""
        return self.log.last("start")

    @cached_property
    def ranks(self) -> int:
        """Ranks of the latest attempt that began; 0: not known."""
        found = whole(self.start.get("world_size"), 0)
        return found or next((one.ranks for one in reversed(self.attempts) if one.ranks), 0)

    @cached_property
    def begin_s(self) -> float:
        """Return the begin of the first attempt, unix seconds; NaN without one."""
        return min((one.begin_s for one in self.attempts), default=math.nan)

    @cached_property
    def end_s(self) -> float:
        """Return the end of the run, or its last sign of life."""
        if self.alive:
            return self.looked_s
        return max((one.end_s for one in self.attempts), default=math.nan)

    @cached_property
    def busy_s(self) -> float:
        """Seconds that all attempts have lasted."""
        return math.fsum(one.end_s - one.begin_s for one in self.attempts if one.end_s >= one.begin_s)

    @cached_property
    def between_s(self) -> float:
        """Seconds between attempts, in a queue or until somebody started the run again."""
        return math.fsum(max(0.0, b.begin_s - a.end_s) for a, b in zip(self.attempts, self.attempts[1:]))

    @cached_property
    def ran_s(self) -> float:
        """Seconds from the begin to the end, without those between attempts."""
        return self.end_s - self.begin_s - self.between_s

    @cached_property
    def rank_s(self) -> float:
        """Seconds of all ranks together, while attempts lasted."""
        return math.fsum((one.end_s - one.begin_s) * (one.ranks or 1) for one in self.attempts)

    @cached_property
    def step(self) -> int:
        """Steps that stand: where the run has come to."""
        found = next((one.step_end for one in reversed(self.attempts) if one.step_end >= 0), -1)
        logged = self.log.steps["step"]  # of a log whose begin is gone there are no attempts
        return found if self.attempts else max(whole((self.completed or {}).get("steps")), *map(int, logged[-1:]), -1)

    @cached_property
    def steps(self) -> int:
        """Steps of the whole run; 0: not known."""
        return whole(self.start.get("steps"), 0) or whole(self.config.get("max_steps"), 0)

    @cached_property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, len(self.attempts) - 1)

    @cached_property
    def lost_steps(self) -> int:
        """Steps that were computed again."""
        return sum(one.lost for one in self.attempts)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Of the latest evaluation."""
        found: Any = next((e.values.get("metrics") for e in reversed(self.log.events)
                           if e.name in ("eval", "end") and e.values.get("metrics")), {})
        return {str(k): number(v) for k, v in found.items()} if isinstance(found, dict) else {}

    @cached_property
    def loss(self) -> float:
        """The latest training loss; NaN: none is recorded."""
        losses = self.log.steps["loss"]
        return float(losses[-1]) if len(losses) else math.nan

    @cached_property
    def spent(self) -> TimeBreakdown:
        return add_up(self.log)

    @cached_property
    def hosts(self) -> list[str]:
        """Host by rank, as far as the log tells it; "" where it does not."""
        return by_rank(self.log.last("environment").get("hosts"), str(self.start.get("hosts") or ""), self.ranks)

    @cached_property
    def copies(self) -> list[list[int]]:
        """The ranks of each replica, by stage; [] where no model is partitioned over ranks, or nobody tells."""
        found = self.start.get("pipeline")
        rows = found.get("copies") if isinstance(found, dict) else None
        copies = [[r for r in row if isinstance(r, int)] for row in rows or () if isinstance(row, list)]
        return copies if sorted(r for row in copies for r in row) == list(range(self.ranks)) else []

    def stage(self, rank: int) -> str:
        """Say which stage of the model a rank has, and of which copy where there are several; "" of a whole model."""
        for copy, ranks in enumerate(self.copies):
            if rank in ranks and len(ranks) > 1:
                of = f" of replica {copy}" if len(self.copies) > 1 else ""
                return f"stage {ranks.index(rank)}{of}"
        return ""

    def who(self, rank: int) -> str:
        """Say a rank with its host."""
        host = self.hosts[rank] if 0 <= rank < len(self.hosts) else ""
        return f"rank {rank} on {host}" if host else f"rank {rank}"


def gather(path: Path) -> RunFacts:
    """Read the run in ``path``. `UserError` where there is none; OSError where files cannot be read."""
    if not path.is_dir():
        raise UserError(f"there is no directory {path}", "the directory of a run", "correct RUN")
    run = RunDirectory(path.resolve())
    names = (run.LOG, run.CONFIG, run.COMPLETED, history.HISTORY)
    if not any((path / name).exists() for name in names):
        raise UserError(f"{path} holds no run", f"a directory with one of {', '.join(names)}", "correct RUN")
    log, completed = read(run.path / run.LOG), run.completed
    started = log.last("start").get("config")  # of the latest attempt
    return RunFacts(run.path, log, find(log, history.read_attempts(run.path)),
                    started if isinstance(started, dict) else run.config,
                 completed, _checkpoints(run), completed is None and _alive(run.path, log))


def by_rank(hosts: Any, words: str, ranks: int) -> list[str]:
    """Return the host of each rank, from an "environment" record's hosts or from the words of a "start" record."""
    found = [""] * ranks
    if isinstance(hosts, dict):
        hosts = [{"node": name, **row} for name, row in hosts.items() if isinstance(row, dict)]
    for row in hosts if isinstance(hosts, list) else ():
        own = row.get("ranks") if isinstance(row, dict) else None
        for rank in own if isinstance(own, list) else ():
            if isinstance(rank, int) and 0 <= rank < ranks:
                found[rank] = str(row.get("node") or "")
    if not any(found):
        _from_words(words, found)
    return found


def _from_words(words: str, found: list[str]) -> None:
    """Fill in hosts from "2 hosts: a (ranks 0-3, 8 cores), b (rank 4, 4 cores)"."""
    import re

    for node, spans in re.findall(r"(\S+) \(ranks? ([\d, -]+?), \d+ cores?\)", words):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", spans):
            for rank in range(int(first), min(int(last or first) + 1, len(found))):
                found[rank] = node


def _checkpoints(run: RunDirectory) -> list[tuple[int, float, int]]:
    """(step, unix seconds, bytes) of what lies in checkpoints/ now, by names and sizes only."""
    found: list[tuple[int, float, int]] = []
    with contextlib.suppress(OSError):
        for one in run.checkpoints.iterdir():
            step = one.name.removeprefix("step-")
            manifest = one / MANIFEST_NAME
            if not step.isdigit() or step == one.name:
                continue
            with contextlib.suppress(OSError):
                found.append((int(step), manifest.stat().st_mtime, sum(file.stat().st_size for file in one.iterdir())))
    return sorted(found)


def _alive(path: Path, log: Log) -> bool:
    """Return whether the run is under way: its rank 0, if on this host, holds the run's directory open for its lock.

    Elsewhere a log that was written a moment ago counts. Never by taking the lock: a job that starts would be refused.
    """
    now = log.events[-1].order if log.events else 0
    if not log.events or any(e.name in ("end", "failed") and e.order == now for e in log.events):
        return False
    pid = whole(log.last("start").get("pid"))
    if pid > 0 and _here(log.last("environment")):
        return _holds(pid, path)
    times = [log.events[-1].time_s, *log.steps["time"][-1:]]
    return time.time() - max(times) < FRESH_S


def _here(environment: Mapping[str, Any]) -> bool:
    import platform

    first = by_rank(environment.get("hosts"), "", 1)[0]
    return first in ("", platform.node(), platform.node().split(".")[0])


def _holds(pid: int, path: Path) -> bool:
    try:
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for handle in handles:
        with contextlib.suppress(OSError):
            if os.readlink(handle) == str(path):
                return True
    return False


def environment(facts: RunFacts) -> Mapping[str, Any]:
    """Return the latest "environment" record, {} where there is none."""
    return facts.log.last("environment")


def differing(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value, default) of a configuration where it differs from the defaults; keys are dotted."""
    plain = json.loads(json.dumps(Config().to_dict(), default=repr))
    own, defaults = flat(config), flat(plain)
    return {key: (value, defaults.get(key, "(no such key)")) for key, value in own.items()
            if key not in defaults or defaults[key] != value}


def words_of(value: Any) -> str:
    """Return a value of a configuration as it is written in YAML's short form."""
    return cut(json.dumps(value, default=str, ensure_ascii=False) if not isinstance(value, str) else value or '""', 200)
