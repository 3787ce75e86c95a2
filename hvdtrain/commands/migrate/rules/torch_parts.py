"""Optimizer, loss, schedule and data of a PyTorch script as keys of hvdtrain's Config.

Owns what has the same meaning there, with torch's own defaults. What has not, or cannot be read, is ``...`` and a
`Word` that says what to do. Reads only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from hvdtrain.commands.migrate.names import is_size, sized
from hvdtrain.commands.migrate.rules import Word
from hvdtrain.commands.migrate.scan import Scan, argument, is_true, name_of, starred
from hvdtrain.config.run_length import KINDS

RATES = {"SGD": "0.001", "Adam": "0.001", "AdamW": "0.001", "NAdam": "0.002", "RAdam": "0.001", "Adamax": "0.002",
         "RMSprop": "0.01", "Adagrad": "0.01", "Adadelta": "1.0"}
"""torch.optim's default rates (torch 2.13), for those that Trainer takes by name."""
LOSSES = {"CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "MSELoss": "mse_loss", "L1Loss": "l1_loss",
          "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss",
          "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "BCELoss": "binary_cross_entropy"}
"""Losses whose mean over a batch is the mean over its samples -> the function of that name."""
OF_CLASSES = ("cross_entropy", "nll_loss")
LOSS_ARGS = ("label_smoothing", "ignore_index", "beta", "delta")
SCHEDULES = {name: kind.torch for name, kind in KINDS.items() if kind.torch}
"""Schedules that Trainer takes by name -> their parameters behind the optimizer, in order."""
NEAREST = "take the nearest: schedule=Schedule(\"CosineAnnealingLR\", {\"T_max\": 100}, warmup_steps=10), for example"
SETS = re.compile(r"test|val|eval|dev", re.IGNORECASE)
WHY = "Config has no key for it, or it cannot be read here"


@dataclass
class Parts:
    """``keys``: Config's, as code; ``said``: comments beside them. ``model``, ``data``: arguments of fit.
    ``scaled``: whether a factor of the number of processes was taken off the rate."""

    keys: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    words: list[Word] = field(default_factory=list)
    model: str = "model"
    data: str = "dataset"
    scaled: bool = False

    def tell(self, node: cst.CSTNode, what: str, do: str, why: str = WHY) -> None:
        """Add what has to be done by hand."""
        self.words.append(Word(node, what, do, None, why))


def code(scan: Scan, node: cst.CSTNode) -> str:
    """Its code on one line."""
    return " ".join(scan.code(node).split())


# --- loops -----------------------------------------------------------------------------------------------------


def trains(scan: Scan, node: cst.CSTNode, levels: int = 4) -> bool:
    """Whether ``node`` runs backward, itself or through functions and methods of the file."""
    if any(True for _ in scan.methods("backward", within=node)):
        return True
    called = {(name_of(c.func) or "").rpartition(".")[2] for c in scan.all(cst.Call, node) if not scan.dotted(c.func)}
    return bool(levels) and any(f.name.value in called and not scan.inside(node, f) and trains(scan, f, levels - 1)
                                for f in scan.all(cst.FunctionDef))


def epochs_loop(scan: Scan) -> cst.For | None:
    """The outermost loop over a range that trains; one that speaks of epochs before others."""
    loops = [loop for loop in scan.all(cst.For) if _range(loop.iter) is not None and trains(scan, loop)]
    named = [loop for loop in loops if "epoch" in scan.code(loop.target) + scan.code(loop.iter)]
    return next(iter(named or loops), None)


def batch_loop(scan: Scan) -> cst.For | None:
    """The innermost loop around the first backward."""
    call = next(scan.methods("backward"), None)
    return None if call is None else next((up for up in scan.above(call) if isinstance(up, cst.For)), None)


def _range(node: cst.BaseExpression) -> cst.Call | None:
    """``range(...)``, also inside ``tqdm(...)``."""
    node = _unwrapped(node)
    return node if isinstance(node, cst.Call) and name_of(node.func) in ("range", "trange") else None


def _unwrapped(node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Call) and (name_of(node.func) or "").rpartition(".")[2] in (
            "enumerate", "tqdm") and node.args:
        node = node.args[0].value
    return node


def epochs(scan: Scan, loop: cst.For | None) -> str:
    """How often the loop over epochs runs: ``n`` of ``range(n)``, of ``range(1, n + 1)``, of ``range(start, n)``."""
    call = _range(loop.iter) if loop is not None else None
    plain = [arg.value for arg in call.args if arg.keyword is None] if call is not None else []
    if not 1 <= len(plain) <= 2:
        return "..."
    start, stop = plain[0] if len(plain) == 2 else cst.Integer("0"), plain[-1]
    if not isinstance(start, cst.Integer):  # where an earlier run ended: Trainer counts its epochs, too
        return code(scan, stop) if re.search("start|begin|first|resume|init|last", scan.code(start)) and not isinstance(
            stop, cst.BinaryOperation) else "..."
    first = int(start.value)
    if isinstance(stop, cst.Integer):
        return str(int(stop.value) - first)
    if isinstance(stop, cst.BinaryOperation) and isinstance(stop.operator, cst.Add) and isinstance(
            stop.right, cst.Integer) and int(stop.right.value) == first:
        return code(scan, stop.left)
    return code(scan, stop) if not first else f"{code(scan, stop)} - {first}"


# --- data ------------------------------------------------------------------------------------------------------


def loader(scan: Scan, parts: Parts, per_rank: bool, ranks: int, passes: str = "1") -> None:
    """Note ``global_batch``, the dataset and whether it is permuted, from the DataLoader that the loop reads."""
    made = {name: call for call in scan.calls("DataLoader") for name in [_name(scan, call)]}
    loop = batch_loop(scan)
    read = name_of(_unwrapped(loop.iter)) if loop is not None else None
    train = made.get(read or "") or next((c for name, c in made.items() if not SETS.search(name)), None)
    tests = [c for name, c in made.items() if SETS.search(name) and c is not train]
    parts.keys["global_batch"] = "..."
    if train is None:
        return
    size, dataset = argument(train, "batch_size", 1), argument(train, "dataset", 0)
    if size is not None or not starred(train):
        _batch(scan, parts, size.value if size is not None else cst.Integer("1"), per_rank, ranks, passes)
    parts.data = code(scan, dataset.value) if dataset is not None else "dataset"
    test = argument(tests[0], "dataset", 0) if tests else None
    for word in ("collate_fn", "batch_sampler", "sampler"):
        given = argument(train, word, {"sampler": 3, "batch_sampler": 4}.get(word))
        value = scan.value(given.value) if given is not None else None
        if isinstance(value, cst.Call) and scan.means(value.func, "DistributedSampler"):
            continue
        if given is not None and scan.code(given.value) != "None":
            parts.tell(given, f"the loader has {scan.short(given)}", f"give fit the loader itself: it keeps {word}, "
                       "and global_batch rules the batch size", "Trainer makes its own batches of a dataset")
    if test is not None:
        parts.data = f"({parts.data}, {code(scan, test.value)})"
    shuffle, sampler = argument(train, "shuffle", 2), argument(train, "sampler", 3)
    if not starred(train) and sampler is None and not is_true(shuffle) and (
            shuffle is None or scan.code(shuffle.value) == "False"):
        parts.keys["data"] = "Data(shuffle=False)"


def _name(scan: Scan, call: cst.Call) -> str:
    """The name that a call's result is given, "" if none."""
    up = scan.parent[call]
    return name_of(up.targets[0].target) or "" if isinstance(up, cst.Assign) else scan.short(call)


def _batch(scan: Scan, parts: Parts, size: cst.BaseExpression, per_rank: bool, ranks: int, passes: str) -> None:
    """``32`` -> ``128`` with 4 processes; ``TOTAL // world_size`` -> ``TOTAL``."""
    value = scan.value(size)
    times = [str(ranks)] if per_rank and ranks > 1 else []
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.FloorDivide) and is_size(
            scan, value.right):
        size, times = value.left, []
    elif per_rank and ranks == 1:
        parts.said["global_batch"] = "one process's; times the processes of the old job: --ranks N"
    times = ([passes] if passes != "1" else []) + times
    text = code(scan, size)
    if text.isdigit() and all(number.isdigit() for number in times):
        for number in times:
            text, times = str(int(text) * int(number)), []
    if times and not isinstance(size, (cst.Name, cst.Attribute, cst.Integer, cst.Call, cst.Subscript)):
        text = f"({text})"
    parts.keys["global_batch"] = " * ".join([text, *times])


