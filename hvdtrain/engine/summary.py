"""The table at the end of a run, and the same facts as a record."""

from __future__ import annotations

import math
from typing import Any, cast

from hvdtrain.checkpoint.downloads import shown
from hvdtrain.core.errors import count
from hvdtrain.core.protocols import DataParallel, DividesState
from hvdtrain.core.terminal import facts, say
from hvdtrain.core.units import format_bytes
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline import plan

MOST_RANKS = 8
"""Ranks that get a row of their own."""

WORDS = {"slowest": "waiting for stragglers", "wire": "transfer", "input": "input", "update": "update",
         "idle": "stages waiting for each other", "channel": "messages between stages"}


def record(run: Run) -> dict[str, Any]:
    """JSON-able facts of a finished run. Phase times are rank 0's, in milliseconds a step."""
    s, phases = run.state, run.timeline.totals
    steps = max(1, phases.steps)
    return {
        "framework": run.spec.framework,
        "model": run.spec.name,
        "ranks": run.control.size,
        "hosts": run.topology.describe(),
        "pipeline": plan.facts(run.parts.layout, run.config),
        "wire": run.collectives.name,
        "compression": run.dp.describe(),
        "global_batch": run.config.global_batch,
        "steps": s.cursor.step,
        "epochs": s.cursor.epoch,
        "samples_per_s": _number(phases.samples_per_s()),
        "loss": _number(s.outcome.last_loss),
        "metrics": {k: _number(v) for k, v in s.metrics.items()},
        "metrics_at": s.findings.metrics_at,
        "weights_at": weights_at(run),
        "best": {metric: {"step": found[0].step, "value": found[0].metrics[metric]}
                 for metric, found in s.findings.best.items() if found},
        "test_unread": run.setup.eval_unread,
        "meter": _meter(run),
        "zero": _zero(run.dp),
        "saves": _saves(run),
        "phases_ms": {name: round(1e3 * seconds / steps, 3) for name, seconds in phases.seconds.items()},
        "stop": s.stop,
        "ledger": run.ledger,
        "memory": run.memory,
        "mfu": _mfu(run),
        "out_of_memory": {"times": len(run.shortages), "micro_batch": run.recovery.ceilings, "each": run.shortages},
        "forecast": _forecast(s.findings.forecast),
        "notes": run.notes,
        "step": run.parts.describe(),
    }


