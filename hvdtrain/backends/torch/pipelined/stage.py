"""Forward and backward of a rank's blocks of a PyTorch model that is partitioned over ranks.

Blocks of other ranks are replaced by placeholders; `cargo` packs what goes between ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hvdtrain.backends.torch import placement as devices_of
from hvdtrain.backends.torch.blocks import called_with, model_input
from hvdtrain.backends.torch.modules import check_loss, like, tensors_of
from hvdtrain.backends.torch.pipelined import cargo as cargos
from hvdtrain.backends.torch.stage import TorchStage, few_samples
from hvdtrain.backends.torch.task import TorchEvaluator
from hvdtrain.backends.torch.trial import first_not_finite, restoring
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Batch, Cargo, GradientSink, Pair

Chunk = Sequence[torch.nn.Module]


class _Back:
    """Takes the gradients of inputs. Apart from `_InFlight`, or it and autograd's graph were a cycle, never freed."""

    def __init__(self) -> None:
        self.grads: Sequence[torch.Tensor | None] | None = None

    def keep(self, grads: Sequence[torch.Tensor | None]) -> None:
        self.grads = grads


class _InFlight:
    """State of a chunk and micro-batch from its forward to its backward.

    ``like``: the shapes and types of inputs which have a gradient. ``ends``: where backward begins, None for a tensor
    that depends on no parameter; so the tensors themselves can be freed once they are sent. ``loss``: the scaled one.
    ``back``: the gradients of ``like``, once backward has made them.
    """

    def __init__(self) -> None:
        self.like: list[torch.Tensor] = []
        self.ends: list[Any] = []
        self.loss: torch.Tensor | None = None
        self.back = _Back()


