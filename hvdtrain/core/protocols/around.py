"""The seams of what watches a run and of what starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hvdtrain.core.events import Event


class Callback(Protocol):
    """Observes a run: a method per `Event` it cares for, called with the run.

    ``where``: "root" (rank 0 only; gets no group, so it cannot enter a collective) or "all".
    ``every``: "N step", "N epoch" or "N s" thins out STEP_END (root only for seconds); "" is every time.
    """

    where: str
    every: str

    def on(self, event: Event, run: Any) -> None:
        """See one moment."""
        ...

    def saving(self, run: Any) -> None:
        """Bring together what `state_dict` will tell, before each save; collective with ``where`` "all"."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state to keep in a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        ...

    def restored(self, run: Any) -> None:
        """See the run between `load_state_dict` and the return of what each rank owns, such as compressor state."""
        ...


class Launcher(Protocol):
    """Turns a launch into a command line without running it."""

    def command(self, spec: Any) -> tuple[list[str], dict[str, str]]:
        """Return (argv, environment); pure."""
        ...
