"""Starts a job, waits for its end, and starts it again where `hvdtrain.commands.launch.supervisor` says so.

Owns the effects: the launcher in a group of its own, bounded waits, signals to the supervisor, what an attempt left
behind as one record, ``history.jsonl``. Decides nothing but what the cause of an attempt was (`cause_of`, pure).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.cluster.launchers.spec import HostSlots
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.liveness.causes import in_words, start_parts
from hvdtrain.cluster.liveness.pulse import WAITING
from hvdtrain.commands.launch.group import Group
from hvdtrain.commands.launch.job import Job, next_number, prepare_attempt
from hvdtrain.commands.launch.supervisor import (
    EXIT_INTERRUPTED, EXIT_REQUEUE, Attempt, Candidate, End, Launch, next_launch, row)
from hvdtrain.reports import launch_history as history

TICK_S = 0.05
LOOK_S = 0.25
"""How often the attempt's folder is looked at."""

END_S = 20.0
"""From a rank's cause to the end of its launcher: what takes longer is ended."""

LEAVE_S = 120.0
"""From the completion record of ``train``, or from the last rank's "done", to the end of the launcher."""

TOGETHER_S = 2.0
"""Ranks that were lost within this time may have been lost by one cause."""

REQUEUE_S = 600.0
"""From the wish to save and end to the end of the launcher."""

Command = Callable[[tuple[HostSlots, ...], tuple[str, ...], Mapping[str, str]], tuple[list[str], dict[str, str]]]
"""(hosts, program, variables for the ranks) -> (the launcher's words, its whole environment)."""


@dataclass
class Around:
    """What the supervisor needs from outside: how a launch is written, which hosts there are, what to say.

    ``start_s``: longest wait for the first sign of rank 0, 0 for no bound (rank 0 writes elsewhere). ``ends_at``: unix
    seconds of a known wall limit, 0 without one. ``forwards``: the launcher hands SIGUSR2 on to its ranks. ``page``:
    begins to write the report page of the run in a folder, and does not wait.
    """

    command: Command
    candidates: Callable[[Path | None], list[Candidate]]
    placed: Callable[[tuple[HostSlots, ...]], tuple[HostSlots, ...]]
    say: Callable[[str], None]
    start_s: float = 0.0
    ends_at: float = 0.0
    forwards: bool = False
    own_names: tuple[str, ...] = ()
    page: Callable[[Path], None] = lambda out: None


@dataclass
class Watched:
    """One attempt while it runs and what is known of it."""

    number: int
    where: Path
    launch: Launch
    began: float
    stamp: tuple[int, int]
    oom_kills: int
    status: int | None = None
    ended: float = 0.0
    why: str = ""
    """What the supervisor ended it for, "" where it ended by itself."""
    parts: dict[str, float] = field(default_factory=dict)
    told: bool = False


