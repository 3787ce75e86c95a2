"""Where a model is cut over ranks, and which rank of a copy takes which part: one plan, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config
from hvdtrain.config.pipeline import cut_over_ranks, micro_batches
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.core.mesh import Layout, Mesh
from hvdtrain.core.protocols import Control
from hvdtrain.core.table import as_text
from hvdtrain.core.terminal import say
from hvdtrain.core.units import MIB, format_bytes
from hvdtrain.parallel.pipeline import link
from hvdtrain.parallel.pipeline.devices import span
from hvdtrain.parallel.pipeline.link import Link
from hvdtrain.planning.batch.sampler import cut
from hvdtrain.planning.batch.sampler import micro_batches as bounds_of
from hvdtrain.planning.pipeline.blocks import Block, Needs
from hvdtrain.planning.pipeline.measured import Measured, evened, measured_samples
from hvdtrain.planning.pipeline.predict import Step
from hvdtrain.planning.pipeline.search import Choice, Task, fullness, search, spread

__all__ = ["CopyPlan", "Measured", "Planned", "agree", "even_layout", "measured_samples", "planned"]

MORE_STAGES = 8
"""So many stages more are tried where a model does not fit."""

HEAD = ("copy", "stage", "rank", "host", "device", "blocks", "ms", "parameters", "gradients", "optimizer",
        "activations", "MiB in all", "of MiB")


@dataclass(frozen=True)
class CopyPlan:
    """What was chosen for a copy, out of what, and the step that it is predicted to take."""

    task: Task
    choice: Choice
    step: Step


@dataclass(frozen=True)
class Planned(Layout):
    """A layout with what it was made from. ``plans``: of each copy; ``hosts``: of each rank."""

    plans: tuple[CopyPlan, ...] = ()
    hosts: tuple[str, ...] = ()

    def foreseen(self, samples: Sequence[int], micros: Sequence[int]) -> Planned:
        """The same layout with what is predicted where copies take ``samples`` in ``micros`` micro-batches.

        A block is taken to need time and room in proportion to its samples.
        """
        plans = []
        for plan, n, m in zip(self.plans, samples, micros):
            kinds = tuple(kind.over(n / m, -(-n // m)) for kind in plan.task.kinds) if m else plan.task.kinds
            task = replace(plan.task, kinds=kinds, micros=m)
            plans.append(replace(plan, task=task, step=plan.choice.played(task)))
        return replace(self, plans=tuple(plans))

    @property
    def step_s(self) -> float:
        """Predicted seconds of forwards and backwards of a step: those of the slowest copy."""
        return max(plan.step.step_s for plan in self.plans)

    @property
    def idle_share(self) -> float:
        """The predicted part of all ranks' time in which they wait for other stages or copies."""
        busy_s = math.fsum(s for plan in self.plans for s in plan.step.busy_s)
        ranks = sum(len(copy) for copy in self.mesh.copies)
        return max(0.0, 1 - busy_s / (ranks * self.step_s)) if self.step_s > 0 else 0.0


def agree(measured: Measured, config: Config, control: Control, mesh: Mesh,
          links: Sequence[Link] | None = None) -> Planned:
    """Return the one layout of all ranks, from what each found; collective. Rank 0 prints its table.

    So it is told what will be where before a rank drops what it does not keep. ``links``: what messages take within
    each copy, () for nothing; None: they are measured.
    Errors: `UserError` on every rank for unlike blocks, too few of them, too little memory.
    """
    if config.emulate_speed:
        measured = measured.slowed(config.emulate_speed[control.rank])
    rows = control.gather((measured, control.node))
    hosts = [node for _, node in rows]
    if links is None:
        cargo_bytes = max(b.cargo_bytes for row, _ in rows for b in row.blocks[:-1] or row.blocks)
        links = link.measured(control, mesh, cargo_bytes, hosts)
    layout = agreed(control, lambda: planned([row for row, _ in rows], config, mesh, hosts, links), "pipeline")
    # Unlike processors may round a sum in another way: what rank 0 has chosen counts.
    copies, starts = control.bcast((layout.mesh.copies, layout.starts))
    layout = replace(layout, mesh=mesh.ordered(copies), starts=starts)
    if control.rank == 0 and config.progress != "off":
        say(text(layout))
        for rank, (row, _) in enumerate(rows):
            if row.why:
                say(f"note: rank {rank} measured its blocks with fewer samples than a micro-batch has: {row.why}")
    return layout


