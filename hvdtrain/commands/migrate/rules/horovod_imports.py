"""Move imports of Horovod's APIs to hvdtrain's modules of the same names, if hvdtrain has all names."""

from __future__ import annotations

import importlib

import libcst as cst

from hvdtrain.commands.migrate.edit import Change, Edits, expression
from hvdtrain.commands.migrate.finding import Rewrite
from hvdtrain.commands.migrate.scan import Scan, local_name, name_of

HOMES = {"horovod.tensorflow.keras": "hvdtrain.keras", "horovod.keras": "hvdtrain.keras",
         "horovod.tensorflow": "hvdtrain.tensorflow", "horovod.torch": "hvdtrain.torch"}
CALLBACKS = frozenset("BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback "
                      "LearningRateWarmupCallback BestModelCheckpoint".split())
LAUNCHERS = ("horovod", "horovod.run", "horovod.runner")
OF_PACKAGE = {"run", "runner", "__version__"}
"""What of Horovod's package itself is left in place: it starts jobs, and is no part of training."""
PRIVATE = ("mpi_ops", "compression", "functions", "optimizer", "sync_batch_norm")
"""Modules of ``horovod.tensorflow`` and ``horovod.torch`` whose names these packages have, too."""
ELASTIC = ("Horovod's elastic rendezvous runs code from anyone on its port (CVE-2024-10190), so "
           "hvdtrain has none",
           "save checkpoints and restart the job: load the last one on every rank and give the loop its first epoch "
           "(fit: initial_epoch), or use Trainer with resume: auto")


def move(scan: Scan, made: Rewrite) -> int:
    """Plan the new imports; return the line of the first, 0 where none moves. A name that is missing undoes all."""
    lines = [scan.line(node) for node in scan.nodes
             if isinstance(node, cst.Import) and _import(scan, node, made)
             or isinstance(node, cst.ImportFrom) and _import_from(scan, node, made)]
    if made.findings:  # two of them in one process would be two worlds
        made.edits = Edits()
        return 0
    return min(lines, default=0)


def home(scan: Scan, module: str, names: set[str]) -> tuple[str, set[str]]:
    """Return (hvdtrain's module for one of Horovod's, used names that it lacks); ("", names) where there is none."""
    base, _, tail = module.partition(".callbacks")
    if module.endswith(".callbacks") and base in HOMES and not tail:
        return "hvdtrain.keras.callbacks", names - CALLBACKS
    if module not in HOMES:
        return "", names
    to = HOMES[module]
    fits = any(True for _ in scan.methods("fit", "compile")) and scan.imports_any("keras", "tensorflow")
    if module == "horovod.tensorflow" and "DistributedOptimizer" in names and fits and names <= _has("hvdtrain.keras"):
        to = "hvdtrain.keras"  # Horovod's TensorFlow module wraps Keras optimizers, too
    return to, names - _has(to)


def _has(module: str) -> set[str]:
    """Return the names of Horovod's API that hvdtrain's module has; its import loads no framework."""
    return set(importlib.import_module(module).__all__) - {"elastic"}


def _used(scan: Scan, local: str) -> set[str]:
    """Return the attributes that are read of a local name (``hvd`` of ``hvd.callbacks.X``: callbacks)."""
    depth = local.count(".") + 1
    found = set()
    for node in scan.all(cst.Attribute):
        text = name_of(node) or ""
        if text.startswith(local + ".") and text.count(".") == depth and scan.dotted(node) and not any(
                isinstance(up, (cst.Import, cst.ImportFrom)) for up in scan.above(node)):
            found.add(node.attr.value)
    return found


def _import(scan: Scan, node: cst.Import, made: Rewrite) -> bool:
    moved = False
    for alias in node.names:
        module = name_of(alias.name) or ""
        if module.split(".")[0] != "horovod" or _launcher(scan, alias, module):
            continue
        reach = local_name(alias) if alias.asname else module
        names = _used(scan, reach) - ({"keras"} if not alias.asname and module == "horovod.tensorflow" else set())
        to, missing = home(scan, module, names)
        if not alias.asname and not missing and to:
            missing = _other_chains(scan, module)
        if not to or missing:
            _stays(scan, node, made, module, missing)
            continue
        made.edits.put(alias, _renamed(to))
        if not alias.asname:
            _chains(scan, made, module, to)
        moved = True
    return moved


def _renamed(module: str) -> Change:
    return lambda new: new.with_changes(name=expression(module))


