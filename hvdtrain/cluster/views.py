"""The control plane as some ranks' own: each copy of a model with one voice, or a group alone.

All ranks of the job take part in every call, so that it is one plane with one order; a view leaves out what others say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.control import sum_rows
from hvdtrain.core.group import Group
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Control


class _View:
    """What a view takes from the plane as it is."""

    def __init__(self, control: Control) -> None:
        self._whole = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def bcast(self, obj: Any) -> Any:
        """Return rank 0's ``obj``."""
        return self._rows(obj)[0]

    def gather(self, obj: Any) -> list[Any]:
        """Return the members' ``obj``."""
        return self._rows(obj)

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        """Return the members' sum, in their order."""
        return sum_rows(np.stack(self._rows(np.array(values_k, np.float64))))

    def agree(self, flag: bool) -> bool:
        """Return whether any rank's ``flag`` is true, a member or not: an error of one is one of all."""
        return self._whole.agree(flag)

    def _rows(self, obj: Any) -> list[Any]:
        raise NotImplementedError


class Copies(_View):
    """The copies of a model as ranks: ``leads[c]`` speaks for copy c, ``copy`` is this rank's own."""

    def __init__(self, control: Control, leads: Sequence[int], copy: int) -> None:
        super().__init__(control)
        self._leads, self.rank, self.size = list(leads), copy, len(leads)

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        """Return the sum over the copies; what ranks say that do not lead is left out."""
        own_k = np.array(values_k, np.float64)
        return self._whole.sum(own_k if self._whole.rank in self._leads else np.zeros_like(own_k))

    def _rows(self, obj: Any) -> list[Any]:
        rows = self._whole.gather(obj)
        return [rows[lead] for lead in self._leads]


class Members(_View):
    """The ranks of ``group`` alone, counted from 0. Every rank of the job makes the same calls, each in its group."""

    def __init__(self, control: Control, group: Group) -> None:
        super().__init__(control)
        self._group, self.rank, self.size = group, group.index, group.size

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        """Overwrite one member's ``arrays`` by another's; from ``source`` to all, one after the other."""
        ranks = self._group.ranks
        for to in range(self.size) if target is None else (target,):
            if to != source:
                self._whole.send(arrays, ranks[source], ranks[to])

    def _rows(self, obj: Any) -> list[Any]:
        rows = self._whole.gather(obj)
        return [rows[rank] for rank in self._group.ranks]


def every_rank(control: Control) -> Control:
    """Return the plane of all ranks of the job, of which ``control`` may be a view."""
    return control._whole if isinstance(control, _View) else control


def voices(control: Control, mesh: Mesh) -> Control:
    """Return the plane with one voice for each copy of the model; as it is where no copy is cut over ranks."""
    return Copies(control, mesh.leads, mesh.copy) if mesh.deepest > 1 else control
