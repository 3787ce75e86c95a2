"""Options that reduce the memory of training: saving, cost and the line to type. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hvdtrain.config import Config
from hvdtrain.core.protocols import BlockCost
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.units import Footprint, format_bytes
from hvdtrain.planning.memory import fit
from hvdtrain.planning.memory.fit import RematChoice
from hvdtrain.planning.memory.forecast import MARGIN, MemoryFacts, forecast

LEAST_PART = 0.01
"""Part of what a rank holds that an option has to save to be worth a line."""

BF16_PART = 0.6
"""Part of the activations that is left in bf16 where it was not measured: losses, norms and masks stay as they are."""


@dataclass(frozen=True)
class Option:
    """A change of settings, and the memory of each rank with it (``needs_P``).

    ``line``: what to add to the command. ``cost``: as text.
    """

    name: str
    line: str
    cost: str
    needs_P: tuple[Footprint, ...]

    def saved(self, now_P: Sequence[Footprint]) -> int:
        """Return the bytes saved on the rank that holds most now."""
        worst = max(range(len(now_P)), key=lambda r: now_P[r].total)
        return now_P[worst].total - self.needs_P[worst].total

    def fits(self, free_P: Sequence[int | None]) -> bool:
        """Return whether it fits every rank whose memory is known."""
        return all(free is None or need.total <= free for need, free in zip(self.needs_P, free_P))


@dataclass(frozen=True)
class Change:
    """An `Option` without its numbers, to be tried on each rank's facts."""

    name: str
    line: str
    cost: str
    apply: Callable[[MemoryFacts], MemoryFacts]