class Signals:
    """Hold what a supervisor is asked while it works: the first signal to save and end, a further one to end now.

    A further SIGUSR2 changes nothing, and SIGHUP ends now: nobody reads the output any more. ``status``: of a run that
    was saved, 130 where SIGINT asked for it.
    """

    def __init__(self) -> None:
        self.requeue = False
        self.interrupt = False
        self.status = EXIT_REQUEUE

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Listen while the body runs; the handlers before return after it. What is ignored (nohup) stays so."""
        numbers = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._heard)
                  for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP or number != signal.SIGUSR2 and self.requeue:
            self.interrupt = True
        elif not self.requeue:
            self.requeue, self.status = True, EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


class Supervisor:
    """Runs one job to its end; ``restarts``: how many there may be."""

    def __init__(self, job: Job, restarts: int, around: Around) -> None:
        self.job, self.restarts, self.around = job, restarts, around
        self.signals = Signals()
        self.token = secrets.token_hex(16)
        self.micro_batch = 0
        self.attempts: list[Attempt] = []
        self.records: list[dict[str, Any]] = []

    def run(self) -> int:
        """Launch until `next_launch` says that it is over; return the exit status (0, 1, 2, 75, 130)."""
        begin, before = time.monotonic(), None
        decision = next_launch((), self.around.candidates(None), self.restarts)
        with self.signals.taken():
            while isinstance(decision, Launch):
                self._pause(decision.wait_s)
                asked = self._asked()
                if asked is not None:
                    self.around.say(asked.why)
                    decision = asked
                    break
                self.micro_batch = decision.micro_batch or self.micro_batch
                seen = self._attempt(decision, before)
                hosts = self.around.candidates(seen.where)  # before the verdict: it brings causes from other hosts
                self.attempts.append(self._judge(seen))
                decision = self._decide(hosts)
                self.records.append(row(self.attempts[-1], seen.began, seen.ended - seen.began, seen.parts,
                                        decision.why))
                trouble = history.append(self.job.out, self.records[-1])
                self.around.page(self.job.out)
                for text in filter(None, (trouble, decision.why)):
                    self.around.say(text)
                before = seen
        if len(self.records) > 1:
            for line in history.table(self.records):
                self.around.say(line)
        self.around.say(f"{history.sentence(self.records, time.monotonic() - begin)}; files in {self.job.out}")
        return self.signals.status if decision.status == EXIT_REQUEUE else decision.status

    def _decide(self, hosts: Sequence[Candidate]) -> Launch | End:
        last, ends_at = self.attempts[-1], self.around.ends_at
        asked = self._asked()
        if asked is not None and last.kind not in ("done", "user", "requeue"):
            return asked
        decision = next_launch(self.attempts, hosts, self.restarts)
        if isinstance(decision, Launch) and ends_at and time.time() + decision.wait_s >= ends_at:
            return End(EXIT_REQUEUE, f"{last.kind}, and the time limit is reached: to go on in another job")
        return decision

    def _asked(self) -> End | None:
        """The end that a signal asks for, where no attempt is there to be saved; None without one."""
        if self.signals.interrupt:
            return End(EXIT_INTERRUPTED, "interrupted")
        if not self.signals.requeue:
            return None
        what = f"; the attempt ended before it was saved ({self.attempts[-1].kind})" if self.attempts else ""
        return End(EXIT_REQUEUE, f"asked to end{what}: to go on in another job from the newest checkpoint")

    def _pause(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and not (self.signals.requeue or self.signals.interrupt):
            time.sleep(TICK_S)

    def _attempt(self, launch: Launch, before: Watched | None) -> Watched:
        """Launch, wait for the end, end what is left."""
        job, number = self.job, next_number(self.job.out)
        launch = replace(launch, hosts=self.around.placed(launch.hosts))
        where = prepare_attempt(job, number)
        if before is not None and (anew := job.cut_anew(launch.hosts)):
            self.around.say(anew)
        told = {causes.DIRECTORY: str(where), causes.ATTEMPT: str(number), causes.JOB: self.token}
        if self.around.ends_at:
            told[causes.ENDS_AT] = f"{self.around.ends_at:.0f}"
        program = job.attempt(len(self.attempts) + 1, launch.hosts, self.micro_batch)
        words, env = self.around.command(launch.hosts, program, told)
        seen = Watched(number, where, launch, time.time(), job.stamp(), oom_kills())
        group = Group(words, env, self.token)
        try:
            self._watch(seen, group, before)
        finally:
            ended = time.time()
            seen.ended = seen.ended or ended
            seen.status = group.status()
            seen.parts["kill"] = round(ended - seen.ended + group.end(), 3)
        return seen

    def _watch(self, seen: Watched, group: Group, before: Watched | None) -> None:
        """Wait until the launcher ends or must be ended. Every wait here has a bound but that for training itself."""
        look_at, asked_at, final_at, begin = 0.0, 0.0, 0.0, time.monotonic()
        while group.status() is None:
            time.sleep(TICK_S)
            now = time.monotonic()
            if self.signals.interrupt:
                seen.why = "interrupted"
                return
            if self.signals.requeue and not asked_at:
                asked_at = now
                self._ask(seen, group)
            if now < look_at:
                continue
            look_at = now + LOOK_S
            self._report(seen, before)
            bound_s, why = self._bound(seen)
            final_at = final_at or (now if bound_s else 0.0)
            if asked_at and now - asked_at > REQUEUE_S:
                seen.why = f"it had not saved and ended {REQUEUE_S:g} s after it was asked to"
            elif bound_s and now - final_at > bound_s:
                seen.why = f"its launcher had not ended {bound_s:g} s after {why}"
            elif self.around.start_s and now - begin > self.around.start_s and not _begun(seen.where):
                seen.why = f"no rank had begun {self.around.start_s:g} s after the launch"
            if seen.why:
                return
        seen.ended = time.time()
        self._report(seen, before)

    def _bound(self, seen: Watched) -> tuple[float, str]:
        """How long the launcher may go on after what the ranks have left, and what that is; (0, "") for no bound."""
        left = causes.read(seen.where)
        bad = [row for row in left if row["kind"] not in ("done", "requeue")]
        if bad:
            return END_S, f"a rank's last words ({bad[0]['kind']})"
        ranks = sum(host.slots for host in seen.launch.hosts)
        # A program of the user's may have more to do after its fit.
        complete = self.job.config is not None and self.job.stamp() not in ((0, 0), seen.stamp)
        if ranks and len(left) >= ranks or complete:
            return LEAVE_S, "the end of the run"
        return 0.0, ""

    def _ask(self, seen: Watched, group: Group) -> None:
        """Have the ranks save and end with status 75: by a file, and by SIGUSR2 to those that listen.

        A rank that does not listen yet, or no longer, or runs a program of the user's without a handler, would die of
        the signal.
        """
        with contextlib.suppress(OSError):
            (seen.where / causes.REQUEUE).touch()
        listening = [row for row in causes.read_marks(seen.where) if row["name"] == "fit"]
        told = [group.tell_rank(row["pid"], signal.SIGUSR2) for row in listening
                if isinstance(row.get("pid"), int) and row.get("host") == socket.gethostname()]
        interrupted = self.signals.status == EXIT_INTERRUPTED
        if interrupted and not any(told) and all(row.get("host") == socket.gethostname() for row in listening):
            self.signals.interrupt = True  # no rank is in a fit: there is nothing to save
            return
        again = "; another Ctrl-C ends them at once" if interrupted else ""
        self.around.say(f"asked to end: the ranks save, and end with status 75{again}")
        if not any(told) and self.around.forwards and not listening and self.job.config is None:
            group.tell(signal.SIGUSR2)

    def _report(self, seen: Watched, before: Watched | None) -> None:
        """Once the first step after a restart is finished: print how long the recovery took, by part."""
        if before is None or seen.told:
            return
        parts = start_parts(seen.began, causes.read_marks(seen.where))
        if "first step" in parts:
            seen.told = True
            gone: dict[str, float] = {name: s for name, s in before.parts.items() if name in ("notice", "kill")}
            self.around.say(f"recovered in {in_words({**gone, **parts})}")

    def _judge(self, seen: Watched) -> Attempt:
        """What an attempt that has ended was."""
        job, hosts = self.job, seen.launch.hosts
        ranks = sum(host.slots for host in hosts)
        left, marks = causes.read(seen.where), causes.read_marks(seen.where)
        end, last_sign = causes.read_progress(seen.where)
        begin = next((row["step"] for row in marks if row["name"] == "fit" and isinstance(row.get("step"), int)), -1)
        succeeded = job.succeeded(seen.stamp, -1 if seen.status is None else seen.status, ranks, left)
        succeeded = succeeded and not self._cut_short(seen, left, ranks) or self._knows_nothing_of_us(seen)
        kind, text, rank, host = cause_of(left, succeeded, seen.status, seen.why, oom_kills() - seen.oom_kills)
        # Of the host that this process lives on it is known that it is there.
        silent = [name for name in silent_hosts(hosts, left) if name not in self.around.own_names]
        if kind == "lost" and WAITING in text and len(silent) == 1:  # a host is gone whole, and others waited
            rank, host, text = -1, silent[0], f"no rank there told why it ended; {text}"
        if not succeeded and last_sign:
            seen.parts["notice"] = round(max(0.0, seen.ended - last_sign), 3)
        seen.parts.update(start_parts(seen.began, marks))
        end = max([end, *(row["step"] for row in left)])
        micro = job.micro_batch(ranks, self.micro_batch)
        return Attempt(seen.number, kind, text, rank, self._named(host, rank, hosts), hosts, begin, end,
                       job.checkpoint(), micro, seen.launch.left_out)

    def _cut_short(self, seen: Watched, left: Sequence[Mapping[str, Any]], ranks: int) -> bool:
        """Whether a program of the user's was ended while it worked on after its fit."""
        return self.job.config is None and bool(seen.why) and sum(row["kind"] == "done" for row in left) < max(1, ranks)

    def _knows_nothing_of_us(self, seen: Watched) -> bool:
        """Whether a program without hvdtrain, of which no rank ever speaks, has ended well: on this host alone.

        Where a host was lost, a launcher's 0 means nothing.
        """
        near = {host.name for host in seen.launch.hosts} <= set(self.around.own_names)
        return self.job.config is None and seen.status == 0 and not seen.why and near and not _begun(seen.where)

    def _named(self, host: str, rank: int, hosts: tuple[HostSlots, ...]) -> str:
        """The name that a host has in the launch, from what it calls itself, or from the rank's place there."""
        alike = [one.name for one in hosts if one.name.partition(".")[0] == host.partition(".")[0]
                 or {one.name, host} <= set(self.around.own_names)] if host else []
        if len(alike) == 1:
            return alike[0]
        for one in hosts if rank >= 0 else ():
            if rank < one.slots:
                return one.name
            rank -= one.slots
        return hosts[0].name if len(hosts) == 1 else ""


