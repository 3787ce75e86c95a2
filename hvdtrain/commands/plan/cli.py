"""``python -m hvdtrain plan``: measure every rank's speed and print its share of the batch; with ``--memory``, its
bytes. ``--inventory`` is left to `hvdtrain.commands.plan.inventory`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain import backends
from hvdtrain.cluster import exit_calls
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.machine import memory
from hvdtrain.commands.plan import inventory
from hvdtrain.commands.train import parse
from hvdtrain.config import Config, cut_over_ranks
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.units import format_bytes
from hvdtrain.engine import loop, machine, memory_survey
from hvdtrain.engine import memory_plan as plans
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.balance import Balance
from hvdtrain.engine.callbacks.memory_fit import MemoryFit
from hvdtrain.engine.callbacks.meter import Meter
from hvdtrain.engine.memory_plan import COLUMNS, OPTION_COLUMNS, MemoryPlan
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline.plan import Planned, record

USAGE = """usage: python -m hvdtrain plan [--memory [--json FILE] [--check]] [options of train]
       python -m hvdtrain plan --inventory FILE [--assume FILE] [--samples N] [--budget AMOUNT] [--deadline HOURS]
                               [--mtbf HOURS] [--restart SECONDS] [--json FILE] [options of train]

Probes each rank's speed for the model, and prints each rank's share of the global batch
(balance: static). Trains nothing and writes no run. Start it like the training, for example:

  mpirun -np 4 python -m hvdtrain plan --model torch_models.resnet:build --global_batch 256

Ignores earlier measurements; --rebalance.max_micro_batch 64,64,16,16 sets memory limits by hand.

--memory prints a memory plan instead: bytes of each rank by kind, whether they fit, and options that reduce
them, best first, each with its command-line option. Optimizer state is exact; activations are measured
with a few samples.
--json FILE also writes the memory plan to FILE. --check then trains three steps, without saves, and prints the measured
memory next to the plan.

With --pipeline either form prints the partition of the model over ranks, the memory of each stage, and the predicted
step time and idle share; without --memory also the share of each replica, if there are several.

--inventory FILE predicts a training on the hosts of a YAML file, which need not be here, in one process: whether it
fits, step time, samples/s, scaling efficiency, hours, cost and energy of --samples N (default: of all epochs), and
alternatives, best first, each with its command. --inventory here calibrates this job's devices: start it with mpirun
like the training; the measurements are kept and used by later plans. Devices without a calibration need
--assume FILE, such as `efficiency: 0.4` (fraction of the peak FLOP/s); such results are labelled ASSUMED.
--budget and --deadline choose among the alternatives. --json - writes to standard output.
With --mtbf HOURS, the mean time between failures of a host (mtbf_hours in the inventory, where it differs), the hours
are expected ones, with restarts (--restart SECONDS each, by default 60) and the work since the last save.

