"""PyTorch's standard loop rewritten to hvdtrain's Trainer, for the kinds of distributed scripts that have one.

Owns the edit: what goes, what is put in its place, and the proof that nothing that went is still used. Each kind says
which of its statements go (`Kind`); reading is ``torch_loop``'s and ``torch_parts``'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libcst as cst

from hvdtrain.migrate.edit import guarded, statement
from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.habits.names import environment, is_rank, is_size, under_root
from hvdtrain.migrate.rules import Plan, Wish, torch_loop, torch_parts, torch_shape, torch_snippet
from hvdtrain.migrate.rules.keras_calls import sole
from hvdtrain.migrate.scan import Scan, name_of

FACTS = "launch_facts(os.environ)"
TRAINERS = {"Config", "Trainer", "trainer", "Named", "Data", "Exchange", "launch_facts"}
ALSO_GONE = ("torch.cuda.set_device", "torch.distributed.init_process_group",
             "torch.distributed.destroy_process_group",
             "torch.distributed.barrier")


@dataclass(frozen=True)
class Kind:
    """``roots``: dotted beginnings that nothing may use afterwards. ``goes(scan, small)``: whether a statement goes.
    ``wrappers``: what is around the model. ``per_rank``: the loader's batch is one process's. ``keys(scan)``: more keys
    of Config as code. ``root(scan, node)``: whether an expression is true on the first rank only. ``unwraps``: methods
    that give the bare model. ``handle(scan)``: the name of the object that all goes through, "" if there is none."""

    roots: tuple[str, ...]
    goes: Callable[[Scan, cst.CSTNode], bool]
    wrappers: tuple[str, ...]
    per_rank: bool = True
    keys: Callable[[Scan], dict[str, str]] = lambda scan: {}
    root: Callable[[Scan, cst.CSTNode], bool] = lambda scan, node: False
    unwraps: tuple[str, ...] = ()
    handle: Callable[[Scan], str] = lambda scan: ""


def plan(scan: Scan, wish: Wish, kind: Kind) -> Plan:
    """The rewrite; where it cannot be whole, what stands against it and code to go on from."""
    rewrite = _Rewrite(scan, kind, wish.ranks)
    try:
        rewrite.make()
    except Refused as refused:
        return Plan(findings=[refused.finding], snippet=torch_snippet.guess(scan, kind.per_rank, wish.ranks,
                                                                            kind.keys(scan)))
    return rewrite.made


class _Rewrite:
    """One script's. ``gone``: statements, and other nodes, that will not be there any more."""

    def __init__(self, scan: Scan, kind: Kind, ranks: int) -> None:
        self.scan, self.kind, self.ranks = scan, kind, ranks
        self.made = Plan()
        self.gone: set[cst.CSTNode] = set()

    def make(self) -> None:
        """Plan every edit; `Refused` at the first that cannot be."""
        scan = self.scan
        taken = sorted(TRAINERS & scan.bound)
        if taken:
            raise Refused(1, f"the name {taken[0]} is used for something else", "hvdtrain's would be imported by it",
                          "rename it, then run migrate again")
        self.loop = loop = torch_loop.find(scan)
        assert loop.loss is not None
        if loop.clip is not None and "horovod" in self.kind.roots:
            raise Refused(scan.line(loop.clip), "gradients are clipped before Horovod has averaged them",
                          "each rank clips its own; Trainer's clip_norm is of the mean",
                          "set clip_norm in the code below")
        self.gone.add(loop.outer)
        self.models = self._models()
        self.optimizer = torch_parts.optimizer(scan, loop.outer, loop.optimizer, self.models, self.ranks)
        self.loss = torch_parts.loss(scan, loop.loss)
        self.loader = torch_parts.loader(scan, loop.loader)
        self._model()
        for assign in [self.optimizer.made, *self.loader.made, *([self.loss.made] if self.loss.made else [])]:
            self._remove(sole(scan, assign))
        self._kind_goes()
        self._unwrap()
        self._places()
        self._saves()
        self._trainer()
        self._nothing_dangles()
        self._handle_is_gone()
        self._no_device()
        torch_shape.check(scan, self.loop, self.kind.wrappers, self.models, self._left)
        self._tell()

    # --- what goes -------------------------------------------------------------------------------------------

    def _remove(self, line: cst.CSTNode) -> None:
        if line not in self.gone:
            self.gone.add(line)
            self.made.edits.remove(line)

    def _left(self, node: cst.CSTNode) -> bool:
        """Whether a node will still be there."""
        return node not in self.gone and not any(up in self.gone for up in self.scan.above(node))

    def _models(self) -> set[str]:
        """Names that the model goes by, bare or wrapped."""
        names = {self.loop.model}
        for assign in self.scan.assigned(self.loop.model):
            inner = self._inner(assign.value)
            if isinstance(inner, cst.Name):
                names.add(inner.value)
        return names

    def _inner(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """The model without wrappers and moves around it."""
        while isinstance(node, cst.Call):
            bare = torch_parts.bare(self.scan, node)
            if bare is not node:
                node = bare
            elif self.scan.means(node.func, *self.kind.wrappers, "convert_sync_batchnorm") and node.args:
                node = node.args[0].value
            else:
                break
        return node

    def _model(self) -> None:
        """Take wrappers and moves to a device off the model, wherever it is assigned."""
        for name in sorted(self.models):
            for assign in self.scan.assigned(name):
                inner = self._inner(assign.value)
                if name_of(inner) == name:
                    self._remove(sole(self.scan, assign))
                elif inner is not assign.value:
                    kept = inner
                    self.gone |= {n for n in self.scan.inner(assign.value)
                                  if not self.scan.inside(n, kept) and not self.scan.inside(kept, n)}
                    self._shed(assign.value, kept)
            for call in self.scan.methods("to", "cuda"):
                assert isinstance(call.func, cst.Attribute)
                if name_of(call.func.value) == name and isinstance(self.scan.parent[call], cst.Expr) and (
                        torch_parts.is_move(self.scan, call)):
                    self._remove(sole(self.scan, call))

    def _shed(self, whole: cst.BaseExpression, kept: cst.BaseExpression) -> None:
        """Plan ``kept``, as it will have become, in place of ``whole``."""
        held: list[Any] = []

        def keep(new: Any) -> Any:
            held.append(new)
            return new

        self.made.edits.put(kept, keep)
        self.made.edits.put(whole, lambda _: held.pop())
        self.gone |= {n for n in (whole, *self.scan.above(kept)) if self.scan.inside(n, whole)} - {whole}

    def _kind_goes(self) -> None:
        """Remove the kind's own statements, and an ``if`` that held nothing else."""
        scan = self.scan
        for node in list(scan.nodes):
            if isinstance(node, cst.SimpleStatementLine) and self._goes(node):
                self._remove(node)
        for node in list(scan.nodes):
            if isinstance(node, cst.If) and node.orelse is None and isinstance(node.body, cst.IndentedBlock) and all(
                    part in self.gone for part in node.body.body) and not isinstance(scan.parent[node], cst.If):
                self._remove(node)

    def _goes(self, line: cst.SimpleStatementLine) -> bool:
        scan, small = self.scan, line.body[0]
        call = small.value if isinstance(small, cst.Expr) else None
        own = isinstance(call, cst.Call) and scan.dotted(call.func) in ALSO_GONE
        target = small.targets[0].target if isinstance(small, cst.Assign) else None
        address = isinstance(target, cst.Subscript) and environment(scan, target) in ("MASTER_ADDR", "MASTER_PORT")
        if not (own or address or self.kind.goes(scan, small)):
            return False
        return sole(scan, small) is line

    def _unwrap(self) -> None:
        """``model.module`` and ``accelerator.unwrap_model(model)`` are ``model``."""
        for node in self.scan.all(cst.Attribute):
            owner = name_of(node.value)
            if node.attr.value == "module" and owner in self.models and self._left(node):
                self.made.edits.swap(node, str(owner))
        for call in self.scan.methods(*self.kind.unwraps):
            if self._left(call) and len(call.args) >= 1 and name_of(call.args[0].value) in self.models:
                self.made.edits.swap(call, self.scan.code(call.args[0].value))
                self.gone.add(call.func)

    # --- ranks, sizes, devices -------------------------------------------------------------------------------

    def _places(self) -> None:
        """Ranks and sizes come from the launcher; assignments of them, and of devices, that nothing reads go."""
        scan = self.scan
        for _ in range(3):  # a device is made of a rank
            for assign in scan.all(cst.Assign):
                target = assign.targets[0].target
                if len(assign.targets) == 1 and isinstance(target, cst.Name) and self._left(assign) and self._place(
                        assign.value) and not any(self._left(use) for use in scan.uses(target.value)):
                    self._remove(sole(scan, assign))
        for node in list(scan.nodes):
            if isinstance(node, cst.BaseExpression) and self._left(node):
                text = self._launcher(node)
                if text:
                    self.made.edits.swap(node, text)
                    if FACTS in text:
                        self.made.edits.imports += ["import os", "from hvdtrain.cluster.launcher import launch_facts"]
                    self.gone |= {node}

    def _place(self, value: cst.BaseExpression) -> bool:
        """Whether a value is a rank, a number of ranks, or a device."""
        device = isinstance(value, cst.Call) and self.scan.dotted(value.func) == "torch.device"
        text = self.scan.code(value)
        handle = self.kind.handle(self.scan)
        own = bool(handle) and text == f"{handle}.device"
        return device or own or is_rank(self.scan, value) or is_size(self.scan, value) or (
            not isinstance(value, cst.Call) and ("cuda" in text or text.strip("'\"") == "cpu"))

    def _launcher(self, node: cst.BaseExpression) -> str:
        """What a call or variable of ranks is by ``launch_facts``; "" for anything else."""
        scan = self.scan
        if self.kind.root(scan, node):
            return f"({FACTS}.rank == 0)" if isinstance(scan.parent[node],
                                                        cst.UnaryOperation) else f"{FACTS}.rank == 0"
        handle = self.kind.handle(scan)
        if handle and name_of(node) == f"{handle}.device" and scan.scope(node) is scan.scope(self.loop.outer) and (
                scan.line(node) > scan.line(self.loop.outer)):
            return f"next({self.loop.model}.parameters()).device"  # where Trainer has put it
        if not isinstance(node, (cst.Call, cst.Subscript)):
            return ""
        inner = node.args[0].value if isinstance(node,
                                                 cst.Call) and name_of(node.func) == "int" and node.args else node
        variable = environment(scan, inner)
        called = scan.dotted(node.func) if isinstance(node, cst.Call) else ""
        if not (variable or called.startswith(self.kind.roots)):
            return ""
        last = called.rpartition(".")[2]
        for name, words in (("local_rank", ("LOCAL_RANK", "local_rank", "get_node_local_rank")),
                            ("rank", ("RANK", "rank", "get_rank")),
                            ("local_size", ("LOCAL_WORLD_SIZE", "local_size")),
                            ("size", ("WORLD_SIZE", "size", "get_world_size"))):
            if (variable or last) in words:
                return f"{FACTS}.{name}"
        return ""

    def _saves(self) -> None:
        """``torch.save(...)`` that all ranks would run, on the first."""
        for call in self.scan.calls("torch.save"):
            if self._left(call) and under_root(self.scan, call) is None:
                self.made.edits.imports += ["import os", "from hvdtrain.cluster.launcher import launch_facts"]
                self.made.edits.put(sole(self.scan, call), lambda new: guarded(new, f"{FACTS}.rank == 0"))

    # --- what comes ------------------------------------------------------------------------------------------

    def _trainer(self) -> None:
        """``trainer = Trainer(Config(...))`` and ``trainer.fit(model, dataset)`` in place of the loop."""
        config = torch_snippet.config(self._keys())
        self.made.edits.imports.append("from hvdtrain import Config, Trainer")
        named = [name for name in ("Data", "Exchange", "Named") if f"{name}(" in config]
        if named:
            self.made.edits.imports.append(f"from hvdtrain.config import {', '.join(named)}")
        texts = [f"trainer = {config}", f"trainer.fit({self.loop.model}, {self.loader.dataset})"]

        def change(old: Any) -> Any:
            lines = [statement(text) for text in texts]
            lines[0] = lines[0].with_changes(leading_lines=old.leading_lines)
            return cst.FlattenSentinel(lines)

        self.made.edits.put(self.loop.outer, change)

    def _keys(self) -> dict[str, str]:
        """Keys of Config as code."""
        batch = torch_parts.batch_of_all(self.scan, self.loader.batch, self.ranks if self.kind.per_rank else 1)
        keys = {"epochs": self.scan.code(self.loop.epochs), "global_batch": batch, "lr": self.optimizer.lr,
                "optimizer": torch_snippet.named(self.optimizer.name, self.optimizer.args),
                "loss": torch_snippet.named(self.loss.name, self.loss.args)}
        if not self.loss.classes:
            keys["metrics"] = "[]"
        if not self.loader.shuffled:
            keys["data"] = "Data(shuffle=False)"
        if self.loop.clip is not None:
            keys["clip_norm"] = self.scan.code(self.loop.clip)
        if any(True for _ in self.scan.calls("convert_sync_batchnorm")):
            keys["sync_batchnorm"] = "True"
        return {**keys, **self.kind.keys(self.scan)}

    def _nothing_dangles(self) -> None:
        """`Refused` where something that goes is used by what stays, or the kind's modules are."""
        scan = self.scan
        for assign in [self.optimizer.made, *self.loader.made, *([self.loss.made] if self.loss.made else [])]:
            name = name_of(assign.targets[0].target) or ""
            for use in scan.uses(name):
                if self._left(use):
                    raise Refused(scan.line(use),
                                  f"{name} is used outside the loop: {scan.short(scan.statement(use))}",
                                  *torch_loop.STANDARD)
        for node in scan.nodes:
            if isinstance(node, (cst.Attribute, cst.Name)) and scan.dotted(node).startswith(
                    (*self.kind.roots, "torch.multiprocessing")) and self._left(node) and not any(
                    isinstance(up, (cst.Import, cst.ImportFrom)) for up in scan.above(node)):
                raise Refused(scan.line(node), f"{scan.short(scan.statement(node))} is not part of the loop",
                              "it would be left without the processes that it is about", *torch_loop.STANDARD[1:])
        for node in scan.all(cst.Attribute):
            if node.attr.value in ("local_rank", "LOCAL_RANK") and self._left(node) and not scan.dotted(node):
                raise Refused(scan.line(node), f"{scan.short(node)} is read", "no launcher of hvdtrain sets it",
                              "Trainer chooses the device; take it out, then run migrate again")

    def _handle_is_gone(self) -> None:
        """`Refused` where the object that all went through (the Accelerator) is still read."""
        scan, handle = self.scan, self.kind.handle(self.scan)
        for node in scan.nodes:
            if handle and isinstance(node, (cst.Name, cst.Attribute)) and name_of(node) == handle and self._left(
                    node) and not (isinstance(node, cst.Name) and node not in scan.uses(handle)):
                raise Refused(scan.line(node), f"{scan.short(scan.statement(node))} uses {handle}",
                              "it is made no more, and this use has no counterpart that can be put in by itself",
                              "use the code below; print and save under 'if rank == 0:', the model is on its device")

    def _no_device(self) -> None:
        """A device not made of the local rank is the model's behind the loop; `Refused` where it is read before.

        Trainer chooses where the model is.
        """
        scan = self.scan
        for assign in scan.all(cst.Assign):
            name, text = name_of(assign.targets[0].target) or "", scan.code(assign.value)
            if not self._left(assign) or "cuda" not in text or "local_rank" in text.lower() or not self._place(
                    assign.value):
                continue
            left = [use for use in scan.uses(name) if self._left(use)]
            early = next((use for use in left if scan.line(use) < scan.line(self.loop.outer)), None)
            if early is not None:
                raise Refused(scan.line(early), f"{name} is read before the loop",
                              "Trainer puts the model on this rank's own device",
                              "use next(model.parameters()).device behind it, then run migrate again")
            for use in left:
                self.made.edits.swap(use, f"next({self.loop.model}.parameters()).device")
                self.gone.add(use)
            if left:
                self._remove(sole(scan, assign))

    def _tell(self) -> None:
        """What is not the same as before."""
        line, tell = self.scan.line(self.loop.outer), self.made.tell
        tell(line, "changed", "the loop is Trainer's, with the same optimizer, loss and data",
             "logs, checkpoints and the final model go to a folder under runs/; the order of samples is another one",
             "start it with horovodrun -np N python script.py (or mpirun), N the number of GPUs")
        if self.kind.per_rank:
            at = self.loader.made[0] if self.loader.made else self.loop.inner
            tell(self.scan.line(at), "changed",
                 f"the loader's batch was one process's; global_batch is that of {self.ranks} of them",
                 "Trainer's batch is that of all ranks together, however many they are",
                 "give --ranks N with the number of processes of the old job, or correct global_batch and lr by hand")
