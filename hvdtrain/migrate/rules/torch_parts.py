"""Optimizer, loss and data of a PyTorch script as keys of hvdtrain's Config.

Owns which optimizers, losses and loaders have the same meaning there, with torch's own defaults. Reads only.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.habits.names import is_rank, is_size
from hvdtrain.migrate.scan import Scan, argument, is_false, is_true, name_of, starred

RATES = {"SGD": "0.001", "Adam": "0.001", "AdamW": "0.001", "NAdam": "0.002", "RAdam": "0.001", "Adamax": "0.002",
         "RMSprop": "0.01", "Adagrad": "0.01", "Adadelta": "1.0"}
"""torch.optim's default rates (torch 2.13), for those that Trainer takes by name."""
LOSSES = {"CrossEntropyLoss": True, "NLLLoss": True, "MSELoss": False, "L1Loss": False, "SmoothL1Loss": False,
          "HuberLoss": False, "BCEWithLogitsLoss": False, "BCELoss": False, "cross_entropy": True, "nll_loss": True,
          "mse_loss": False, "l1_loss": False, "smooth_l1_loss": False, "huber_loss": False,
          "binary_cross_entropy_with_logits": False, "binary_cross_entropy": False}
"""Losses whose mean over a batch is the mean over its samples -> whether targets are classes."""
LOSS_ARGS = ("label_smoothing", "beta", "delta")
LOADER_ARGS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")
IDLE = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last", "generator",
        "worker_init_fn",
        "timeout")


@dataclass(frozen=True)
class Optimizer:
    """``name`` in torch.optim, ``lr`` and ``args`` ({keyword: text}) as code; ``made``: its assignment."""

    name: str
    lr: str
    args: dict[str, str]
    made: cst.Assign


@dataclass(frozen=True)
class Loss:
    """``name`` in torch.nn or functional; ``made``: its assignment, None where it is written in the loop."""

    name: str
    args: dict[str, str]
    classes: bool
    made: cst.Assign | None


@dataclass(frozen=True)
class Loader:
    """``dataset`` and ``batch`` (of one process) as code; ``made``: the assignments of loader and sampler."""

    dataset: str
    batch: str
    shuffled: bool
    made: tuple[cst.Assign, ...]


def one(scan: Scan, at: cst.CSTNode, name: str, *ends: str) -> tuple[cst.Assign, cst.Call]:
    """The one assignment ``name = f(...)`` with ``f`` meaning one of ``ends`` that the name read at ``at`` comes from.

    It may be moved, wrapped or prepared by name afterwards. `Refused` for none, several, or anything else.
    """
    found, other = [], False
    for binder in scan.binders(name, at):
        assign = next((up for up in scan.above(binder) if isinstance(up, (cst.Assign, cst.Param, cst.For))), None)
        value = bare(scan, assign.value) if isinstance(assign, cst.Assign) else None
        if isinstance(assign, cst.Assign) and isinstance(value, cst.Call) and (scan.means(value.func, *ends) or any(
                scan.dotted(value.func).startswith(end) for end in ends if end.endswith("."))):
            found.append((assign, value))
        elif not (name_of(value) == name or isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute)
                  and value.func.attr.value == "prepare" and any(name_of(a.value) == name for a in value.args)):
            other = True
    if len(found) != 1 or other:
        uses = scan.uses(name)
        raise Refused(scan.line(uses[0]) if uses else 1, f"{name} is not made once, by one of {', '.join(ends)}",
                      "what it is cannot be read here", "use the code below")
    if starred(found[0][1]):
        raise Refused(scan.line(found[0][0]), f"{name} is made with *args or **kwargs",
                      "what is in them cannot be read here", "write the arguments out, then run migrate again")
    return found[0]


