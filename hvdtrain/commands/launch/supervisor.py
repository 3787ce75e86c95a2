"""Supervisor of a job: start it, wait for its end, record the attempt, start it again by `restart_policy`."""

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

from hvdtrain.cluster.launchers.spec import HostSlots, valid_name
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.liveness.causes import in_words, start_parts
from hvdtrain.cluster.liveness.pulse import WAITING
from hvdtrain.cluster.liveness.watch.system import catches
from hvdtrain.cluster.machine.usage import oom_kills
from hvdtrain.commands.launch.job import SupervisedJob, next_number, prepare_attempt
from hvdtrain.commands.launch.restart_policy import (
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    End,
    HostCandidate,
    Launch,
    LaunchAttempt,
    cause_of,
    next_launch,
    row,
    silent_hosts,
    started_hosts,
)
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import Child, processes
from hvdtrain.reports import jsonl as history

TICK_S = 0.05
GRACE_S = 3.0
"""From SIGTERM to SIGKILL: a launcher ends its ranks, on other hosts too, in about half a second."""
ALONE_S = 1.0
"""Time for processes to end by themselves after their launcher."""
KILLED_S = 10.0
"""Longest wait for the end of killed processes (one in a system call that hangs stays)."""
LOOK_S = 0.25
"""How often the attempt's folder is looked at."""
END_S = 20.0
"""From a rank's cause to the end of its launcher: what takes longer is ended."""
LEAVE_S = 120.0
"""From the completion record of ``train``, or from the last rank's "done", to the end of the launcher."""
REQUEUE_S = 600.0
"""From the wish to save and end to the end of the launcher."""

Command = Callable[[tuple[HostSlots, ...], tuple[str, ...], Mapping[str, str]], tuple[list[str], dict[str, str]]]
"""(hosts, program, variables for the ranks) -> (the launcher's words, its whole environment)."""


@dataclass
class SupervisorEnvironment:
    """``command``: writes a launch. ``start_s``: longest wait for the first sign of rank 0, 0 for no bound.

    ``ends_at``: unix seconds of a known wall limit, 0 without one. ``forwards``: the launcher hands SIGUSR2 on to its
    ranks. ``page``: begins to write the run report in a folder, and does not wait.
    """

    command: Command
    candidates: Callable[[Path | None], list[HostCandidate]]
    placed: Callable[[tuple[HostSlots, ...]], tuple[HostSlots, ...]]
    say: Callable[[str], None]
    start_s: float = 0.0
    ends_at: float = 0.0
    forwards: bool = False
    own_names: tuple[str, ...] = ()
    page: Callable[[Path], None] = lambda out: None


@dataclass
class RunningAttempt:
    """Attempt while it runs, and what is known of it."""

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
    recovered: bool = False


