"""Habits of data: shards that leave samples out or repeat them, or that are no shards at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate import names
from hvdtrain.commands.migrate.finding import Finding
from hvdtrain.commands.migrate.scan import Scan, argument, is_false, is_true, name_of

NO_SAMPLES = re.compile(r"batch|epoch|bs\b|lr|rate|cpu|worker|thread|port", re.IGNORECASE)


def truncated_shards(scan: Scan, context: Any) -> Iterator[Finding]:
    """``n // size``, ``int(n / size)``: the samples that are left over are never seen."""
    floors = [(node, node) for node in scan.all(cst.BinaryOperation) if isinstance(node.operator, cst.FloorDivide)
              and not isinstance(node.left, cst.Integer)]  # of a number of steps that somebody chose, nothing is lost
    casts = [(call, call.args[0].value) for call in scan.all(cst.Call)
             if call.args and (name_of(call.func) or "").rpartition(".")[2] in ("int", "floor")]
    divided = [(whole, node) for whole, node in casts
               if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide)]
    for whole, node in [*floors, *divided]:
        if _by_size(scan, node.right) and (not NO_SAMPLES.search(scan.code(node.left)) or _is_steps(scan, whole)):
            yield Finding(scan.line(whole), "unsafe", f"{scan.short(whole)} is cut down to a whole number",
                          "up to size - 1 samples, or batches, of every epoch are never seen",
                          "take x[rank::size] and every step of it, or hvd.shard(x, y, global_batch=...), or hand "
                          "the whole data to Trainer")


def _by_size(scan: Scan, node: cst.BaseExpression) -> bool:
    """Whether a divisor has the number of ranks in it, as a whole or as a factor."""
    if names.is_size(scan, node):
        return True
    return isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply) and (
        _by_size(scan, node.left) or _by_size(scan, node.right))


def _is_steps(scan: Scan, node: cst.CSTNode) -> bool:
    """Whether the result is a number of steps."""
    for up in scan.above(node):
        if isinstance(up, cst.Arg) and up.keyword is not None:
            return "steps" in up.keyword.value
        if isinstance(up, cst.Assign):
            return any("steps" in (name_of(t.target) or "") for t in up.targets)
    return False


def padded_samplers(scan: Scan, context: Any) -> Iterator[Finding]:
    """A DistributedSampler repeats samples so that all ranks have as many; or leaves some out."""
    for call in scan.calls("DistributedSampler"):
        if is_true(argument(call, "drop_last", 5)):
            yield _dropped(scan, call)
            continue
        yield Finding(scan.line(call), "unsafe", "DistributedSampler repeats samples until every rank has as many",
                      "repeated samples count twice in the gradient and in every metric",
                      "hand the dataset itself to Trainer, which cuts each global batch without repeating any")


def _dropped(scan: Scan, call: cst.Call) -> Finding:
    return Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} drops the last samples of an epoch",
                   "they are never seen in that epoch, and more are dropped the more ranks there are",
                   "leave drop_last out: hvdtrain weighs a short last batch by its samples")


def dropped_batches(scan: Scan, context: Any) -> Iterator[Finding]:
    """``drop_last=True`` or ``drop_remainder=True``."""
    for call in scan.all(cst.Call):
        if scan.means(call.func, "DistributedSampler"):
            continue
        if is_true(argument(call, "drop_last")) or is_true(argument(call, "drop_remainder")):
            yield _dropped(scan, call)


def same_order_each_epoch(scan: Scan, context: Any) -> Iterator[Finding]:
    """A shuffling DistributedSampler that is never told the epoch."""
    samplers = [c for c in scan.calls("DistributedSampler") if not is_false(argument(c, "shuffle", 3))]
    if samplers and not any(True for _ in scan.methods("set_epoch")):
        yield Finding(scan.line(samplers[0]), "unsafe", "sampler.set_epoch is never called",
                      "every epoch then has the same order of samples",
                      "call sampler.set_epoch(epoch) first in each epoch (Trainer permutes anew by itself)")


def not_sharded(scan: Scan, context: Any) -> Iterator[Finding]:
    """Training on several ranks where nothing gives each its own samples."""
    if context.kind not in ("horovod_keras", "horovod_torch", "ddp"):
        return
    fits = [*scan.methods("fit", "fit_generator"), *scan.calls("DataLoader")]
    if not fits or _sharded(scan):
        return
    shared = any(names.is_size(scan, node) and _is_steps(scan, node) for node in scan.nodes
                 if isinstance(node, (cst.Call, cst.Name, cst.Attribute)))
    yield Finding(scan.line(fits[0]), "note" if shared else "unsafe", "nothing gives each rank samples of its own",
                  "each rank draws from all samples by itself: in an epoch some are seen twice and others not at all"
                  if shared else "all ranks train on all samples: the work of one, done by each",
                  "take x[hvd.rank()::hvd.size()], or hvd.shard(x, y, global_batch=...), or hand the whole data to "
                  "Trainer")


def _sharded(scan: Scan) -> bool:
    """Whether a slice, a shard or a sampler depends on the rank."""
    if any(True for _ in scan.calls("DistributedSampler", "split_dataset_by_node", "DistributedBatchSampler")):
        return True
    for node in scan.nodes:
        if (isinstance(node, (cst.Attribute, cst.Name, cst.Call)) and names.is_rank(scan, node)
                and not isinstance(scan.parent.get(node), cst.Comparison) and _selects(scan, node)):
            return True
    return any(True for _ in scan.methods("shard"))


def _selects(scan: Scan, node: cst.CSTNode) -> bool:
    """Whether ``node`` takes part in choosing samples: an index or a bound, not a device."""
    for up in scan.above(node):
        if isinstance(up, cst.Comparison):
            return False
        if isinstance(up, cst.Subscript):
            return "device" not in scan.code(up.value).lower() and "gpu" not in scan.code(up.value).lower() and (
                scan.code(up.value) != "os.environ")
        if isinstance(up, (cst.Assign, cst.AugAssign)):
            return isinstance(up, cst.Assign) and not isinstance(up.value, (cst.Call, cst.Comparison)) and (
                up.value is not node)
        if isinstance(up, cst.BaseStatement):
            return False
    return False


HABITS = (truncated_shards, padded_samplers, dropped_batches, same_order_each_epoch, not_sharded)
