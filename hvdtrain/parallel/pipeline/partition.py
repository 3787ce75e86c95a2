"""Agreement of all ranks on one partition of a model, over ranks or over the devices of each.

Profiles come from the backends, the partition from `hvdtrain.planning.pipeline.search`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config, cut_over_ranks, micro_batches
from hvdtrain.core.comparison import Origin, finite, plain_name
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.core.mesh import Layout, Mesh
from hvdtrain.core.protocols import Batch, Cargo, Control, Pair, PipelineStage
from hvdtrain.core.terminal import say
from hvdtrain.core.units import format_bytes
from hvdtrain.parallel.pipeline.messages import measure_links
from hvdtrain.parallel.pipeline.plan import CopyPlan, DevicePlan, Planned, span, text
from hvdtrain.planning.batch.sampler import cut
from hvdtrain.planning.batch.sampler import micro_batches as bounds_of
from hvdtrain.planning.linear import Link
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs, evened, micro_samples, slowest, split_micros
from hvdtrain.planning.pipeline.orders import FORWARD, Action
from hvdtrain.planning.pipeline.search import Partition, Task, fullness, search, spread

MORE_STAGES = 8
"""Further stages that are tried if a model does not fit."""


def agree(measured: DeviceProfile, config: Config, control: Control, mesh: Mesh,
          links: Sequence[Link] | None = None) -> Planned:
    """Return the one layout of all ranks, from each rank's profile; collective. Rank 0 prints its table.

    ``links``: of messages within each copy, () for none; None: measured here. Errors: `UserError` on every rank for
    different models, too few blocks, too little memory.
    """
    if config.emulate_speed:
        measured = measured.slowed(config.emulate_speed[control.rank])
    rows = control.gather((measured, control.node))
    hosts = [node for _, node in rows]
    if links is None:
        cargo_bytes = max(b.cargo_bytes for row, _ in rows for b in row.blocks[:-1] or row.blocks)
        links = measure_links(control, mesh, cargo_bytes, hosts)
    layout = agreed(control, lambda: planned([row for row, _ in rows], config, mesh, hosts, links), "pipeline")
    # Heterogeneous processors may round a sum differently: rank 0's choice is valid for all.
    copies, starts = control.bcast((layout.mesh.copies, layout.starts))
    layout = replace(layout, mesh=mesh.ordered(copies), starts=starts)
    if control.rank == 0 and config.progress != "off":
        say(text(layout))
        for rank, (row, _) in enumerate(rows):
            if row.why:
                say(f"note: rank {rank} measured its blocks with fewer samples than a micro-batch: {row.why}")
    return layout


def planned(rows: Sequence[DeviceProfile], config: Config, mesh: Mesh, hosts: Sequence[str] = (),
            links: Sequence[Link] = ()) -> Planned:
    """Return the layout for the ranks' profiles; ``links``: of each copy. Pure."""
    names = rows[0].names
    _check_same(rows)
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


def agree_devices(profiles: Sequence[DeviceProfile], config: Config, control: Control) -> DevicePlan:
    """Return the one partition over each rank's devices, from profiles by device; collective. Rank 0 prints its table.

    A block costs what it costs the slowest rank. Errors: `UserError` on every rank for different models, too few
    blocks, too little memory.
    """
    rows = control.gather(tuple(profiles))

    def made() -> DevicePlan:
        _check_same([row[0] for row in rows])
        kinds = tuple(map(slowest, zip(*rows)))
        n, names = len(kinds), kinds[0].names
        if n > len(names):
            raise UserError(f"model_parallel is {n} and the model has {count(len(names), 'block')} "
                            f"({', '.join(names[:6])})", f"{count(len(names), 'device')} at most: each "
                            "needs a block", f"set model_parallel: {len(names)}")
        task = Task(kinds, tuple(range(n)), "gpipe", split_micros(config), ordered=True)
        found = search(task)
        if found is None:
            raise _too_large(task, config)
        plan = DevicePlan(task, *found, devices=tuple(profile.device for profile in profiles))
        held = [plan.choice.holds(task, stage) for stage in range(n)]
        total, most = math.fsum(h.total for h in held), kinds[0].together_bytes
        if most and total > most:
            raise UserError(f"training needs {format_bytes(total)} and the devices share {format_bytes(most)}",
                            "a model that fits the memory they share",
                            "use a smaller model or micro_batch, or fewer ranks on each host")
        return plan

    plan = agreed(control, made, "split")
    plan = replace(plan, choice=control.bcast(plan.choice))  # heterogeneous processors may round a sum differently
    if control.rank == 0 and config.progress != "off":
        say(plan.table())
    return plan


def _check_same(rows: Sequence[DeviceProfile]) -> None:
    """Raise `UserError` unless all ranks have the same blocks."""
    for rank, row in enumerate(rows):
        if [(b.name, b.param_bytes) for b in row.blocks] != [(b.name, b.param_bytes) for b in rows[0].blocks]:
            raise UserError(f"rank {rank} has blocks that differ from rank 0's", "the same model on every rank",
                            "build the model on every rank in the same way")