# --- optimizer, loss, schedule ---------------------------------------------------------------------------------


def optimizer(scan: Scan, parts: Parts, ranks: int) -> None:
    """Note ``lr``, ``optimizer`` and the model's name from the one optimizer of torch.optim that is made."""
    made = [c for c in scan.all(cst.Call) if scan.dotted(c.func).startswith("torch.optim.")
            and "lr_scheduler" not in scan.dotted(c.func)]
    parts.keys |= {"lr": "...", "optimizer": 'Named("...")'}
    if not made:
        return
    call = made[0]
    name = (name_of(call.func) or "").rpartition(".")[2]
    if len(made) > 1:
        parts.tell(made[1], f"{len(made)} optimizers are made", "choose one in the code below; for several, keep the "
                   "loop and use Horovod as it is", "Trainer has one for all parameters of the model")
    of = argument(call, "params", 0)
    owner = scan.code(of.value).partition(".parameters()")[0] if of is not None else ""
    if of is not None and scan.code(of.value) == f"{owner}.parameters()" and owner:
        parts.model = owner.removesuffix(".module") if owner != "self" else "model"
    elif of is not None:
        parts.tell(of, f"the optimizer is of {scan.short(of)}", "set requires_grad = False on what is not to train",
                   "Trainer makes one for all parameters of the model; groups of parameters have no key")
    lr = argument(call, "lr", 1)
    own = lr is None and of is not None and '"lr"' in scan.code(of.value).replace("'", '"')
    usual = "..." if own else RATES.get(name, "...")  # of groups that have rates of their own, none is the model's
    parts.keys["lr"] = usual if lr is None else rate(scan, parts, lr.value, ranks)
    args = {}
    for index, arg in enumerate(call.args):
        if arg.keyword is not None and arg.keyword.value not in ("lr", "params"):
            args[arg.keyword.value] = code(scan, arg.value)
        elif arg.star or arg.keyword is None and index > 1:
            parts.tell(arg, f"an argument of {name} has no name: {scan.short(arg)}", "add it to the optimizer's in the "
                       "code below", "its meaning depends on the optimizer")
    parts.keys["optimizer"] = named(name, args)