class LauncherGroup(Child):
    """Launcher and all that it starts on this host; ``token``: the value of HVDLAUNCH_JOB in their environment.

    Launchers give their ranks process groups of their own, so only the token finds all. A supervisor that is killed
    takes the launcher along by SIGTERM, not SIGKILL, so that the launcher ends its ranks on all hosts.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str], token: str) -> None:
        # horovodrun passes every name to a shell; names that are none (an exported function's, or worse) stay here.
        names = {name: value for name, value in env.items() if valid_name(name)}
        try:
            super().__init__(words, names, causes.JOB, token, signal.SIGTERM)
        except OSError as error:
            raise UserError(f"{words[0]} cannot be started: {error.strerror}", "a launcher that runs",
                            "check the program; one argument of more than 128 KiB is too long") from None

    def processes(self) -> list[int]:
        """Return the ids of the processes on this host that this supervisor started."""
        return processes(self.mark, self.variable)

    def signal_rank(self, pid: int, number: int) -> bool:
        """Send a signal to a rank on this host if it has a handler; return whether the signal was sent."""
        if pid not in self.processes() or not catches(pid, number):
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
        return False

    def end_all(self, grace_s: float = GRACE_S) -> float:
        """End all processes: SIGTERM, ``grace_s``, SIGKILL; return the seconds it took.

        After the launcher's own end the rest has `ALONE_S` first: watchers then record which rank was lost.
        """
        begin = time.monotonic()
        while self.process.poll() is not None and self.processes() and time.monotonic() < begin + ALONE_S:
            time.sleep(TICK_S)
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_S)):
            if self._ended():
                break
            self._signal(number)
            ends_at = time.monotonic() + wait_s
            while not self._ended() and time.monotonic() < ends_at:
                time.sleep(TICK_S)
        return time.monotonic() - begin

    def _ended(self) -> bool:
        return self.process.poll() is not None and not self.processes()

    def _signal(self, number: int) -> None:
        # The launcher first, and alone where it can still do the work: it reaches its ranks on other hosts too.
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, number)
            if number == signal.SIGTERM:
                return
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, number)


class Signals:
    """Signals to the supervisor: the first asks to save and end, a further one to end now.

    A further SIGUSR2 changes nothing, and SIGHUP ends now: nobody reads the output any more. ``status``: of a run that
    was saved, 130 where SIGINT asked for it.
    """

    def __init__(self) -> None:
        self.requeue = False
        self.interrupt = False
        self.status = EXIT_REQUEUE

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Listen while the body runs; restore the handlers. What is ignored (nohup) stays so."""
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
    """Run of one job to its end; ``restarts``: how many there may be."""

    def __init__(self, job: SupervisedJob, restarts: int, environment: SupervisorEnvironment) -> None:
        self.job, self.restarts, self.environment = job, restarts, environment
        self.signals = Signals()
        self.token = secrets.token_hex(16)
        self.micro_batch = 0
        self.attempts: list[LaunchAttempt] = []
        self.records: list[dict[str, Any]] = []

    def run(self) -> int:
        """Launch until `next_launch` ends it; return the exit status (0, 1, 2, 75, 130)."""
        begin, before = time.monotonic(), None
        decision = next_launch((), self.environment.candidates(None), self.restarts)
        with self.signals.taken():
            while isinstance(decision, Launch):
                self._pause(decision.wait_s)
                asked = self._asked()
                if asked is not None:
                    self.environment.say(asked.why)
                    decision = asked
                    break
                self.micro_batch = decision.micro_batch or self.micro_batch
                seen = self._attempt(decision, before)
                hosts = self.environment.candidates(seen.where)  # before the verdict: it brings causes from other hosts
                self.attempts.append(self._judge(seen))
                decision = self._decide(hosts)
                self.records.append(row(self.attempts[-1], seen.began, seen.ended - seen.began, seen.parts,
                                        decision.why))
                trouble = history.append_attempt(self.job.out, self.records[-1])
                self.environment.page(self.job.out)
                for text in filter(None, (trouble, decision.why)):
                    self.environment.say(text)
                before = seen
        if len(self.records) > 1:
            for line in history.attempts_table(self.records).splitlines():  # each gets the supervisor's tag
                self.environment.say(line)
        cost = history.restarts_sentence(self.records, time.monotonic() - begin)
        self.environment.say(f"{cost}; files in {self.job.out}")
        return self.signals.status if decision.status == EXIT_REQUEUE else decision.status

    def _decide(self, hosts: Sequence[HostCandidate]) -> Launch | End:
        last, ends_at = self.attempts[-1], self.job.last_start(self.environment.ends_at, self.token)
        asked = self._asked()
        if asked is not None and last.kind not in ("done", "user", "requeue"):
            return asked
        decision = next_launch(self.attempts, hosts, self.restarts)
        if isinstance(decision, Launch) and ends_at and time.time() + decision.wait_s >= ends_at:
            return End(EXIT_REQUEUE, f"{last.kind}, and the limit is too near for another start: resume in another job")
        return decision

    def _asked(self) -> End | None:
        """Return the end that a signal asks for, where no attempt is there to be saved; None without one."""
        if self.signals.interrupt:
            return End(EXIT_INTERRUPTED, "interrupted")
        if not self.signals.requeue:
            return None
        what = f"; the attempt ended before it was saved ({self.attempts[-1].kind})" if self.attempts else ""
        return End(EXIT_REQUEUE, f"asked to end{what}: resume in another job from the newest checkpoint")

    def _pause(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and not (self.signals.requeue or self.signals.interrupt):
            time.sleep(TICK_S)

    def _attempt(self, launch: Launch, before: RunningAttempt | None) -> RunningAttempt:
        job, number = self.job, next_number(self.job.out)
        launch = replace(launch, hosts=self.environment.placed(launch.hosts))
        where = prepare_attempt(job, number)
        if before is not None and (change := job.partition_change(launch.hosts)):
            self.environment.say(change)
        variables = {causes.DIRECTORY: str(where), causes.ATTEMPT: str(number), causes.JOB: self.token,
                     causes.STARTED_AT: f"{causes.started_at():.3f}"}
        if self.environment.ends_at:
            variables[causes.ENDS_AT] = f"{self.environment.ends_at:.3f}"
        program = job.attempt(len(self.attempts) + 1, launch.hosts, self.micro_batch)
        words, env = self.environment.command(launch.hosts, program, variables)
        seen = RunningAttempt(number, where, launch, time.time(), job.stamp(), oom_kills())
        group = LauncherGroup(words, env, self.token)
        try:
            self._watch(seen, group, before)
        finally:
            ended = time.time()
            seen.ended = seen.ended or ended
            seen.status = group.process.poll()
            seen.parts["kill"] = round(ended - seen.ended + group.end_all(), 3)
        return seen

    def _watch(self, seen: RunningAttempt, group: LauncherGroup, before: RunningAttempt | None) -> None:
        """Wait until the launcher ends or must be ended. Every wait has a bound, but that for training itself."""
        look_at, asked_at, final_at, begin = 0.0, 0.0, 0.0, time.monotonic()
        while group.process.poll() is None:
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
                seen.why = f"the run had not saved and ended {REQUEUE_S:g} s after it was asked to"
            elif bound_s and now - final_at > bound_s:
                seen.why = f"its launcher had not ended {bound_s:g} s after {why}"
            elif self.environment.start_s and now - begin > self.environment.start_s and not _begun(seen.where):
                seen.why = f"no rank had begun {self.environment.start_s:g} s after the launch"
            if seen.why:
                return
        seen.ended = time.time()
        self._report(seen, before)

    def _bound(self, seen: RunningAttempt) -> tuple[float, str]:
        """Return how long the launcher may continue after what the ranks have left, and what; (0, "") for no bound."""
        left = causes.read(seen.where)
        bad = [row for row in left if row["kind"] not in ("done", "requeue")]
        if bad:
            return END_S, f"a rank's last message ({bad[0]['kind']})"
        ranks = sum(host.slots for host in seen.launch.hosts)
        # A program of the user's may have more to do after its fit.
        complete = self.job.config is not None and self.job.stamp() not in ((0, 0), seen.stamp)
        if ranks and len(left) >= ranks or complete:
            return LEAVE_S, "the end of the run"
        return 0.0, ""

    def _ask(self, seen: RunningAttempt, group: LauncherGroup) -> None:
        """Have the ranks save and end with status 75: by a file, and by SIGUSR2 to those that listen.

        A rank without a handler (before fit, after it, or in a program of the user's) would die of the signal.
        """
        with contextlib.suppress(OSError):
            (seen.where / causes.REQUEUE).touch()
        listening = [row for row in causes.read_marks(seen.where) if row["name"] == "fit"]
        signalled = [group.signal_rank(row["pid"], signal.SIGUSR2) for row in listening
                if isinstance(row.get("pid"), int) and row.get("host") == socket.gethostname()]
        interrupted = self.signals.status == EXIT_INTERRUPTED
        if interrupted and not any(signalled) and all(row.get("host") == socket.gethostname() for row in listening):
            self.signals.interrupt = True  # no rank is in a fit: there is nothing to save
            return
        again = "; another Ctrl-C ends them at once" if interrupted else ""
        self.environment.say(f"asked to end: the ranks save, and end with status 75{again}")
        if not any(signalled) and self.environment.forwards and not listening and self.job.config is None:
            group.process.send_signal(signal.SIGUSR2)

    def _report(self, seen: RunningAttempt, before: RunningAttempt | None) -> None:
        if before is None or seen.recovered:
            return
        parts = start_parts(seen.began, causes.read_marks(seen.where))
        if "first step" in parts:
            seen.recovered = True
            gone: dict[str, float] = {name: s for name, s in before.parts.items() if name in ("notice", "kill")}
            self.environment.say(f"recovered in {in_words({**gone, **parts})}")

    def _judge(self, seen: RunningAttempt) -> LaunchAttempt:
        job, hosts, ranks = self.job, seen.launch.hosts, sum(host.slots for host in seen.launch.hosts)
        left, marks = causes.read(seen.where), causes.read_marks(seen.where)
        end, last_sign = causes.read_progress(seen.where)
        begin = next((row["step"] for row in marks if row["name"] == "fit" and isinstance(row.get("step"), int)), -1)
        succeeded = job.succeeded(seen.stamp, -1 if seen.status is None else seen.status, ranks, left)
        succeeded = succeeded and not self._cut_short(seen, left, ranks) or self._ended_without_hvdtrain(seen)
        kind, text, rank, host = cause_of(left, succeeded, seen.status, seen.why, oom_kills() - seen.oom_kills)
        # Of the host that this process lives on it is known that it is there.
        silent = [name for name in silent_hosts(hosts, left) if name not in self.environment.own_names]
        if kind == "lost" and WAITING in text and len(silent) == 1:  # a host is gone whole, and others waited
            rank, host, text = -1, silent[0], f"no rank there reported why it ended; {text}"
        if not succeeded and last_sign:
            seen.parts["notice"] = round(max(0.0, seen.ended - last_sign), 3)
        seen.parts.update(start_parts(seen.began, marks))
        end, placed = max([end, *(row["step"] for row in left)]), hosts or started_hosts(marks)
        micro = job.micro_batch(ranks or sum(one.slots for one in placed), self.micro_batch)
        return LaunchAttempt(seen.number, kind, text, rank, self._named(host, rank, hosts), placed, begin, end,
                             job.checkpoint(), micro, seen.launch.left_out)

    def _cut_short(self, seen: RunningAttempt, left: Sequence[Mapping[str, Any]], ranks: int) -> bool:
        return self.job.config is None and bool(seen.why) and sum(row["kind"] == "done" for row in left) < max(1, ranks)

    def _ended_without_hvdtrain(self, seen: RunningAttempt) -> bool:
        """Return whether a program without hvdtrain ended well on this host; of a lost host, 0 means nothing."""
        near = {host.name for host in seen.launch.hosts} <= set(self.environment.own_names)
        return self.job.config is None and seen.status == 0 and not seen.why and near and not _begun(seen.where)

    def _named(self, host: str, rank: int, hosts: tuple[HostSlots, ...]) -> str:
        """Return a host's name in the launch, from what it calls itself, or from the rank's place there."""
        alike = [one.name for one in hosts if one.name.partition(".")[0] == host.partition(".")[0]
                 or {one.name, host} <= set(self.environment.own_names)] if host else []
        if len(alike) == 1:
            return alike[0]
        for one in hosts if rank >= 0 else ():
            if rank < one.slots:
                return one.name
            rank -= one.slots
        return hosts[0].name if len(hosts) == 1 else ""


def _begun(where: Path) -> bool:
    return any(where.glob("marks-*.jsonl")) or any(where.glob("cause-*.json"))


def say(text: str) -> None:
    """Print a line of the supervisor's, and ignore that nobody reads it."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"hvdtrain launch: {text}\n".encode(errors="replace"))
