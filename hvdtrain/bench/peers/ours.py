"""hvdtrain itself: a run as `assemble` builds it, and the loop's own `train_step` with its votes and callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.bench.peers import IDLE_S, Prepared, Setup, tensorflow_common
from hvdtrain.bench.workloads import LR, MOMENTUM
from hvdtrain.config import Exchange
from hvdtrain.errors import UserError, nearest


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
    from hvdtrain.config import Checkpoint, Config, Data, Named

    return Config(model=setup.workload.model(setup.framework), model_args=setup.workload.args,
                  data=Data(shuffle=False, prefetch=0), global_batch=setup.batch * setup.control.size,
                  seed=setup.seed, lr=LR, optimizer=Named("SGD", {"momentum": MOMENTUM}), epochs=10**9,
                  collectives=wire, compression=compression,  # type: ignore[arg-type]
                  exchange=exchange(setup.exchange, setup.powersgd_rank),
                  checkpoint=Checkpoint(at_end=False), progress="off", threads=setup.threads,
                  control_timeout_s=IDLE_S, out=str(Path(setup.scratch, f"hvdtrain-{wire}-{compression}")))


def exchange(settings: Sequence[str], powersgd_rank: int) -> Exchange:
    """The configuration's section of ``KEY=VALUE`` words, values as YAML reads them; `UserError` for a bad word.

    Whether the values are possible is `Config.check`'s to say.
    """
    import yaml

    known = [key.name for key in fields(Exchange) if key.name != "powersgd_rank"]
    found: dict[str, Any] = {"powersgd_rank": powersgd_rank}
    for text in settings:
        name, equals, value = text.partition("=")
        if name == "powersgd_rank":
            raise UserError(f"--exchange is {text!r}", "--powersgd_rank, of which DDP hears too", "use that")
        if name not in known:
            raise UserError(f"--exchange is {text!r}", f"KEY=VALUE; KEY: {nearest(name, known)}", "correct --exchange")
        try:
            found[name] = yaml.safe_load(value) if equals else None
        except yaml.YAMLError:
            found[name] = None
        if found[name] is None:
            raise UserError(f"--exchange is {text!r}", "KEY=VALUE such as bucket_mb=4", "correct --exchange")
    return Exchange(**found)


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