def _other_chains(scan: Scan, module: str) -> set[str]:
    """Return uses of ``horovod`` that are not of ``module``, which the moved import would no longer serve."""
    modules = {name_of(a.name) or "" for n in scan.all(cst.Import) for a in n.names if not a.asname}
    found = set()
    for node in scan.uses("horovod"):
        text = "horovod"
        for up in scan.above(node):
            if not isinstance(up, cst.Attribute):
                break
            text += "." + up.attr.value
        if "horovod" in modules and text.split(".")[1:2] and text.split(".")[1] in OF_PACKAGE:
            continue
        if not any(text.startswith(m + ".") or text == m for m in modules if m in HOMES or m == module):
            found.add(text)
    return found


def _chains(scan: Scan, made: Rewrite, module: str, to: str) -> None:
    for node in scan.all(cst.Attribute):
        is_import = any(isinstance(up, (cst.Import, cst.ImportFrom)) for up in scan.above(node))
        if name_of(node) == module and not is_import and not (
                module == "horovod.tensorflow" and _next(scan, node) == "keras"):
            made.edits.swap(node, to)


def _next(scan: Scan, node: cst.CSTNode) -> str:
    up = scan.parent.get(node)
    return up.attr.value if isinstance(up, cst.Attribute) else ""


def _import_from(scan: Scan, node: cst.ImportFrom, made: Rewrite) -> bool:
    module = name_of(node.module) or ""
    if node.relative or module.split(".")[0] != "horovod":
        return False
    if module in LAUNCHERS and not isinstance(node.names, cst.ImportStar) and {
            name_of(alias.name) for alias in node.names} <= OF_PACKAGE:
        return False
    if isinstance(node.names, cst.ImportStar):
        to, missing = home(scan, module, set())
        if to:
            made.edits.put(node, lambda new: new.with_changes(module=expression(to)))
        else:
            _stays(scan, node, made, module, missing)
        return bool(to)
    homes: dict[str, str] = {}
    for alias in node.names:
        name = name_of(alias.name) or ""
        if f"{module}.{name}" in HOMES:  # from horovod.tensorflow import keras as hvd
            to, missing = home(scan, f"{module}.{name}", _used(scan, local_name(alias)))
            homes[name] = "" if missing else to.rpartition(".")[0] + ":" + to.rpartition(".")[2]
        else:
            to, missing = home(scan, _public(module, name), {name})
            homes[name] = "" if missing else to + ":" + name
        if not homes[name]:
            _stays(scan, node, made, f"{module}.{name}", missing)
            return False
    bases = {home.partition(":")[0] for home in homes.values()}
    if len(bases) > 1:
        _stays(scan, node, made, module, set(homes))
        return False
    made.edits.put(node, lambda new: new.with_changes(module=expression(bases.pop())))
    for alias in node.names:
        new_name = homes[name_of(alias.name) or ""].partition(":")[2]
        if new_name != name_of(alias.name):
            _rename(scan, made, alias, new_name)
    return True


def _public(module: str, name: str) -> str:
    """Return the public module of ``name``, for a private one of Horovod's (``horovod.tensorflow.mpi_ops``)."""
    package, _, inner = module.rpartition(".")
    return package if package in ("horovod.tensorflow", "horovod.torch") and inner in PRIVATE else module


def _rename(scan: Scan, made: Rewrite, alias: cst.ImportAlias, name: str) -> None:
    """Keep the local name by ``as`` where hvdtrain's module has another name."""
    local = local_name(alias)
    made.edits.put(alias, lambda new: new.with_changes(
        name=cst.Name(name), asname=new.asname or cst.AsName(cst.Name(local))))


def _stays(scan: Scan, node: cst.CSTNode, made: Rewrite, module: str, missing: set[str]) -> None:
    line = scan.line(node)
    if "elastic" in module or "elastic" in missing:
        made.tell(line, "by hand", f"{module} is used for elastic training; the script was left as it was", *ELASTIC)
    elif missing:
        made.tell(line, "by hand",
                  f"{module}: hvdtrain has no {', '.join(sorted(missing))}; the script was left as it was",
                  "if only half of it moved, Horovod and hvdtrain would both start in one process",
                  "replace these names, then run migrate again")
    else:
        made.tell(line, "by hand", f"{module} has no counterpart in hvdtrain; the script was left as it was",
                  "it is not in Horovod's documented API",
                  "use hvdtrain.keras, hvdtrain.tensorflow or hvdtrain.torch, then run migrate again")


def _launcher(scan: Scan, alias: cst.ImportAlias, module: str) -> bool:
    """Return whether an import is Horovod's package itself, for its ``run`` alone."""
    if module not in LAUNCHERS:
        return False
    served = {(name_of(a.name) or "").split(".")[1] for n in scan.all(cst.Import) for a in n.names
              if (name_of(a.name) or "").startswith("horovod.")} if alias.asname is None else set()
    return module != "horovod" or _used(scan, local_name(alias)) <= OF_PACKAGE | served
