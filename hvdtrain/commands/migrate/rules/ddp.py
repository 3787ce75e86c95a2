"""Scripts of DistributedDataParallel: a diff of a few lines to ``hvdtrain.torch``, where it trains the same weights.

Owns model, optimizer, sampler and process group; the order of backward and step is read by ``ddp_loop``. A use that
cannot be converted faithfully is reported, and the script stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits, arg, below, followed_by, statement, with_args
from hvdtrain.commands.migrate.finding import Refused, Rewrite
from hvdtrain.commands.migrate.ranks import environment
from hvdtrain.commands.migrate.rules import ddp_loop
from hvdtrain.commands.migrate.rules.ddp_loop import DdpModel, last_part
from hvdtrain.commands.migrate.scan import Scan, argument, is_false, is_true, name_of, starred, text_of

GROUP = "torch.distributed."
ENVIRONMENT = {"RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local_rank", "LOCAL_WORLD_SIZE": "local_size"}
"""Variables that torchrun sets -> functions of ``hvdtrain.torch``."""
OTHER_LAUNCHERS = ("--local_rank", "--local-rank", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "GROUP_RANK",
                   "NODE_RANK")
FUNCTIONS = {"get_rank": "rank", "get_world_size": "size", "get_node_local_rank": "local_rank",
             "is_initialized": "is_initialized", "barrier": "barrier", "destroy_process_group": "shutdown"}
OPS = {"SUM": "Sum", "AVG": "Average", "MAX": "Max", "MIN": "Min", "PRODUCT": "Product"}
HARMLESS = ("is_available", "is_nccl_available", "is_gloo_available", "is_mpi_available", "elastic.multiprocessing")
"""Names of ``torch.distributed`` that need no process group."""
DROPPED = ("device_ids", "output_device", "dim", "broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view",
           "find_unused_parameters")
"""Arguments of DistributedDataParallel that have no effect on the mean of gradients; see `_wrapper` for two of them."""
ONLY_DDP = {"no_sync": "remove it and give hvd.DistributedOptimizer backward_passes_per_step=N, the number of passes",
            "join": "remove it; hvd.shard(dataset, global_batch) gives all ranks as many batches",
            "register_comm_hook": "give hvd.DistributedOptimizer compression=hvd.Compression.fp16",
            "require_backward_grad_sync": "give hvd.DistributedOptimizer backward_passes_per_step=N"}
AGAIN = "then run migrate again"
POSITIONAL = ("module", *DROPPED[:4])
"""First arguments of DistributedDataParallel, in its order."""
T = TypeVar("T")


def rewrite(scan: Scan, made: Rewrite) -> None:
    """Plan the diff, or report each line that stands against one."""
    _spawned(scan, made)
    asked = [*_functions(scan, made), *_variables(scan, made), *_samplers(scan, made)]
    line = _or_report(made, lambda: _group(scan, made, asked)) or 1
    model = _or_report(made, lambda: _wrapper(scan, made))
    if model is not None:
        _module(scan, made, model)
        _or_report(made, lambda: _optimizer(scan, made, model))
        if model.optimizer:
            _or_report(made, lambda: ddp_loop.rewrite(scan, made, model))
    if "hvd" in scan.bound:
        made.tell(1, "by hand", "the name hvd is taken", "the diff imports hvdtrain.torch as hvd",
                  f"give it another name, {AGAIN}")
    refusals = [finding for finding in made.findings if finding.kind == "by hand"]
    if refusals:
        made.edits, made.findings = Edits(), refusals
        made.tell(min(f.line for f in refusals), "note", "the script was left as it was",
                  "half of a diff would start two process groups, or average no gradients",
                  "change the lines that are named 'by hand'; or run migrate --to trainer to replace the loop")
        return
    made.edits.imports.append("import hvdtrain.torch as hvd")
    made.tell(line, "changed", "ranks and gradients are those of hvdtrain.torch", "rank 0's weights are broadcast "
              "once, and hvd.DistributedOptimizer averages the gradients of each backward as DDP did",
              "start it with mpirun -np N python script.py in place of torchrun; run migrate --to trainer to replace "
              "the loop by Trainer")


def _or_report(made: Rewrite, plan: Callable[[], T]) -> T | None:
    """Return the result of ``plan``; None where it is refused, which becomes a finding."""
    try:
        return plan()
    except Refused as refused:
        made.findings.append(refused.finding)
        return None


def _spawned(scan: Scan, made: Rewrite) -> None:
    for call in scan.all(cst.Call):
        if scan.dotted(call.func) in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
            made.tell(scan.line(call), "by hand", f"{scan.short(call)} starts the ranks", "mpirun starts them, each of "
                      "which runs the whole script", "call the function itself, with int(os.environ['LOCAL_RANK']) "
                      f"as its rank, {AGAIN}")
    for call in scan.calls("convert_sync_batchnorm", "nn.SyncBatchNorm"):
        made.tell(scan.line(call), "by hand", f"{scan.short(call)} needs a process group of PyTorch",
                  "hvdtrain.torch has none", f"build the layers as hvd.SyncBatchNorm(features), {AGAIN}")


def _functions(scan: Scan, made: Rewrite) -> list[cst.CSTNode]:
    """Plan new names for uses of torch.distributed; return the calls that need a process group. Reports all others."""
    asked: list[cst.CSTNode] = []
    reduced: set[cst.CSTNode] = set()
    for node in (*scan.all(cst.Attribute), *scan.all(cst.Name)):
        up = scan.parent[node]
        dotted = scan.dotted(node)
        if isinstance(up, cst.Attribute) or isinstance(node, cst.Name) and node not in scan.uses(node.value):
            continue
        wrapper = dotted.startswith("torch.nn.parallel.") and not isinstance(up, cst.Call)
        if any(isinstance(outer, (cst.Import, cst.ImportFrom)) for outer in scan.above(node)) or not wrapper and (
                not f"{dotted}.".startswith(GROUP) or dotted.removeprefix(GROUP).startswith(HARMLESS)):
            continue
        name = dotted.removeprefix(GROUP)
        call = up if isinstance(up, cst.Call) and up.func is node else None
        if call is not None and name == "init_process_group" or any(outer in reduced for outer in scan.above(node)):
            continue
        text = _replacement(scan, call, name) if call is not None else ""
        if call is None or not text:
            made.tell(scan.line(node), "by hand", f"{scan.short(call or node)} uses the process group of PyTorch",
                      "it has no counterpart that is the same for all arguments",
                      "write it with hvd.allreduce, hvd.allgather, hvd.broadcast_object, hvd.alltoall or "
                      f"hvd.rank() of hvdtrain.torch, {AGAIN}")
            continue
        made.edits.swap(call, text)
        reduced.add(call)
        asked.append(call)
    return asked


def _replacement(scan: Scan, call: cst.Call, name: str) -> str:
    """Return the code of the same collective or question in ``hvdtrain.torch``; "" where there is none."""
    keywords = {a.keyword.value for a in call.args if a.keyword is not None}
    if name in FUNCTIONS:
        return "" if call.args and (name != "barrier" or keywords != {"device_ids"}) else f"hvd.{FUNCTIONS[name]}()"
    if name not in ("all_reduce", "broadcast") or starred(call) or keywords - {"tensor", "op", "src"} or len(
            call.args) > 2 or not isinstance(scan.parent[call], cst.Expr):
        return ""
    tensor = argument(call, "tensor", 0)
    other = argument(call, "op" if name == "all_reduce" else "src", 1)
    asks = tensor is not None and any(scan.dotted(node).startswith(GROUP) for node in scan.inner(tensor.value))
    text = "" if tensor is None or asks else scan.code(tensor.value)
    if name == "broadcast":
        return f"hvd.broadcast_({text}, root_rank={scan.code(other.value)})" if other is not None else ""
    op = "Sum" if other is None else OPS.get(last_part(other.value), "")
    return f"hvd.allreduce_({text}, op=hvd.{op})" if op and text else ""


def _variables(scan: Scan, made: Rewrite) -> list[cst.CSTNode]:
    """Plan hvd's functions for what torchrun puts into the environment; return these reads."""
    asked: list[cst.CSTNode] = []
    for node in (*scan.all(cst.Subscript), *scan.all(cst.Call)):
        name = environment(scan, node)
        if name not in ENVIRONMENT or isinstance(scan.parent[node], cst.AssignTarget):
            continue
        call = scan.parent[scan.parent[node]] if isinstance(scan.parent[node], cst.Arg) else None
        if isinstance(call, cst.Call) and name_of(call.func) == "int" and len(call.args) == 1:
            made.edits.swap(call, f"hvd.{ENVIRONMENT[name]}()")
        else:
            made.edits.swap(node, f"str(hvd.{ENVIRONMENT[name]}())")
        asked.append(node)
    inner = {text for node in asked for text in scan.inner(node)}
    for text in scan.all(cst.SimpleString):
        if text not in inner and text_of(text) in (*ENVIRONMENT, *OTHER_LAUNCHERS):
            made.tell(scan.line(text), "by hand", f"{scan.short(scan.statement(text))} names {text.value}, a variable "
                      "or option of another launcher", "mpirun does not set it",
                      f"use hvd.rank(), hvd.size() or hvd.local_rank() after hvd.init(), or remove it, {AGAIN}")
    return asked