python -m hvdtrain train --help lists all options.
"""

CHECK_STEPS = 3


def main(argv: list[str]) -> int:
    if any(a in ("-h", "--help") for a in argv):
        print(USAGE, end="")
        return 0
    if any(word.partition("=")[0] == "--inventory" for word in argv):
        with exit_calls.told():
            return inventory.main(argv)
    argv, memory, check, target = _own_options(argv)
    config = parse(argv)
    if config is None:
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with exit_calls.told():
        if memory and cut_over_ranks(config):
            _stages(config, check, target)
        elif memory:
            _memory(config, check, target)
        else:
            _shares(config)
    return 0


def _own_options(argv: list[str]) -> tuple[list[str], bool, bool, str]:
    """Return (the options of train, --memory, --check, the file of --json)."""
    rest, found, target = [], set(), ""
    words = iter(argv)
    for word in words:
        if word in ("--memory", "--check"):
            found.add(word)
        elif word == "--json":
            target = next(words, "")
            if not target:
                raise UserError("--json has no value", "a file to write", "write --json FILE")
        else:
            rest.append(word)
    if (target or "--check" in found) and "--memory" not in found:
        raise UserError("--json and --check without --memory", "--memory, whose plan they use", "add --memory")
    return rest, "--memory" in found, "--check" in found, target


def _shares(config: Config) -> None:
    options = replace(config.rebalance, probe_cache=False)
    run = assemble(replace(config, balance="static", shares=[], resume="", rebalance=options))
    if run.mesh.deepest == 1 or len(run.mesh.copies) > 1:
        Balance(Meter(1)).plan(run)


def _stages(config: Config, check: bool, target: str) -> None:
    if check:
        raise UserError("--check with a pipeline over ranks", "a training, whose summary has peaks of memory, and "
                        "planned and measured stages", "leave --check out")
    run = assemble(replace(config, balance="off", resume=""))
    layout = run.parts.layout
    assert isinstance(layout, Planned)
    agreed(run.control, lambda: _written(record(layout), target if run.control.rank == 0 else ""), "--json")
    run.leave()


def _memory(config: Config, check: bool, target: str) -> None:
    if check:  # three steps hold no copies for a checkpoint
        config = replace(config, checkpoint=replace(config.checkpoint, every="off", every_steps=0, every_s=0.0))
    run = assemble(replace(config, balance="off", resume=""))
    MemoryFit().fit_start(run)
    scene = memory_survey.scene_of(run, backends.load(run.spec.framework))
    way = memory_survey.way_of(scene, run.dp)
    facts = agreed(run.control, lambda: plans.facts_now(scene, way, True), "memory")
    plan = plans.agreed_plan(scene, facts)
    measured = facts.measured
    rows = agreed(run.control, lambda: memory_survey.rows(scene, measured.blocks, measured.block_samples)
                  if measured.blocks else [], "memory")
    if run.control.rank == 0:
        show(plan, run.control.size > 1)
        if rows:
            terminal.show(f"activation checkpointing, measured with {count(measured.block_samples, 'sample')} on rank "
                          "0",
                       memory_survey.COLUMNS,
                       rows, launched=run.control.size > 1)
    agreed(run.control, lambda: _written(plan.to_dict(), target if run.control.rank == 0 else ""), "--json")
    if check:
        checked(run, plan, CHECK_STEPS)
    run.leave()


def _written(plan: dict[str, Any], target: str) -> None:
    try:
        if target:
            Path(target).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the memory plan could not be written: {error}", "a writable file", "correct --json") from None


def show(plan: MemoryPlan, launched: bool) -> None:
    """Print a plan's tables; on rank 0."""
    terminal.show("memory of each rank, in addition to the framework's import", COLUMNS, plan.rows(),
                  launched=launched)
    if plan.options:
        terminal.show("options that reduce memory, best first", OPTION_COLUMNS, plan.option_rows(), launched=launched)
    else:
        terminal.note("no known option would reduce memory")


def checked(run: Run, plan: MemoryPlan, steps: int) -> None:
    """Train ``steps`` of an assembled run, which is over then, and print the peaks of all ranks; collective."""
    feed, control = run.feed, run.control
    run.callbacks.clear()  # they count on a fit's begin and end, and this is none
    run.join()
    memory.host_peak_bytes(lambda: None)  # what was measured before does not count
    cursor = run.state.cursor
    batches = feed.epoch(cursor)
    for _, batch in zip(range(steps), batches):
        loop.train_step(run, batch)
    batches.close()
    peaks = control.gather(machine.peak_bytes(run))
    if control.rank == 0:
        rows = [[str(r), format_bytes(need.total), format_bytes(peak),
                 f"{100 * (need.total / peak - 1):+.1f} %" if peak else "N/A"]
                for r, (need, peak) in enumerate(zip(plan.needs_P, peaks))]
        terminal.show(f"measured in {count(steps, 'step')}", ("rank", "predicted", "measured", "off by"), rows,
                   launched=control.size > 1)