def _forecast(found: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of the forecast with the seconds they are of; where there was none, why."""
    names = [name for name in found if name.startswith("error_") or name in ("forecast_s", "measured_s", "why")]
    return {name: found[name] for name in names}


def weights_at(run: Run) -> int:
    """Return the step whose weights the final model has."""
    at = run.state.findings.weights_at
    return run.state.cursor.step if at < 0 else at


def rows(run: Run) -> list[tuple[str, str]]:
    """Return what the table shows, in order."""
    r = record(run)
    per_rank = f"{r['ranks']} on {r['hosts']}"
    table = [("framework", f"{r['framework']}, {r['model']}"), ("ranks", per_rank),
             ("transport", f"{r['wire']}, compression {r['compression']}"),
             ("global batch", count(r["global_batch"], "sample")),
             *([("pipeline", plan.summary(r["pipeline"]))] if r["pipeline"] else []), *r["step"].items(),
             ("steps", f"{r['steps']} in {count(r['epochs'], 'epoch')}"
              + (f", stopped: {r['stop']}" if r["stop"] else "")),
             ("speed", f"{r['samples_per_s']:,.0f} samples/s" if r["samples_per_s"] else "not known: too few steps"),
             ("train loss", f"{r['loss']:.4g}" if r["loss"] is not None else "none")]
    if r["weights_at"] < r["steps"]:
        table.append(("weights", f"restored: those of step {r['weights_at']}"))
    other = f", of the weights of step {r['metrics_at']}" if 0 <= r["metrics_at"] < r["steps"] else ""
    table += [(name if "/" in name else f"test {name}", (f"{value:.4f}" if value is not None else "none") + other)
              for name, value in r["metrics"].items()]
    table += [(f"best {name}", f"{best['value']:.4f} at step {best['step']}") for name, best in r["best"].items()]
    if r["test_unread"]:
        table.append(("test samples", f"{r['test_unread']} unreadable, skipped"))
    table += _ledger(r["ledger"])
    if r["meter"]:
        table += _efficiency(r["meter"])
    table.append(("time a step", ", ".join(f"{name} {ms:.1f}" for name, ms in r["phases_ms"].items()) + " ms"))
    if r["zero"]:
        table.append(("zero", f"stage {r['zero']['stage']}, parameters gathered in {r['zero']['gather_ms']:.1f} "
                      "ms a step (included in update)"))
    if r["saves"]:
        table.append(("checkpoints", _saved(r["saves"])))
    table += _utilisation(r["mfu"]) + _memory(r["memory"]) + _shortages(r["out_of_memory"])
    out = shown(run.config, run.out)
    table.append(("files", f"{out}, with report.html" if run.begun else out))
    return table + [("note", note) for note in r["notes"]]


def _meter(run: Run) -> dict[str, Any] | None:
    """Return the meter's reading over the run, JSON-able; None where there was none."""
    if "meter" not in run.records.latest:
        return None
    found = run.records.latest["meter"].values
    ranks = [{name: _number(value) for name, value in row.items()} for row in found["ranks"]]
    return {"percent_of_solo": _number(found["percent_of_solo"]), "step_s": _number(found["step_s"]),
            "lost_percent": {cause: _number(value) for cause, value in found["lost_percent"].items()}, "ranks": ranks,
            "of": "rank" if run.mesh.deepest == 1 else "copy", "advice": found["advice"]}


def _ledger(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what was checked of the samples, as text; nothing where no step was made."""
    epochs = found.get("epochs", 0)
    rows = found.get("compared", 0)  # none where all rows were compared, or there is one rank
    unit = found.get("unit") or "index" * bool(rows)
    said = [f"each {unit}{' ' * bool(unit)}exactly once in {count(epochs, 'epoch')}"
            + (f", {count(rows, 'row')} compared across ranks" if rows else "")] if epochs else []
    said += [f"the first {found['partial']} of the last epoch once each"
             + (f", {count(rows, 'row')} compared across ranks" if rows and not epochs else "")
             ] if found.get("partial") else []
    said += [f"{found['skipped']} in skipped steps"] if found.get("skipped") else []
    said += [f"{found['unread']} unreadable, skipped"] if found.get("unread") else []
    why = f": {found['reason']}" if found.get("reason") else ""
    if found.get("unchecked"):
        which = ", ".join(map(str, found["unchecked"]))
        said.append(f"epoch{'s' if len(found['unchecked']) > 1 else ''} {which} not verified{why}")
    said += [f"the evaluation is not verified: {found['evaluation']}"] if found.get("evaluation") else []
    return [("samples", "; ".join(said))] if said else []


def _zero(dp: DataParallel) -> dict[str, Any] | None:
    """Return the stage of ZeRO and the mean milliseconds of gathering parameters in a step; None without it."""
    zero = cast(DividesState, dp) if dp.divides_state else None
    if zero is None or not zero.gathers:
        return None
    return {"stage": zero.stage, "gather_ms": round(1e3 * zero.gathered_s / zero.gathers, 3)}


def _memory(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the peak memory of rank 0 and of the worst rank with the estimate; nothing where it is unknown."""
    peaks, states = found.get("peak", []), found.get("state", [])
    if not any(peaks) or len(peaks) != len(states):
        return []
    worst = max(range(len(peaks)), key=lambda r: peaks[r])
    said = [f"rank {r} peak {format_bytes(peaks[r])}, of which {format_bytes(states[r])} parameters, "
            f"gradients and optimizer as predicted{_measured(found, r)}" for r in dict.fromkeys((0, worst)) if peaks[r]]
    return [("memory", "; ".join(said))]


def _measured(found: dict[str, Any], rank: int) -> str:
    """Return what of ``_memory``'s estimate was found in the end, as text; "" where a kind of it cannot be told."""
    measured = found.get("measured", [])
    held = measured[rank] if rank < len(measured) else {}
    kinds = [held.get(kind) for kind in ("parameters", "gradients", "state")]
    return "" if None in kinds else f" ({format_bytes(sum(n for n in kinds if n is not None))} found)"


def _mfu(run: Run) -> dict[str, Any] | None:
    """Return the utilisation of the ranks' devices over the run; None where no device's peak is known."""
    if "system" not in run.records.latest:
        return None
    found = run.records.latest["system"].values
    names = ("mfu", "flops", "flops_unknown", "peak_flops", "peak_source")
    return {name: found[name] for name in names} if any(found["peak_flops"]) else None


def _utilisation(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Each kind of device with its peak, the operations and what part of the peak the ranks on it used."""
    said, sources = [], found["peak_source"] if found else []
    for source in dict.fromkeys(filter(None, sources)):
        ranks = [r for r, other in enumerate(sources) if other == source]
        known = [(found["mfu"][r], r) for r in ranks if found["mfu"][r] is not None] if found else []
        if found and known:
            (least, slow), (most, fast) = min(known), max(known)
            part = f"{most:.1%} on rank {fast}" + (f", {least:.1%} on rank {slow}" if slow != fast else "")
            said.append(f"{part} of {source}; {found['flops'][fast] / 1e9:.4g} GFLOP a sample, forward and backward")
        elif found:
            said.append(f"not known, of {source}: {found['flops_unknown'][ranks[0]] or 'too few steps'}")
    return [("mfu", "; ".join(said))] if said else []


def _shortages(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how often ranks ran out of memory, and which take smaller micro-batches since."""
    if not found["times"]:
        return []
    smaller = [f"rank {rank} uses micro-batches of at most {limit}" for rank, limit in
               sorted(found["micro_batch"].items())]
    return [("out of memory", "; ".join([count(found["times"], "time"), *smaller]))]


def _saves(run: Run) -> dict[str, Any] | None:
    """Return what the saves have cost rank 0, in seconds; None without any."""
    if run.saver is None or not run.saver.spent.saves:
        return None
    spent = run.saver.spent
    return {"saves": spent.saves, "blocked_s": round(spent.blocked_s, 6), "threads_cpu_s": round(spent.cpu_s, 6),
            "longest_s": round(spent.longest_s, 6)}


def _saved(saves: dict[str, Any]) -> str:
    blocked_ms, cpu_ms = (1e3 * saves[key] / saves["saves"] for key in ("blocked_s", "threads_cpu_s"))
    return (f"{saves['saves']} saved; a save blocked training for {blocked_ms:.1f} ms and took {cpu_ms:.1f} "
            "ms in a background thread")


def _efficiency(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the meter's rows: how much of the devices' speed was used, what was lost, each rank, what to do."""
    lost = ", ".join(f"{WORDS[cause]} {percent:.1f} %" for cause, percent in found["lost_percent"].items())
    rows = [("scaling efficiency", f"{found['percent_of_solo']:.0f} % of the sum of single-rank "
                                   "throughputs"), ("time lost", lost)]
    what = "rank" if found["of"] == "rank" else "replica"
    for rank, row in list(enumerate(found["ranks"]))[:MOST_RANKS]:
        rows.append((f"{what} {rank}", f"{row['samples']:.4g} samples, compute {1e3 * row['compute_s']:.1f}, "
                     f"wait {1e3 * row['wait_s']:.1f}, input {1e3 * row['data_s']:.1f}, update "
                     f"{1e3 * row['update_s']:.1f} ms"))
    more = len(found["ranks"]) - MOST_RANKS
    return rows + ([("", f"and {count(more, 'more rank')}")] if more > 0 else []) + [("advice", found["advice"])]


def show(run: Run) -> None:
    """Print the table; on rank 0."""
    # mpirun gives ranks pseudo-terminals even where its own output goes to a file: plain text under a launcher.
    say(facts("hvdtrain", rows(run), plain=run.control.size > 1))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