def _samplers(scan: Scan, made: Rewrite) -> list[cst.CSTNode]:
    """Give each DistributedSampler the ranks, which it else asks the process group for."""
    calls = list(scan.calls("DistributedSampler"))
    for call in calls:
        if starred(call):
            made.tell(scan.line(call), "by hand", f"{scan.short(call)} has arguments in * or **",
                      "num_replicas and rank cannot be read", f"write them out, {AGAIN}")
            continue
        added = [arg(f"hvd.{text}()", word) for word, at, text in (("num_replicas", 1, "size"), ("rank", 2, "rank"))
                 if argument(call, word, at) is None]
        if added:
            made.edits.put(call, lambda new, added=added: with_args(new, [*new.args, *added]))  # type: ignore[misc]
    return [call for call in calls if call in made.edits.changes]


def _group(scan: Scan, made: Rewrite, asked: list[cst.CSTNode]) -> int:
    """Plan ``hvd.init()`` for init_process_group, above the first line of its block that asks for ranks."""
    calls = [call for call in scan.calls("init_process_group") if scan.dotted(call.func).startswith(GROUP)]
    if len(calls) != 1:
        raise Refused(scan.line(calls[1] if calls else scan.module), f"init_process_group is called {len(calls)} times",
                      "hvd.init() takes the place of one call", f"call it once in this file, {AGAIN}")
    call, line = calls[0], _sole(scan, calls[0])
    block, early = scan.parent[line], []
    _always(scan, line, "init_process_group")
    _of_launcher(scan, call)
    if not isinstance(line.body[0], cst.Expr):
        raise Refused(scan.line(call), f"{scan.short(line)} uses the result of init_process_group", "hvd.init() has "
                      "none", f"call it on a line of its own, {AGAIN}")
    for node in asked:
        if scan.line(node) >= scan.line(call) or scan.scope(node) not in (scan.scope(call), scan.module):
            continue
        top = next((up for up in (node, *scan.above(node)) if scan.parent.get(up) is block), None)
        if top is None:
            raise Refused(scan.line(node), f"{scan.short(scan.statement(node))} comes before init_process_group",
                          "ranks are known after hvd.init()", f"move it below, {AGAIN}")
        early.append(top)
    first = min(early, key=scan.line, default=None)
    if first is None:
        made.edits.swap(call, "hvd.init()")
    else:
        made.edits.remove(line)
        made.edits.put(first, below(statement("hvd.init()")))
    return scan.line(call)