def measured_samples(config: Config, mesh: Mesh) -> int:
    return micro_samples(config, mesh.copy, len(mesh.copies), micro_batches(config, mesh.depth))


def _parts(config: Config, depth: int, samples: int) -> int:
    """Return the micro-batches of a step in which a copy takes ``samples``."""
    return len(bounds_of(samples, micro_batches(config, depth), config.micro_batch_limit))


def _as_before(mesh: Mesh, copy: int, task: Task, kind_of: Sequence[int], names: Sequence[str]) -> CopyPlan | None:
    """Return the plan of the checkpoint being resumed; None if there is none or it does not fit ranks or keys."""
    before = mesh.before
    if before is None or before.names != tuple(names) or copy >= len(before.copies):
        return None
    ranks, starts = before.copies[copy], before.starts[copy]
    chunks = task.depth * (task.chunks if task.depth > 1 else 1)
    if sorted(ranks) != sorted(mesh.copies[copy]) or len(starts) != chunks or task.fixed not in ((), starts):
        return None
    choice = Partition(tuple(kind_of[rank] for rank in ranks), starts)
    return CopyPlan(task, choice, choice.played(task)) if choice.fits(task) else None


def _task(config: Config, copy: int, copies: int, kinds: Sequence[DeviceProfile], kind_of: Sequence[int],
          names: Sequence[str], between: Link) -> Task:
    depth = len(kind_of)
    chunks = config.pipeline.chunks if config.pipeline.order == "interleaved" and depth > 1 else 1
    if depth * chunks > len(names):
        what = f"{depth} stages" + (f" of {chunks} chunks each" if chunks > 1 else "")
        counted = count(len(names), "block")
        most = len(names) // chunks
        do = "leave pipeline out" if len(names) == 1 else "set fewer pipeline.chunks" if most < 2 else \
            f"partition it over {count(most, 'rank')} at most"
        raise UserError(f"the model has {counted} ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
                        f" for {what}", "a block for each stage", f"{do}, or give the model more blocks")
    fixed = _fixed(config.pipeline.cut, names, depth * chunks) if depth > 1 else ()
    assert isinstance(config.shares, (list, tuple))
    shares = config.shares or [1.0] * copies
    samples = max(1, math.ceil(config.global_batch * shares[copy] / sum(shares)))
    micros = _parts(config, depth, samples)
    return Task(tuple(kinds), tuple(sorted(kind_of)), config.pipeline.order, micros, chunks, fixed,
                between.alpha_s, between.beta_s_per_byte)


def _fixed(cut: Sequence[str], names: Sequence[str], parts: int) -> tuple[int, ...]:
    """Return the first block of each chunk by ``pipeline.cut``; () without the key."""
    if not cut:
        return ()
    for name in cut:
        if name not in names:
            raise UserError(f"pipeline.cut has {name!r}, which is no block of the model", nearest(name, list(names)),
                            "name the first blocks of stages")
    starts = (0, *(list(names).index(name) for name in cut))
    if len(starts) != parts:
        raise UserError(f"pipeline.cut names {count(len(cut), 'block')} for a replica of {parts} stages",
                        f"{count(parts - 1, 'name')}: of "
                        "the first block of each stage except the first", "correct pipeline.cut, or leave it out")
    if any(a >= b for a, b in zip(starts, starts[1:])):
        raise UserError(f"pipeline.cut is {list(cut)}", "blocks in the order of the model, none twice and not its "
                        f"first, {names[0]!r}", "correct pipeline.cut")
    return starts


