"""Makes the feeds of a run: how each replica of the model walks through the data.

Owns what a feed is made with. The walk itself is `hvdtrain.data.feed`'s.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hvdtrain import backends
from hvdtrain import config as settings
from hvdtrain.backends.model_spec import Spec
from hvdtrain.cluster.control import agreed, control_of_replicas
from hvdtrain.config import Config
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Control
from hvdtrain.data import prepare
from hvdtrain.data.feed import Feed
from hvdtrain.engine.run import Run


def feeds_of(config: Config, spec: Spec, mesh: Mesh, control: Control, train: Any,
             test: Any) -> tuple[Feed, Feed | None]:
    """Return the feeds of each replica for training and evaluation. Collective."""
    feed = Feed(train, config.global_batch, shuffle=config.data.shuffle, accumulate=_micros(config, mesh),
                weight_fn=spec.weight, even_micros=config.sync_batchnorm and control.size > 1,
                **_cut(config, mesh, control))
    feed.check_ranks_agree()
    test_feed = None if test is None else _eval_feed(config, mesh, control, test)
    if test_feed is not None:
        test_feed.check_ranks_agree()
    return feed, test_feed


def _eval_feed(config: Config, mesh: Mesh, control: Control, data: Any) -> Feed:
    micros: int | list[int] = _micros(config, mesh) if mesh.deepest > 1 else 1
    return Feed(data, config.global_batch, shuffle=False, accumulate=micros, **_cut(config, mesh, control))


def _micros(config: Config, mesh: Mesh) -> list[int]:
    """Micro-batches of each copy in a step."""
    return [settings.micro_batches(config, len(copy)) for copy in mesh.copies]


def _cut(config: Config, mesh: Mesh, control: Control) -> dict[str, Any]:
    """What training and evaluation cut alike."""
    return {"rank": mesh.copy, "size": len(mesh.copies), "control": control_of_replicas(control, mesh),
            "shares": list(config.shares) or None, "seed": config.seed, "micro_batch": config.micro_batch_limit,
            "prefetch": config.data.prefetch, "skip_unread": config.on_bad_sample == "skip"}


def eval_feed(run: Run, data: Any) -> Feed:
    """A feed over evaluation ``data`` given to an assembled run: its test split, or all of it. Collective."""
    adapters = (partial(backends.load(run.spec.framework).adapt_data, seed=run.config.seed, rows=run.spec.rows),)
    cores = run.topology.cores_of(run.control.rank)
    test, remark = agreed(run.control, lambda: prepare.later(run.config, data, adapters, cores, run.control.size),
                          "data")
    if remark and remark not in run.notes:
        run.note(remark)
    feed = _eval_feed(run.spelled, run.mesh, run.control, test)
    feed.check_ranks_agree()
    return feed
