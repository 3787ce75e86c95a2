"""Parts of a PyTorch model that is partitioned over ranks: checked, measured, partitioned by one plan of all ranks.

Blocks are measured by `measuring` and `outline`; `stage` computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.misfit import told
from hvdtrain.backends.torch import keras, placement
from hvdtrain.backends.torch.blocks import refuse_shared
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.maker import Maker, build_lazy
from hvdtrain.backends.torch.memory import free_cached, out_of_memory
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.backends.torch.optimizer import slot_share
from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.backends.torch.pipelined import measuring, outline
from hvdtrain.backends.torch.pipelined.measuring import ByBlock
from hvdtrain.backends.torch.pipelined.outline import free, source_of, why_whole
from hvdtrain.backends.torch.pipelined.stage import UNDO, Cut, PipelineStage, refuse_cut, take_out
from hvdtrain.backends.torch.pipelined.tape import Inexact, Tape
from hvdtrain.backends.torch.snapshot import Modules, attributes_kept
from hvdtrain.backends.torch.stage import TorchStage
from hvdtrain.backends.torch.task import TorchEvaluator
from hvdtrain.backends.torch.transforms.placement import Placement, least_samples
from hvdtrain.backends.torch.transforms.remat import Remat
from hvdtrain.cluster.control import agreed, in_turn
from hvdtrain.cluster.machine import memory as heap
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout, Mesh
from hvdtrain.core.protocols import Batch, Collectives, Control
from hvdtrain.core.terminal import say
from hvdtrain.parallel.parts import GroupBuffers, ModelParts, ReplicaGroup, replicas_of
from hvdtrain.parallel.pipeline.partition import agree, measured_samples
from hvdtrain.parallel.precision import Precision
from hvdtrain.parallel.recovery import attempt_halving
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs

Sample = Callable[[int], Batch]
Source = Tape | ByBlock
Found = tuple[DeviceProfile, list[Any], Source | None]
"""What a rank's blocks cost, what came into each, and what fills them; None: they are there."""

UNCERTAIN = (UserError, RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)
"""What an outline may raise where the whole model raises nothing, or something else."""


def make_parts(spec: Any, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
               precision: Precision, sample: Sample | None, mesh: Mesh) -> ModelParts:
    """Return the parts of this rank's blocks of ``spec.model``; collective.

    All ranks measure at once where none needs the whole model for it: in training, too, those of a host share its
    caches and memory, which costs some blocks more than others.

    Errors: `UserError` for a model that cannot be partitioned, a task that needs more than its outputs, and what does
    not go together with a pipeline.
    """
    def of(model: torch.nn.Module, source: Source | None = None) -> PartMaker:
        build_lazy_as_alone(model, spec, config.seed, sample)
        return PartMaker(replace(spec, model=model), config, mesh, wire, steps_per_epoch, precision, sample, source)

    def at_once() -> Found | str:
        source = source_of(spec.model)
        if source is None:
            return why_whole(spec.model)
        try:
            maker = of(spec.model, source)
            return maker.measure(control), maker.came, source
        except (Inexact, *UNCERTAIN) as error:
            return " ".join(str(error).split())[:100]

    def whole() -> Found:
        if not isinstance(first, str):
            return first
        maker = of(built(spec))
        found, came = maker.measure(control), maker.came
        del maker
        free()
        return found, came, None

    def finish() -> PartMaker:
        if source is not None:
            with contextlib.suppress(Inexact):
                maker = of(spec.model, source)
                maker.cut(layout, came)
                return maker
        maker = of(built(spec))
        maker.cut(layout, came)
        spec.become(maker.model)
        free()
        return maker

    agreed(control, lambda: refuse(spec, config), "model")
    first = agreed(control, at_once, "measuring the model's blocks")
    if any(control.gather(isinstance(first, str))):
        if isinstance(first, str) and first and control.rank == 0 and config.progress != "off":
            say("note: each rank builds the whole model in host memory before it keeps its stage, one rank of "
                f"a host at a time: partial building is not possible ({first})")
        first = in_turn(control, whole, "measuring the model's blocks")
    assert not isinstance(first, str)
    found, came, source = first
    layout = agree(found, config, control, mesh)
    maker = in_turn(control, finish, "building the model")
    if maker.placement.home.type == "cpu":
        heap.keep_freed()
    maker.replicas = replicas_of(layout, wire)
    return agreed(control, maker.parts, "pipeline")


