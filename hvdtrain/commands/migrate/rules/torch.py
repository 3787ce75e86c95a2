"""Rules of PyTorch scripts with a loop of their own: horovod.torch, Accelerate, DDP and DataParallel.

For ``--to trainer`` lists the calls to remove and drafts a Config from the making of loader, optimizer and loss; this
rewrites nothing. The diffs to ``hvdtrain.torch`` are of ``horovod_imports`` and ``ddp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from hvdtrain.commands.migrate.edit import HOMES, Names
from hvdtrain.commands.migrate.finding import MigrateOptions, Rewrite
from hvdtrain.commands.migrate.ranks import sized
from hvdtrain.commands.migrate.rules import ddp, horovod_imports
from hvdtrain.commands.migrate.scan import Scan, argument, is_true, name_of, starred, text_of

RATES = {"SGD": "0.001", "Adam": "0.001", "AdamW": "0.001", "NAdam": "0.002", "RAdam": "0.001", "Adamax": "0.002",
         "RMSprop": "0.01", "Adagrad": "0.01", "Adadelta": "1.0"}
"""torch.optim's default rates (torch 2.13), for those that Trainer takes by name."""
LOSSES = {"CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "MSELoss": "mse_loss", "L1Loss": "l1_loss",
          "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss",
          "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "BCELoss": "binary_cross_entropy"}
"""Losses whose mean over a batch is the mean over its samples -> the function of that name."""
OF_CLASSES = ("cross_entropy", "nll_loss")
LOSS_ARGS = ("label_smoothing", "ignore_index", "beta", "delta")
OWN_BATCHES = ("sampler", "batch_sampler", "collate_fn")
"""Arguments of a DataLoader that the draft cannot express."""
TESTS = ("test", "val", "eval", "dev")
IDLE = ("split_batches", "log_with", "project_dir", "project_config", "cpu", "device_placement", "rng_types",
        "mixed_precision", "gradient_accumulation_steps")
"""Arguments of an Accelerator that are read, or have no effect on training."""
ACCELERATOR_DO = {"mixed_precision": 'write precision="fp32" (their "no"), "bf16" or "fp16"',
                  "gradient_accumulation_steps": "set accumulate to it, and global_batch to the samples of all passes"}
PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
SPLITS = ("FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer", "DistributedOptimizer", "Pipe")
ASKED = ("rank", "get_rank", "size", "get_world_size", "local_rank", "local_size")
"""Calls that stay: code that reads them is the user's to change."""
SAMPLERS = ("torch.utils.data.distributed", "torch.utils.data.DistributedSampler", "torch.cuda.set_device")
NO_KEY = "Config has no key for it, or the value cannot be derived from the code"
SCHEDULE = 'schedule=ScheduleConfig("CosineAnnealingLR", {"T_max": 100}, warmup_steps=10), for example'


@dataclass
class TorchDraft:
    """Draft of ``trainer = Trainer(Config(...)); trainer.fit(model, data)``.

    ``keys``: of Config, as code, "..." where the user has to decide. ``per_rank``: the loader's batch is that of one
    process. ``made``: receives the findings.
    """

    scan: Scan
    made: Rewrite
    per_rank: bool = True
    model: str = "model"
    data: str = "dataset"
    keys: dict[str, str] = field(default_factory=dict)

    def decide(self, node: cst.CSTNode, what: str, do: str, why: str = NO_KEY) -> None:
        """Report what the user has to decide."""
        self.made.tell(self.scan.line(node), "by hand", what, why, do)

    def code(self, node: cst.CSTNode) -> str:
        """Return the code of ``node`` on one line."""
        return " ".join(self.scan.code(node).split())


@dataclass(frozen=True)
class TorchRule:
    """A rule as `hvdtrain.commands.migrate.plan` calls it.

    ``uses``: recognises a script. ``gone``: prefixes of the dotted names whose calls go. ``per_rank``: a loader's batch
    is that of one process. ``more``: adds keys of its own. ``handle``: makes the object whose methods go, too.
    ``diff``: plans the rewrite to ``hvdtrain.torch``, the default target where there is one.
    """

    TITLE: str
    uses: Callable[[Scan], bool]
    gone: tuple[str, ...]
    per_rank: bool = True
    more: Callable[[TorchDraft], None] = lambda draft: None
    handle: str = ""
    diff: Callable[[Scan, Rewrite], None] | None = None

    @property
    def TARGETS(self) -> tuple[str, ...]:
        return ("trainer",) if self.diff is None else ("hvdtrain.torch", "trainer")

    def recognise(self, scan: Scan) -> bool:
        return self.uses(scan)

    def plan(self, scan: Scan, options: MigrateOptions) -> Rewrite:
        made = Rewrite()
        if self.diff is not None and options.target == "hvdtrain.torch":
            self.diff(scan, made)
            return made
        draft = TorchDraft(scan, made, self.per_rank)
        at = scan.line(next(scan.methods("backward"), scan.module))
        made.tell(at, "by hand", "Trainer runs the training loop", "a loop can do anything: accumulation "
                  "over several passes, rate changes and selection of samples by rank are not analysed",
                  "replace it with the code below; move other work of the loop into the "
                  "test data, a callback, or a task(model, batch) -> (loss_sum, weight) in the model's file")
        if gone := self._calls_to_remove(scan):
            made.tell(gone[0][0], "by hand", "removed: " + ", ".join(f"{text} (line {line})" for line, text in gone),
                      "Trainer starts the exchange, divides each global batch, and moves the plain "
                      "model to this rank's device",
                      "remove them, with .module and similar wrappers of the model; strip module. "
                      "from names in saved files; to read the rank, use launch_facts(os.environ).rank of "
                      "hvdtrain.core.launcher")
        draft.keys["epochs"] = _epochs(draft)
        self.more(draft)
        _loader(draft, options.ranks)
        _optimizer(draft)
        _loss(draft)
        _step(draft)
        made.snippet = _snippet(draft)
        return made

    def _calls_to_remove(self, scan: Scan) -> list[tuple[int, str]]:
        """Return (line, text) of the calls that go."""
        handles = {name_of(node.targets[0].target) for node in scan.all(cst.Assign) if self.handle
                   and any(True for _ in scan.calls(self.handle, within=node))}
        gone = []
        for call in scan.all(cst.Call):
            dotted, func = scan.dotted(call.func), call.func
            of_handle = isinstance(func, cst.Attribute) and name_of(func.value) in handles and (
                func.attr.value in ("prepare", "wait_for_everyone", "gather", "gather_for_metrics"))
            if of_handle or dotted.startswith(self.gone) and dotted.rpartition(".")[2] not in ASKED:
                gone.append((scan.line(call), scan.short(func)))
        return gone


def _snippet(draft: TorchDraft) -> str:
    names = Names(draft.scan)
    lines = [f"    {key}={text}," for key, text in draft.keys.items()]
    text = "\n".join([f"{names.trainer} = Trainer(Config(", *lines, "))",
                      f"{names.trainer}.fit({draft.model}, {draft.data})"])
    for name in HOMES:
        text = re.sub(rf"\b{name}\(", lambda _: f"{names[name]}(", text)
    return "\n".join([*names.imports(text), "", text])


def _named(name: str, args: dict[str, str]) -> str:
    inner = ", ".join(f'"{key}": {value}' for key, value in args.items())
    return f'Named("{name}", {{{inner}}})' if args else f'Named("{name}")'


def _epochs(draft: TorchDraft) -> str:
    """Return ``n`` where backward stands in a loop inside ``for ... in range(n)``, else "..."."""
    call = next(draft.scan.methods("backward"), draft.scan.module)
    loops = [up.iter for up in draft.scan.above(call) if isinstance(up, cst.For)]
    outer = loops[-1] if len(loops) > 1 else None
    plain = isinstance(outer, cst.Call) and name_of(outer.func) == "range" and len(outer.args) == 1
    return draft.code(outer.args[0].value) if plain and isinstance(outer, cst.Call) else "..."


def _loader(draft: TorchDraft, ranks: int) -> None:
    """Draft ``global_batch``, the dataset and whether it is permuted; several training loaders leave them open."""
    scan = draft.scan
    draft.keys["global_batch"] = "..."
    loaders: dict[bool, list[cst.Call]] = {True: [], False: []}
    for call in scan.calls("DataLoader"):
        up = scan.parent[call]
        name = name_of(up.targets[0].target) or "" if isinstance(up, cst.Assign) else ""
        loaders[any(word in name.lower() for word in TESTS)].append(call)
    if len(loaders[False]) != 1:
        return
    train, tests = loaders[False][0], loaders[True]
    size = argument(train, "batch_size", 1)
    if size is not None and not sized(scan, size.value):
        text = draft.code(size.value)
        plain = isinstance(size.value, (cst.Name, cst.Attribute, cst.Integer, cst.Call, cst.Subscript))
        times = ranks if draft.per_rank else 1
        if text.isdigit():
            text, times = str(int(text) * times), 1
        draft.keys["global_batch"] = text if times == 1 else f"{text if plain else f'({text})'} * {times}"
    if draft.per_rank and ranks == 1:
        draft.decide(train, "global_batch is that of one process in the code below", "run migrate with --ranks N, the "
                     "number of processes of the old job",
                     "Trainer's batch is over all ranks, for any number of ranks")
    parts = [argument(call, "dataset", 0) for call in (train, *tests[:1])]
    texts = [draft.code(part.value) if part is not None else "dataset" for part in parts]
    draft.data = f"({', '.join(texts)})" if len(texts) > 1 else texts[0]
    for word in OWN_BATCHES:
        given = argument(train, word, {"sampler": 3, "batch_sampler": 4}.get(word))
        value = scan.value(given.value) if given is not None else None
        known = value is None or scan.code(value) == "None" or (
            isinstance(value, cst.Call) and scan.means(value.func, "DistributedSampler"))
        if given is not None and not known:
            draft.decide(given, f"the loader has {scan.short(given)}", "pass the loader itself to fit: it "
                         f"keeps {word}, and global_batch sets the batch "
                         "size", "Trainer makes its own batches of a dataset")
    shuffle = argument(train, "shuffle", 2)
    ordered = shuffle is None or scan.code(shuffle.value) == "False"
    if ordered and not starred(train) and argument(train, "sampler", 3) is None:
        draft.keys["data"] = "DataConfig(shuffle=False)"


def _optimizer(draft: TorchDraft) -> None:
    """Draft ``lr``, ``optimizer`` and the model's name from the one optimizer of torch.optim."""
    scan = draft.scan
    draft.keys |= {"lr": "...", "optimizer": 'Named("...")'}
    schedules = [call for call in scan.all(cst.Call) if ".lr_scheduler." in scan.dotted(call.func)]
    for call in schedules:
        draft.decide(call, f"the rate follows {scan.short(call)}", SCHEDULE, "the code below keeps the rate constant")
    made = [call for call in scan.all(cst.Call) if scan.dotted(call.func).startswith("torch.optim.")
            and call not in schedules]
    if len(made) > 1:
        draft.decide(made[1], f"{len(made)} optimizers are made", "choose one in the code below; for several, "
                     "keep the loop and use Horovod directly", "Trainer has one for all parameters of the model")
    if len(made) != 1:
        return
    call, of, rate = made[0], argument(made[0], "params", 0), argument(made[0], "lr", 1)
    name = (name_of(call.func) or "").rpartition(".")[2]
    owner, _, rest = (scan.code(of.value) if of is not None else "").partition(".parameters()")
    whole = of is not None and scan.code(of.value).endswith(".parameters()") and not rest
    if whole:
        draft.model = owner.removesuffix(".module") if owner != "self" else "model"
    elif of is not None:
        draft.decide(of, f"the optimizer is of {scan.short(of)}", "set requires_grad = False on parameters that must "
                                                                  "not train",
                     "Trainer makes one for all parameters of the model; groups of parameters have no key")
    if rate is not None and not sized(scan, scan.value(rate.value)):
        draft.keys["lr"] = draft.code(rate.value)
    elif rate is not None:
        draft.decide(rate, f"the rate is {scan.short(rate.value)}, which depends on the number of processes",
                     "write the number explicitly", "Trainer's rate and batch are for all ranks together")
    elif whole and not starred(call):  # groups may have rates of their own
        draft.keys["lr"] = RATES.get(name, "...")
    for arg in (arg for at, arg in enumerate(call.args) if arg.star or arg.keyword is None and at > 1):
        draft.decide(arg, f"an argument of {name} has no name: {scan.short(arg)}", "add it to the optimizer's in the "
                     "code below", "its meaning depends on the optimizer")
    draft.keys["optimizer"] = _named(name, {
        arg.keyword.value: draft.code(arg.value) for arg in call.args
        if arg.keyword is not None and arg.keyword.value not in ("lr", "params")})


def _loss(draft: TorchDraft) -> None:
    """Draft ``loss`` from the losses of torch.nn, if all have one name; no accuracy where it is not of classes."""
    scan = draft.scan
    draft.keys["loss"] = 'Named("...")'
    calls = []
    for call in scan.all(cst.Call):
        module, _, last = scan.dotted(call.func).rpartition(".")
        if module.startswith("torch.nn") and LOSSES.get(last, last) in LOSSES.values():
            calls.append((LOSSES.get(last, last), call))
    if len({name for name, _ in calls}) != 1:
        return
    name, call = calls[0]
    args = {arg.keyword.value: draft.code(arg.value) for arg in call.args if arg.keyword is not None
            and arg.keyword.value not in ("input", "target")}
    odd = sorted(set(args) - set(LOSS_ARGS))
    if odd:
        draft.decide(call, f"the loss is {scan.short(call)}", "give the model's file a task(model, batch) -> "
                     "(loss_sum, weight)",
                     f"Trainer takes losses by name that are means over samples, without {', '.join(odd)}")
    draft.keys["loss"] = _named(name, {key: text for key, text in args.items() if key in LOSS_ARGS})
    if name not in OF_CLASSES:
        draft.keys["metrics"] = "[]"


def _step(draft: TorchDraft) -> None:
    scan, clips = draft.scan, ("clip_grad_norm_", "clip_grad_norm")
    for call in [*scan.calls(*clips), *scan.methods(*clips)]:  # methods: an Accelerator's
        largest = argument(call, "max_norm", 1)
        if largest is not None:
            draft.keys["clip_norm"] = draft.code(largest.value)
    for call in scan.calls("clip_grad_value_"):
        draft.decide(call, f"gradients are clipped by value: {scan.short(call)}", "set clip_norm, the largest norm")
    if any(True for _ in scan.calls("convert_sync_batchnorm")):
        draft.keys["sync_batchnorm"] = "True"
    casts = [*scan.calls("autocast"), *scan.calls("GradScaler")]
    if casts:
        draft.keys["precision"] = "..."
        draft.decide(casts[0], f"{scan.short(casts[0])} sets the compute type",
                     'write precision="fp32", "bf16" or "fp16"', "the code below does not set it")
    for call in scan.methods("no_sync"):
        draft.decide(call, f"{scan.short(call)} delays gradients over several passes",
                     "set accumulate to their number, and global_batch to the samples of all of them")
    for call in scan.calls(*SPLITS):
        if scan.dotted(call.func).startswith(("torch.", "accelerate.")):
            draft.decide(call, f"{scan.short(call.func)} shards the model or its state over the ranks", "do not "
                         "migrate if one device cannot hold it; model_parallel partitions over the devices of a rank",
                         "hvdtrain's ranks hold whole models and sum their gradients")


def _of_horovod(draft: TorchDraft) -> None:
    """Draft Config's compression and exchange from the arguments of DistributedOptimizer."""
    scan = draft.scan
    for call in scan.calls("DistributedOptimizer"):
        for word, at, known in (("compression", 2, {"none": "", "fp16": 'compression="fp16"'}),
                                ("op", None, {"Average": "", "Adasum": "exchange=ExchangeConfig(adasum=True)"}),
                                ("backward_passes_per_step", 3, {"1": ""})):
            given = argument(call, word, at)
            if given is None:
                continue
            text = known.get((name_of(given.value) or "").rpartition(".")[2] or draft.code(given.value))
            if text is None:
                draft.decide(given, f"DistributedOptimizer has {scan.short(given)}",
                             'set compression, exchange.adasum or accumulate (global_batch is that of all passes); '
                             "where gradients are summed, multiply lr by the number of processes")
            elif text:
                key, _, value = text.partition("=")
                draft.keys[key] = value


def _new_import(scan: Scan, made: Rewrite) -> None:
    if line := horovod_imports.move(scan, made):
        made.tell(line, "changed", "trains through hvdtrain, with Horovod's names and arguments",
                  "gradients of ranks on one host travel through shared memory, and errors name the rank that failed",
                  "start it as before (horovodrun or mpirun); run migrate --to trainer to replace the loop by Trainer")


def _of_accelerate(draft: TorchDraft) -> None:
    scan = draft.scan
    for arg in (arg for call in scan.calls("accelerate.Accelerator") for arg in call.args):
        word = arg.keyword.value if arg.keyword is not None else ""
        if word == "split_batches":
            draft.per_rank = not is_true(arg)
        elif word == "mixed_precision" and text_of(arg.value) in PRECISION:
            draft.keys["precision"] = f'"{PRECISION[text_of(arg.value) or ""]}"'
        elif word not in IDLE or word == "mixed_precision" or (
                word == "gradient_accumulation_steps" and scan.code(arg.value) != "1"):
            draft.decide(arg, f"the Accelerator has {scan.short(arg)}",
                         ACCELERATOR_DO.get(word, "see docs/reference/settings.md"))


def _calls(*names: str) -> Callable[[Scan], bool]:
    return lambda scan: any(True for _ in scan.calls(*names))


TORCH_RULES = {
    "horovod_torch": TorchRule("a script of horovod.torch", lambda scan: scan.imports_any("horovod.torch"),
                               ("horovod", *SAMPLERS), more=_of_horovod, diff=_new_import),
    "accelerate": TorchRule("a script of Accelerate", _calls("accelerate.Accelerator"), ("accelerate.Accelerator",),
                            more=_of_accelerate, handle="accelerate.Accelerator"),
    "ddp": TorchRule("a script of DistributedDataParallel",
                     _calls("DistributedDataParallel", "torch.distributed.init_process_group"),
                     ("torch.distributed", "torch.nn.parallel", "torch.multiprocessing", *SAMPLERS),
                     diff=ddp.rewrite),
    "data_parallel": TorchRule("a script of DataParallel", _calls("DataParallel", "data_parallel"),
                               ("torch.nn.DataParallel", "torch.nn.parallel"),
                               per_rank=False),  # one process: its batch is the global one already
}
