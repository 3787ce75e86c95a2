"""Ranks in a distributed script: names for rank and size, collectives, and hazards of ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hvdtrain.commands.migrate.finding import Context, Finding
from hvdtrain.commands.migrate.scan import Scan, argument, name_of, text_of

RANK_WORDS = ("rank", "local_rank", "global_rank", "world_rank", "RANK", "LOCAL_RANK", "process_index",
              "task_index", "task_id", "gpu_id")
SIZE_WORDS = ("world_size", "WORLD_SIZE", "num_replicas_in_sync", "num_processes", "n_ranks", "num_ranks",
              "num_workers_total")
ROOT_FLAGS = ("is_main_process", "is_local_main_process", "is_master", "is_main", "is_root", "is_chief",
              "is_rank0", "is_rank_0", "is_rank_zero")
COLLECTIVES = frozenset(
    "allreduce all_reduce allgather all_gather broadcast broadcast_variables broadcast_parameters "
    "broadcast_object broadcast_optimizer_state broadcast_global_variables barrier reducescatter "
    "reduce_scatter alltoall all_to_all grouped_allreduce grouped_allgather gather_for_metrics "
    "wait_for_everyone allgather_object broadcast_object_list all_gather_object allreduce_ allreduce_async "
    "synchronize join".split())
"""Functions that every rank has to enter."""
HOMES = ("horovod", "hvdtrain", "torch.distributed", "tensorflow.distribute")
HOROVOD_APIS = ("hvdtrain.keras", "hvdtrain.tensorflow", "hvdtrain.torch")


def is_rank(scan: Scan, node: cst.BaseExpression) -> bool:
    """Return whether an expression is this process's number: ``hvd.rank()``, ``dist.get_rank()``, or its name."""
    return _is(scan, node, RANK_WORDS, ("rank", "local_rank", "get_rank", "get_node_local_rank"), ("RANK",
                                                                                                   "LOCAL_RANK"))