def built(spec: Any) -> torch.nn.Module:
    """Return the whole model of ``spec`` in host memory, built again if it is an outline; restores generators."""
    if spec.again is None:
        return spec.model  # type: ignore[no-any-return]
    with placement.seeded_apart(None):
        return spec.again()  # type: ignore[no-any-return]


def build_lazy_as_alone(model: torch.nn.Module, spec: Any, seed: int, sample: Sample | None) -> None:
    """Do `build_lazy` with the random numbers of one process, whatever this rank's are; restores generators."""
    with placement.seeded_apart(seed):
        build_lazy(model, spec, sample)


def refuse(spec: Any, config: Config) -> None:
    """Raise `UserError` for what cannot be partitioned over ranks, or does not go together with it."""
    if keras.is_keras(spec.model):
        raise UserError("pipeline with a Keras model on PyTorch", "a model of PyTorch's own, or Keras on TensorFlow",
                        "leave pipeline out, or set KERAS_BACKEND=tensorflow")
    for key, on in (("sync_batchnorm", config.sync_batchnorm), ("compile: auto", config.compile == "auto")):
        if on:
            raise UserError(f"{key} with a pipeline over ranks and PyTorch", "one of the two",
                            f"leave {key.partition(':')[0]} out, or {UNDO}")
    refuse_cut(spec.model)