def _of_launcher(scan: Scan, call: cst.Call) -> None:
    """Raise `Refused` where rank or size of init_process_group are not read from the launcher's environment."""
    for word, at in (("world_size", 3), ("rank", 4)):
        given = argument(call, word, at)
        if given is None or scan.code(given.value) == "-1":
            continue
        values: list[cst.CSTNode] = [given.value]
        if isinstance(given.value, (cst.Name, cst.Attribute)):
            values = [one.value for one in scan.assigned(name_of(given.value) or "")]
        bound = scan.binders(given.value.value, given) if isinstance(given.value, cst.Name) else values
        read = [value for value in values if any(environment(scan, node) in ENVIRONMENT for node in scan.inner(value)
                                                 if isinstance(node, (cst.Subscript, cst.Call)))]
        if not read or len(read) < len(values) or any(isinstance(node, cst.Param) for node in bound):
            raise Refused(scan.line(given), f"init_process_group has {scan.short(given)}", "hvd.init() asks mpirun; "
                          "other uses of that value would still be the old one, the same on all ranks",
                          f"use int(os.environ['RANK']) and ['WORLD_SIZE'] there and wherever it is used, {AGAIN}")


def _wrapper(scan: Scan, made: Rewrite) -> DdpModel:
    """Plan the plain model and a broadcast of rank 0's weights for DistributedDataParallel."""
    calls = list(scan.calls("DistributedDataParallel"))
    if len(calls) != 1:
        raise Refused(scan.line(calls[1] if calls else scan.module),
                      f"DistributedDataParallel is called {len(calls)} times", "one model is followed through a script",
                      "wrap one model, or run migrate --to trainer")
    call, up = calls[0], scan.parent[calls[0]]
    target = name_of(up.targets[0].target) if isinstance(up, cst.Assign) and len(up.targets) == 1 else None
    inner = argument(call, "module", 0)
    if target is None or inner is None or starred(call):
        raise Refused(scan.line(call), f"{scan.short(call)} is not assigned to one name", "the model of each use "
                      "cannot be derived from the code", f"write model = DistributedDataParallel(model), {AGAIN}")
    line = _sole(scan, call)
    _always(scan, line, "DistributedDataParallel")
    for index, given in enumerate(call.args):
        word = given.keyword.value if given.keyword is not None else (*POSITIONAL, "")[min(index, len(POSITIONAL))]
        if word not in ("module", *DROPPED) or word == "find_unused_parameters" and not is_false(given):
            made.tell(scan.line(given), "by hand", f"DistributedDataParallel has {scan.short(given)}",
                      "without it parameters without a gradient are left alone; hvd.DistributedOptimizer gives them a "
                      "gradient of zero" if is_true(given) else "hvd.DistributedOptimizer has no such argument",
                      f"remove it if every parameter gets a gradient in each step, {AGAIN}")
    broadcast = statement(f"hvd.broadcast_parameters({target}.state_dict(), root_rank=0)")
    if scan.code(inner.value) == target:
        made.edits.put(line, lambda old: broadcast.with_changes(
            leading_lines=old.leading_lines, trailing_whitespace=old.trailing_whitespace))
    else:
        at = [given is inner for given in call.args].index(True)
        made.edits.put(call, lambda new: new.args[at].value)
        made.edits.put(line, followed_by([broadcast]))
    if not is_false(argument(call, "broadcast_buffers", 4)):
        own = any(True for _ in scan.methods("register_buffer"))
        made.tell(scan.line(call), "unsafe" if own else "note",
                  "buffers, such as statistics of BatchNorm, stay each rank's own",
                  "DDP copies those of rank 0 before each forward pass; gradients differ if the model changes a buffer "
                  "and reads it in training" + ("" if own else ", which BatchNorm does not"),
                  f"call hvd.broadcast_parameters({target}.state_dict(), root_rank=0) before "
                  + ("each forward pass if it does, else before " if own else "") + "other ranks than 0 evaluate")
    return DdpModel(target, scan.code(inner.value), scan.line(call))


