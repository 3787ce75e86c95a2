"""Scripts of tf.distribute's (MultiWorker)MirroredStrategy with ``fit``; own loops stay as they are."""

from __future__ import annotations

import libcst as cst

from hvdtrain.commands.migrate.edit import dedent, statement
from hvdtrain.commands.migrate.finding import MigrateOptions, Refused, Rewrite
from hvdtrain.commands.migrate.ranks import environment
from hvdtrain.commands.migrate.rules import keras2, keras_fit, keras_trainer
from hvdtrain.commands.migrate.rules.keras_calls import fits, sole
from hvdtrain.commands.migrate.scan import Scan, name_of, text_of

TITLE = "a script of tf.distribute"
TARGETS = ("hvdtrain.keras", "trainer")
STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy")
OTHERS = ("TPUStrategy", "ParameterServerStrategy", "CentralStorageStrategy", "OneDeviceStrategy")
FACTS = "launch_facts(os.environ)"
FACTS_IMPORTS = ["import os", "from hvdtrain.core.launcher import launch_facts"]
LOOP = ("the loss's divisor, the datasets and the reductions of a custom loop cannot be converted one by one",
        "hvdtrain.tensorflow has Horovod's tape: hvd.init(); tape = hvd.DistributedGradientTape(tape); call "
        "the step itself in place of strategy.run; hvd.broadcast_variables after the first step; shard the "
        "dataset by hand; or pass model and data to Trainer")


snippet = keras_trainer.snippet


def recognise(scan: Scan) -> bool:
    return any(True for _ in scan.calls(*STRATEGIES, *OTHERS))


def plan(scan: Scan, options: MigrateOptions) -> Rewrite:
    made = Rewrite()
    assign = _strategy(scan)
    target = assign.targets[0].target
    assert isinstance(target, cst.Name)
    name, to_trainer = target.value, options.target == "trainer"
    for use in scan.uses(name):
        _use(scan, made, use, to_trainer)
    if not fits(scan):
        raise Refused(scan.line(assign), "there is no fit of a compiled model here", *LOOP)
    _tf_config(scan, made, to_trainer)
    if to_trainer:
        made.edits.remove(sole(scan, assign))
        keras_trainer.rewrite(scan, made)
        keras2.rewrite(scan, made)
        return made
    line, texts = sole(scan, assign), keras_fit.rewrite(scan, made)
    keras2.rewrite(scan, made)
    made.edits.put(line, lambda old: cst.FlattenSentinel(
        [old.with_changes(body=cst.ensure_type(statement(texts[0]), cst.SimpleStatementLine).body),
         *(statement(text) for text in texts[1:])]))
    made.tell(scan.line(assign), "changed",
              "the strategy is removed: ranks are processes, one per GPU, and each runs the whole script",
              "one process of tf.distribute had several replicas, which Horovod's API does not have",
              keras_fit.START)
    return made


def _strategy(scan: Scan) -> cst.Assign:
    """Return the one assignment that makes the strategy; `Refused` for anything else."""
    calls = list(scan.calls(*STRATEGIES, *OTHERS))
    for call in calls:
        if scan.means(call.func, *OTHERS):
            raise Refused(scan.line(call), f"{scan.short(call.func)} is used",
                          "hvdtrain's ranks hold whole models and sum their gradients, which differs",
                          "use data parallelism as in MirroredStrategy, or do not migrate")
    up = scan.parent[calls[0]]
    if len(calls) > 1 or not (isinstance(up, cst.Assign) and len(up.targets) == 1
                              and isinstance(up.targets[0].target, cst.Name)
                              and scan.bindings(up.targets[0].target.value) == 1):
        raise Refused(scan.line(calls[-1]), "the strategy is not created once under one name",
                      "the strategy of each use cannot be derived from the code",
                      "keep one, then run migrate again; or remove all of them, and use a Trainer for each fit")
    sole(scan, up)
    return up


