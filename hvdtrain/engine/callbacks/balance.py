"""`balance: static` and `auto`: give each replica the share of the batch that its speed asks for.

Measuring is left to `hvdtrain.engine.balance_probe`, plans and decisions to `hvdtrain.planning.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain import backends
from hvdtrain.cluster.control import agreed
from hvdtrain.core.terminal import as_text, say
from hvdtrain.engine import balance_plan
from hvdtrain.engine.balance_probe import probe, verified
from hvdtrain.engine.callbacks.auto_compression import AutoCompression
from hvdtrain.engine.callbacks.auto_wire import AutoWire
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.meter import Meter, meter_of
from hvdtrain.engine.run import Run
from hvdtrain.planning.batch import plan as plans
from hvdtrain.planning.batch.rebalance import Rebalancer
from hvdtrain.planning.batch.sampler import BatchShares
from hvdtrain.planning.linear import LinearTime, Speed, least

VERIFY_ROUNDS = 4
"""Plans that are tried against the devices' memory; one more is made from what they showed, and followed."""


class Balance(Callback):
    """Runs on all ranks. ``meter``: whose windows it decides on. ``holds``: others compare steps with the cut in force,
    which a new plan would change."""

    where = "all"
    doing = "measuring each rank's speed"
    state_key = "Balance"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.config.balance != "off")

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(meter_of(run, earlier), lambda: any(
            isinstance(one, (AutoCompression, AutoWire)) and not one.settled for one in run.callbacks))

    def __init__(self, meter: Meter, holds: Callable[[], bool] = lambda: False) -> None:
        self._meter, self._holds = meter, holds
        self._rebalancer: Rebalancer | None = None
        self._world = ""
        self._kept: dict[str, Any] = {}
        self._advised = False
        self._in_force_from = 0

    def fit_start(self, run: Run) -> None:
        """Probe and plan; a run that continues in the world that its plan was made for keeps it."""
        if len(run.mesh.copies) == 1:
            run.note(f"balance {run.config.balance}: there is one {balance_plan.called(run.mesh)}, which takes all "
                     "samples")
            return
        if self._rebalancer is not None:  # a second fit of the same run
            self._follow(run, self._rebalancer.plan, run.state.cursor.step)
            return
        self._world = _world(run)
        if self._kept and self._resume(run):
            return
        self.plan(run)

    def step_end(self, run: Run) -> None:
        """At the end of a window: advise, and in auto plan again where that is worth it."""
        window, rebalancer = self._meter.window, self._rebalancer
        if rebalancer is None or self._lowered(run) or window is None:
            return
        if not self._advised:
            self._advise(run, min(row.wait_s for row in window.reading.rows))
        if run.config.balance != "auto" or not window.own_s_P or window.ends <= self._in_force_from:
            return
        if self._holds():
            return
        new = rebalancer.observe(window.own_s_P, window.samples_P, window.micros_P, window.latest_s_P)
        run.state.findings.solo_lines = rebalancer.lines_P
        if new is None:
            if rebalancer.closer:
                self._meter.look_closer()
            return
        at = run.state.cursor.step + run.feed.ahead
        self._follow(run, new, at)
        run.note(f"balance auto: from step {at} on the {_those(run)} take {_spelled(new.samples_P)} samples")
        self._log(run, "replan", from_step=at)

    def state_dict(self) -> dict[str, Any]:
        if self._rebalancer is None:
            return {}
        return {"world": self._world, "plan": self._rebalancer.state_dict(),
                "ceilings": list(self._rebalancer.ceilings_P or [])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state

    def plan(self, run: Run) -> None:
        """Probe, plan, cut by the plan from here on, and tell; collective, also for a rank alone."""
        with run.parts.draws_kept():
            self._rebalancer, speeds = self._planned(run, self._probed(run))
        self._follow(run, self._rebalancer.plan, run.state.cursor.step)
        self._tell(run, speeds)

    @staticmethod
    def _probed(run: Run) -> list[Speed]:
        return balance_plan.probe(run) if run.mesh.deepest > 1 else probe(run, backends.load(run.spec.framework))

    def _planned(self, run: Run, speeds: list[Speed]) -> tuple[Rebalancer, list[Speed]]:
        own = run.control.rank
        lines = [s.line for s in speeds]
        ceilings = [s.ceiling for s in speeds]
        backend = backends.load(run.spec.framework)
        made = plans.plan(lines, *_work(run, ceilings))
        if run.mesh.deepest > 1:  # ceilings are of the plan of the cut
            return _controller(run, lines, ceilings, made), speeds
        for _ in range(VERIFY_ROUNDS):
            wanted = [part.micro_batch for part in made.parts]
            if not run.control.agree(run.devices[own].kind != "cpu" and wanted[own] > max(speeds[own].sizes)):
                break
            tried = max(speeds[own].sizes)
            holds = agreed(run.control, lambda: verified(run, backend, wanted[own], tried)
                           if run.devices[own].kind != "cpu" and wanted[own] > tried else wanted[own], "probe")
            held = run.control.gather(holds)
            if held == wanted:
                break
            ceilings = [h if h < w else c for h, w, c in zip(held, wanted, ceilings)]
            made = plans.plan(lines, *_work(run, ceilings))
        # What a device has not been tried with it accumulates in a later plan: that one is not tried beforehand.
        ceilings = [c if device.kind == "cpu" else least(c, max(max(s.sizes), part.micro_batch))
                    for c, device, s, part in zip(ceilings, run.devices, speeds, made.parts)]
        found = [Speed(s.line, c, s.sizes, s.seconds, s.remembered) for s, c in zip(speeds, ceilings)]
        return _controller(run, lines, ceilings, made), found

    def _lowered(self, run: Run) -> bool:
        """Return whether a rank ran out of memory below its ceiling: it is lowered, here and in the plan in force.

        Its share stays, until `balance: auto` finds that its micro-batches have become slow.
        """
        assert self._rebalancer is not None
        known = self._rebalancer.ceilings_P or [0] * len(run.mesh.copies)
        found = [least(c or 0, limit) for c, limit in zip(known, balance_plan.lowest(run.mesh, run.recovery.ceilings))]
        if found == [c or 0 for c in known]:
            return False
        at = run.state.cursor.step + run.feed.ahead
        self._follow(run, self._rebalancer.lower(found), at)
        ranks = [f"{balance_plan.called(run.mesh)} {r} holds {new}" for r, (old, new) in enumerate(zip(known, found))
                 if new != (old or 0)]
        run.note(f"balance {run.config.balance}: {', '.join(ranks)} samples in a micro-batch from step {at} on")
        self._log(run, "ceilings", from_step=at, ceilings=found)
        return True

    def _follow(self, run: Run, made: plans.BatchPlan, step: int) -> None:
        """Cut training and evaluation by ``made`` from step ``step`` on."""
        cut = cut_of(made)
        run.feed.recut(cut, step)
        for feed in run.eval_feeds.values():
            feed.recut(cut, 0)
        assert self._rebalancer is not None
        self._meter.restart(step, self._rebalancer.closer)
        self._in_force_from = step
        run.state.findings.solo_lines = self._rebalancer.lines_P

    def _resume(self, run: Run) -> bool:
        """Take up the plan of a checkpoint; False where it does not fit this job."""
        if self._kept["world"] != self._world:
            run.note("balance: the checkpoint's plan was made for other ranks, devices or limits; probing again")
            return False
        config = run.config
        lines = [LinearTime(*row) for row in self._kept["plan"]["lines"]]
        self._rebalancer = _controller(run, lines, self._kept["ceilings"], plans.plan(lines, *_work(run)))
        unfit = self._rebalancer.load_state_dict(self._kept["plan"])
        if unfit:
            run.note(f"balance: {unfit}; probing again")
            return False
        self._follow(run, self._rebalancer.plan, run.state.cursor.step)
        run.note(f"balance {config.balance}: continues with {_spelled(self._rebalancer.plan.samples_P)} samples, "
                 "as planned before")
        return True

    def _tell(self, run: Run, speeds: list[Speed]) -> None:
        assert self._rebalancer is not None
        made, config = self._rebalancer.plan, run.config
        rows = plans.table(made, balance_plan.labels(run), [s.ceiling for s in speeds])
        heads = balance_plan.columns(run.mesh)
        if run.control.rank == 0 and config.progress != "off":
            say(as_text(heads, rows))
        lines = [s.line for s in speeds]
        equal = plans.equal(lines, *_work(run, [s.ceiling for s in speeds]))
        remembered = ", as measured before and confirmed" if all(s.remembered for s in speeds) else ""
        run.note(f"balance {config.balance}: {_spelled(made.samples_P)} samples; computing {1e3 * made.step_s:.1f} ms "
                 f"a step instead of {1e3 * equal.step_s:.1f} ms with equal shares, by the probe{remembered}")
        self._log(run, "plan", columns=heads, rows=rows,
                  lines=[[s.line.a_s, s.line.c_s] for s in speeds], equal_s=equal.step_s, plan_s=made.step_s)

    def _advise(self, run: Run, wire_s: float) -> None:
        self._advised = True
        assert self._rebalancer is not None
        config = run.config
        words = plans.advise_drop(self._rebalancer.lines_P, balance_plan.hosts(run), config.global_batch, wire_s,
                                  self._rebalancer.ceilings_P, balance_plan.least_parts(run), config.sync_batchnorm)
        if words:
            run.note(f"balance: {words}")

    def _log(self, run: Run, stage: str, **fields: Any) -> None:
        assert self._rebalancer is not None
        run.record("balance", stage=stage, samples=self._rebalancer.plan.samples_P, **fields)


def _work(run: Run, ceilings_P: plans.Ceilings = None) -> tuple[int, plans.Ceilings, plans.Parts, bool]:
    """Return what `hvdtrain.planning.batch.plan.plan` takes after the lines."""
    return run.config.global_batch, ceilings_P, balance_plan.least_parts(run), run.config.sync_batchnorm


def _controller(run: Run, lines_P: list[LinearTime], ceilings_P: list[int], made: plans.BatchPlan) -> Rebalancer:
    """Make the controller that watches plan ``made``."""
    config = run.config
    return Rebalancer(lines_P, config.global_batch, ceilings_P or None, made, config.rebalance.margin,
                      config.rebalance.lasting, balance_plan.least_parts(run), config.sync_batchnorm)


def cut_of(made: plans.BatchPlan) -> BatchShares:
    """Return the plan as the feed cuts by it."""
    return BatchShares(tuple(float(part.samples) for part in made.parts),
                       tuple(max(1, p.accumulate) for p in made.parts),
               tuple(part.micro_batch for part in made.parts))


def _those(run: Run) -> str:
    return "ranks" if run.mesh.deepest == 1 else "replicas"


def _spelled(samples_P: tuple[int, ...]) -> str:
    if len(samples_P) <= 8:
        return " + ".join(map(str, samples_P))
    return f"{min(samples_P)} to {max(samples_P)}"


def _world(run: Run) -> str:
    config = run.config
    devices = ", ".join(f"{d.kind} {d.name}" for d in run.devices)
    keys: list[object] = [run.spelled.precision, config.accumulate, config.micro_batch,
                          run.spelled.rebalance.max_micro_batch, config.sync_batchnorm, config.threads,
                          config.emulate_speed]
    if run.parts.layout is not None:
        keys += [run.mesh.copies, run.parts.layout.starts, config.pipeline]
    # Of the pipeline under its class' name in earlier checkpoints, whose plans stay valid.
    text = str(keys).replace("PipelineConfig(", "Pipeline(", 1)
    return f"{run.control.size} ranks, {run.topology.describe()}, {devices}, {text}"
