"""torch.profiler's events as spans of a trace: operations by thread, kernels and copies by stream of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.core.timeline.spans import KERNEL, Marks, Span

_MARK, _WARM = "hvdtrain mark", "hvdtrain start"


class Profiler:
    """Implements `hvdtrain.core.timeline.spans.Profiler` for PyTorch."""

    def __init__(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._marks = Marks(lambda: torch.profiler.record_function(_MARK))
        self.within_s = 0.0

    def start(self) -> None:
        """Begin; takes seconds the first time on a GPU."""
        self._profile.start()
        with torch.profiler.record_function(_WARM):  # the first takes milliseconds
            pass
        self._marks.put()

    def stop(self) -> list[Span]:
        """End, and return what was found."""
        self._marks.put()
        self._profile.stop()
        found = [(e.name, _lane(e), e.time_range.start, e.time_range.end, _cause(e)) for e in self._profile.events()]
        shift_s, self.within_s = self._marks.shift([begin / 1e6 for name, _, begin, _, cause in found
                                                    if name == _MARK and cause != KERNEL])
        return [Span(name, lane, begin / 1e6 + shift_s, end / 1e6 + shift_s, cause)
                for name, lane, begin, end, cause in found if name not in (_MARK, _WARM)]


def ranges() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Return what begins and ends an NVTX range, which Nsight Systems shows beside the kernels of a GPU."""
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop


def _lane(event: Any) -> str:
    if event.device_type == torch.autograd.DeviceType.CPU:
        return f"torch thread {event.thread}"
    return f"gpu {event.device_index} stream {event.device_resource_id}"


def _cause(event: Any) -> str:
    return "torch" if event.device_type == torch.autograd.DeviceType.CPU else KERNEL
