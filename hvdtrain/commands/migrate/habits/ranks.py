"""Habits of ranks that do not do the same: collectives that some skip, weights and seeds of their own, shared files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate import names
from hvdtrain.commands.migrate.finding import Finding
from hvdtrain.commands.migrate.scan import Scan, name_of

SEEDS = ("manual_seed", "manual_seed_all", "set_seed", "set_random_seed", "seed_everything", "seed")
SAVES = ("save", "save_weights", "save_model", "save_pretrained", "export")
PRINTS = ("print", "savefig", "savez", "savetxt", "to_csv", "dump", "writelines", "write_text", "write", "makedirs")
ONE_PROCESS = ("keras_fit", "data_parallel")
"""Kinds of scripts that do not run as several processes, each the whole script."""
FILE_CALLBACKS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore")


def rank_only_collectives(scan: Scan, context: Any) -> Iterator[Finding]:
    """Something that all ranks must enter, where only some come by."""
    inside = _functions_with_collectives(scan)
    for call in scan.all(cst.Call):
        where = names.some_ranks(scan, call)
        if not where:
            continue
        name = names.collective(scan, call) or _collective_method(scan, call)
        if not name and isinstance(call.func, cst.Name) and call.func.value in inside:
            name = f"{call.func.value} (which calls {inside[call.func.value]})"
        if name:
            yield Finding(scan.line(call), "unsafe", f"{name} {where}",
                          "every rank has to enter it; the ranks that do not come make the others wait for ever",
                          "move it out of the branch; keep only printing and writing files inside")


def _functions_with_collectives(scan: Scan) -> dict[str, str]:
    """Name of a function of the file -> a collective that it calls, itself or through another."""
    found: dict[str, str] = {}
    functions = [f for f in scan.all(cst.FunctionDef) if isinstance(scan.scope(f), cst.Module)]
    for _ in range(4):  # through four levels of calls
        for function in functions:
            for call in scan.all(cst.Call, function):
                name = names.collective(scan, call) or _collective_method(scan, call)
                if not name and isinstance(call.func, cst.Name):
                    name = found.get(call.func.value, "")
                if name and not names.some_ranks(scan, call):
                    found.setdefault(function.name.value, name)
    return found


def _collective_method(scan: Scan, call: cst.Call) -> str:
    """``model.fit`` of a distributed optimizer, and what of an hvdtrain Trainer is collective; else ""."""
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


def no_broadcast(scan: Scan, context: Any) -> Iterator[Finding]:
    """Horovod training whose ranks never get the same first weights."""
    if context.kind not in ("horovod_keras", "horovod_torch", "hvdtrain"):
        return
    wrapped = [*scan.calls("DistributedOptimizer"), *scan.calls("DistributedGradientTape")]
    given = any(scan.means(n, "BroadcastGlobalVariablesCallback", "broadcast_variables", "broadcast_parameters",
                           "broadcast_global_variables", "BroadcastGlobalVariablesHook")
                for n in scan.all(cst.Attribute)) or any(
        "broadcast" in name.lower() for name in scan.imports.values())
    if wrapped and not given and scan.imports_any("horovod", "hvdtrain.keras", "hvdtrain.tensorflow"):
        yield Finding(scan.line(wrapped[0]), "unsafe", "no rank broadcasts its first weights",
                      "each rank starts from weights of its own, and equal updates keep them apart for ever",
                      "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit, or hvd.broadcast_parameters / "
                      "hvd.broadcast_variables before the first step (Trainer does so by itself)")


def seeds_of_ranks(scan: Scan, context: Any) -> Iterator[Finding]:
    """A seed that depends on the rank."""
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        if last in SEEDS and any(_mentions_rank(scan, arg) for arg in call.args):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call)} seeds each rank differently",
                          "what is drawn after it differs: first weights that nothing broadcasts, splits of "
                          "the data, the order of samples",
                          "seed all ranks alike (hvdtrain gives each rank's dropout a generator of its own)")


def _mentions_rank(scan: Scan, node: cst.CSTNode) -> bool:
    return any(names.is_rank(scan, inner) for inner in [node, *scan.inner(node)]
               if isinstance(inner, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)))


def files_of_every_rank(scan: Scan, context: Any) -> Iterator[Finding]:
    """Checkpoints and logs that all ranks write to one path."""
    if context.kind in ONE_PROCESS or context.edited and context.kind != "horovod_keras":
        return
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        is_save = last in SAVES and isinstance(call.func,
                                               cst.Attribute) and bool(call.args) and not _of_trainer(scan, call)
        is_save = is_save and not scan.dotted(call.func).startswith(("accelerate", "numpy"))
        if not (is_save or last in FILE_CALLBACKS) or _for_one(scan, call):
            continue
        if context.kind == "hvdtrain" and is_save and not scan.imports_any("hvdtrain.keras", "hvdtrain.tensorflow"):
            continue
        yield Finding(scan.line(call), "unsafe", f"every rank runs {scan.short(call, 50)}",
                      "ranks that write one file at the same time leave a broken one",
                      "guard it by 'if rank == 0:' (and keep collectives out of that branch)")


def _of_trainer(scan: Scan, call: cst.Call) -> bool:
    owner = scan.value(call.func.value) if isinstance(call.func, cst.Attribute) else None
    named = isinstance(call.func, cst.Attribute) and (name_of(call.func.value) or "").endswith("accelerator")
    return named or isinstance(owner, cst.Call) and scan.means(owner.func, "Trainer", "Accelerator")


def _for_one(scan: Scan, call: cst.Call, levels: int = 4) -> bool:
    """Whether one rank alone comes by: under an ``if`` or behind an early return, in ``a if root else b``, with a path
    of the rank's own, or in a function or method all of whose callers are such places."""
    if names.some_ranks(scan, call) or any(_mentions_rank(scan, arg) for arg in call.args):
        return True
    function = next((up for up in scan.above(call) if isinstance(up, cst.FunctionDef)), None)
    if function is None or not levels:
        return False
    callers = [c for c in scan.all(cst.Call) if not scan.dotted(c.func)
               and (name_of(c.func) or scan.code(c.func)).rpartition(".")[2] == function.name.value]
    return bool(callers) and all(_for_one(scan, c, levels - 1) for c in callers)