def _use(scan: Scan, made: Rewrite, use: cst.Name, to_trainer: bool) -> None:
    up = scan.parent[use]
    attribute = up.attr.value if isinstance(up, cst.Attribute) else ""
    if attribute == "num_replicas_in_sync":
        made.edits.swap(up, f"{FACTS}.size" if to_trainer else "hvd.size()")  # type: ignore[arg-type]
        made.edits.imports += FACTS_IMPORTS if to_trainer else []
        return
    item = scan.parent[scan.parent[up]] if attribute == "scope" else None
    block = scan.parent[item] if isinstance(item, cst.WithItem) else None
    if isinstance(block, cst.With) and len(block.items) == 1 and block.items[0].asname is None:
        made.edits.put(block, dedent)
        return
    what = f"{scan.short(scan.statement(use), 50)} uses the strategy"
    if attribute in ("run", "experimental_run_v2", "reduce", "experimental_distribute_dataset", "gather",
                     "distribute_datasets_from_function", "make_dataset_iterator"):
        raise Refused(scan.line(use), what, *LOOP)
    raise Refused(scan.line(use), what, "only its scope and num_replicas_in_sync have a counterpart",
                  "rewrite this line by hand (hvd.rank(), hvd.size(), hvd.rank() == 0), then run migrate again")


def _tf_config(scan: Scan, made: Rewrite, to_trainer: bool) -> None:
    """Plan to remove lines that write TF_CONFIG; the number of workers of one that was read is the size."""
    for node in scan.all(cst.Assign):
        if len(node.targets) == 1 and _is_tf_config(scan, node.targets[0].target):
            made.edits.remove(sole(scan, node))
    for call in scan.all(cst.Call):
        if scan.dotted(call.func) in ("os.environ.pop", "os.environ.setdefault") and call.args and text_of(
                call.args[0].value) == "TF_CONFIG":
            made.edits.remove(sole(scan, call))
    for node in scan.all(cst.Assign):
        if _reads(scan, node.value) and not to_trainer:
            _read(scan, made, node)
    for read in scan.nodes:
        if _is_tf_config(scan, read) and scan.statement(read) not in made.edits.changes:
            raise Refused(scan.line(read), "TF_CONFIG is read",
                          "no launcher of hvdtrain sets it: ranks and hosts come from mpirun or horovodrun",
                          "use hvd.rank() and hvd.size(), then run migrate again")


def _is_tf_config(scan: Scan, node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.Subscript, cst.Call)) and environment(scan, node) == "TF_CONFIG"


def _reads(scan: Scan, node: cst.BaseExpression) -> bool:
    return isinstance(node,
                      cst.Call) and scan.dotted(node.func) == "json.loads" and bool(node.args) and _is_tf_config(
        scan, node.args[0].value)


def _read(scan: Scan, made: Rewrite, node: cst.Assign) -> None:
    target = node.targets[0].target
    name = name_of(target)
    if len(node.targets) != 1 or not isinstance(target, cst.Name) or scan.bindings(target.value) != 1:
        return
    lengths = []
    for use in scan.uses(target.value):
        whole = scan.parent[scan.parent[use]] if isinstance(scan.parent[use], cst.Subscript) else None
        call = scan.parent[scan.parent[whole]] if isinstance(whole, cst.Subscript) else None
        text = scan.code(whole).replace("'", '"') if whole is not None else ""
        if text != f'{name}["cluster"]["worker"]' or not isinstance(call, cst.Call) or name_of(call.func) != "len":
            return
        lengths.append(call)
    for call in lengths:
        made.edits.swap(call, "hvd.size()")
        made.tell(scan.line(call), "changed", "the number of workers is hvd.size(), the number of ranks",
                  "a worker of tf.distribute may have held several GPUs; a rank has one",
                  "check the batch and the rate if workers had several GPUs")
    made.edits.remove(sole(scan, node))