class PipelineStage(TorchStage):
    """Implements `hvdtrain.core.protocols.PipelineStage` over the blocks of ``layout``.

    ``own``: this rank's chunks of blocks. ``cut``: the model's forward pass. ``narrow``: the ranks that give 16 bits
    where their parameters have 32. ``samples``: for each own chunk an input tree on the host; None for the model's
    first, and where nothing was measured.
    """

    def __init__(self, layout: Layout, own: Sequence[Chunk], cut: Cut, evaluator: TorchEvaluator,
                 narrow: Collection[int], samples: Sequence[Any], **parts: Any) -> None:
        super().__init__(**parts)
        self._layout, self._own, self._cut, self._evaluator = layout, own, cut, evaluator
        self._came_like = list(samples)
        mesh = layout.mesh
        self.chunks = len(own)
        self._numbers = range(mesh.place, len(layout.chunks()), mesh.depth)
        self._last = len(layout.chunks()) - 1
        widens = mesh.rank not in narrow
        self._wide = [widens and n > 0 and mesh.ranks[(n - 1) % mesh.depth] in narrow for n in self._numbers]
        self._kept: dict[tuple[int, int], _InFlight] = {}
        self.held = self.most_held = 0

    def begin(self) -> None:
        self.drop()
        super().begin()

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        kept = self._keep(chunk, micro, batch)
        with few_samples(self._rank), self._precision.computing():
            value = self._input(batch) if came is None else self._received(chunk, came, kept)
            value = self._through(chunk, value)
        kept.ends = [get_gradient_edge(t) if t.requires_grad else None
                     for t in tensors_of(value) if cargos.has_gradient(t)]
        return cargos.pack(value, f"block {self._name(chunk)}")

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        kept = self._keep(chunk, micro, batch)
        loss_sum, weight = self._loss(chunk, came, batch, kept)
        kept.loss = loss_sum * (scale * self._precision.factor)
        return loss_sum.detach(), weight

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        kept = self._kept.pop((chunk, micro))
        self.held -= 1
        if came is None:
            assert kept.loss is not None
            self._gradients.backward(kept.loss, 1.0, final=False)
        else:
            found = zip(kept.ends, cargos.unpack_gradients(came, self._placement.home), strict=True)
            there = [(end, grad) for end, grad in found if end is not None and grad is not None]
            if there:
                self._gradients.add([end for end, _ in there], [grad for _, grad in there])
        if self._numbers[chunk] == 0:
            return None
        return cargos.pack_gradients(kept.back.grads or [None] * len(kept.like), kept.like)

    def hand_over(self, sink: GradientSink) -> None:
        self.waited_s = 0.0
        self._gradients.hand_over(self._precision.factor)
        if self._clock:
            self._clock.stop()

    def drop(self) -> None:
        self._kept, self.held = {}, 0

    def evaluate(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        with self._evaluator.evaluating():
            tensors = self._placement.tensors(batch)
            value = None if came is None else self._received(chunk, came)
            if self._numbers[chunk] < self._last:
                value = self._through(chunk, self._input(batch) if came is None else value)
                return cargos.pack(value, f"block {self._name(chunk)}")
            with self._cut.giving(_Outputs(lambda x: self._through(chunk, x if came is None else value))):
                self._evaluator.measure(tensors)
        return None

    @contextlib.contextmanager
    def once(self, batch: Batch, factor: float = 1.0) -> Iterator[None]:
        """Compute the gradients of this rank's chunks for made-up inputs, available within the body; restore all.

        An input is that of the measuring of blocks, for as many samples as ``batch`` has.
        """
        with restoring(self._model, self._params.tensors, self.generators):
            for chunk, number in enumerate(self._numbers):
                came = None if number == 0 else self._made_up(chunk, len(batch[0]))
                if number == self._last:
                    loss_sum, _ = self._loss(chunk, came, batch, _InFlight())
                    (loss_sum * (factor / max(1, len(batch[0])))).backward()
                else:
                    kept = _InFlight()
                    with self._precision.computing():
                        value = self._input(batch) if came is None else self._received(chunk, came, kept)
                        ends = [t for t in tensors_of(self._through(chunk, value)) if t.requires_grad]
                    if ends:
                        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            devices_of.synchronize(self.devices)
            yield

    def culprit(self, batch: Batch) -> str:
        """Return the first parameter whose gradient of the step is not finite: a batch cannot be computed alone."""
        found = first_not_finite(self._params.tensors)
        return "" if found is None else self._params.names[found]

    def alone(self, batch: Batch) -> list[torch.Tensor]:
        """Raise `UserError`: a rank's blocks have no gradient of their own."""
        raise UserError("audit with a pipeline over ranks", "an unpartitioned model", "leave audit out")

    def _made_up(self, chunk: int, samples: int) -> Cargo:
        """Return a possible input of a chunk for so many samples."""
        tree = self._came_like[chunk]
        assert tree is not None, "blocks were measured"
        tensors = tensors_of(tree)
        was = next((t.shape[0] for t in tensors if t.dim()), 1)
        rows = torch.arange(samples) % was
        made = [t[rows] if t.dim() and t.shape[0] == was else t.clone() for t in tensors]
        return cargos.pack(like(tree, made), "a block")

    def _keep(self, chunk: int, micro: int, batch: Batch) -> _InFlight:
        if chunk == 0:
            self._buffers.saw(len(batch[0]))
        kept = self._kept[chunk, micro] = _InFlight()
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return kept

    def _input(self, batch: Batch) -> Any:
        return model_input(self._model, self._task, self._placement.tensors(batch), UNDO)

    def _received(self, chunk: int, came: Cargo, kept: _InFlight | None = None) -> Any:
        """Return the output of the chunk before, in the types that this rank computes with."""
        tensors = cargos.unpack(came, self._placement.home)
        if kept is not None:
            kept.like = [torch.empty_like(t, device="meta") for t in tensors if cargos.has_gradient(t)]
            tensors = cargos.arrived(tensors, kept.back.keep)
        if self._wide[chunk]:
            tensors = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
        return cargos.tree_of(came.form, tensors)

    def _through(self, chunk: int, value: Any) -> Any:
        for block in self._own[chunk]:
            value = block(value)
        return value

    def _loss(self, chunk: int, came: Cargo | None, batch: Batch, kept: _InFlight) -> Pair:
        calls = 0

        def outputs(x: Any) -> Any:
            nonlocal calls
            calls += 1
            return self._through(chunk, x if came is None else self._received(chunk, came, kept))

        with self._cut.giving(outputs):
            pair = self.loss_of(batch)
        if calls != 1:
            raise UserError(f"task calls a partitioned model {calls} times", "model(x), once",
                            "fix task, or leave pipeline out")
        check_loss(self._model, pair[0])
        return pair

    def _name(self, chunk: int) -> str:
        return self._layout.names[self._layout.mine[chunk][-1]]


class _Outputs:
    """Caches a model's output for one x, which a task and metrics may both ask for."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute
        self._found: tuple[list[torch.Tensor], Any] | None = None

    def __call__(self, x: Any) -> Any:
        tensors = tensors_of(x)
        if self._found is None:
            self._found = tensors, self._compute(x)
        same = len(tensors) == len(self._found[0]) and all(map(torch.equal, tensors, self._found[0]))
        if not same:
            raise UserError("metrics give a partitioned model an x that differs from task's", "one x",
                            "fix metrics, or leave pipeline out")
        return self._found[1]


Named = Sequence[tuple[str, torch.nn.Module]]

UNDO = "leave pipeline out"
"""How to do without a model that is partitioned over ranks."""


class NotHere(UserError, AttributeError):
    """A task needs something of another rank; to `hasattr` it does not exist."""


class RemoteBlock(torch.nn.Module):
    """Placeholder of a block that another rank has; without parameters and buffers."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **named: Any) -> Any:
        """Raise the error that names the block."""
        raise self._told("it was called")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            raise self._told(f"its {name} was asked for") from None

    def _told(self, what: str) -> NotHere:
        return NotHere(f"block {self.__dict__['block']} of the model is on another rank of the pipeline, and {what} "
                       "here", "a task that uses only model(x)",
                       "return values that task needs from the block as outputs of the model, or leave pipeline out")


def take_out(model: torch.nn.Module, blocks: Named, own: Collection[int]) -> None:
    """Put a placeholder in place of each block that is not among ``own`` (numbers), and free its memory."""
    kept = {id(m) for i in own for m in blocks[i][1].modules()}
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            places.setdefault(id(child), []).append((module, name))

    def out(name: str, module: torch.nn.Module) -> None:
        if id(module) in kept:
            return
        found = places.get(id(module))
        if found is None:  # put together by blocks(model) of modules that the model has
            for child in list(module.children()):
                out(name, child)
            return
        for parent, attribute in found:
            parent._modules[attribute] = RemoteBlock(name)
        module.to("meta")  # whoever still holds it (a list beside the modules) holds no memory

    for i, (name, block) in enumerate(blocks):
        if i not in own:
            out(name, block)


def is_cut(model: torch.nn.Module) -> bool:
    """Return whether blocks of ``model`` have been taken out."""
    return any(isinstance(module, RemoteBlock) for module in model.modules())


def refuse_cut(model: torch.nn.Module) -> None:
    """Raise `UserError` for a model that an earlier run has partitioned over ranks."""
    if is_cut(model):
        raise UserError("a model of which an earlier pipeline run left only some blocks on this rank",
                        "the whole model", "build the model again and load the weights of that run's folder")


class Cut:
    """Forward pass of ``model``, of which this rank has some blocks; all, where ``whole``: then its own."""

    def __init__(self, model: torch.nn.Module, whole: bool = False) -> None:
        self._model, self._own = model, model.forward if whole else None
        self._give: Callable[[Any], Any] | None = None
        vars(model)["forward"] = self.forward

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the output within `giving`; `UserError` for a partitioned model elsewhere."""
        if self._give is None and self._own is not None:
            return self._own(*args, **named)
        if self._give is None:
            raise UserError(f"a call of {type(self._model).__name__}, of which this rank of a pipeline "
                            "has only some blocks", "the whole model", "build the model again and load the weights of "
                                                                       "the run's folder")
        if len(args) != 1 or named:
            raise called_with(args, named, UNDO)
        return self._give(args[0])

    @contextlib.contextmanager
    def giving(self, outputs: Callable[[Any], Any]) -> Iterator[None]:
        """Let a call ``model(x)`` return ``outputs(x)`` within the body."""
        before, self._give = self._give, outputs
        try:
            yield
        finally:
            self._give = before