def _optimizer(scan: Scan, made: Rewrite, model: DdpModel) -> None:
    """Plan hvd.DistributedOptimizer below each making of the optimizer, and note its name in ``model``."""
    calls = [call for call in scan.all(cst.Call) if scan.dotted(call.func).startswith("torch.optim.")
             and scan.dotted(call.func).count(".") == 2]
    made_by = {call: scan.parent[call] for call in calls}
    names = {name_of(up.targets[0].target) if isinstance(up, cst.Assign) and len(up.targets) == 1 else None
             for up in made_by.values()}
    blocks = {scan.parent[scan.statement(call)] for call in calls}
    if len(names) != 1 or None in names or len(blocks) < len(calls) or any(scan.means(c.func, "LBFGS") for c in calls):
        raise Refused(scan.line(calls[-1] if calls else scan.module),
                      f"{len(calls)} optimizers of torch.optim are assigned to a name", "the diff wraps one, which "
                      "steps once after each backward", "make one, as optimizer = torch.optim.SGD(...), "
                      f"{AGAIN}; or run migrate --to trainer")
    model.optimizer = str(names.pop())
    for step in scan.methods("step"):
        assert isinstance(step.func, cst.Attribute)
        owner = name_of(step.func.value) or ""
        if owner != model.optimizer and any("parameters(" in scan.code(one.value) and one.value not in calls
                                            for one in scan.assigned(owner)):
            raise Refused(scan.line(step), f"{scan.short(step)} is of a second optimizer", "the diff wraps the one of "
                          "torch.optim", f"make one of torch.optim, {AGAIN}; or run migrate --to trainer")
    for call in scan.methods("add_param_group"):
        raise Refused(scan.line(call), f"{scan.short(call)} adds parameters to an optimizer", "DDP averages those of "
                      "its model alone", f"make the optimizer of all parameters, {AGAIN}")
    for call in calls:
        owners = {scan.code(one.func.value).removesuffix(".module")
                  for one in scan.methods("parameters", "named_parameters", within=call)
                  if isinstance(one.func, cst.Attribute)}
        known = [owner for owner in owners if model.of(owner)]
        parts = [owner for owner in owners if owner.startswith(f"{model.target}.")]
        if len(known) + len(parts) != len(owners) or len(known) > 1 or not owners:
            raise Refused(scan.line(call), f"the optimizer is made as {scan.short(call)}", "its parameters are not "
                          f"visibly those of {model.target}", f"make it of {model.target}.parameters(), {AGAIN}")
        model.whole = model.whole and bool(known)
        owner = known[0] if known else model.target
        made.edits.put(_sole(scan, call), followed_by([statement(
            f"{model.optimizer} = hvd.DistributedOptimizer({model.optimizer}, "
            f"named_parameters={owner}.named_parameters())")]))


