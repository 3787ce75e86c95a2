"""Seconds of steps of earlier runs on these devices, kept in a folder beside the probe's (`balance_probe`).

Owns the files: one for each model on a rank's device, one for the links of a set of hosts; whole, versioned, bounded.
Predicting is left to `hvdtrain.engine.callbacks.forecast`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from hvdtrain.engine import balance_probe
from hvdtrain.engine.run import Run
from hvdtrain.planning.linear import LinearTime, fit

VERSION = 1
MOST_ROWS, MOST_LINKS, MOST_FILES = 8, 32, 400
FOLDER = "steps"

NEAR, SPAN = 1.25, 2.0
"""A micro-batch is predicted up to so many times larger, or smaller, than those measured: of one size; of several."""

LIKE_BYTES = 4.0
"""A link is used for steps of up to so many times more, or fewer, bytes than those it was measured with."""

T = TypeVar("T")


@dataclass(frozen=True)
class StepRow:
    """A mean step of a rank in one run: its samples and micro-batches, seconds of each part, and of one save's block.

    ``error``: of the whole step's forecast in that run, relative; NaN without one. Rank 0's counts.
    """

    samples: float
    micros: float
    compute_s: float
    update_s: float
    input_s: float
    save_s: float = 0.0
    error: float = math.nan


@dataclass(frozen=True)
class LinkRow:
    """Seconds a sent byte adds to a step, in hosts and between; ``nbytes``: of gradients; ``ranks``: by host."""

    transport: str
    compression: str
    nbytes: float
    ranks: tuple[int, ...]
    within_s_per_byte: float
    between_s_per_byte: float


def key_of(run: Run) -> str:
    """Return the name of this rank's file: what a step's parts depend on, but for the size of the batch."""
    sample: Any = ()
    if run.feed.samples is not None:  # a stream has no sample to spare
        with run.parts.draws_kept():
            sample = run.feed.sample(1, run.state.cursor)
    layout, config = run.parts.layout, run.config
    more = [balance_probe.key(run, sample), config.compile, str(config.remat), config.optimizer.name,
            config.data.name, str(config.data.args), str(config.data.augment), run.dp.divides_state,
            None if layout is None else (layout.starts, run.mesh.copies, config.pipeline)]
    return hashlib.sha256(repr(more).encode()).hexdigest()[:32]


def hosts_key(run: Run) -> str:
    """Return the name of the file of these hosts' links."""
    facts = [[(host.node, host.cores) for host in run.topology.hosts], [(d.kind, d.name) for d in run.devices[:1]]]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32] + "-links"


def steps(name: str) -> list[StepRow]:
    """Return the rows of the file ``name``, oldest first; [] where there is none, or it is of another version."""
    return _rows(name, StepRow)


def links(name: str) -> list[LinkRow]:
    """Return the links of the file ``name``, oldest first."""
    return _rows(name, LinkRow)


def add(name: str, *rows: StepRow | LinkRow) -> None:
    """Keep ``rows`` with the latest ones of their file; each replaces one of the same setting."""
    kept = _rows(name, type(rows[0]))
    for row in rows:
        kept = [*(one for one in kept if _setting(one) != _setting(row)), row]
    most = MOST_LINKS if isinstance(rows[0], LinkRow) else MOST_ROWS
    balance_probe.write(name, {"version": VERSION, "rows": [asdict(one) for one in kept[-most:]]}, FOLDER)
    _forget()


def line_of(rows: Sequence[StepRow], micro: float) -> LinearTime | None:
    """Return the line through the micro-batches of ``rows``; None where ``micro`` samples are too far from them."""
    known = {row.samples / row.micros: row.compute_s / row.micros for row in rows if row.micros > 0 < row.samples}
    if not known:
        return None
    least, most = min(known), max(known)
    reach = SPAN if most >= SPAN * least else NEAR
    if not least / reach <= micro <= most * reach:
        return None
    return fit([max(1.0, size) for size in known], list(known.values()))


def link_of(rows: Sequence[LinkRow], transport: str, compression: str, nbytes: float,
            ranks: Sequence[int]) -> LinkRow | None:
    """Return the link that was measured in the setting most like this one; None where none is like it."""
    alike = [row for row in rows if (row.transport, row.compression) == (transport, compression)
             and nbytes > 0 and 1 / LIKE_BYTES <= row.nbytes / nbytes <= LIKE_BYTES
             and (len(row.ranks) > 1 or len(ranks) == 1)]
    # The newest of those with as many ranks on each host, else with a number of bytes as near as can be.
    return max(alike, key=lambda row: (list(row.ranks) == list(ranks), -abs(math.log(row.nbytes / nbytes)),
                                       rows.index(row)), default=None)


def _setting(row: StepRow | LinkRow) -> tuple[object, ...]:
    if isinstance(row, LinkRow):
        return row.transport, row.compression, round(math.log2(max(1.0, row.nbytes))), tuple(row.ranks)
    return round(row.samples), round(row.micros)


def _rows(name: str, kind: type[T]) -> list[T]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = balance_probe.read(name, FOLDER)
        if found["version"] != VERSION:
            return []
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        made = [kind(**{key: tuple(row[key]) if isinstance(row[key], list) else row[key] for key in names})
                for row in found["rows"][-max(MOST_ROWS, MOST_LINKS):]]
        return [row for row in made if _sound(row)]
    return []


def _sound(row: Any) -> bool:
    """Return whether the numbers of a row are what they can be."""
    numbers = {key: value for key, value in vars(row).items() if key not in ("transport", "compression", "ranks")}
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers.values()):
        return False
    return all(0 <= value < 1e18 for key, value in numbers.items() if key != "error")


def _forget() -> None:
    """Remove the oldest files beyond `MOST_FILES`."""
    with contextlib.suppress(OSError):
        files = [*balance_probe.cache_folder(FOLDER).glob("*.json")]
        if len(files) > MOST_FILES:
            for path in sorted(files, key=lambda path: path.stat().st_mtime)[:len(files) - MOST_FILES]:
                path.unlink(missing_ok=True)