def rate(scan: Scan, parts: Parts, node: cst.BaseExpression, ranks: int) -> str:
    """A rate as code, with the number of processes as a number: ``0.1 * hvd.size()`` -> ``0.1 * 4``."""
    value = scan.value(node)
    if not sized(scan, value):
        return code(scan, node)
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Multiply):
        for side, other in ((value.left, value.right), (value.right, value.left)):
            if sized(scan, other) and not sized(scan, side):
                parts.scaled = True
                text = code(scan, side)
                whole = code(scan, value.with_changes(lpar=[], rpar=[]))
                parts.said["lr"] = f"was {whole}" + ("" if ranks > 1 else ": --ranks N writes its number")
                return text + (f" * {ranks}" if ranks > 1 else "")
    parts.tell(node, f"the rate is {scan.short(value)}, which depends on the number of processes",
               "write the number you mean", "Trainer's rate and batch are those of all ranks together")
    return "..."


def loss(scan: Scan, parts: Parts) -> None:
    """Note ``loss``, from a loss of torch.nn, the training one first; no accuracy for one that is not of classes."""
    found = []
    for call in scan.all(cst.Call):
        name = (name_of(call.func) or "").rpartition(".")[2]
        if scan.dotted(call.func).startswith("torch.nn") and (name in LOSSES or name in LOSSES.values()):
            scope = scan.scope(call)
            found.append((scope is not scan.module and not trains(scan, scope), call, LOSSES.get(name, name)))
    if not found:
        parts.keys["loss"] = 'Named("...")'
        return
    _, call, name = min(found, key=lambda one: one[0])
    args = {a.keyword.value: code(scan, a.value) for a in call.args if a.keyword is not None
            and a.keyword.value not in ("input", "target")}
    odd = sorted(set(args) - set(LOSS_ARGS))
    if odd:
        parts.tell(call, f"the loss is {scan.short(call)}", "give the model's file a task(model, batch) -> (loss_sum, "
                   "weight)", f"Trainer takes losses by name whose mean is that over samples, without {', '.join(odd)}")
    parts.keys["loss"] = named(name, {key: text for key, text in args.items() if key in LOSS_ARGS})
    if name not in OF_CLASSES:
        parts.keys["metrics"] = "[]"


