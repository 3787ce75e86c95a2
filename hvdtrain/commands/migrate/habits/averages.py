"""Habits of averages: metrics of ranks that are averaged as if all were worth the same; losses divided twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate import names
from hvdtrain.commands.migrate.finding import Finding
from hvdtrain.commands.migrate.scan import Scan, argument

METRIC = re.compile(r"loss|acc|metric|error|correct|score|auc|f1|ppl|perplex|avg|mean", re.IGNORECASE)
COUNTED = re.compile(r"sum|total|count|num|correct|weight", re.IGNORECASE)
REDUCES = ("allreduce", "all_reduce", "allreduce_")


def unweighted_metrics(scan: Scan, context: Any) -> Iterator[Finding]:
    """A metric that is averaged over ranks without the number of samples behind it."""
    for call in scan.all(cst.Call):
        if names.collective(scan, call) not in REDUCES or not call.args:
            continue
        function = next((up.name.value for up in scan.above(call) if isinstance(up, cst.FunctionDef)), "")
        value = scan.code(call.args[0].value)
        named = argument(call, "name")
        about = " ".join([value, function, scan.code(named.value) if named else ""])
        op = argument(call, "op", 1)
        if op is not None and "sum" in scan.code(op.value).lower() and COUNTED.search(value):
            continue
        if METRIC.search(about) and "grad" not in about and not _reduced_sum(scan, call):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call)} averages a metric over ranks",
                          "each rank counts the same, however few samples it has: the last batches and unequal "
                          "shards come out wrong", "sum (metric x samples) and samples over the ranks, then divide; "
                          "hvdtrain's MetricAverageCallback and Trainer weigh by samples")


def _reduced_sum(scan: Scan, call: cst.Call) -> bool:
    """Whether torch.distributed sums a count (its default), which nothing divides by the number of ranks."""
    if scan.dotted(call.func).startswith("torch.distributed") and argument(call, "op", 1) is None:
        return bool(COUNTED.search(scan.code(call.args[0].value)))
    return False


def losses_of_replicas(scan: Scan, context: Any) -> Iterator[Finding]:
    """Losses in a loop of tf.distribute's own, which are divided by the global batch, or ought to be."""
    if context.kind != "tf_distribute" or not any(True for _ in scan.methods("run", "experimental_run_v2")):
        return
    for call in scan.calls("compute_average_loss", "scale_regularization_loss"):
        yield Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} divides by the global batch",
                      "under tf.distribute gradients are summed; Horovod's tape averages them, which divides by the "
                      "number of ranks once more",
                      "keep the division and give the tape op=hvd.Sum, or divide by this rank's own batch and "
                      "keep the average (equal batches only)")
    for call in scan.calls("reduce_mean"):
        yield Finding(scan.line(call), "unsafe", f"{scan.short(call)} divides by this replica's own batch",
                      "tf.distribute sums the replicas' gradients: the step is too large by the number of replicas, "
                      "and a short last batch weighs too much",
                      "sum over samples and divide by the global batch once")


HABITS = (unweighted_metrics, losses_of_replicas)
