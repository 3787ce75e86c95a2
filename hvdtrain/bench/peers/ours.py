"""hvdtrain itself: a run as `assemble` builds it, and the loop's own `train_step` with its votes and callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.bench.peers import IDLE_S, Prepared, Setup, tensorflow_common
from hvdtrain.bench.workloads import LR, MOMENTUM


def prepare(setup: Setup, wire: str = "auto", compression: str = "none") -> Prepared:
    """``wire``: the configuration's ``collectives``; ``compression``: its key of that name."""
    from hvdtrain import loop
    from hvdtrain.assemble import assemble
    from hvdtrain.events import Event
    from hvdtrain.outdir import ensure_out

    run = assemble(_config(setup, wire, compression), data=setup.arrays)
    with contextlib.closing(run.feed.epoch(run.state.cursor)) as fetched:
        batches = list(fetched)
    assert len(batches) == len(setup.batches), "the feed cut another number of batches"
    ensure_out(run)
    run.emit(Event.FIT_START)
    run.emit(Event.EPOCH_START)

    def step(i: int) -> None:
        loop.train_step(run, batches[i % len(batches)])

    return Prepared(step, lambda: run.state.loss, lambda: _params(run), run.collectives.name, _sync(run),
                    global_loss=True, notes=run.notes)


def _config(setup: Setup, wire: str, compression: str) -> Any:
    """The run's configuration: what all contenders share, nothing else changed from its default."""
    from hvdtrain.config import Checkpoint, Config, Data, Exchange, Named

    exchange = Exchange(powersgd_rank=setup.powersgd_rank, **dict(map(_key, setup.exchange)))
    return Config(model=setup.workload.model(setup.framework), model_args=setup.workload.args,
                  data=Data(shuffle=False, prefetch=0), global_batch=setup.batch * setup.control.size,
                  seed=setup.seed, lr=LR, optimizer=Named("SGD", {"momentum": MOMENTUM}), epochs=10**9,
                  collectives=wire, compression=compression, exchange=exchange,  # type: ignore[arg-type]
                  checkpoint=Checkpoint(at_end=False), progress="off", threads=setup.threads,
                  control_timeout_s=IDLE_S, out=str(Path(setup.scratch, f"hvdtrain-{wire}-{compression}")))


def _key(text: str) -> tuple[str, Any]:
    """(name, value) of ``name=value``, the value as YAML reads it."""
    import yaml

    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


def _params(run: Any) -> list[Any]:
    """Copies of the trainable parameters, in the step's own order."""
    groups, _ = run.step.state()
    return [groups["model"][spec.name].copy() for spec in run.step.params()]


def _sync(run: Any) -> Callable[[], None]:
    """How to wait for the device; on a CPU a step has ended when it returns."""
    if not run.step.asynchronous:
        return lambda: None
    if run.spec.framework == "torch":
        import torch

        return torch.cuda.synchronize
    return partial(tensorflow_common.sync, run.step.model)
