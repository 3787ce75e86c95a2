"""Where a chain of blocks is cut over devices: contiguous, so that the slowest device is as fast as can be.

Owns the choice; pure. What a device holds is counted by `hvdtrain.planning.pipeline.blocks`; measuring is the
backends'.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.core.errors import UserError, count
from hvdtrain.core.units import format_bytes
from hvdtrain.planning.pipeline.blocks import Block, Needs


@dataclass(frozen=True)
class Cut:
    """The first block of each stage, ascending from 0; stage s is on device s."""

    starts: tuple[int, ...]

    def stages(self, n: int) -> list[range]:
        """The block numbers of each stage, of ``n`` blocks in all."""
        return [range(a, b) for a, b in zip(self.starts, (*self.starts[1:], n))]

    def stage_of(self, block: int) -> int:
        """The stage that has this block."""
        return bisect_right(self.starts, block) - 1


def min_max_cut(blocks: Sequence[Block], devices: int, capacity_bytes: Sequence[float] = (),
                needs: Needs | None = None, speeds: Sequence[float] = ()) -> Cut:
    """The contiguous cut whose slowest stage is fastest; each device has a block at least. Exact.

    ``capacity_bytes``: of each device, 0 or nothing for no limit; ``needs``: what training holds beside parameters;
    ``speeds``: relative speed of each device, nothing for equal ones. Among equals the cut with the later starts.
    By dynamic programming over (devices used, blocks placed), O(devices x blocks^2).
    Errors: `UserError` for more devices than blocks, and where no cut fits.
    """
    n, needs = len(blocks), needs or Needs()
    if devices > n:
        raise UserError(f"model_parallel is {devices} and the model has {count(n, 'block')}"
                        + (f" ({', '.join(b.name for b in blocks[:6])})" if n <= 6 else ""),
                        f"{count(n, 'device')} at most: each holds a block at least",
                        f"set model_parallel: {max(1, n)}")
    room = [c or math.inf for c in capacity_bytes] or [math.inf] * devices
    fast = list(speeds) or [1.0] * devices
    assert len(room) == len(fast) == devices, "a capacity and a speed for each device"
    sums = _Sums(blocks)

    def seconds(device: int, begin: int, end: int) -> float:
        if sums.bytes(needs, begin, end) > room[device]:
            return math.inf
        return sums.cost(begin, end) / fast[device]

    slowest_s, starts = _best(n, devices, seconds)
    if math.isinf(slowest_s):
        raise _too_large(blocks, devices, room, needs)
    return Cut(starts)


class _Sums:
    """Costs and bytes of ``blocks[begin:end]``, each from two entries of a running sum."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._cost_s, self._param, self._activation = [0.0], [0], [0]
        for block in blocks:
            self._cost_s.append(self._cost_s[-1] + block.cost_s)
            self._param.append(self._param[-1] + block.param_bytes)
            self._activation.append(self._activation[-1] + block.activation_bytes)

    def cost(self, begin: int, end: int) -> float:
        return self._cost_s[end] - self._cost_s[begin]

    def bytes(self, needs: Needs, begin: int, end: int) -> float:
        return needs.total(self._param[end] - self._param[begin], self._activation[end] - self._activation[begin])


def _best(n: int, devices: int, value: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The least largest ``value(device, begin, end)`` over contiguous cuts of n blocks, and its starts."""
    best = [value(0, 0, end) if end else math.inf for end in range(n + 1)]
    chosen: list[list[int]] = []
    for device in range(1, devices):
        row, begins = [math.inf] * (n + 1), [device] * (n + 1)
        for end in range(device + 1, n + 1):
            for begin in range(end - 1, device - 1, -1):
                worst = max(best[begin], value(device, begin, end))
                if worst < row[end]:
                    row[end], begins[end] = worst, begin
        best = row
        chosen.append(begins)
    starts, end = [], n
    for begins in reversed(chosen):
        end = begins[end]
        starts.append(end)
    return best[n], (0, *reversed(starts))


def _too_large(blocks: Sequence[Block], devices: int, room: Sequence[float], needs: Needs) -> UserError:
    """The error that names the fullest device of the cut that spreads memory best."""
    sums = _Sums(blocks)

    def fullness(device: int, begin: int, end: int) -> float:
        return sums.bytes(needs, begin, end) / room[device]

    _, starts = _best(len(blocks), devices, fullness)
    stages = Cut(starts).stages(len(blocks))
    full = max(range(devices), key=lambda s: fullness(s, stages[s].start, stages[s].stop))
    held = needs.of([blocks[i] for i in stages[full]])
    part = blocks[stages[full].start].name
    if len(stages[full]) > 1:
        part += f"..{blocks[stages[full].stop - 1].name}"
    return UserError(f"stage {full} ({part}) needs {format_bytes(held.total)} and device {full} has "
                     f"{format_bytes(room[full])} ({held.words()}), in the cut that spreads memory best",
                     "a cut that fits the devices", _remedy(blocks, devices, room, needs, fullness))


def _remedy(blocks: Sequence[Block], devices: int, room: Sequence[float], needs: Needs,
            fullness: Callable[[int, int, int], float]) -> str:
    """What would help: more devices like the smallest, else a smaller micro-batch or model."""
    smallest = min(room)
    sums = _Sums(blocks)
    for more in range(devices + 1, len(blocks) + 1):
        if _best(len(blocks), more, lambda d, a, b: sums.bytes(needs, a, b) / smallest)[0] <= 1:
            smaller = ", or a smaller micro_batch" if any(b.activation_bytes for b in blocks) else ""
            return f"set model_parallel: {more}{smaller}"
    only_parameters = max(needs.total(b.param_bytes, 0) for b in blocks)
    if only_parameters > smallest:
        return "use a smaller model, or an optimizer with less state"
    return "set a smaller micro_batch, or precision: bf16"
