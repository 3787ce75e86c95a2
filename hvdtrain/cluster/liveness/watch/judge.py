"""Verdict of the watchdog on ranks that stand still, hang or are gone. Pure: sights and clock are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.cluster.liveness.pulse import COMPUTING

TOGETHER_S = 0.03
"""Ranks that end within this time of each other were ended from outside, by their launcher or by who ended that."""

LONGER, FIRST_LONGER = 20.0, 2.0
"""A step hangs when it takes this many times as long as the longest so far, and as the first, which may compile."""

SETTLED = 2
"""Steps that a rank has finished before its next one can be judged."""

IDLE = 0.1
"""Share of a processor below which a rank that sleeps does not compute."""


@dataclass(frozen=True)
class Sight:
    """A rank as seen at a look. ``state``: letter of the system, "" once its process is gone; ``cpu_s``: computed so
    far.

    The rest is its page's: step, phase, ``since`` (changes when a phase begins), whether it waits for others, whether
    it is leaving, how many steps it has finished, and how long the first and the longest of the others took.
    """

    rank: int
    state: str = "S"
    cpu_s: float = 0.0
    step: int = -1
    phase: str = "start"
    since: int = 0
    waits: bool = False
    leaving: bool = False
    steps: int = 0
    first_s: float = 0.0
    longest_s: float = 0.0

    @property
    def gone(self) -> bool:
        return self.state in ("", "Z", "X")

    @property
    def stopped(self) -> bool:
        """Stopped by a signal; a debugger's stop ("t") is wanted."""
        return self.state == "T"


@dataclass(frozen=True)
class Others:
    """Numbers of the other hosts' ranks: all, waiting, stopped. ``known``: all were heard of."""

    ranks: int = 0
    waiting: int = 0
    stopped: int = 0
    known: bool = True


@dataclass(frozen=True)
class WatchdogVerdict:
    """Reason for ending the job: "hang", "lost" or "unreachable"; the ranks of this host; the seconds."""

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    stopped: bool = False


@dataclass
class _Clock:
    """Seconds that a rank was seen stopped, and seen computing while all others waited; when it was seen gone."""

    stopped_s: float = 0.0
    stuck_s: float = 0.0
    key: tuple[int, str, int] = (-1, "", 0)
    cpu_s: float = 0.0
    gone_at: float | None = None


@dataclass
class Judge:
    """Looks at the ranks of a host every ``pause_s``. ``bound_s``: longest time that a rank may stand still."""

    bound_s: float
    pause_s: float
    moment_s: float = TOGETHER_S
    """Time for which a rank is gone before it counts as lost: more where a message of another host may be due."""
    _last: float | None = None
    _clocks: dict[int, _Clock] = field(default_factory=dict)

    def look(self, now: float, sights: Sequence[Sight], others: Others = Others()) -> WatchdogVerdict | None:
        """Return the verdict, if there is one. ``now``: seconds of a clock that does not go back."""
        passed_s = self.passed(now)
        self._last = now
        for sight in sights:
            self._clocks.setdefault(sight.rank, _Clock())
        return (self._lost(now, sights) or self._frozen(passed_s, sights, others)
                or self._hung(passed_s, sights, others))

    def passed(self, now: float) -> float:
        """Return the seconds since the last look, at most two pauses: what the watchdog did not see accuses nobody."""
        return 0.0 if self._last is None else min(max(now - self._last, 0.0), 2 * self.pause_s)

    def pending(self, now: float) -> bool:
        """Return whether a rank is gone that is not yet judged."""
        return any(c.gone_at is not None and now - c.gone_at < self.moment_s for c in self._clocks.values())

    def _lost(self, now: float, sights: Sequence[Sight]) -> WatchdogVerdict | None:
        if any(sight.leaving for sight in sights):
            return None
        gone = [sight.rank for sight in sights if sight.gone]
        for rank in gone:
            clock = self._clocks[rank]
            clock.gone_at = now if clock.gone_at is None else clock.gone_at
        times = [at for rank in gone if (at := self._clocks[rank].gone_at) is not None]
        if not times or now - min(times) < self.moment_s:
            return None
        if len(gone) == len(sights) > 1 and max(times) - min(times) <= TOGETHER_S:
            return None
        first = tuple(r for r in gone if (self._clocks[r].gone_at or 0.0) - min(times) <= TOGETHER_S)
        return WatchdogVerdict("lost", first, 0.0)

    def _frozen(self, passed_s: float, sights: Sequence[Sight], others: Others) -> WatchdogVerdict | None:
        """Judge ranks stopped by a signal beyond the bound; all at once were stopped on purpose, as by Ctrl-Z."""
        stopped = [sight for sight in sights if sight.stopped]
        alive = [sight for sight in sights if not sight.gone]
        everyone = len(stopped) == len(alive) and (
            others.stopped == others.ranks and (len(alive) > 1 or others.ranks > 0) if others.known else len(alive) > 1)
        for sight in sights:
            clock = self._clocks[sight.rank]
            clock.stopped_s = clock.stopped_s + passed_s if sight.stopped and not everyone else 0.0
        worst = max((self._clocks[s.rank].stopped_s for s in sights), default=0.0)
        if worst < self.bound_s:
            return None
        late = tuple(s.rank for s in sights if self._clocks[s.rank].stopped_s >= self.bound_s / 2)
        return WatchdogVerdict("hang", late, worst, stopped=True)

    def _hung(self, passed_s: float, sights: Sequence[Sight], others: Others) -> WatchdogVerdict | None:
        """Judge the one rank for which all others wait, in a step that takes far longer than those before.

        It is given processor time, not time, while it wants to run: a rank whose processor is rationed, or shared by
        many, is slow and not hung.
        """
        awaited = [sight for sight in sights if not sight.waits]
        all_wait = others.known and others.waiting == others.ranks and len(awaited) == 1
        if not all_wait or len(sights) + others.ranks < 2 or not _judged(awaited[0]):
            for clock in self._clocks.values():
                clock.stuck_s, clock.key = 0.0, (-1, "", 0)
            return None
        sight = awaited[0]
        clock, key = self._clocks[sight.rank], (sight.step, sight.phase, sight.since)
        if clock.key != key:
            clock.key, clock.stuck_s, clock.cpu_s = key, 0.0, sight.cpu_s
            return None
        computed_s = sight.cpu_s - clock.cpu_s
        clock.cpu_s = sight.cpu_s
        # A sleeper that does not compute is given time; who runs, or would run if it had a processor, processor time.
        idle = sight.state != "R" and computed_s < IDLE * passed_s
        clock.stuck_s += passed_s if idle else min(computed_s, passed_s)
        bound_s = max(self.bound_s, LONGER * sight.longest_s, FIRST_LONGER * sight.first_s)
        return WatchdogVerdict("hang", (sight.rank,), clock.stuck_s) if clock.stuck_s >= bound_s else None


def _judged(sight: Sight) -> bool:
    return (sight.phase in COMPUTING and sight.steps >= SETTLED and not sight.leaving
            and sight.state in ("R", "S", "D"))
