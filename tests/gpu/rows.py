"""Rows to check, each with its ranks, its limit in seconds and its needs. Pure.

The program of a row is the function of its name in `jobs`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MODULES = ("numpy", "safetensors", "yaml", "rich")
"""What every run of a trainer imports beside PyTorch (found by leaving out one after the other)."""


@dataclass(frozen=True)
class Row:
    """``needs``: names of `lacking`. ``limit_s``: after so long the row has failed."""

    name: str
    about: str
    ranks: int = 2
    limit_s: float = 60.0
    needs: tuple[str, ...] = ()


ROWS: tuple[Row, ...] = (
    Row("start", "two ranks meet, each with its device; the guards of devices that are shared"),
    Row("wires", "every collective over shared memory and MPI, for tensors of the device, against numpy"),
    Row("staged", "tensors of a GPU over pinned host memory while the GPU computes", needs=("gpu",)),
    Row("uploads", "batches from pinned memory, ahead of their step, while the GPU computes", ranks=1, needs=("gpu",)),
    Row("training", "unequal shares, accumulation, clipping: the weights of plain PyTorch"),
    Row("precision", "bf16, and fp16 with its loss scale, against plain PyTorch in the same type"),
    Row("batchnorm", "BatchNorm over ranks: the weights of plain PyTorch on the whole batch"),
    Row("compressors", "fp16, bf16, int8, top-k and PowerSGD: one model on all ranks, and a loss that falls"),
    Row("zero", "ZeRO stages 1 and 2: the weights of replicas, part of the state"),
    Row("checkpoint", "saved, restored and gone on: the bits of a run without a break"),
    Row("remat", "recomputed blocks: the same weights, with dropout, and a lower peak", limit_s=90.0),
    Row("oom", "one rank runs out of memory: only its micro-batch shrinks, the weights stay", limit_s=90.0),
    Row("balance", "unlike memory on one GPU: ceilings are kept, the weights stay", limit_s=90.0),
    Row("micro_batch", "micro_batch auto: the largest that fits, on each rank by itself", limit_s=90.0),
    Row("readings", "what is read of each rank's memory and GPU, and how much of its peak is used"),
    Row("split", "a model on a GPU and the CPU of one rank: the weights of plain PyTorch", ranks=1, needs=("gpu",)),
    Row("command", "python -m hvdtrain train with a recipe", needs=("jsonargparse",)),
    Row("compile_auto", "compile auto: the choice, and the weights of the uncompiled model", limit_s=150.0, ranks=1),
    Row("gpt_100m", "a GPT of 100M parameters in bf16: milliseconds a step and MFU against plain PyTorch", ranks=1,
        limit_s=150.0),
    Row("horovod", "every collective and a training over Horovod", needs=("horovod",)),
    Row("nccl", "two ranks on two GPUs, gradients by NCCL", needs=("horovod", "two GPUs", "NCCL in Horovod")),
)


def chosen(names: Sequence[str]) -> list[Row]:
    """Return the rows of these names, all without names; ValueError for a name that is none."""
    known = {row.name: row for row in ROWS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no row {unknown[0]!r}; rows: {', '.join(known)}")
    return [known[name] for name in names] if names else list(ROWS)


def lacking(row: Row, lacks: Mapping[str, str]) -> str:
    """Return why ``row`` cannot run, or "". ``lacks``: reasons by what is not there; "mpi": for several ranks."""
    needs = ("torch", *MODULES, *(("mpi",) if row.ranks > 1 else ()), *row.needs)
    return next((lacks[need] for need in needs if need in lacks), "")