class PartMaker(Maker):
    """Makes the parts of the blocks that one rank has of a model.

    ``source``: of a model that is an outline, what fills its blocks. ``came``: the input of each block when it was
    measured. ``layout``: the blocks of each rank, once `cut`. ``replicas``: this rank's blocks by the ranks that share
    them, to be set then.
    """

    whole = False
    layout: Layout
    replicas: Sequence[ReplicaGroup]

    def __init__(self, spec: Any, config: Config, mesh: Mesh, wire: Collectives, steps_per_epoch: int,
                 precision: Precision, sample: Sample | None, source: Source | None = None) -> None:
        self._mesh, self._source = mesh, source
        self.named = measuring.chain(spec)
        super().__init__(spec, config, mesh.rank, wire, steps_per_epoch, precision, sample)

    def place(self) -> Placement:
        return Placement(self.spec, self.config, whole=False)

    def scaled(self, precision: Precision) -> Collection[int]:
        """Return all ranks of each replica in which one computes in float16: a loss goes back through all of them."""
        return {rank for copy in self._mesh.copies if set(copy) & set(precision.scaled) for rank in copy}

    def measure(self, control: Control) -> DeviceProfile:
        """Check the model and measure its blocks, one at a time on this rank's device."""
        if self.sample is None:
            raise UserError("pipeline without data or example(B) to measure the blocks with", "one of them",
                            "define example(B) in the model file")
        samples, least = measured_samples(self.config, self._mesh), least_samples(self.named)
        blocks, n, why = attempt_halving(self._blocks_of, max(samples, least), out_of_memory, free_cached, least)
        blocks = tuple(block.over(max(samples, least) / n) for block in blocks)
        needs = Needs(gradients=1.0, slots=slot_share(self.config, self.optimizer_spec))
        capacity = placement.memory_bytes(self.placement.home)
        ranks = max(1, control.local_size) if not self.placement.on_gpu else 1
        return DeviceProfile(blocks, max(samples, least), capacity // ranks, needs, str(self.placement.home), why=why)

    def _blocks_of(self, samples: int) -> tuple[Block, ...]:
        """Measure the blocks with so many samples."""
        assert self.sample is not None
        random, host = placement.random_arrays(), torch.device("cpu")
        batch = self.sample(samples)
        turned = tuple(np.roll(array, 1) for array in batch)  # another batch, whose arrays keep their kind
        try:
            with told(self.spec.model, batch), attributes_kept(Modules(self.model)):
                one, other = (self.placement.tensors(b, host) for b in (batch, turned))
                if self._source is not None:
                    x = outline.check_outline(self.model, self.named, self.task, one)
                else:
                    measuring.check(self.spec, self.named, self.task, one, other)
                    x = measuring.input_of(self.model, self.task, one)
                steps = contextlib.nullcontext() if self.placement.on_gpu else heap.kept_freed()
                with self.precision.computing(), steps:
                    home = self.placement.home
                    blocks, self.came = (measuring.measure(self.named, x, home) if self._source is None
                                         else outline.measure_in_parts(self.named, self._source, x, home))
                return blocks
        finally:
            placement.load_random(random)

    def cut(self, layout: Layout, came: Sequence[Any]) -> None:
        """Keep the blocks that ``layout`` gives to this rank, on its device; ``came``: what each block may get."""
        mesh, chunks = layout.mesh, layout.chunks()
        parts = ((number % mesh.depth, [self.named[i] for i in chunk]) for number, chunk in enumerate(chunks))
        refuse_shared(parts, "ranks of a pipeline", f"set pipeline.cut so that they are on one rank, or {UNDO}")
        self.layout = layout
        self.chunks = [[self.named[i][1] for i in chunk] for chunk in layout.mine]
        self._came = [came[chunk.start] for chunk in layout.mine]
        self._caveats = super().caveats()  # of all blocks, wherever they are
        if self._source is not None:
            self.named = outline.fill(self.model, self.named, layout.blocks, self._source)
        take_out(self.model, self.named, layout.blocks)
        self.model.to(self.placement.home)
        self.forward = Cut(self.model, whole=layout.mesh.depth == 1)
        self._evaluator = super().evaluator()

    def stage(self, params: TorchParams, buffers: Buffers) -> TorchStage:
        return PipelineStage(
            self.layout, self.chunks, self.forward, self._evaluator, self._narrow(), self._came,
            model=self.model, task=self.task, params=params, buffers=buffers, placement=self.placement,
            precision=self.precision, sync=None, generators=self.generators, rank=self.rank, caveats=self.caveats)

    def _narrow(self) -> set[int]:
        """Return the ranks whose blocks give 16 bits where their parameters have 32."""
        return {rank for rank, name in enumerate(self.policy.names) if name != "fp32"}

    def evaluator(self) -> TorchEvaluator:
        return self._evaluator

    def buffers(self) -> Buffers:
        return PartBuffers(self.model, self.named, self.replicas)

    def blocks(self) -> list[torch.nn.Module]:
        """Return all blocks by their numbers; those of other ranks hold nothing."""
        return [block for _, block in self.named]

    def remat(self, stage: TorchStage) -> Remat | None:
        own = [self.named[i] for i in self.layout.blocks]
        return Remat(self.model, own, stage, None, self.sample, self.layout.names)

    def caveats(self) -> list[str]:
        return self._caveats

    def parts(self) -> ModelParts:
        parts = super().parts()
        parts.layout, parts.replicas = self.layout, self.replicas
        return parts


Named = Sequence[tuple[str, torch.nn.Module]]


class PartBuffers(GroupBuffers, Buffers):
    """Implements `hvdtrain.core.protocols.Buffers`: one `Buffers` for the blocks that each group of ranks shares."""

    groups: Sequence[Buffers]

    def __init__(self, model: torch.nn.Module, blocks: Named, replicas: Sequence[ReplicaGroup]) -> None:
        paths = {id(module): name for name, module in model.named_modules()}
        self.groups = [Buffers(torch.nn.ModuleList([blocks[i][1] for i in each.blocks]), Transport(each.wire, Ops()),
                               paths) for each in replicas]

    def saw(self, samples: int) -> None:
        for group in self.groups:
            group.saw(samples)

    def loaded(self) -> None:
        for group in self.groups:
            group.loaded()

    def appeared(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self.groups[0].appeared(buffers)

    def aliases(self) -> dict[str, str]:
        """Return {}: PyTorch's names are those of the whole model."""
        return {}
