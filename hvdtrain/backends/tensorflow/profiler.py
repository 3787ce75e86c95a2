"""tf.profiler's events as spans of a trace: operations by thread, kernels and copies by stream of a device."""

from __future__ import annotations

import ctypes
import ctypes.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.core.timeline.spans import KERNEL, Marks, Span

_MARK = "hvdtrain mark"


class Profiler:
    """Implements `hvdtrain.core.timeline.spans.Profiler` for TensorFlow."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-profile-")
        self._marks = Marks(lambda: tf.profiler.experimental.Trace(_MARK))
        self.within_s = 0.0

    def start(self) -> None:
        tf.profiler.experimental.start(self._folder.name)
        self._marks.put()

    def stop(self) -> list[Span]:
        self._marks.put()
        tf.profiler.experimental.stop()
        with self._folder:
            found = [event for path in Path(self._folder.name).rglob("*.xplane.pb") for event in _events(path)]
        shift_s, self.within_s = self._marks.shift([begin_s for name, _, begin_s, _, _ in found if name == _MARK])
        return [Span(name, lane, begin_s + shift_s, end_s + shift_s, cause)
                for name, lane, begin_s, end_s, cause in found if name != _MARK]


def ranges() -> tuple[Callable[[str], Any], Callable[[], Any]] | None:
    """Return functions that begin and end an NVTX range, which Nsight Systems shows; None without CUDA's library for
    it.

    TensorFlow has none of its own; CUDA's toolkit has, and pip's nvidia-nvtx.
    """
    try:
        library = ctypes.CDLL(ctypes.util.find_library("nvToolsExt") or "libnvToolsExt.so.1")
    except OSError:
        return None
    library.nvtxRangePushA.argtypes = [ctypes.c_char_p]
    return lambda name: library.nvtxRangePushA(name.encode()), library.nvtxRangePop


def _events(path: Path) -> list[tuple[str, str, float, float, str]]:
    """Return (name, lane, begin, end, cause) of each event in a file of TensorFlow's, in seconds since 1970."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # its own readers are in no package that it needs

    space: Any = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    found = []
    threads: dict[str, str] = {}  # TensorFlow's own names of them are long numbers
    for plane in space.planes:
        device = plane.name.startswith("/device:")
        if not device and not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            name = line.display_name or line.name or str(line.id)
            kind = name.partition("/")[0]
            threads.setdefault(name, f"{kind} {sum(other.startswith(kind) for other in threads) + 1}")
            lane = f"{plane.name.removeprefix('/device:')} {name}" if device else f"tensorflow {threads[name]}"
            for event in line.events:
                if not event.duration_ps:
                    continue
                begin_s = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
                found.append((plane.event_metadata[event.metadata_id].name, lane, begin_s,
                              begin_s + event.duration_ps / 1e12, KERNEL if device else "tensorflow"))
    return found
