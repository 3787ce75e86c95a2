"""Job under supervision: its folder, its words for an attempt, the partition of its model, and its success.

The options of ``train`` are known; any other program gets its folder and resumes by itself. Starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.checkpoint import run_directory as outdir
from hvdtrain.checkpoint.downloads import refuse
from hvdtrain.checkpoint.remote import prepared
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster.launchers.spec import HostSlots
from hvdtrain.cluster.liveness import causes
from hvdtrain.commands.launch.restart_policy import refit
from hvdtrain.config import Config, cut_over_ranks, micro_batches, schema
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import depths_of
from hvdtrain.core.resolve import is_url

_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)

Stamp = tuple[int, int]


@dataclass(frozen=True)
class SupervisedJob:
    """``words``: of each rank. ``out``: the run's. ``config``: of ``train``. ``first``: hosts of per-rank lists."""

    words: tuple[str, ...]
    out: Path
    config: Config | None = None
    first: tuple[HostSlots, ...] = ()
    resume: str = field(default="")

    def attempt(self, number: int, hosts: tuple[HostSlots, ...], micro_batch: int) -> tuple[str, ...]:
        """Return the words of an attempt: folder, resume, lists cut for its ranks, a smaller micro-batch."""
        if self.config is None:
            return self.words
        more = ["--out", self.config.out if is_url(self.config.out) else str(self.out)]
        if number > 1:
            more += ["--resume", self.resume if self.resume and self.checkpoint() < 0 else "auto"]
        if micro_batch:
            more += ["--micro_batch", str(micro_batch)]
        return (*self.words, *more, *self._refitted(hosts))

    def _refitted(self, hosts: tuple[HostSlots, ...]) -> list[str]:
        if not self.first or not hosts or hosts == self.first:
            return []
        ranks = sum(host.slots for host in self.first)
        assert self.config is not None
        lists = schema.per_rank(self.config)
        more: list[str] = []
        if cut_over_ranks(self.config):
            more += pipeline_options(self.config, recut(self.config, self.first, hosts))
            del lists["shares"]  # of replicas, not of ranks
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

    def partition_change(self, hosts: tuple[HostSlots, ...]) -> str:
        """Return the model's partition over the ranks of ``hosts`` as text; "" where the user's is unchanged."""
        if self.config is None or not self.first or not hosts or not cut_over_ranks(self.config):
            return ""
        return recut(self.config, self.first, hosts).why

    def checkpoint(self) -> int:
        """Return the step of the newest checkpoint in the folder; -1 without one."""
        try:
            names = [path.name for path in RunDirectory(self.out).checkpoints.iterdir()]
        except OSError:
            return -1
        return max((int(found[1]) for name in names if (found := _STEP.fullmatch(name))), default=-1)

    def last_start(self, ends_at: float, token: str) -> float:
        """Return when an attempt must have begun, so that its start is over before the limit; 0 without a limit.

        ``ends_at``: of the time limit, 0 without one. A budget ends when the attempts of supervisor ``token`` have
        spent it. The start takes as long as the one of the latest attempt.
        """
        attempts, budget = self.out / "attempts", self.config.budget if self.config is not None else 0.0
        spent_at = causes.spent_at(attempts, token, budget, causes.started_at()) if budget else 0.0
        ends = [at for at in (ends_at, spent_at) if at]
        marks = causes.read_marks(max(attempts.glob("*/"), default=attempts))
        times = [row["time"] for row in marks if row["name"] in ("start", "fit")]
        return min(ends) - (max(times) - min(times) if times else 0.0) if ends else 0.0

    def micro_batch(self, ranks: int, smaller: int) -> int:
        """Return the largest micro-batch that a rank may compute; 0 where that is not known."""
        if self.config is None:
            return 0
        stages = max([self.config.pipeline.stages, *self.config.pipeline.depths])
        alike = not self.config.shares and self.config.balance == "off" and not self.config.pipeline.depths
        part = -(-self.config.global_batch // max(1, ranks // stages)) if alike else self.config.global_batch
        part = -(-part // micro_batches(self.config, stages))
        sizes = [size for size in (smaller, self.config.micro_batch_limit, part) if size]
        return min(sizes, default=0)

    def stamp(self) -> Stamp:
        """Return what distinguishes one completed.json from another; (0, 0) without one."""
        try:
            found = (self.out / RunDirectory.COMPLETED).stat()
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_ino)

    def succeeded(self, before: Stamp, status: int, ranks: int, left: Sequence[dict[str, Any]]) -> bool:
        """Return whether an attempt ended well. ``before``: the stamp when it began; ``left``: its ranks' causes.

        By completed.json, new or, of ``train``, found complete by rank 0. Another program that writes none ended well
        where every rank left "done", as Python's end does by itself, and the launcher ended with 0.
        """
        now = self.stamp()
        done = {row["rank"] for row in left if row["kind"] == "done"}
        if now != (0, 0) and (now != before or self.config is not None and 0 in done):
            return True
        return self.config is None and status == 0 and bool(done) and len(done) >= max(1, ranks)


def job_of(words: Sequence[str], program: tuple[str, ...], out: str,
           hosts: tuple[HostSlots, ...]) -> SupervisedJob | None:
    """Return the job that stands after ``--``; None where nothing is to be run (``train --help``).

    ``program``: the words as ranks run them; ``out``: launch's own --out. `UserError` for a configuration that a rank
    would refuse, and for a program without a folder.
    """
    if words[0] != "train" and not words[0].startswith("-"):
        if not out:
            raise UserError(f"launch --restarts does not know where {words[0]} keeps its files",
                            "--out FOLDER before the --",
                            "pass the folder in which its Trainer writes, or an empty one")
        refuse("launch --out", out)
        return SupervisedJob(program, Path(out).absolute())
    if out:
        raise UserError("launch has --out for train, which has its own --out", "--out behind the --",
                        "write: launch ... -- train --out FOLDER")
    from hvdtrain.commands.train import by_keys, parse

    options = list(words[1:] if words[0] == "train" else words)
    config = parse(options)
    if config is None:
        return None
    if (keys := by_keys(options)) != options:  # an attempt appends keys, which refuse their aliases
        program = (*program[:-len(options)], *keys)
    return SupervisedJob(program, folder_of(config).absolute(), config, hosts, config.resume)


def folder_of(config: Config) -> Path:
    """Make and return the folder of a run: the config's, the newest of its model with ``resume auto``, or a new one."""
    from hvdtrain import backends

    name = backends.built_in_model() if config.model == "auto" else config.model
    if is_url(config.out) and not config.resume:
        return prepared(config, spared=())  # attempts under this URL are those of an earlier run
    return outdir.choose(config, name)[0]


def prepare_attempt(job: SupervisedJob, number: int) -> Path:
    """Make an attempt's folder, ``OUT/attempts/NNN``; `UserError` where that is impossible."""
    where = job.out / "attempts" / f"{number:03d}"
    try:
        where.mkdir(parents=True, exist_ok=True)
        for left in (*where.glob("cause-*.json"), *where.glob("marks-*.jsonl"), where / "step", where / causes.REQUEUE):
            left.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the attempt's folder cannot be created: {error}", "a writable folder",
                        "choose another --out") from None
    return where


