"""Hazards of a distributed script: data, averages, learning rates, Keras 3; ``ranks`` has the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import libcst as cst

from hvdtrain.commands.migrate import ranks
from hvdtrain.commands.migrate.finding import Context, Finding
from hvdtrain.commands.migrate.ranks import collective, is_rank, is_size, sized
from hvdtrain.commands.migrate.rules import keras2
from hvdtrain.commands.migrate.scan import Scan, argument, is_false, is_true, name_of

NO_SAMPLES = re.compile(r"batch|epoch|bs\b|lr|rate|cpu|worker|thread|port", re.IGNORECASE)


def truncated_shards(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report ``n // size``, ``int(n / size)``: the samples that are left over are never seen."""
    floors = [(node, node) for node in scan.all(cst.BinaryOperation) if isinstance(node.operator, cst.FloorDivide)
              and not isinstance(node.left, cst.Integer)]  # of a number of steps that somebody chose, nothing is lost
    casts = [(call, call.args[0].value) for call in scan.all(cst.Call)
             if call.args and (name_of(call.func) or "").rpartition(".")[2] in ("int", "floor")]
    divided = [(whole, node) for whole, node in casts
               if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide)]
    for whole, node in [*floors, *divided]:
        if _by_size(scan, node.right) and (not NO_SAMPLES.search(scan.code(node.left)) or _counts_steps(scan, whole)):
            yield Finding(scan.line(whole), "unsafe", f"{scan.short(whole)} is rounded down to a whole number",
                          "up to size - 1 samples, or batches, of every epoch are never seen",
                          "take x[rank::size] and all of its steps, or hvd.shard(x, y, "
                          "global_batch=...), or pass the whole data to Trainer")


def _by_size(scan: Scan, node: cst.BaseExpression) -> bool:
    if is_size(scan, node):
        return True
    return isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply) and (
        _by_size(scan, node.left) or _by_size(scan, node.right))


def _counts_steps(scan: Scan, node: cst.CSTNode) -> bool:
    for up in scan.above(node):
        if isinstance(up, cst.Arg) and up.keyword is not None:
            return "steps" in up.keyword.value
        if isinstance(up, cst.Assign):
            return any("steps" in (name_of(t.target) or "") for t in up.targets)
    return False


