"""Base of callbacks: which ranks run it, how often, and a method for each event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdtrain.core.events import Event
from hvdtrain.core.records import Turns
from hvdtrain.engine.run import Run


def several_replicas(run: Run) -> bool:
    """Return whether several replicas train one model; over the transport "null" every rank trains its own."""
    return len(run.mesh.copies) > 1 and run.collectives.name != "null"


class Callback:
    """Base of callbacks: define a method named like an event (``step_end(run)``) to see it.

    ``where``: "root" runs on rank 0 only and must not enter a collective; "all" runs on every rank. Which exchanges an
    event allows, and where a checkpoint may be requested, is written at the events (`hvdtrain.core.events`).
    ``every`` thins out STEP_END: "50 step", "2 epoch", or "5 s" (root only, since clocks differ); "" is each time.
    """

    where = "root"
    every = ""
    doing = ""
    """What it does, such as "measuring memory", printed where its events take over 3 s; "": the event's name is."""
    steers = False
    """What it measures or is told of metrics changes the training, so that keys of metrics do."""
    state_key = "Callback"
    """Name of the state in checkpoints: of each class its own name, unless its body sets another."""
    setting = ""
    """Key that a run gets this built-in callback for, where it is set; its value makes the callback."""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Built-in callbacks that see each event after, or before, this one does."""
    _turns: Turns | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class without a ``state_key`` of its own the name of the class; a base's key is not inherited."""
        super().__init_subclass__(**kwargs)
        if "state_key" not in vars(cls):
            cls.state_key = cls.__name__

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Return whether ``run`` gets this built-in callback; the same on all ranks with ``where`` "all"."""
        return not cls.setting or bool(getattr(run.config, cls.setting))

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        """Return the callback for ``run``; ``earlier``: those made before it, by the names of their classes."""
        return cls(getattr(run.config, cls.setting)) if cls.setting else cls()  # type: ignore[call-arg]

    def hears(self, event: Event) -> bool:
        """Return whether `on` does anything at ``event``; asked once, so that a run leaves the others out.

        Always for a class of a user's own, whose instances may get methods later.
        """
        own = not type(self).__module__.startswith("hvdtrain.")
        return own or type(self).on is not Callback.on or hasattr(self, event.value)

    def listener(self, event: Event) -> Callable[[Run], None]:
        """Return what an ``event`` that this callback hears calls: `on`, or its method where each time is its turn."""
        each = type(self).__module__.startswith("hvdtrain.") and not (event is Event.STEP_END and self.every)
        if not each or type(self).on is not Callback.on:
            return partial(self.on, event)
        name = event.value
        return lambda run: getattr(self, name)(run)  # looked up in each call: users may wrap the method

    def on(self, event: Event, run: Run) -> None:
        """Call the method of this event, if there is one and it is its turn."""
        method = getattr(self, event.value, None)
        if method is not None and (event is not Event.STEP_END or self._turn(run)):
            method(run)

    def _turn(self, run: Run) -> bool:
        if not self.every:
            return True
        if self._turns is None:
            self._turns = Turns(self.every, f"{type(self).__name__}.every is {self.every!r} with where={self.where!r}",
                                self.where == "root")
        return self._turns.ask(run)

    def saving(self, run: Run) -> None:
        """Bring together what `state_dict` will tell, before each save; collective with ``where`` "all"."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state to keep in a checkpoint; rank 0's is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""

    def restored(self, run: Run) -> None:
        """Adapt to the run after `load_state_dict`, before each rank gets back its own state (of compressors)."""