def elastic(scan: Scan, context: Any) -> Iterator[Finding]:
    """Horovod's elastic mode, or its function ``run``."""
    for node in scan.all(cst.Attribute):
        if scan.dotted(node).startswith("horovod.torch.elastic") and node.attr.value == "elastic":
            yield Finding(scan.line(node), "unsafe", f"{scan.short(node)} starts Horovod's rendezvous server",
                          "it runs what anybody on its port sends it (CVE-2024-10190), and no release mends that",
                          "start the job with mpirun or horovodrun, save checkpoints, and start it anew with "
                          "resume: auto")
    for call in scan.all(cst.Call):
        if scan.dotted(call.func) in ("horovod.run", "horovod.run.run", "horovod.runner.run"):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} hands the function to the ranks over an "
                          "open port", "they unpickle, and run, what anybody has put there",
                          "start the script itself: horovodrun -np N python script.py, or mpirun")


def prints_of_every_rank(scan: Scan, context: Any) -> Iterator[Finding]:
    """What one process printed and wrote, and every rank will once the script is moved."""
    if context.kind != "data_parallel" and not (context.edited and context.kind in ("keras_fit", "tf_distribute")):
        return
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        opens = last == "open" and any(w in scan.code(a.value) for a in call.args[1:2] for w in "wax")
        if (opens or last in PRINTS) and not names.some_ranks(scan, call):
            yield Finding(scan.line(call), "note", f"every rank runs {scan.short(call, 40)}, and all else that prints "
                          "or writes outside of training", "one process ran it; now each rank runs the whole script",
                          "put such lines under 'if rank == 0:', with no collective in the branch")
            return


HABITS = (rank_only_collectives, no_broadcast, seeds_of_ranks, files_of_every_rank, elastic, prints_of_every_rank)
