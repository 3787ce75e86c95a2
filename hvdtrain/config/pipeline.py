"""The keys of section ``pipeline``: what they may be, and what does not go together with a model cut over ranks. Pure.
"""

from __future__ import annotations

from hvdtrain.config.keys import Keys
from hvdtrain.core.errors import UserError

FOR_EACH = 4
"""Micro-batches for each rank of a copy where nothing is configured: a bubble below a fifth."""


def cut_over_ranks(config: Keys) -> bool:
    """Return whether the model is cut over ranks."""
    return config.pipeline.over_ranks


def micro_batches(config: Keys, depth: int) -> int:
    """Return the parts in which a copy of ``depth`` ranks computes its part of a batch, where it has so many samples.
    """
    if depth == 1:
        return config.accumulate
    return config.pipeline.micro_batches or max(config.accumulate, FOR_EACH * depth)


def check(config: Keys) -> None:
    """Raise `UserError` for values that cannot be, and for keys that do not go together with a cut model."""
    pipeline = config.pipeline
    if any(depth < 1 for depth in pipeline.depths):
        raise UserError(f"pipeline.depths is {pipeline.depths}", "1 or more ranks for each copy", "correct it")
    if pipeline.depths and pipeline.stages > 1:
        raise UserError(f"pipeline.stages {pipeline.stages} with pipeline.depths {pipeline.depths}",
                        "one of the two: depths says it for each copy", "leave stages out")
    if not cut_over_ranks(config):
        return
    if config.model_parallel > 1:
        raise UserError(f"model_parallel {config.model_parallel} with a pipeline over ranks", "one of the two: a "
                        "rank's part of the model is on one device", "start a rank for each device, or leave "
                        "pipeline out")
    auto = [name for name, value in (("micro_batch", config.micro_batch), ("remat", config.remat)) if value == "auto"]
    if auto:
        raise UserError(f"{auto[0]}: auto with a pipeline over ranks, whose plan counts memory by itself",
                        "a number" if auto[0] == "micro_batch" else "names of blocks, or off",
                        f"set {auto[0]}, or leave it out")
    _check_exchange(config)


def _check_exchange(config: Keys) -> None:
    """Raise `UserError` for keys of what copies of a cut model exchange that ask for more than one rank knows."""
    exchange, horovod = config.exchange, config.collectives == "horovod"
    for name, asked, expected, do in (
            ("compression auto", config.compression == "auto", "a compression by name: it is measured on one rank's "
             "gradient, and ranks have unlike parts of it", "set compression: none, or another"),
            ("exchange.bucket_mb auto", exchange.bucket_mb == "auto", "a size: it is measured for one gradient, and "
             "ranks have unlike parts of it", "set exchange.bucket_mb: 16, or another"),
            ("exchange.adasum", exchange.adasum, "sums: Adasum looks at the gradients of all ranks of a job",
             "leave exchange.adasum out"),
            ("collectives horovod", horovod, "a wire between some of the ranks: Horovod sums over all of a job",
             "set collectives: auto, shared or mpi"),
            ("exchange.autotune", exchange.autotune, "Horovod's own settings: it tunes them for sums over all ranks",
             "leave exchange.autotune out"),
            ("on_bad_sample skip", config.on_bad_sample == "skip", "stop: each rank of a copy reads the samples by "
             "itself, and all would have to leave out the same", "leave on_bad_sample out"),
            (f"audit {config.audit}", config.audit, "none: an audit computes a micro-batch of one rank on another, "
             "which has another part of the model", "leave audit out; check_every compares the copies' weights"),
            ("data_parallel.stage auto", config.data_parallel.name == "zero" and config.data_parallel.stage == "auto",
             "stage 1 or 2: no rank can compute samples alone, by which auto tells what is needed",
             "name data_parallel.stage")):
        if asked:
            raise UserError(f"{name} with a pipeline over ranks", expected, do)


def check_launcher(config: Keys, kind: str) -> None:
    """Raise `UserError` where ranks that were started by ``kind`` of launcher can send each other nothing."""
    if kind == "gloo" and cut_over_ranks(config):
        raise UserError("a pipeline over ranks under horovodrun --gloo, whose ranks cannot send each other messages",
                        "a job over MPI", "start it with mpirun, or horovodrun --mpi")