def planned(rows: Sequence[Measured], config: Config, mesh: Mesh, hosts: Sequence[str] = (),
            links: Sequence[Link] = ()) -> Planned:
    """Return the layout for what the ranks have found; ``links``: of each copy. Pure."""
    names = tuple(block.name for block in rows[0].blocks)
    for rank, row in enumerate(rows):
        if [(b.name, b.param_bytes) for b in row.blocks] != [(b.name, b.param_bytes) for b in rows[0].blocks]:
            raise UserError(f"rank {rank} has other blocks than rank 0", "the same model on every rank",
                            "build the model on every rank in the same way")
    kind_of, kinds = evened(rows)
    plans, copies = [], []
    known: dict[Task, CopyPlan] = {}
    for number, copy in enumerate(mesh.copies):
        ranks = sorted(copy)
        task = _task(config, number, len(mesh.copies), kinds, [kind_of[r] for r in ranks], names,
                     links[number] if links else Link(0.0, 0.0))
        again = _as_before(mesh, number, task, kind_of, names)
        if again is not None:
            plans.append(again)
            copies.append(list(mesh.before.copies[number]) if mesh.before else ranks)
            continue
        if task not in known:
            found = search(task)
            if found is None:
                raise _too_large(task, config)
            known[task] = CopyPlan(task, *found)
        plans.append(known[task])
        copies.append(_seated(ranks, [kind_of[r] for r in ranks], known[task].choice.places))
    layout = Planned(mesh.ordered(copies), names, tuple(plan.choice.starts for plan in plans), tuple(plans),
                     tuple(hosts) or ("?",) * len(rows))
    assert isinstance(config.shares, (list, tuple))
    samples = np.diff(cut(config.global_batch, config.shares or [1.0] * len(copies))).tolist()
    return layout.foreseen(samples, [_parts(config, plan.task.depth, n) for plan, n in zip(plans, samples)])


def _parts(config: Config, depth: int, samples: int) -> int:
    """The micro-batches of a step in which a copy takes ``samples``."""
    return len(bounds_of(samples, micro_batches(config, depth), config.micro_batch_limit))


def _as_before(mesh: Mesh, copy: int, task: Task, kind_of: Sequence[int], names: Sequence[str]) -> CopyPlan | None:
    """The plan of the run that is gone on with; None without one, and where it does not fit the ranks or the keys."""
    before = mesh.before
    if before is None or before.names != tuple(names) or copy >= len(before.copies):
        return None
    ranks, starts = before.copies[copy], before.starts[copy]
    chunks = task.depth * (task.chunks if task.depth > 1 else 1)
    if sorted(ranks) != sorted(mesh.copies[copy]) or len(starts) != chunks or task.fixed not in ((), starts):
        return None
    choice = Choice(tuple(kind_of[rank] for rank in ranks), starts)
    return CopyPlan(task, choice, choice.played(task)) if choice.fits(task) else None


def _task(config: Config, copy: int, copies: int, kinds: Sequence[Measured], kind_of: Sequence[int],
          names: Sequence[str], between: Link) -> Task:
    depth = len(kind_of)
    chunks = config.pipeline.chunks if config.pipeline.order == "interleaved" and depth > 1 else 1
    if depth * chunks > len(names):
        what = f"{depth} stages" + (f" of {chunks} chunks each" if chunks > 1 else "")
        counted = count(len(names), "block")
        most = len(names) // chunks
        do = "leave pipeline out" if len(names) == 1 else "set fewer pipeline.chunks" if most < 2 else \
            f"cut it over {count(most, 'rank')} at most"
        raise UserError(f"the model has {counted} ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
                        f" for {what}", "a block for each part", f"{do}, or give the model more blocks")
    fixed = _fixed(config.pipeline.cut, names, depth * chunks) if depth > 1 else ()
    assert isinstance(config.shares, (list, tuple))
    shares = config.shares or [1.0] * copies
    samples = max(1, math.ceil(config.global_batch * shares[copy] / sum(shares)))
    micros = _parts(config, depth, samples)
    return Task(tuple(kinds), tuple(sorted(kind_of)), config.pipeline.order, micros, chunks, fixed,
                between.latency_s, between.byte_s)


