"""The control plane with one voice for each copy of the model.

All ranks of the job take part in every call, so that it is one plane with one order; a view leaves out what others say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Control


class Copies:
    """The copies of a model as ranks: ``leads[c]`` speaks for copy c, ``copy`` is this rank's own.

    `agree` is that of all ranks of the job: an error of one is one of all.
    """

    def __init__(self, control: Control, leads: Sequence[int], copy: int) -> None:
        self._whole = control
        self._leads, self.rank, self.size = list(leads), copy, len(leads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def bcast(self, obj: Any) -> Any:
        """Return the first copy's ``obj``."""
        return self.gather(obj)[0]

    def gather(self, obj: Any) -> list[Any]:
        """Return the copies' ``obj``."""
        rows = self._whole.gather(obj)
        return [rows[lead] for lead in self._leads]

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        """Return the sum over the copies; what ranks say that do not lead is left out."""
        own_k = np.array(values_k, np.float64)
        return self._whole.sum(own_k if self._whole.rank in self._leads else np.zeros_like(own_k))


def every_rank(control: Control) -> Control:
    """Return the plane of all ranks of the job, of which ``control`` may be a view."""
    return control._whole if isinstance(control, Copies) else control


def voices(control: Control, mesh: Mesh) -> Control:
    """Return the plane with one voice for each copy of the model; as it is where no copy is cut over ranks."""
    return Copies(control, mesh.leads, mesh.copy) if mesh.deepest > 1 else control
