"""What a supervised program is: where it keeps its files, its words for an attempt, and how its success is known.

Owns the difference between our ``train``, whose options a supervisor can write, and any other program, which is told
its folder and brings its own way to go on. Reads files, starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster.launchers.spec import Host
from hvdtrain.cluster.liveness import causes
from hvdtrain.commands.launch.recut import options, recut
from hvdtrain.commands.launch.supervisor import refit
from hvdtrain.config import Config, cut_over_ranks, micro_batches, schema
from hvdtrain.core.errors import UserError

_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)

Stamp = tuple[int, int]


@dataclass(frozen=True)
class Job:
    """A program under supervision.

    ``words``: what each rank runs. ``out``: the run's folder. ``config``: of ``train``, else None. ``first``: the
    hosts that the user's per-rank lists are for.
    """

    words: tuple[str, ...]
    out: Path
    config: Config | None = None
    first: tuple[Host, ...] = ()
    resume: str = field(default="")

    def attempt(self, number: int, hosts: tuple[Host, ...], micro_batch: int) -> tuple[str, ...]:
        """The words for one attempt: the folder, where to go on, lists cut for its ranks, a smaller micro-batch."""
        if self.config is None:
            return self.words
        more = ["--out", str(self.out)]
        if number > 1:
            more += ["--resume", self.resume if self.resume and self.checkpoint() < 0 else "auto"]
        if micro_batch:
            more += ["--micro_batch", str(micro_batch)]
        return (*self.words, *more, *self._refitted(hosts))

    def _refitted(self, hosts: tuple[Host, ...]) -> list[str]:
        """The options that fit the cut of the model and the user's lists to other ranks; none where they are the same.
        """
        if not self.first or not hosts or hosts == self.first:
            return []
        ranks = sum(host.slots for host in self.first)
        assert self.config is not None
        lists = schema.per_rank(self.config)
        more: list[str] = []
        if cut_over_ranks(self.config):
            more += options(self.config, recut(self.config, self.first, hosts))
            del lists["shares"]  # of copies of the model, not of ranks
        for name, values in lists.items():
            # Settings by host or by kind of device need no fitting: they are mappings.
            if isinstance(values, (list, tuple)) and len(values) == ranks:
                fitted = refit([repr(value) for value in values], self.first, hosts)
                if name in ("shares", "data_parallel.shards") and not any(float(value) for value in fitted):
                    fitted = ["1"] * len(fitted)  # only ranks without a part are left: equal parts
                more += [f"--{name}", f"[{', '.join(fitted)}]"]
            elif isinstance(values, str) and ":" in values and len(words := values.split(":")) == ranks:  # precision
                more += [f"--{name}", ":".join(refit(words, self.first, hosts))]
        return more

    def cut_anew(self, hosts: tuple[Host, ...]) -> str:
        """How the model is cut over the ranks of ``hosts``, in words; "" where that is as the user has it."""
        if self.config is None or not self.first or not hosts or not cut_over_ranks(self.config):
            return ""
        return recut(self.config, self.first, hosts).why

    def checkpoint(self) -> int:
        """The step of the newest checkpoint in the folder; -1 without one."""
        try:
            names = [path.name for path in RunDirectory(self.out).checkpoints.iterdir()]
        except OSError:
            return -1
        return max((int(found[1]) for name in names if (found := _STEP.fullmatch(name))), default=-1)

    def micro_batch(self, ranks: int, smaller: int) -> int:
        """The largest micro-batch that a rank may compute; 0 where that is not known."""
        if self.config is None:
            return 0
        stages = max([self.config.pipeline.stages, *self.config.pipeline.depths])
        alike = not self.config.shares and self.config.balance == "off" and not self.config.pipeline.depths
        part = -(-self.config.global_batch // max(1, ranks // stages)) if alike else self.config.global_batch
        part = -(-part // micro_batches(self.config, stages))
        sizes = [size for size in (smaller, self.config.micro_batch_limit, part) if size]
        return min(sizes, default=0)

    def stamp(self) -> Stamp:
        """What tells one completed.json from another; (0, 0) without one."""
        try:
            found = (self.out / RunDirectory.COMPLETED).stat()
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_ino)

    def succeeded(self, before: Stamp, status: int, ranks: int, left: Sequence[dict[str, Any]]) -> bool:
        """Whether an attempt has ended well. ``before``: the stamp when it began; ``left``: its ranks' causes.

        By completed.json, new or, of ``train``, found complete by rank 0. A program that is not ours and writes none
        has ended well where every rank left "done", as Python's end does by itself, and the launcher saw nothing else.
        """
        now = self.stamp()
        done = {row["rank"] for row in left if row["kind"] == "done"}
        if now != (0, 0) and (now != before or self.config is not None and 0 in done):
            return True
        return self.config is None and status == 0 and bool(done) and len(done) >= max(1, ranks)


def job_of(words: Sequence[str], program: tuple[str, ...], out: str, hosts: tuple[Host, ...]) -> Job | None:
    """The job that stands after ``--``; None where nothing is to be run (``train --help``).

    ``program``: the words as ranks run them; ``out``: launch's own --out. `UserError` for a configuration that a rank
    would refuse, and for a program without a folder.
    """
    if words[0] != "train" and not words[0].startswith("-"):
        if not out:
            raise UserError(f"launch --restarts does not know where {words[0]} keeps its files",
                            "--out FOLDER before the --",
                            "name the folder in which its Trainer writes, or an empty one")
        return Job(program, Path(out).absolute())
    if out:
        raise UserError("launch was given --out for train, which has one itself", "--out behind the --",
                        "write: launch ... -- train --out FOLDER")
    from hvdtrain.commands.train import parse

    config = parse(list(words[1:] if words[0] == "train" else words))
    if config is None:
        return None
    return Job(program, folder_of(config).absolute(), config, hosts, config.resume)


def folder_of(config: Config) -> Path:
    """The folder of a run, made: the config's, the newest of its model with ``resume auto``, or a new one."""
    from hvdtrain import backends
    from hvdtrain.checkpoint import run_directory as outdir

    name = backends.built_in_model() if config.model == "auto" else config.model
    return outdir.choose(config, name)[0]


def prepare_attempt(job: Job, number: int) -> Path:
    """Make an attempt's folder, ``OUT/attempts/NNN``; `UserError` where that is impossible."""
    where = job.out / "attempts" / f"{number:03d}"
    try:
        where.mkdir(parents=True, exist_ok=True)
        for left in (*where.glob("cause-*.json"), *where.glob("marks-*.jsonl"), where / "step", where / causes.REQUEUE):
            left.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the attempt's folder cannot be made: {error}", "a writable place",
                        "choose another --out") from None
    return where


def next_number(out: Path) -> int:
    """The number of the next attempt in a folder, after those of all supervisors before."""
    try:
        taken = [int(path.name) for path in (out / "attempts").iterdir() if path.name.isdigit()]
    except OSError:
        taken = []
    return max(taken, default=0) + 1
