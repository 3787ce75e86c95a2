"""From what a run is given as data to what it trains on and is evaluated on.

Owns the order in which data is wrapped: as it is stored, then augmented, then read by worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.data import sources
from hvdtrain.data.augment import Augmented
from hvdtrain.data.rows import INPUTS, of_data
from hvdtrain.data.workers.choose import with_workers

START_S = 5.0
"""About what workers take to start that import a framework."""


def read(config: Config, data: Any, adapters: Sequence[sources.Adapter], cores: int,
         notes: list[str]) -> tuple[Any, Any]:
    """Return (training data, evaluation data or None) of ``data``, or of ``config.data`` where that is None.

    ``cores``: those that this rank has for itself. What was chosen is added to ``notes``.
    """
    if data is not None:
        pair = sources.interpret(data, "train", adapters), sources.interpret(data, "test", adapters)
    else:
        pair = sources.resolve_splits(config.data.name, config.data.args, adapters)
    (train, test), remark = with_workers(config, config.seed, prepared(config, *pair), cores)
    notes += [remark] if remark else []
    return train, test


def later(config: Config, data: Any, adapters: Sequence[sources.Adapter], cores: int, ranks: int) -> tuple[Any, str]:
    """Return what a run is to be evaluated on, of ``data`` that comes when it is there already, and a remark.

    Workers of its own are chosen where all ``ranks`` would read for longer than these take to start; they end with it.
    """
    test = sources.interpret(data, "test", adapters)
    test = sources.interpret(data, "train", adapters) if test is None else test
    (test,), remark = with_workers(config, config.seed, (test,), cores, START_S * ranks)
    return test, remark


def prepared(config: Config, train: Any, test: Any) -> tuple[Any, Any]:
    """Wrap the training data as the configuration says; evaluation data stays as it is.

    Errors: `UserError` for data that cannot be augmented.
    """
    if config.data.augment:
        train = Augmented(train, config.data.augment, config.seed)
        if len(train):
            train.fetch(np.zeros(1, np.int64))  # what does not suit it is told before anything is made
        rows = of_data(train)
        if not rows.x_first or rows.layout is not None:
            raise UserError(f"data.augment with rows of which none or several columns are pictures ({rows.note})",
                            f"one of the columns {', '.join(INPUTS)}", "rename or drop columns, or leave it out")
    return train, test