def padded_samplers(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report a DistributedSampler, which repeats samples until all ranks have as many, or leaves some out."""
    for call in scan.calls("DistributedSampler"):
        if is_true(argument(call, "drop_last", 5)):
            yield _dropped(scan, call)
            continue
        yield Finding(scan.line(call), "unsafe", "DistributedSampler repeats samples until every rank has as many",
                      "repeated samples count twice in the gradient and in every metric", _no_repetition(context))


def _no_repetition(context: Context) -> str:
    if context.target == "hvdtrain.torch":
        return ("nothing if the ranks divide the samples evenly; else read batches = hvd.shard(dataset, global_batch) "
                "and call batches.scale(loss).backward(), which counts every sample once")
    return "pass the dataset itself to Trainer, which divides each global batch without repeating samples"


def _dropped(scan: Scan, call: cst.Call) -> Finding:
    return Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} drops the last samples of an epoch",
                   "they are never seen in that epoch, and more ranks drop more samples",
                   "remove drop_last: hvdtrain weights a short last batch by its samples")


def dropped_batches(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report ``drop_last=True`` or ``drop_remainder=True``."""
    for call in scan.all(cst.Call):
        if scan.means(call.func, "DistributedSampler"):
            continue
        if is_true(argument(call, "drop_last")) or is_true(argument(call, "drop_remainder")):
            yield _dropped(scan, call)


def same_order_each_epoch(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report a shuffling DistributedSampler without ``set_epoch``."""
    samplers = [c for c in scan.calls("DistributedSampler") if not is_false(argument(c, "shuffle", 3))]
    if samplers and not any(True for _ in scan.methods("set_epoch")):
        yield Finding(scan.line(samplers[0]), "unsafe", "sampler.set_epoch is never called",
                      "every epoch then has the same order of samples",
                      "call sampler.set_epoch(epoch) first in each epoch (Trainer permutes automatically)")


def not_sharded(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report training on several ranks where nothing gives each its own samples."""
    if context.kind not in ("horovod_keras", "horovod_torch", "ddp"):
        return
    fits = [*scan.methods("fit", "fit_generator"), *scan.calls("DataLoader")]
    if not fits or _sharded(scan):
        return
    shared = any(is_size(scan, node) and _counts_steps(scan, node) for node in scan.nodes
                 if isinstance(node, (cst.Call, cst.Name, cst.Attribute)))
    yield Finding(scan.line(fits[0]), "note" if shared else "unsafe", "no code divides the samples among ranks",
                  "each rank draws from all samples separately: in an epoch some are seen twice and others not at all"
                  if shared else "all ranks train on all samples and repeat the same work",
                  "take x[hvd.rank()::hvd.size()], or "
                  + ("hvd.shard(dataset, global_batch)" if context.target == "hvdtrain.torch" else
                     "hvd.shard(x, y, global_batch=...)") + ", or pass the whole data to Trainer")


def _sharded(scan: Scan) -> bool:
    if any(True for _ in scan.calls("DistributedSampler", "split_dataset_by_node", "DistributedBatchSampler")):
        return True
    for node in scan.nodes:
        if (isinstance(node, (cst.Attribute, cst.Name, cst.Call)) and is_rank(scan, node)
                and not isinstance(scan.parent.get(node), cst.Comparison) and _selects(scan, node)):
            return True
    return any(True for _ in scan.methods("shard"))


def _selects(scan: Scan, node: cst.CSTNode) -> bool:
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


METRIC = re.compile(r"loss|acc|metric|error|correct|score|auc|f1|ppl|perplex|avg|mean", re.IGNORECASE)
COUNTED = re.compile(r"sum|total|count|num|correct|weight", re.IGNORECASE)
REDUCES = ("allreduce", "all_reduce", "allreduce_")


def unweighted_metrics(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report a metric that is averaged over ranks without the number of samples behind it."""
    for call in scan.all(cst.Call):
        if collective(scan, call) not in REDUCES or not call.args:
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
                          "each rank counts the same, even with few samples: results are "
                          "wrong for last batches and unequal shards", "sum (metric x samples) and samples over the "
                          "ranks, then divide; hvdtrain's MetricAverageCallback and Trainer weight by samples")


def _reduced_sum(scan: Scan, call: cst.Call) -> bool:
    """Return whether torch.distributed sums a count (its default), which nothing divides by the number of ranks."""
    if scan.dotted(call.func).startswith("torch.distributed") and argument(call, "op", 1) is None:
        return bool(COUNTED.search(scan.code(call.args[0].value)))
    return False


def losses_of_replicas(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report losses in a loop of tf.distribute's own, which are divided by the global batch, or ought to be."""
    if context.kind != "tf_distribute" or not any(True for _ in scan.methods("run", "experimental_run_v2")):
        return
    for call in scan.calls("compute_average_loss", "scale_regularization_loss"):
        yield Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} divides by the global batch",
                      "under tf.distribute gradients are summed; Horovod's tape averages them, which divides "
                      "by the number of ranks again",
                      "keep the division and give the tape op=hvd.Sum, or divide by this rank's own batch and "
                      "keep the average (equal batches only)")
    for call in scan.calls("reduce_mean"):
        yield Finding(scan.line(call), "unsafe", f"{scan.short(call)} divides by this replica's own batch",
                      "tf.distribute sums the replicas' gradients: the step is too large by the number of "
                      "replicas, and a short last batch counts too much",
                      "sum over samples and divide by the global batch once")


RATES = re.compile(r"(^|_)(lr|learning_rate|rate)(_?\d+|_scaler?)?$|^lr_", re.IGNORECASE)


def rate_times_size(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report ``lr * size``: right only for equal batches that grow with the ranks."""
    for node in scan.all(cst.BinaryOperation):
        if not isinstance(node.operator, cst.Multiply) or not any(
                is_size(scan, side) or isinstance(side, cst.Name) and sized(scan, side)
                for side in (node.left, node.right)):
            continue
        if _product_is_rate(scan, node):
            yield Finding(scan.line(node), "unsafe", f"the learning rate is {scan.short(node)}", *_rate_advice(context))
    for grown in scan.all(cst.AugAssign):
        if isinstance(grown.operator, cst.MultiplyAssign) and _is_rate_name(grown.target) and any(
                is_size(scan, n) for n in scan.inner(grown.value) if isinstance(n, cst.BaseExpression)):
            yield Finding(scan.line(grown), "unsafe", f"the learning rate is multiplied by {scan.short(grown)}",
                          *_rate_advice(context))


def _rate_advice(context: Context) -> tuple[str, str]:
    if context.target == "trainer":
        return ("Trainer keeps the global batch, whatever the number of ranks, so the rate must not grow with them",
                "give the rate of the global batch (ScheduleConfig(linear_scaling_base=...) scales it by the batch, "
                "if it is to be scaled)")
    return ("this is right if the global batch grows with the ranks in equal shares; with "
            "unequal shares, or a constant global batch, the rate is too large (hvdtrain.keras and hvdtrain.torch "
            "keep Horovod's mean)",
            "keep it only if each rank's batch is the same and does not depend on the number of ranks")


def _product_is_rate(scan: Scan, node: cst.BinaryOperation) -> bool:
    for up in scan.above(node):
        if isinstance(up, cst.Arg):
            call = scan.parent[up]
            optimizer = isinstance(call, cst.Call) and ("optim" in scan.dotted(call.func).lower())
            first = isinstance(call, cst.Call) and call.args and call.args[0] is up
            return bool(RATES.search(up.keyword.value)) if up.keyword is not None else bool(
                optimizer and first) or _factor(node)
        if isinstance(up, (cst.Assign, cst.AnnAssign)):
            targets = [t.target for t in up.targets] if isinstance(up, cst.Assign) else [up.target]
            return any(_is_rate_name(t) for t in targets) or _factor(node)
        if isinstance(up, cst.BaseStatement):
            break
    return _factor(node)


def _factor(node: cst.BinaryOperation) -> bool:
    return _is_rate_name(node.left) or _is_rate_name(node.right)


def _is_rate_name(node: cst.CSTNode) -> bool:
    return bool(RATES.search((name_of(node) or "").rpartition(".")[2]))


def silent_divergence(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report Horovod's DistributedOptimizer with Keras' fit."""
    if context.kind != "horovod_keras" or not any(True for _ in scan.methods("fit", "compile")):
        return
    for call in scan.calls("DistributedOptimizer"):
        if scan.dotted(call.func).startswith("horovod."):
            yield Finding(scan.line(call), "unsafe", "Horovod's DistributedOptimizer does nothing under Keras 3",
                          "fit runs without an error, no gradient is exchanged, and every rank "
                          "trains a separate model",
                          "import hvdtrain.keras instead" + (": the diff does" if context.edited else ""))


def compiled_by_xla(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report ``jit_compile=True``, which no collective of MPI or Horovod goes through."""
    if context.kind in ("horovod_torch", "ddp", "data_parallel", "accelerate"):
        return
    for call in scan.all(cst.Call):
        if is_true(argument(call, "jit_compile")):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} asks for XLA (jit_compile=True)",
                          "XLA cannot compile the exchange of gradients between processes",
                          "set jit_compile=False")


def keras_2_calls(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report what Keras 3 refuses, where the diff does not replace it."""
    if context.kind not in ("horovod_keras", "tf_distribute", "keras_fit", "hvdtrain"):
        return
    for word in keras2.replacements(scan):
        if word.edit is None or not context.edited:
            yield Finding(scan.line(word.node), "by hand", word.what, word.why, word.do)


HABITS: tuple[Callable[[Scan, Context], Iterator[Finding]], ...] = (
    ranks.rank_only_collectives, ranks.no_broadcast, ranks.seeds_of_ranks, ranks.files_of_every_rank, ranks.elastic,
    ranks.prints_of_every_rank, rate_times_size, truncated_shards, padded_samplers, dropped_batches,
    same_order_each_epoch, not_sharded, unweighted_metrics, losses_of_replicas, silent_divergence, compiled_by_xla,
    keras_2_calls)


def look(scan: Scan, context: Context) -> list[Finding]:
    """Return the findings of all habits in a script, in the order of its lines."""
    return sorted({finding for habit in HABITS for finding in habit(scan, context)})