def cause_of(left: Sequence[Mapping[str, Any]], succeeded: bool, status: int | None, ended_for: str,
             oom_kills: int) -> tuple[str, str, int, str]:
    """(kind, words, rank, host) of an attempt's end, from what its ranks left. Pure.

    The first cause counts: what comes after it is mostly its echo. ``ended_for``: what the supervisor ended it for;
    ``oom_kills``: processes that the system killed for memory on this host meanwhile.
    """
    if succeeded:
        return "done", "", -1, ""
    told = sorted((row for row in left if row["kind"] not in ("done", "echo")), key=lambda row: row["time"])
    if told:
        one = _origin(told)
        kind, text = one["kind"], one["text"]
        if kind == "lost" and oom_kills > 0:
            kind, text = "oom", f"the system killed it for memory: {text}"
        return kind, text, one["rank"], one["host"]
    if ended_for == "interrupted":
        return "interrupted", "", -1, ""
    if oom_kills > 0:
        return "oom", "the system killed a process for memory", -1, ""
    if ended_for:
        return "hang", ended_for, -1, ""
    return "lost", f"no rank told why it ended; the launcher's status was {status}", -1, ""


def silent_hosts(hosts: Sequence[HostSlots], left: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the hosts of whose ranks none has left a cause. Pure."""
    told, first, silent = {row["rank"] for row in left}, 0, []
    for host in hosts:
        if not told & set(range(first, first + host.slots)):
            silent.append(host.name)
        first += host.slots
    return silent


def _origin(told: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The cause that brought the others about: the first; but of ranks that were lost together, one that did not wait.

    A launcher kills the others as soon as it misses one, so that watchers see all of them go, in any order; who waited
    for others then, as `pulse.Seen.words` says, is not who was missing.
    """
    together = [row for row in told if row["kind"] == "lost" and row["time"] <= told[0]["time"] + TOGETHER_S]
    if told[0]["kind"] != "lost":
        return told[0]
    return next((row for row in together if WAITING not in row["text"]), told[0])


def oom_kills(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes of this one's control group the system has killed for memory; 0 where it does not tell.

    The ranks on this host are of the same group, unless somebody moves them.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds and "memory" not in kinds.split(","):
            continue
        folder, name = (root / "memory", "memory.oom_control") if kinds else (root, "memory.events")
        for place in (folder / path.lstrip("/"), folder):  # in a container the group's own path is its root
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split() for line in (place / name).read_text(encoding="utf-8").splitlines())
                return int(counts["oom_kill"]) if "oom_kill" in counts else 0
    return 0


def _begun(where: Path) -> bool:
    return any(where.glob("marks-*.jsonl")) or any(where.glob("cause-*.json"))


def say(text: str) -> None:
    """Print a line of the supervisor's, and go on where nobody reads it."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"hvdtrain launch: {text}\n".encode(errors="replace"))