def is_move(scan: Scan, call: cst.Call) -> bool:
    """Whether a call is ``x.to(device)`` or ``x.cuda(...)``: to another place, not to another type or layout."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in ("to", "cuda"):
        return False
    given = [a for a in call.args if a.keyword is None or a.keyword.value != "non_blocking"]
    return not starred(call) and len(given) <= 1 and all(
        (a.keyword is None or a.keyword.value == "device") and _is_device(scan, a.value) for a in given) and (
        bool(given) or call.func.attr.value == "cuda")


def _is_device(scan: Scan, node: cst.BaseExpression) -> bool:
    """Whether an expression is a device: a string, an index, torch.device(...), or a name that says so."""
    value = scan.value(node)
    if isinstance(value, cst.IfExp):
        return _is_device(scan, value.body) and _is_device(scan, value.orelse)
    if isinstance(value, (cst.SimpleString, cst.FormattedString)):
        return scan.code(value).lstrip("rRfF").strip("'\"").startswith(("cuda", "cpu", "mps", "xpu"))
    if isinstance(value, cst.Call) and scan.dotted(value.func) == "torch.device" or isinstance(
            value, cst.Integer) or is_rank(scan, value):
        return True
    last = (name_of(node) or "").rpartition(".")[2].lower()
    return any(word in last for word in ("device", "gpu", "rank"))


def bare(scan: Scan, node: cst.BaseExpression) -> cst.BaseExpression:
    """``node`` without ``.to(...)`` and ``.cuda(...)`` behind it, and without a DistributedOptimizer around it."""
    while isinstance(node, cst.Call):
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if isinstance(node.func, cst.Attribute) and is_move(scan, node):
            node = node.func.value
        elif method == "DistributedOptimizer" and node.args and node.args[0].keyword is None:
            node = node.args[0].value
        else:
            break
    return node


def optimizer(scan: Scan, at: cst.CSTNode, name: str, models: set[str], ranks: int) -> Optimizer:
    """The optimizer ``name``, as read at ``at``, of all parameters of one of ``models``."""
    assign, call = one(scan, at, name, "torch.optim.")
    kind = (name_of(call.func) or "").rpartition(".")[2]
    first = argument(call, "params", 0)
    if kind not in RATES or first is None or scan.code(first.value) not in {f"{m}.parameters()" for m in models}:
        raise Refused(scan.line(assign), f"the optimizer is {scan.short(call)}",
                      "Trainer makes one of torch.optim for all parameters of the model, by its name",
                      "use the code below; groups of parameters have no key in Config")
    lr, args = RATES[kind], {}
    for index, arg in enumerate(call.args):
        if arg is first:
            continue
        keyword = arg.keyword.value if arg.keyword is not None else {1: "lr"}.get(index)
        if keyword is None:
            raise Refused(scan.line(assign), f"an argument of {kind} has no name",
                          "its meaning depends on the optimizer",
                          "write keyword=, then run migrate again")
        if keyword == "lr":
            lr = with_ranks(scan, arg.value, ranks)
        else:
            args[keyword] = scan.code(arg.value)
    return Optimizer(kind, lr, args, assign)


def with_ranks(scan: Scan, node: cst.BaseExpression, ranks: int) -> str:
    """An expression as code, with the number of processes as a number: ``0.1 * hvd.size()`` -> ``0.1 * 4``."""
    value = scan.value(node)
    sized = [n for n in scan.inner(value)
             if isinstance(n, (cst.Call, cst.Name, cst.Attribute, cst.Subscript)) and is_size(scan, n)]
    if not sized:
        return scan.code(node)
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Multiply):
        for side, other in ((value.left, value.right), (value.right, value.left)):
            if is_size(scan, other):
                return with_ranks(scan, side, ranks) + (f" * {ranks}" if ranks > 1 else "")
    raise Refused(scan.line(node), f"{scan.short(value)} depends on the number of processes",
                  "Trainer's rate and batch are those of all ranks together",
                  "use the code below, with the number you mean")


def loss(scan: Scan, call: cst.Call) -> Loss:
    """The loss that the loop calls with output and targets."""
    made, maker = None, call
    if isinstance(call.func, cst.Name) and not scan.dotted(call.func):
        made, maker = one(scan, call, call.func.value, "torch.nn.")
        given = list(maker.args)
    elif isinstance(call.func, cst.Call):
        maker = call.func
        given = list(maker.args)
    else:
        given = list(call.args)[2:]
    name = (name_of(maker.func) or "").rpartition(".")[2]
    args = {a.keyword.value if a.keyword is not None else "": scan.code(a.value) for a in given}
    if name not in LOSSES or not scan.dotted(maker.func).startswith("torch.") or not set(args) <= set(LOSS_ARGS):
        raise Refused(scan.line(call), f"the loss is {scan.short(maker)}",
                      "Trainer takes losses by name whose mean over a batch is the mean over its samples "
                      "(weights of classes, ignored targets and other reductions are not)",
                      "use the code below, with a task(model, batch) -> (loss_sum, weight) in the model's file")
    return Loss(name, args, LOSSES[name], made)


def loader(scan: Scan, node: cst.BaseExpression) -> Loader:
    """The DataLoader ``node``, by its name or written in place: its dataset and batch size."""
    made: list[cst.Assign] = []
    if isinstance(node, cst.Call) and scan.means(node.func, "DataLoader") and not starred(node):
        call = node
    elif isinstance(node, cst.Name):
        assign, call = one(scan, node, node.value, "DataLoader")
        made = [assign]
    else:
        raise Refused(scan.line(node), f"batches come from {scan.short(node)}",
                      "Trainer takes a dataset or a DataLoader",
                      "use the code below")
    given = {}
    for index, arg in enumerate(call.args):
        keyword = arg.keyword.value if arg.keyword is not None else LOADER_ARGS[index] if index < 6 else "?"
        given[keyword] = arg
        if keyword not in ("dataset", "batch_size", "shuffle", "sampler", *IDLE):
            raise Refused(scan.line(arg), f"the loader has {scan.short(arg)}", "Trainer makes its own batches",
                          "hand Trainer the loader itself (it keeps collate_fn; global_batch rules the batch size)")
    if "dataset" not in given:
        raise Refused(scan.line(call), "the loader has no dataset", "Trainer needs it", "mend the script first")
    dataset = given["dataset"].value
    shuffled = is_true(given.get("shuffle"))
    sampler = given.get("sampler")
    if sampler is not None and scan.code(sampler.value) != "None":
        call_of, assign_of = _sampler(scan, sampler.value)
        shuffled = not is_false(argument(call_of, "shuffle", 3))
        made += [assign_of] if assign_of is not None else []
    elif "shuffle" in given and not (is_true(given["shuffle"]) or is_false(given["shuffle"])):
        raise Refused(scan.line(given["shuffle"]), f"shuffle is {scan.short(given['shuffle'].value)}",
                      "whether samples are permuted cannot be read here",
                      "write True or False, then run migrate again")
    size = given["batch_size"].value if "batch_size" in given else cst.Integer("1")
    return Loader(scan.code(dataset), scan.code(size), shuffled, tuple(made))


def _sampler(scan: Scan, node: cst.BaseExpression) -> tuple[cst.Call, cst.Assign | None]:
    """The DistributedSampler, and the assignment that makes it if it is not written in place."""
    if isinstance(node, cst.Name):
        assign, call = one(scan, node, node.value, "DistributedSampler")
        return call, assign
    if isinstance(node, cst.Call) and scan.means(node.func, "DistributedSampler"):
        return node, None
    raise Refused(scan.line(node), f"the sampler is {scan.short(node)}", "Trainer permutes and cuts the data itself",
                  "hand Trainer the dataset, or the loader with this sampler")


def batch_of_all(scan: Scan, batch: str, ranks: int) -> str:
    """The global batch, from the code of one process's: ``32`` -> ``128``, ``TOTAL // world_size`` -> ``TOTAL``."""
    node = scan.value(cst.parse_expression(batch))
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.FloorDivide) and is_size(
            scan, node.right):
        return scan.code(node.left)
    if batch.isdigit():
        return str(int(batch) * ranks)
    return batch if ranks == 1 else f"{batch} * {ranks}"
