"""The audit: every so many steps one micro-batch of each rank of a pair is computed on another rank too.

What travels and how far two results are is left to `hvdtrain.engine.recompute`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hvdtrain import backends
from hvdtrain.core.comparison import plain_name
from hvdtrain.core.protocols.types import ALONE, Shortage
from hvdtrain.engine.callbacks.base import Callback, several_replicas
from hvdtrain.engine.compare_ranks import kinds
from hvdtrain.engine.recompute import (
    Case,
    Miscomputed,
    Recomputed,
    bystander,
    case_of,
    clearly_farther,
    deliver,
    resolution,
    tell,
)
from hvdtrain.engine.run import Run
from hvdtrain.engine.weight_checks import vectors_of
from hvdtrain.planning.linear import least

CONFIRM = 3
"""Steps in a row that ranks of several kinds are audited again where they were far apart; twice decides.

There the results of one micro-batch may be far apart by chance: rounding decides on which side of zero a ReLU is.
"""


class Audit(Callback):
    """Audits every ``every`` steps of a run; raises `hvdtrain.engine.recompute.Miscomputed` on every rank.

    ``good``: the step of the last audit in which each rank agreed with another.
    """

    where = "all"
    setting = "audit"
    doing = "computing a micro-batch on another rank"
    before = ("Checkpoint",)  # so that what was computed wrongly is not saved

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return super().wanted(run) and several_replicas(run) and run.parts.layout is None

    def __init__(self, every: int) -> None:
        self._every, self._last, self._off = every, -1, False
        self._ops: Any = None
        self.good: dict[int, int] = {}
        self.audits = 0
        self._own_s = self._begin_s = 0.0
        self._loose = False
        self._doubts: dict[Pair, list[bool]] = {}
        self._most: dict[int, int] = {}  # by rank that ran out of memory in an audit: samples of its next ones

    def fit_start(self, run: Run) -> None:
        self._ops = backends.load(run.spec.framework).Ops()
        types = run.parts.precision.names
        self._kinds = [f"{kind}, {name}" for kind, name in zip(kinds(run), types)]
        self._eps = [resolution(device.kind, name) for device, name in zip(run.devices, types)]
        self._narrow = [name != "fp32" for name in types]
        out = left_out(self._kinds, self._narrow)
        self._ranks = [rank for rank in range(run.control.size) if rank not in out]
        if out:
            words = ", ".join(f"{rank} ({types[rank]})" for rank in out)
            run.note(f"audit skips rank{'s' if len(out) > 1 else ''} {words}: results in 16 bits "
                     "can only be compared with a rank of the same device and precision")
        self._last = run.state.cursor.step // self._every
        self._begin_s = time.monotonic()

    def step_end(self, run: Run) -> None:
        turn = run.state.cursor.step // self._every
        if self._ops is None or self._off or run.batch is None or not run.state.outcome.met:
            return
        if turn == self._last and not self._doubts:
            return
        began_s = time.perf_counter()
        plan = self._plan(turn) if turn != self._last else list(self._doubts)
        new, self._last = turn != self._last, turn
        if plan and self._audit(run, plan):
            self.audits += new
        self._own_s += time.perf_counter() - began_s

    def fit_end(self, run: Run) -> None:
        if self.audits:
            part = 100 * self._own_s / max(1e-9, time.monotonic() - self._begin_s)
            run.note(f"{self.audits} audits of a micro-batch on another rank found no difference and took {part:.2g} % "
                     "of the time")

    def _plan(self, turn: int) -> list[Pair]:
        found = pairs([self._kinds[rank] for rank in self._ranks], turn)
        return comparable([(self._ranks[a], self._ranks[b]) for a, b in found], self._kinds, self._narrow)

    def _audit(self, run: Run, plan: list[Pair]) -> bool:
        """Have both ranks of each pair compute one case; return whether any had one that can travel. Collective."""
        assert run.batch is not None
        control, rank = run.control, run.control.rank
        mine = next((pair for pair in plan if rank in pair), None)
        limit = 0 if mine is None else least(*(self._most.get(r, 0) for r in mine),
                                             *(run.recovery.ceilings.get(r, 0) for r in mine))
        case = case_of(run.batch.micros, run.parts.state.rank_state, limit) if mine is not None else None
        headers = control.gather(None if case is None else case.header())
        turned = {pair: pair if headers[pair[0]] else pair[::-1] for pair in plan}  # whose micro-batch it is
        plan = [pair for pair in plan if headers[turned[pair][0]]]
        for pair in plan:
            source, target = turned[pair]
            case = deliver(control, case, headers[source], source, target)
        own, short = self._compute(run, case, [r for pair in plan for r in pair])
        digests = control.gather(None if own is None else own.digests())
        plan = [pair for pair in plan if not short.intersection(pair)]
        for pair in plan:
            source, target = turned[pair]
            exact = self._kinds[source] == self._kinds[target] and not self._loose
            if exact and digests[source] == digests[target]:
                self._agreed(run, pair)
            else:
                self._look(run, pair, turned[pair], exact, case, own)
        return bool(plan)

    def _agreed(self, run: Run, pair: Pair) -> None:
        self.good |= dict.fromkeys(pair, run.state.cursor.step)

    def _look(self, run: Run, pair: Pair, turned: Pair, exact: bool, case: Case | None, own: Recomputed | None) -> None:
        """Compare the two results closely, and end the run if one is wrong; collective."""
        control, (source, target) = run.control, turned
        involved = control.rank in pair
        far, place = control.gather(self._distance(run, own if involved else None, turned))[target]
        if not exact:
            if not self._doubtful(pair, far > max(self._eps[source], self._eps[target])):
                self._agreed(run, pair)
                return
            if len(self._doubts[pair]) <= CONFIRM and sum(self._doubts[pair]) < 2:
                return
        again, short = self._compute(run, case, pair)
        if short:
            return  # found apart, but not confirmed: the next audit looks again
        moved = again.far_from(own) if again is not None and own is not None else (0.0, 0)
        same = again is None or own is None or again.digests() == own.digests()
        rows = control.gather((moved, same, _first_other(own, turned, control.rank)))
        unsteady = [r for r in turned if rows[r][0][0] > self._eps[r]]
        if len(unsteady) == 2:
            self._off = True
            run.note("audit is off: gradients of one rank differ between repetitions, so the "
                     "model draws its own random numbers or is not deterministic")
            return
        if exact and not unsteady and not (rows[source][1] and rows[target][1]):
            self._loose = True  # kernels that add up in any order: only rounding can be told from faults
            run.note("audit compares up to rounding: equal devices do not give the same bits twice")
            return
        if unsteady:
            place = rows[unsteady[0]][0][1]
        elif exact:
            first = next((i for i, (a, b) in enumerate(zip(*(rows[r][2] for r in turned))) if a != b), place)
            place, far = first, far if first == place else 0.0
        guilty, third = ((unsteady[0],), None) if unsteady else self._third(run, turned, case, again)
        raise self._found(run, turned, guilty, third, place, far, bool(unsteady))

    def _doubtful(self, pair: Pair, far: bool) -> bool:
        """Return whether a pair of several kinds is under suspicion; ``far``: it was far apart just now."""
        if far or pair in self._doubts:
            self._doubts.setdefault(pair, []).append(far)
        if len(self._doubts.get(pair, ())) > CONFIRM and sum(self._doubts[pair]) < 2:
            del self._doubts[pair]
        return pair in self._doubts

    def _third(self, run: Run, pair: Pair, case: Case | None,
               own: Recomputed | None) -> tuple[tuple[int, ...], int | None]:
        """Have a third rank compute the case, of the pair's kind if there is one: (who is at fault, the third rank).

        Both, where there is none or it cannot tell. Collective.
        """
        control, (source, target) = run.control, pair
        others = sorted((r for r in range(control.size) if r not in pair),
                        key=lambda r: (self._kinds[r] != self._kinds[source], self._kinds[r] != self._kinds[target], r))
        if not others:
            return pair, None
        third = others[0]
        header = control.gather(None if control.rank != source or case is None else case.header())[source]
        case = deliver(control, case, header, source, third)
        found, short = self._compute(run, case, [third])
        if short:
            return pair, None
        if control.rank == third:
            own = found
        if control.rank not in (*pair, third):
            own = None
        fars = [control.gather(self._distance(run, own, (r, third)))[third][0] for r in pair]
        digests = control.gather(own.digests() if own is not None else [])
        same = [digests[r] == digests[third] for r in pair]
        if any(same) and not all(same):
            return (pair[same.index(False)],), third
        worse = clearly_farther(fars[0], fars[1], max(self._eps[r] for r in (*pair, third)))
        return (pair if worse is None else (pair[worse],)), third

    def _compute(self, run: Run, case: Case | None, ranks: Sequence[int]) -> tuple[Recomputed | None, set[int]]:
        """Compute the case on ``ranks``; return (this rank's result, the ranks on which memory lacked); collective.

        Later audits of such a rank take half the samples; one that has no smaller number is left out.
        """
        own, why, samples = None, "", 0
        if run.control.rank in ranks:
            assert case is not None
            samples = len(case.arrays[0])
            own, why = run.recovery.attempt(lambda: Recomputed(run.parts, self._ops, case,
                                                               run.config.model_parallel > 1))
        rows = [(rank, n, why) for rank, (n, why) in enumerate(run.control.gather((samples, why))) if why]
        fewest = 2 if run.parts.caveats() else 1  # BatchNorm takes no statistics of one sample
        for rank, n, _ in rows:
            self._most[rank] = max(fewest, n // 2)
            if n <= fewest and rank in self._ranks:  # a third rank may be none of them
                self._ranks.remove(rank)
                self._doubts = {pair: fars for pair, fars in self._doubts.items() if rank not in pair}
        step = run.state.cursor.step
        run.deliver([(rank, ALONE, Shortage(step, "an audit", n, self._most[rank] if rank in self._ranks else -1,
                                            why).spelled()) for rank, n, why in rows])
        return own, {rank for rank, _, _ in rows}

    def _distance(self, run: Run, own: Recomputed | None, turned: Pair) -> tuple[float, int]:
        """Return how far ``turned``'s results are apart, and in which parameter, on the second of them; collective."""
        if own is not None and run.control.rank in turned:
            return own.compared(run.control, *turned)
        vectors = vectors_of(run.parts.params.specs, run.config.model_parallel > 1)
        return bystander(run.control, len(vectors), *turned)

    def _found(self, run: Run, pair: Pair, guilty: tuple[int, ...], third: int | None, place: int, far: float,
               unsteady: bool) -> Miscomputed:
        """Return what ends the run; the same on every rank."""
        hosts = {r: f"rank {r} on host {run.topology.host_of(r).node} ({run.devices[r].name})" for r in pair}
        name = plain_name(run.parts.params.specs[place].name)
        back = min(self.good.get(rank, -1) for rank in guilty)
        against = [r for r in (*pair, third) if r not in guilty and r is not None]
        return tell([hosts[r] for r in guilty], against, guilty, name, run.state.cursor.step, far, back, unsteady)


def _first_other(own: Recomputed | None, pair: Pair, rank: int) -> list[int]:
    """Digests of each parameter's gradient, of the ranks of ``pair``."""
    return own.prints.prints().bits if own is not None and rank in pair else []


Pair = tuple[int, int]


def tournament(players: Sequence[int], turn: int) -> list[Pair]:
    """Return the pairs of turn ``turn``: each two of ``players`` meet once in n - 1 turns (n even) or n (n odd).

    The order within a pair changes from one such series to the next.

    >>> [tournament([0, 1, 2], turn) for turn in range(3)]
    [[(1, 2)], [(2, 0)], [(0, 1)]]
    """
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    if len(seats) < 2:
        return []
    series, shift = divmod(turn, len(seats) - 1)
    fixed, ring = seats[-1], seats[:-1]
    ring = ring[shift:] + ring[:shift]
    table = [(fixed, ring[0]), *((ring[i], ring[-i]) for i in range(1, len(seats) // 2))]
    found = [(a, b) for a, b in table if a is not None and b is not None]
    return [(b, a) for a, b in found] if series % 2 else found


def pairs(kinds: Sequence[str], turn: int) -> list[Pair]:
    """Return (whose micro-batch, who recomputes it too) of turn ``turn``, no rank twice; by each rank's kind.

    Ranks of one kind meet each other. A rank without its like meets the others without their like, or where it is the
    only one, in every second turn one of the other ranks, whose own pair is left out then.
    """
    groups = [[r for r, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]
    alone = [group[0] for group in groups if len(group) == 1]
    found = [pair for group in groups if len(group) > 1 for pair in tournament(group, turn)]
    if len(alone) != 1 or len(kinds) == 1:
        return found + tournament(alone, turn)
    if turn % 2:
        return found
    others = [r for r in range(len(kinds)) if r != alone[0]]
    series, at = divmod(turn // 2, len(others))
    found = [pair for pair in found if others[at] not in pair]
    return [*found, (alone[0], others[at]) if series % 2 else (others[at], alone[0])]


def comparable(found: Sequence[Pair], kinds: Sequence[str], narrow: Sequence[bool]) -> list[Pair]:
    """Return the pairs whose results tell anything: of one kind, or of two that both compute in their own types.

    ``narrow``: which ranks compute in 16 bits. A small gradient is nothing but rounding there, and a ReLU is often on
    the other side of zero, so that a rank of another kind, or in another type, is rightly as far away as a faulty one.
    """
    return [(a, b) for a, b in found if kinds[a] == kinds[b] or not (narrow[a] or narrow[b])]


def left_out(kinds: Sequence[str], narrow: Sequence[bool]) -> list[int]:
    """Return the ranks that no turn has in a pair that is `comparable`.

    >>> left_out(["cpu, fp32", "cpu, bf16"], [False, True]), left_out(["a", "b", "c, bf16"], [False, False, True])
    ([0, 1], [2])
    """
    if not any(narrow) or len(set(kinds)) == 1:
        return []
    met = {rank for turn in range(2 * len(kinds)) for pair in comparable(pairs(kinds, turn), kinds, narrow)
           for rank in pair}
    return [rank for rank in range(len(kinds)) if rank not in met]