def _module(scan: Scan, made: Rewrite, model: DdpModel) -> None:
    """Plan the model itself for ``model.module``; report what only the wrapper has, and names that lose a prefix."""
    for node in scan.all(cst.Attribute):
        owner, name = name_of(node.value) or "", node.attr.value
        if name in ONLY_DDP and model.of(owner):
            made.tell(scan.line(node), "by hand", f"{scan.short(node)} is of DistributedDataParallel",
                      "a plain model does not have it", f"{ONLY_DDP[name]}, {AGAIN}")
        elif name == "module" and model.of(owner):
            made.edits.put(node, lambda new: new.value)
        elif name == "module" and not scan.dotted(node):
            made.tell(scan.line(node), "by hand", f"{scan.short(node)} may be the model inside the wrapper",
                      "the model stays plain", f"remove .module, {AGAIN}")
        elif name in ("state_dict", "load_state_dict") and owner == model.target and scan.line(node) > model.line:
            made.tell(scan.line(node), "changed", f"the names of {owner}.state_dict() lose the prefix module.",
                      "the model stays plain", "strip module. from the names of old files before they are loaded")


def _always(scan: Scan, line: cst.CSTNode, what: str) -> None:
    """Raise `Refused` where a line is under a condition or in a loop."""
    for up in scan.above(line):
        if isinstance(up, (cst.If, cst.For, cst.While, cst.Try, cst.With)) and not (
                isinstance(up, cst.If) and name_of(getattr(up.test, "left", None)) == "__name__"):
            raise Refused(scan.line(line), f"{what} stands inside '{scan.short(up).split(':')[0]}'", "the diff would "
                          "distribute only where that runs, or everywhere", f"keep the distributed branch, {AGAIN}")


def _sole(scan: Scan, node: cst.CSTNode) -> cst.SimpleStatementLine:
    line = scan.statement(node)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        raise Refused(scan.line(node), f"{scan.short(node)} shares its line with other statements",
                      "one statement cannot be moved separately", f"put it on a separate line, {AGAIN}")
    return line