def is_size(scan: Scan, node: cst.BaseExpression) -> bool:
    """Return whether an expression is the number of processes: ``hvd.size()``, ``dist.get_world_size()``, a name."""
    return _is(scan, node, SIZE_WORDS, ("size", "local_size", "get_world_size"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def sized(scan: Scan, node: cst.BaseExpression) -> bool:
    """Return whether an expression holds the number of processes, also by a name that is assigned it anywhere."""
    for inner in scan.inner(node):
        if isinstance(inner, (cst.Call, cst.Name, cst.Attribute, cst.Subscript)) and is_size(scan, inner):
            return True
        if isinstance(inner, cst.Name) and any(is_size(scan, deep) for assign in scan.assigned(inner.value)
                                               for deep in scan.inner(assign.value)
                                               if isinstance(deep, (cst.Call, cst.Attribute))):
            return True
    return False


def _is(scan: Scan, node: cst.BaseExpression, words: tuple[str, ...], calls: tuple[str, ...],
        variables: tuple[str, ...]) -> bool:
    node = scan.value(node)
    last = (name_of(node) or "").rpartition(".")[2]
    made = scan.assigned(name_of(node) or "") if isinstance(node, cst.Attribute) else []
    if len(made) == 1 and (name_of(node) or "") not in scan.code(made[0].value):  # self.gpu = int(os.environ["RANK"])
        return last in words or _is(scan, made[0].value, words, calls, variables)
    if last and last in words:
        return True
    if isinstance(node, cst.Call):
        if scan.means(node.func, *calls) and scan.dotted(node.func).startswith(HOMES):
            return True
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in calls[2:]:
            return True
        if isinstance(node.func, cst.Name) and node.func.value == "int" and node.args:
            return _is(scan, node.args[0].value, words, calls, variables)
        return environment(scan, node) in variables
    return environment(scan, node) in variables


def environment(scan: Scan, node: cst.BaseExpression) -> str:
    """Return the variable that an expression reads from ``os.environ``, else ""."""
    if isinstance(node, cst.Subscript) and scan.dotted(node.value) == "os.environ" and len(node.slice) == 1:
        index = node.slice[0].slice
        return text_of(index.value) or "" if isinstance(index, cst.Index) else ""
    if isinstance(node, cst.Call) and scan.dotted(node.func) in ("os.environ.get", "os.getenv"):
        key = argument(node, "key", 0)
        return text_of(key.value) or "" if key else ""
    return ""


def mentions_rank(scan: Scan, test: cst.BaseExpression, seen: tuple[cst.CSTNode, ...] = ()) -> bool:
    """Return whether a condition depends on the rank; ``seen``: values of names on the way to it, maybe circular."""
    if isinstance(test, cst.BooleanOperation):
        return mentions_rank(scan, test.left, seen) or mentions_rank(scan, test.right, seen)
    if isinstance(test, cst.UnaryOperation):
        return mentions_rank(scan, test.expression, seen)
    if isinstance(test, cst.Comparison):
        sides = [test.left, *(c.comparator for c in test.comparisons)]
        return any(is_rank(scan, side) or isinstance(side, cst.Name) and mentions_rank(scan, side, seen)
                   for side in sides)
    if isinstance(test, cst.Call):
        return (name_of(test.func) or "").rpartition(".")[2] in ROOT_FLAGS or is_rank(scan, test)
    value = scan.value(test)
    if value is not test and not any(value is one for one in seen):
        if isinstance(value, (cst.Comparison, cst.BooleanOperation, cst.UnaryOperation)):
            return mentions_rank(scan, value, (*seen, value))
        if isinstance(value, cst.IfExp):  # verbose = 1 if hvd.rank() == 0 else 0
            return mentions_rank(scan, value.test, (*seen, value))
    last = (name_of(test) or "").rpartition(".")[2]
    return last in ROOT_FLAGS or is_rank(scan, test) or isinstance(test, cst.Name) and any(
        _set_by_rank(scan, assign) for assign in scan.assigned(test.value))


def _set_by_rank(scan: Scan, assign: cst.Assign) -> bool:
    """Return whether a flag is set under an ``if`` of the rank: ``if hvd.rank() == 0: verbose = 1``."""
    flag = isinstance(assign.value, cst.Integer) or name_of(assign.value) in ("True", "False")
    tests = (up.test for up in scan.above(assign) if flag and isinstance(up, cst.If))
    return any(is_rank(scan, node) for test in tests for node in scan.inner(test)
               if isinstance(node, (cst.Name, cst.Call, cst.Subscript)))


def some_ranks(scan: Scan, node: cst.CSTNode) -> str:
    """Return what lets only some ranks reach ``node``, as text; "" if there is nothing.

    An ``if``, ``while`` or conditional expression around it, ``root and node``, or an early return, ``continue`` or
    exit of the others above it.
    """
    inner: cst.CSTNode = node
    for up in scan.above(node):
        if isinstance(up, (cst.FunctionDef, cst.Lambda)):
            return _left_early(scan, inner, up)
        if isinstance(up, (cst.If, cst.While, cst.IfExp)) and inner is not up.test and mentions_rank(scan, up.test):
            word = "while" if isinstance(up, cst.While) else "if"
            return f"inside '{word} {scan.short(up.test)}'"
        if isinstance(up, cst.BooleanOperation) and inner is up.right and mentions_rank(scan, up.left):
            return f"behind '{scan.short(up.left)}'"
        early = _left_early(scan, inner, up)
        if early:
            return early
        inner = up
    return ""


def _left_early(scan: Scan, node: cst.CSTNode, block: cst.CSTNode) -> str:
    """Return `some_ranks` for a branch above ``node`` in a block that some ranks do not come out of below."""
    body: list[cst.CSTNode] = list(block.body) if isinstance(block, (cst.IndentedBlock, cst.Module)) else []
    at = next((index for index, line in enumerate(body) if line is node), 0)
    for line in body[:at]:
        if isinstance(line, cst.If) and mentions_rank(scan, line.test) and line.orelse is None and isinstance(
                line.body, cst.IndentedBlock) and isinstance(line.body.body[-1], cst.SimpleStatementLine):
            last = line.body.body[-1].body[-1]
            ends = isinstance(last, cst.Expr) and isinstance(last.value, cst.Call) and scan.dotted(
                last.value.func) in ("sys.exit", "os._exit")
            if isinstance(last, (cst.Return, cst.Continue, cst.Break)) or ends:
                return f"below 'if {scan.short(line.test)}: {scan.short(last)}'"
        if isinstance(line, cst.If) and isinstance(line.body, cst.SimpleStatementSuite) and mentions_rank(
                scan, line.test) and isinstance(line.body.body[-1], (cst.Return, cst.Continue, cst.Break)):
            return f"below '{scan.short(line)}'"
    return ""


def collective(scan: Scan, call: cst.Call) -> str:
    """Return the name of the collective that a call is; "" if it is none."""
    dotted = scan.dotted(call.func)
    last = (name_of(call.func) or "").rpartition(".")[2]
    if last not in COLLECTIVES:
        return ""
    if dotted.startswith(HOMES):
        return last
    owner = name_of(call.func.value) if isinstance(call.func, cst.Attribute) else None
    made = scan.value(call.func.value) if isinstance(call.func, cst.Attribute) else None
    if owner and isinstance(made, cst.Call) and scan.means(made.func, "Accelerator"):
        return last
    return ""


SEEDS = ("manual_seed", "manual_seed_all", "set_seed", "set_random_seed", "seed_everything", "seed")
SAVES = ("save", "save_weights", "save_model", "save_pretrained", "export")
PRINTS = ("print", "savefig", "savez", "savetxt", "to_csv", "dump", "writelines", "write_text", "write", "makedirs")
ONE_PROCESS = ("keras_fit", "data_parallel")
"""Kinds of scripts that do not run as several processes, each the whole script."""
FILE_CALLBACKS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore")


def rank_only_collectives(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report what all ranks must enter, where only some come by."""
    inside = _functions_with_collectives(scan)
    for call in scan.all(cst.Call):
        where = some_ranks(scan, call)
        if not where:
            continue
        name = collective(scan, call) or _collective_method(scan, call)
        if not name and isinstance(call.func, cst.Name) and call.func.value in inside:
            name = f"{call.func.value} (which calls {inside[call.func.value]})"
        if name:
            yield Finding(scan.line(call), "unsafe", f"{name} {where}",
                          "every rank must enter it; otherwise the other ranks wait forever",
                          "move it out of the branch; keep only printing and writing files inside")


def _functions_with_collectives(scan: Scan) -> dict[str, str]:
    """Return a collective that a function of the file calls, itself or through another, by its name."""
    found: dict[str, str] = {}
    functions = [f for f in scan.all(cst.FunctionDef) if isinstance(scan.scope(f), cst.Module)]
    for _ in range(4):  # through four levels of calls
        for function in functions:
            for call in scan.all(cst.Call, function):
                name = collective(scan, call) or _collective_method(scan, call)
                if not name and isinstance(call.func, cst.Name):
                    name = found.get(call.func.value, "")
                if name and not some_ranks(scan, call):
                    found.setdefault(function.name.value, name)
    return found


def _collective_method(scan: Scan, call: cst.Call) -> str:
    """Return ``model.fit`` of a distributed optimizer, and what of an hvdtrain Trainer is collective; else ""."""
    if not isinstance(call.func, cst.Attribute):
        return ""
    name, owner = call.func.attr.value, scan.value(call.func.value)
    if isinstance(owner, cst.Call) and scan.means(owner.func, "Trainer") and scan.dotted(owner.func).startswith(
            "hvdtrain") and name in ("fit", "evaluate", "save", "restore"):
        return f"Trainer.{name}"
    uses_callbacks = any(a.keyword is not None and a.keyword.value == "callbacks" and "hvd" in scan.code(a.value)
                         for a in call.args)
    if name == "fit" and (any(True for _ in scan.calls("DistributedOptimizer")) or uses_callbacks):
        return "fit"
    return "evaluate" if name == "evaluate" and uses_callbacks else ""


def no_broadcast(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report Horovod training whose ranks never get the same first weights."""
    if context.kind not in ("horovod_keras", "horovod_torch", "hvdtrain"):
        return
    wrapped = [*scan.calls("DistributedOptimizer"), *scan.calls("DistributedGradientTape")]
    given = any(scan.means(n, "BroadcastGlobalVariablesCallback", "broadcast_variables", "broadcast_parameters",
                           "broadcast_global_variables", "BroadcastGlobalVariablesHook")
                for n in scan.all(cst.Attribute)) or any(
        "broadcast" in name.lower() for name in scan.imports.values())
    if wrapped and not given and scan.imports_any("horovod", *HOROVOD_APIS):
        yield Finding(scan.line(wrapped[0]), "unsafe", "no rank broadcasts its initial weights",
                      "each rank starts from different weights, and equal updates keep them different",
                      "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit, or hvd.broadcast_parameters / "
                      "hvd.broadcast_variables before the first step (Trainer does this automatically)")


def seeds_of_ranks(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report a seed that depends on the rank."""
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        if last in SEEDS and any(_names_rank(scan, arg) for arg in call.args):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call)} seeds each rank differently",
                          "what is drawn after it differs: initial weights without a broadcast, "
                          "splits of the data, the order of samples",
                          "use the same seed on all ranks (hvdtrain gives each rank's dropout a separate generator)")


def _names_rank(scan: Scan, node: cst.CSTNode) -> bool:
    return any(is_rank(scan, inner) for inner in [node, *scan.inner(node)]
               if isinstance(inner, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)))


def files_of_every_rank(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report checkpoints and logs that all ranks write to one path."""
    if context.kind in ONE_PROCESS or context.edited and context.kind in ("tf_distribute", "hvdtrain"):
        return
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        is_save = last in SAVES and isinstance(call.func,
                                               cst.Attribute) and bool(call.args) and not _of_trainer(scan, call)
        is_save = is_save and not scan.dotted(call.func).startswith(("accelerate", "numpy"))
        if not (is_save or last in FILE_CALLBACKS) or _for_one(scan, call):
            continue
        if context.kind == "hvdtrain" and is_save and not scan.imports_any(*HOROVOD_APIS):
            continue
        yield Finding(scan.line(call), "unsafe", f"every rank runs {scan.short(call, 50)}",
                      "ranks that write one file at the same time corrupt it",
                      "guard it by 'if rank == 0:' (and keep collectives out of that branch)")


def _of_trainer(scan: Scan, call: cst.Call) -> bool:
    owner = scan.value(call.func.value) if isinstance(call.func, cst.Attribute) else None
    named = isinstance(call.func, cst.Attribute) and (name_of(call.func.value) or "").endswith("accelerator")
    return named or isinstance(owner, cst.Call) and scan.means(owner.func, "Trainer", "Accelerator")


def _for_one(scan: Scan, call: cst.Call, levels: int = 4) -> bool:
    """Return whether only one rank comes by.

    Under an ``if`` or behind an early return, in ``a if root else b``, with a path of the rank's own, or in a function
    or method all of whose callers are such places.
    """
    if some_ranks(scan, call) or any(_names_rank(scan, arg) for arg in call.args):
        return True
    function = next((up for up in scan.above(call) if isinstance(up, cst.FunctionDef)), None)
    if function is None or not levels:
        return False
    callers = [c for c in scan.all(cst.Call) if not scan.dotted(c.func)
               and (name_of(c.func) or scan.code(c.func)).rpartition(".")[2] == function.name.value]
    return bool(callers) and all(_for_one(scan, c, levels - 1) for c in callers)


def elastic(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report Horovod's elastic mode, or its function ``run``."""
    for node in scan.all(cst.Attribute):
        if scan.dotted(node).startswith("horovod.torch.elastic") and node.attr.value == "elastic":
            yield Finding(scan.line(node), "unsafe", f"{scan.short(node)} starts Horovod's rendezvous server",
                          "it runs code from anyone on its port (CVE-2024-10190), and no release fixes that",
                          "start the job with mpirun or horovodrun, save checkpoints, and restart it with "
                          "resume: auto")
    for call in scan.all(cst.Call):
        if scan.dotted(call.func) in ("horovod.run", "horovod.run.run", "horovod.runner.run"):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} hands the function to the ranks over an "
                          "open port", "they unpickle and run data from anyone",
                          "call hvdtrain.run(function, args=(...), np=N), which starts ranks on this machine by MPI "
                          "and opens no port; on several hosts start the script itself: horovodrun -np N python "
                          "script.py, or mpirun")


def prints_of_every_rank(scan: Scan, context: Context) -> Iterator[Finding]:
    """Report what one process printed and wrote, and every rank will once the script is moved."""
    if context.kind != "data_parallel" and not (context.edited and context.kind in ("keras_fit", "tf_distribute")):
        return
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        opens = last == "open" and any(w in scan.code(a.value) for a in call.args[1:2] for w in "wax")
        if (opens or last in PRINTS) and not some_ranks(scan, call):
            yield Finding(scan.line(call), "note", f"every rank runs {scan.short(call, 40)}, and everything else "
                          "that prints or writes outside of training", "one process ran it; now each rank runs the "
                                                                       "whole script",
                          "put such lines under 'if rank == 0:', with no collective in the branch")
            return