def _seated(ranks: Sequence[int], kind_of: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the rank at each place, those of one kind in ascending order."""
    waiting = {kind: [r for r, own in zip(ranks, kind_of) if own == kind] for kind in set(kind_of)}
    return [waiting[kind].pop(0) for kind in places]


def _too_large(task: Task, config: Config) -> UserError:
    """Return the error that names the fullest stage of the partition that spreads memory best."""
    choice = Partition(spread(task).places, task.fixed) if task.fixed else spread(task)
    full = fullness(task, choice)
    place = max(range(task.depth), key=lambda i: full[i])
    kind, held = task.kinds[choice.places[place]], choice.holds(task, place)
    blocks = ", ".join(span(kind.names, chunk) for chunk in choice.chunks(task, place))
    return UserError(f"stage {place} of {task.depth} ({blocks}) needs {format_bytes(held.total)} and {kind.device} has "
                     f"{format_bytes(kind.capacity_bytes)} ({held.words()}), in the partition that balances memory "
                     "best",
                     "a partition that fits the memory of the ranks", _remedy(task, config))


def _remedy(task: Task, config: Config) -> str:
    """Return the changes of settings that are known to help."""
    helps = []
    if task.order == "gpipe" and not task.ordered and search(replace(task, order="1f1b")) is not None:
        helps.append("pipeline.order: 1f1b, which holds fewer activations")
    if not task.fixed:
        small = min(set(task.kind_of), key=lambda k: task.kinds[k].capacity_bytes or math.inf)
        for more in range(1, MORE_STAGES + 1):
            deeper = replace(task, kind_of=(*task.kind_of, *(small,) * more))
            if deeper.depth * deeper.chunks <= deeper.n and search(deeper) is not None:
                helps.append(f"model_parallel: {deeper.depth}" if task.ordered else
                             f"{deeper.depth} stages (pipeline.stages, or pipeline.depths of this replica)")
                break
    elif search(replace(task, fixed=())) is not None:
        helps.append("no pipeline.cut, for a partition that fits")
    bare = replace(task, kinds=tuple(_without_activations(kind) for kind in task.kinds))
    if search(bare) is not None:
        helps.append("a smaller micro_batch" + ("" if task.ordered else " (more pipeline.micro_batches)"))
        helps.append("remat, which keeps fewer activations" if config.remat == "off" else "a smaller model")
    return "set " + ", or ".join(helps) if helps else "use a smaller model, or an optimizer with less state"


def _without_activations(kind: DeviceProfile) -> DeviceProfile:
    return replace(kind, blocks=tuple(replace(block, activation_bytes=0) for block in kind.blocks))


def even_layout(config: Config, mesh: Mesh, names: Sequence[str]) -> Layout:
    """Return the layout of ``pipeline.cut``, else one with about as many blocks in each chunk."""
    assert cut_over_ranks(config)
    row = DeviceProfile(tuple(Block(name, 1.0, 0, 0) for name in names), 1, 0, Needs(), "")
    layout = planned([row] * sum(map(len, mesh.copies)), config, mesh)
    return Layout(layout.mesh, layout.names, layout.starts)


class Places:
    """Numbers and ranks of the chunks next to those of this rank."""

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        self._ranks, self._depth, self._place = mesh.ranks, mesh.depth, mesh.place
        self.own, self.all = len(layout.mine), len(layout.chunks())

    def number(self, chunk: int) -> int:
        """Return the copy's number of this rank's chunk."""
        return chunk * self._depth + self._place

    def last(self, action: Action) -> bool:
        """Return whether ``action`` is the forward of the copy's last chunk."""
        return action.phase == FORWARD and self.number(action.chunk) == self.all - 1

    def before(self, action: Action) -> int | None:
        """Return the chunk whose output ``action`` needs; None if it needs the batch or the loss."""
        number = self.number(action.chunk) + (-1 if action.phase == FORWARD else 1)
        return number if 0 <= number < self.all else None

    def behind(self, action: Action) -> int | None:
        """Return the chunk that needs the output of ``action``; None without one."""
        number = self.number(action.chunk) + (1 if action.phase == FORWARD else -1)
        return number if 0 <= number < self.all else None

    def rank(self, number: int) -> int:
        """Return the rank of a chunk."""
        return self._ranks[number % self._depth]


class Looking:
    """`PipelineStage` that checks the input and output of the chunks of ``stage``.

    ``first``: turn of the earliest action with finite input and an output that is not; None without one. ``came_bad``:
    whether the input of a backward was not finite.
    """

    def __init__(self, stage: PipelineStage, places: Places) -> None:
        self._stage, self._places = stage, places
        self.first: int | None = None
        self.came_bad = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        gave = self._stage.forward(chunk, micro, came, batch)
        self._look(self._places.number(chunk), _good(came), _good(gave))
        return gave

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        pair = self._stage.loss(chunk, micro, came, batch, scale)
        self._look(self._places.number(chunk), _good(came), bool(np.isfinite(float(pair[0]))))
        self.came_bad = self.came_bad or not _good(came)
        return pair

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        gave = self._stage.backward(chunk, micro, came)
        self._look(self.turn_back(chunk), _good(came), _good(gave))
        self.came_bad = self.came_bad or not _good(came)
        return gave

    def turn_back(self, chunk: int) -> int:
        """Return the turn of a chunk's backward."""
        return 2 * self._places.all - 1 - self._places.number(chunk)

    def origin(self, name: str, blocks: str) -> Origin | None:
        """Return the origin on this rank, None without one; ``name``: its first bad gradient, in ``blocks``."""
        if self.first is None and (self.came_bad or not name):
            return None
        what = f"the gradient of {plain_name(name)}" if name else f"the output of {blocks}"
        return Origin(self.turn_back(0) if self.first is None else self.first, what)

    def _look(self, turn: int, good: bool, still: bool) -> None:
        if good and not still and (self.first is None or turn < self.first):
            self.first = turn


def _good(cargo: Cargo | None) -> bool:
    """Return whether all of a cargo is finite."""
    return cargo is None or all(finite(f"#{dtype.partition(':')[0]}", array)
                                for array, dtype in zip(cargo.arrays, cargo.dtypes))