def _fixed(cut: Sequence[str], names: Sequence[str], parts: int) -> tuple[int, ...]:
    """The first block of each part as ``pipeline.cut`` names them; () where it names none."""
    if not cut:
        return ()
    for name in cut:
        if name not in names:
            raise UserError(f"pipeline.cut has {name!r}, which is no block of the model", nearest(name, list(names)),
                            "name blocks that stages begin with")
    starts = (0, *(list(names).index(name) for name in cut))
    if len(starts) != parts:
        raise UserError(f"pipeline.cut names {count(len(cut), 'block')} for a copy in {parts} parts",
                        f"{count(parts - 1, 'name')}: of "
                        "the block that each part but the first begins with", "correct pipeline.cut, or leave it out")
    if any(a >= b for a, b in zip(starts, starts[1:])):
        raise UserError(f"pipeline.cut is {list(cut)}", "blocks in the order of the model, none twice and not its "
                        f"first, {names[0]!r}", "correct pipeline.cut")
    return starts


def _seated(ranks: Sequence[int], kind_of: Sequence[int], places: Sequence[int]) -> list[int]:
    """The rank at each place: those of one kind in their own order."""
    waiting = {kind: [r for r, own in zip(ranks, kind_of) if own == kind] for kind in set(kind_of)}
    return [waiting[kind].pop(0) for kind in places]


def _too_large(task: Task, config: Config) -> UserError:
    """The error that names the fullest stage of the cut that spreads memory best."""
    choice = Choice(spread(task).places, task.fixed) if task.fixed else spread(task)
    full = fullness(task, choice)
    place = max(range(task.depth), key=lambda i: full[i])
    kind, held = task.kinds[choice.places[place]], choice.holds(task, place)
    blocks = ", ".join(span(kind.blocks, chunk) for chunk in choice.chunks(task, place))
    return UserError(f"stage {place} of {task.depth} ({blocks}) needs {format_bytes(held.total)} and {kind.device} has "
                     f"{format_bytes(kind.capacity_bytes)} ({held.words()}), in the cut that spreads memory best",
                     "a cut that fits the memory of the ranks", _remedy(task, config))


def _remedy(task: Task, config: Config) -> str:
    """What would help, of what is known to."""
    helps = []
    if task.order == "gpipe" and search(replace(task, order="1f1b")) is not None:
        helps.append("pipeline.order: 1f1b, which holds fewer activations")
    if not task.fixed:
        small = min(set(task.kind_of), key=lambda k: task.kinds[k].capacity_bytes or math.inf)
        for more in range(1, MORE_STAGES + 1):
            deeper = replace(task, kind_of=(*task.kind_of, *(small,) * more))
            if deeper.depth * deeper.chunks <= deeper.n and search(deeper) is not None:
                helps.append(f"{deeper.depth} stages (pipeline.stages, or pipeline.depths of this copy)")
                break
    elif search(replace(task, fixed=())) is not None:
        helps.append("no pipeline.cut, for a cut that fits")
    bare = replace(task, kinds=tuple(_without_activations(kind) for kind in task.kinds))
    if search(bare) is not None:
        helps.append("a smaller micro_batch (more pipeline.micro_batches)")
        helps.append("remat, which keeps fewer activations" if config.remat == "off" else "a smaller model")
    return "set " + ", or ".join(helps) if helps else "use a smaller model, or an optimizer with less state"


def _without_activations(kind: Measured) -> Measured:
    return replace(kind, blocks=tuple(replace(block, activation_bytes=0) for block in kind.blocks))