def next_number(out: Path) -> int:
    """Return the number of the next attempt in a folder, after those of all supervisors before."""
    try:
        taken = [int(path.name) for path in (out / "attempts").iterdir() if path.name.isdigit()]
    except OSError:
        taken = []
    return max(taken, default=0) + 1


class Recut(NamedTuple):
    """``depths``: ranks of replicas. ``owners``: former replicas with their settings. ``why``: text, "": unchanged."""

    depths: tuple[int, ...]
    owners: tuple[int, ...]
    why: str = ""


def recut(config: Config, before: Sequence[HostSlots], after: Sequence[HostSlots]) -> Recut:
    """Return the replicas of a model for the ranks of ``after``, where the user's configuration is for ``before``.

    A multiple of ``pipeline.stages`` keeps them. Other ranks make as many replicas as keep each as deep as may be, none
    deeper than it was: 2 ranks of 3 stages are one replica over 2, and 5 are replicas over 3 and 2. Depths of the
    user's are those of the ranks that are left of each replica. Memory is checked by the job itself. Pure.
    """
    old, new = _ranks(before), _ranks(after)
    stages, given = config.pipeline.stages, config.pipeline.depths
    if not given and new % stages == 0:
        return _taken(config, before, after, (stages,) * (new // stages), "")
    if not given:
        copies = -(-new // stages)
        depths = tuple(new // copies + (i < new % copies) for i in range(copies))
        return _taken(config, before, after, depths, f"{new} rank{'s are' * (new > 1) or ' is'} no multiple of "
                      f"pipeline.stages {stages}: the model is {_cut_in_words(depths)}")
    if sum(given) == new and before == after:
        return Recut(tuple(given), tuple(range(len(given))))
    owners = [copy for copy, depth in enumerate(given) for _ in range(depth)]
    if sum(given) != old:  # never the user's own ranks: the job refuses it in words
        return Recut(tuple(given), tuple(range(len(given))))
    left = [int(copy) for copy in refit([str(copy) for copy in owners], before, after)]
    found: list[tuple[int, int]] = []
    for copy, ranks in groupby(left):
        n = len(list(ranks))
        found += [(copy, min(given[copy], n - at)) for at in range(0, n, given[copy])]
    depths, taken = tuple(depth for _, depth in found), tuple(copy for copy, _ in found)
    why = "" if depths == tuple(given) else f"of pipeline.depths {given} the remaining ranks form {list(depths)}"
    return Recut(depths, taken, why)


def pipeline_options(config: Config, found: Recut) -> list[str]:
    """Return the options of ``train`` for these replicas, with the user's shares of them; none for the user's own."""
    words: list[str] = []
    if found.why:
        alike = len(set(found.depths)) == 1
        words += ["--pipeline.stages", str(found.depths[0] if alike else 1)]
        words += ["--pipeline.depths", "[]" if alike else str(list(found.depths))]
        words += ["--pipeline.cut", "[]"] if config.pipeline.cut else []
    shares = config.shares
    if isinstance(shares, (list, tuple)) and max(found.owners) < len(shares):
        own = [shares[copy] for copy in found.owners]
        words += ["--shares", str(own if any(own) else [1] * len(own))]
    return words


def _taken(config: Config, before: Sequence[HostSlots], after: Sequence[HostSlots], depths: tuple[int, ...],
           why: str) -> Recut:
    stages, old = config.pipeline.stages, _ranks(before)
    if old % stages:
        return Recut(depths, tuple(0 for _ in depths), why)
    copy_of = [copy for copy, depth in enumerate(depths_of(stages, [], old)) for _ in range(depth)]
    left = refit([str(copy) for copy in copy_of], before, after)
    firsts = [sum(depths[:i]) for i in range(len(depths))]
    return Recut(depths, tuple(int(left[first]) for first in firsts), why)


def _ranks(hosts: Sequence[HostSlots]) -> int:
    return sum(host.slots for host in hosts)


def _cut_in_words(depths: Sequence[int]) -> str:
    if set(depths) == {1}:
        return "unpartitioned on each"
    if len(set(depths)) == 1:
        return f"partitioned over {depths[0]}" + (f" in each of {len(depths)} replicas" if len(depths) > 1 else "")
    return f"partitioned over {', '.join(map(str, depths[:-1]))} and {depths[-1]} in {len(depths)} replicas"