def changes(facts: MemoryFacts, config: Config, buckets: Sequence[Bucket], parts_P: Sequence[float],
            has_blocks: bool = False, device: str = "cpu") -> Iterator[Change]:
    """Yield the changes to try, the same on every rank. ``buckets``, ``parts_P``: those of ZeRO.

    ``has_blocks``: the model file names blocks to split along. ``device``: kind of the ranks' devices.
    """
    yield from _zero(facts, config, buckets, parts_P)
    micro = facts.rank.micro_batch
    if micro >= 2:
        twice = 2 * config.accumulate
        yield Change("accumulation", f"--accumulate {twice}", f"twice as many micro-batches ({twice} of half the size)",
                     lambda f: replace(f, rank=replace(f.rank, micro_batch=-(-f.rank.micro_batch // 2),
                                                       micros=2 * f.rank.micros)))
    yield from _remat(facts, config)
    if config.precision == "fp32" and facts.model.framework != "numpy":
        yield Change("bf16", "--precision bf16", "rounds activations to bf16 (8 bits of 24); how much it saves is "
                     f"estimated, not measured: {100 * (1 - BF16_PART):.0f} % of activations", in_bf16)
    if has_blocks and config.model_parallel == 1 and device != "cpu":
        yield Change("split", "--model_parallel 2", "two devices for each rank, which wait for each other "
                     "during part of each step", _split)


def _remat(facts: MemoryFacts, config: Config) -> Iterator[Change]:
    """Yield recomputation: the cheapest blocks that fit, or all if this rank fits without."""
    blocks = facts.measured.blocks
    if config.remat != "off" or not any(cost.saved_bytes > 0 for cost in blocks):
        return
    chosen = choice(facts, facts.rank.free_bytes)
    yield Change("remat auto", "--remat auto", f"computes {len(chosen.names)} of {len(blocks)} blocks again: "
                 f"{1e3 * chosen.seconds:.3g} ms a micro-batch", lambda f: spared(
                     f, choice(f, f.rank.free_bytes)))
    if not chosen.names:
        most = choice(facts, 0)
        yield Change("remat", f"--remat {','.join(most.names)}" if len(most.names) < len(blocks) else "--remat every:1",
                     f"computes {len(most.names)} of {len(blocks)} blocks again: {1e3 * most.seconds:.3g} ms a "
                     "micro-batch", lambda f: spared(f, choice(f, 0)))


def _zero(facts: MemoryFacts, config: Config, buckets: Sequence[Bucket], parts_P: Sequence[float]) -> Iterator[Change]:
    """Yield the stages of ZeRO beyond the current one."""
    elementwise, size = facts.model.elementwise, facts.rank.size
    if size < 2 or not elementwise or config.data_parallel.name not in ("replicate", "zero"):
        return
    split_keras = config.model_parallel > 1 and facts.model.framework == "tensorflow"
    if split_keras or config.compression == "auto" or facts.way.wire == "null":  # which ZeRO refuses
        return
    gathered = format_bytes(sum(b.nbytes for b in buckets))
    for stage in range(facts.way.stage + 1, 3):
        if stage == 2 and facts.rank.micros > 1:
            continue  # gradients stay whole while they are accumulated
        said = config.data_parallel.stage == stage  # a bare name leaves a stage that is set elsewhere as it is
        line = "--data_parallel zero" if said else f"--data_parallel.name zero --data_parallel.stage {stage}"
        yield Change(f"zero stage {stage}", line, f"gathers {gathered} of parameters a step", _with_stage(
            stage, buckets, parts_P))


def _with_stage(stage: int, buckets: Sequence[Bucket], parts_P: Sequence[float]) -> Callable[[MemoryFacts],
                                                                                             MemoryFacts]:
    def apply(facts: MemoryFacts) -> MemoryFacts:
        return replace(facts, way=replace(facts.way, stage=stage, buckets=buckets, parts_P=parts_P, sizes_BP=()))
    return apply


def in_bf16(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts of a rank that computes in bf16."""
    line = facts.measured.line
    if line is None:
        return facts
    less = replace(line, base_E=BF16_PART * line.base_E, slope_E=BF16_PART * line.slope_E)
    return replace(facts, measured=replace(facts.measured, line=less))


def _split(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts with half of the blocks on each device, as near as their parameters allow."""
    model, line = facts.model, facts.measured.line
    total = sum(model.param_bytes)
    at, held = 0, 0
    blocks = sorted({spec.block for spec in model.specs})
    while at < len(blocks) and 2 * held < total:
        held += sum(n for spec, n in zip(model.specs, model.param_bytes) if spec.block == blocks[at])
        at += 1
    part = max(held, total - held) / total if total else 1.0
    kept = [i for i, spec in enumerate(model.specs) if (spec.block in blocks[:at]) == (2 * held >= total)]
    half = replace(model, specs=[model.specs[i] for i in kept], slots=[model.slots[i] for i in kept],
                   other_bytes=int(model.other_bytes * part))
    less = None if line is None else replace(line, base_E=line.base_E * part, slope_E=line.slope_E * part, made=())
    return replace(facts, model=half, measured=replace(facts.measured, line=less), way=replace(facts.way, buckets=()))


def tried(facts: MemoryFacts, found: Sequence[Change]) -> list[Footprint]:
    """Return the memory of this rank with each change."""
    return [forecast(change.apply(facts)) for change in found]


def ranked(found: Sequence[Option], now_P: Sequence[Footprint], free_P: Sequence[int | None]) -> list[Option]:
    """Return the options that save something, best first: those that fit, then by saving."""
    least = LEAST_PART * max(need.total for need in now_P)
    useful = [option for option in found if option.saved(now_P) > least]
    return sorted(useful, key=lambda o: (not o.fits(free_P), -o.saved(now_P)))


def costs(facts: MemoryFacts, micro_batch: int) -> list[BlockCost]:
    """Return saving and cost of recomputing each block with so many samples, including fragmentation."""
    measured = facts.measured
    return fit.scaled(measured.blocks, micro_batch / measured.block_samples, MARGIN[facts.model.framework])


def choice(facts: MemoryFacts, free: int | None) -> RematChoice:
    """Return the cheapest blocks that reduce this rank's memory to ``free`` bytes; None: unlimited."""
    return fit.cheapest(costs(facts, facts.rank.micro_batch), forecast(facts).total,
                             sys.maxsize if free is None else free)


def spared(facts: MemoryFacts, chosen: RematChoice) -> MemoryFacts:
    """Return the facts of a rank that recomputes ``chosen``."""
    less = (forecast(facts).total - chosen.peak) / (1 + MARGIN[facts.model.framework])
    return replace(facts, measured=replace(facts.measured, spared=int(less)))