def even_layout(config: Config, mesh: Mesh, names: Sequence[str]) -> Layout:
    """Return the layout that ``pipeline.cut`` names, else one with about as many blocks in each chunk."""
    assert cut_over_ranks(config)
    row = Measured(tuple(Block(name, 1.0, 0, 0) for name in names), 1, 0, Needs(), "")
    layout = planned([row] * sum(map(len, mesh.copies)), config, mesh)
    return Layout(layout.mesh, layout.names, layout.starts)


def rows(layout: Planned) -> list[dict[str, Any]]:
    """Return what is planned of each copy and stage, JSON-able: a record's ``stages``. Seconds are of a step."""
    found = []
    for copy, (plan, ranks) in enumerate(zip(layout.plans, layout.mesh.copies)):
        for stage, rank in enumerate(ranks):
            kind, held = plan.task.kinds[plan.choice.places[stage]], plan.choice.holds(plan.task, stage)
            found.append({
                "copy": copy, "stage": stage, "rank": rank, "host": layout.hosts[rank], "device": kind.device,
                "blocks": ", ".join(span(kind.blocks, chunk) for chunk in plan.choice.chunks(plan.task, stage)),
                "busy_s": plan.step.busy_s[stage], "micro_batches": plan.task.micros,
                "parameters_bytes": int(held.parameters), "gradients_bytes": int(held.gradients),
                "optimizer_bytes": int(held.slots), "activations_bytes": int(held.activations),
                "capacity_bytes": kind.capacity_bytes})
    return found


def record(layout: Planned) -> dict[str, Any]:
    """Return what is planned of all copies, JSON-able."""
    return {"stages": rows(layout), "step_s": layout.step_s, "idle_share": layout.idle_share}


def text(layout: Planned) -> str:
    """Return the table with a first line and the predictions in words."""
    lines: list[tuple[str, ...]] = []
    for row in rows(layout):
        sizes = [row[f"{kind}_bytes"] / MIB for kind in ("parameters", "gradients", "optimizer", "activations")]
        capacity = f"{row['capacity_bytes'] / MIB:.0f}" if row["capacity_bytes"] else "?"
        lines.append((str(row["copy"]), str(row["stage"]), str(row["rank"]), row["host"], row["device"], row["blocks"],
                      f"{1e3 * row['busy_s']:.2f}", *(f"{mib:.2f}" for mib in (*sizes, sum(sizes))), capacity))
    return "\n".join([f"model cut over ranks, {layout.plans[0].task.order} (predicted; ms of a step, memory in MiB)",
                      as_text(HEAD, lines, "  "), *("  " + line for line in foretold(layout))])


def foretold(layout: Planned) -> list[str]:
    """Return the predicted step and idle share of each copy, equal ones together, and of all."""
    said: dict[str, list[int]] = {}
    for copy, plan in enumerate(layout.plans):
        said.setdefault(f"{count(plan.task.micros, 'micro-batch', 'micro-batches')} in "
                        f"{1e3 * plan.step.step_s:.2f} ms, "
                        f"{plan.step.idle_share:.1%} idle", []).append(copy)
    lines = [f"{'copy' if len(copies) == 1 else 'copies'} {', '.join(map(str, copies))}: {words}"
             for words, copies in said.items()]
    if len(layout.plans) > 1:
        lines.append(f"all: {1e3 * layout.step_s:.2f} ms, {layout.idle_share:.1%} idle")
    return lines


def measured_text(layout: Planned, busy_s: Sequence[float], step_s: float, idle_share: float) -> str:
    """Return the stages' planned and measured times of a step side by side; ``busy_s``: measured, by rank."""
    lines = [(*(str(row[name]) for name in HEAD[:6]), f"{1e3 * row['busy_s']:.2f}",
              f"{1e3 * busy_s[row['rank']]:.2f}") for row in rows(layout)]
    return "\n".join([
        "model cut over ranks, planned and measured (of a step)",
        as_text((*HEAD[:6], "ms planned", "ms measured"), lines, "  "),
        f"  forwards and backwards: {1e3 * layout.step_s:.2f} ms planned, {1e3 * step_s:.2f} ms measured",
        f"  idle: {layout.idle_share:.1%} planned, {idle_share:.1%} measured"])
