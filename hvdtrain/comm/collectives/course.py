"""A compressor's exchange as one operation: each request is made as soon as the answer to the one before is there.

Owns only that order. The requests' own operations have the number of the whole and a stage each, so that ranks whose
exchanges advance in another order still pair their messages (law 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.cluster.messages.progress import Operation, Progress
from hvdtrain.core.protocols import Exchange, Request


class Course(Operation):
    """Runs ``exchange`` to its end; the value is what it returns.

    ``make(request, stage)``: the operation of a request; ``arrived``: its value as the exchange wants it. The exchange
    computes in whatever thread moves operations, beside the one that computes gradients.
    """

    def __init__(self, exchange: Exchange, progress: Progress, make: Callable[[Request, int], Operation],
                 arrived: Callable[[Any], Any]) -> None:
        super().__init__()
        self._exchange, self._progress, self._make, self._arrived = exchange, progress, make, arrived
        self._stage = 0

    def begin(self) -> None:
        """Compute up to the first request."""
        self._go_on(None)

    def _go_on(self, answer: Any) -> None:
        try:
            request = self._exchange.send(answer)
        except StopIteration as stop:
            self.end(stop.value)
            return
        operation = self._make(request, self._stage)
        self._stage += 1
        operation.followers.append(self._answered)
        self._progress.guarded(operation, operation.begin)

    def _answered(self, operation: Operation) -> None:
        if operation.error is not None:
            self.end(error=operation.error)
        else:
            self._progress.guarded(self, lambda: self._go_on(self._arrived(operation.value)))