def schedule(scan: Scan, parts: Parts, ranks: int) -> None:
    """Note ``schedule``; a `Word` for every other way in which a rate moves."""
    made = [c for c in scan.all(cst.Call) if scan.dotted(c.func).startswith("torch.optim.lr_scheduler.")]
    for call in made:
        name = scan.dotted(call.func).rpartition(".")[2]
        given = [arg for arg in call.args if (arg.keyword.value if arg.keyword else "") not in (
            "optimizer", "last_epoch", "verbose")]
        given = given[1:] if given and given[0].keyword is None else given
        if len(made) > 1 or name not in SCHEDULES or starred(call):
            parts.tell(call, f"the rate follows {scan.short(call)}", NEAREST,
                       "the code below has one schedule at most, by its name in torch.optim.lr_scheduler")
            continue
        words = {(arg.keyword.value if arg.keyword else SCHEDULES[name][at]): arg.value
                 for at, arg in enumerate(given) if arg.keyword or at < len(SCHEDULES[name])}
        every = interval(scan, call)
        every = every if every == "..." else f'"{every}"'
        inner = ", ".join(f'"{key}": {rate(scan, parts, node, ranks) if key == "max_lr" else code(scan, node)}'
                          for key, node in words.items())
        parts.keys["schedule"] = f'Schedule("{name}", {{{inner}}}, interval={every})'
        if every == '"step"':
            parts.tell(call, f"the rate follows {scan.short(call)}, which counts steps", "look at its lengths: an "
                       "epoch has as many steps as global batches", "a step here is one of all ranks together")
    for node, text in _by_hand(scan):
        parts.tell(node, f"the rate is moved by hand: {text}", NEAREST, "the code below keeps it constant")


def interval(scan: Scan, call: cst.Call) -> str:
    """Whether a schedule steps with each batch or with each epoch; "..." where its steps are not seen."""
    name, loop = _name(scan, call), batch_loop(scan)
    steps = [c for c in scan.methods("step") if isinstance(c.func, cst.Attribute) and scan.code(c.func.value) == name]
    if not steps:
        return "..."
    return "step" if loop is not None and any(scan.inside(c, loop) for c in steps) else "epoch"


def _by_hand(scan: Scan) -> Iterator[tuple[cst.CSTNode, str]]:
    """Where a group's rate is assigned, or a function of another package makes a schedule."""
    assigns: list[cst.Assign | cst.AugAssign] = [*scan.all(cst.Assign), *scan.all(cst.AugAssign)]
    for node in assigns:
        target = node.target if isinstance(node, cst.AugAssign) else node.targets[0].target
        if isinstance(target, cst.Subscript) and scan.code(target).endswith(('["lr"]', "['lr']")):
            yield node, scan.short(node)
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        if re.search(r"get_\w*schedule|warmup|WarmUp", last) and scan.dotted(call.func) and not scan.dotted(
                call.func).startswith("torch."):
            yield call, scan.short(call)


def named(name: str, args: dict[str, str]) -> str:
    """``Named("SGD", {"momentum": 0.9})``."""
    inner = ", ".join(f'"{key}": {value}' for key, value in args.items())
    return f'Named("{name}", {{{inner}}})' if args else f'Named("{name}")'
