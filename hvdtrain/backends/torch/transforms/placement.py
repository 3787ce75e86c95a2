"""Devices of a PyTorch model's tensors: one device, or, of a split model, each block on its own.

Blocks are measured in `hvdtrain.backends.torch.blocks`; the forward pass is `pipelined.over_devices`'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch import blocks, modules, placement
from hvdtrain.backends.torch.memory import free_cached, out_of_memory
from hvdtrain.backends.torch.modules import count_samples
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.backends.torch.optim import OptimizerSpec
from hvdtrain.backends.torch.optimizer import slot_share
from hvdtrain.backends.torch.pinned import Uploads
from hvdtrain.backends.torch.pipelined.over_devices import OverDevices, release
from hvdtrain.backends.torch.transforms.precision import MixedPrecision, floating_dtype
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch, Control
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.pipeline.plan import DevicePlan
from hvdtrain.parallel.recovery import attempt_halving
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs, part_samples, split_micros


class Placement:
    """Implements `hvdtrain.core.protocols.Transform`: the devices of a rank and what is on which; one until `split`.

    ``devices``: in the order of the stages. ``home``: the first. ``whole``: the model is to be there at once.
    """

    collective = False

    def __init__(self, spec: Any, config: Config, whole: bool = True) -> None:
        self._spec, self._config = spec, config
        self.devices = placement.devices(config.model_parallel)
        self.home = self.devices[0]
        self.on_gpu = any(d.type == "cuda" for d in self.devices)
        self.dtype = floating_dtype(spec.model)
        self.uploads = Uploads(self.of_batch, self.dtype)
        self._split: OverDevices | None = None
        self._plan: DevicePlan | None = None
        self._changing: list[str] = []
        release(spec.model)
        # Host memory is where blocks wait to be measured, also those that a run before has left on several devices.
        if whole or not any(p.is_meta for p in spec.model.parameters()):  # else an outline, whose blocks come later
            spec.model.to(self.home if len(self.devices) == 1 and whole else "cpu")
        if len(self.devices) > 1 and config.sync_batchnorm and split_micros(config) > 1:
            raise UserError("sync_batchnorm with a model whose micro-batches are computed in parts on "
                            "several devices, in an order that differs between ranks", "one of the two",
                            "set split_micro_batches: 1, or leave sync_batchnorm out")

    def measure(self, task: Callable[..., Any], sample: Callable[[int], Batch] | None, control: Control,
                precision: MixedPrecision, spec: OptimizerSpec | None = None) -> list[DeviceProfile]:
        """Return a profile of each device. Errors: `UserError` for a model that cannot be split."""
        model, named = self._spec.model, blocks.chain(self._spec)
        source = sample or self._spec.example
        if source is None:
            raise UserError("model_parallel without data or example(B) to measure the blocks with", "one of them",
                            "define example(B) in the model file")

        def blocks_of(samples: int) -> dict[str, tuple[Block, ...]]:
            batch = self.tensors(source(samples), torch.device("cpu"))
            x = blocks.model_input(model, task, batch)
            count_samples(x)
            self._changing = _beside_batchnorm(model, blocks.check_chain(model, named, x))
            if split_micros(self._config) > 1:
                some = self.tensors(source(2 * least + 1), torch.device("cpu"))
                blocks.check_parts(model, named, task, some, least)
            with precision.computing():
                return {d.type: blocks.measure(named, x, d) for d in {d.type: d for d in self.devices[::-1]}.values()}

        least, random = least_samples(named), placement.random_arrays()
        samples = max(least, part_samples(self._config, control.rank, control.size))
        try:
            found, n, _ = attempt_halving(blocks_of, samples, out_of_memory, free_cached, least)
        finally:
            placement.load_random(random)
        by_type = {kind: tuple(block.over(samples / n) for block in some) for kind, some in found.items()}
        needs = Needs(gradients=1.0, slots=slot_share(self._config, spec))
        capacity_bytes, together_bytes = self._memory(control.local_size)
        return [DeviceProfile(by_type[d.type], samples, own, needs, str(d), together_bytes=together_bytes)
                for d, own in zip(self.devices, capacity_bytes)]

    def _memory(self, local_size: int) -> tuple[tuple[int, ...], int]:
        """Return the bytes of each device, and of all together where they are one CPU, which ranks of a host share."""
        ranks = max(1, local_size)
        own = tuple(placement.memory_bytes(d) // (ranks if d.type == "cpu" else 1) for d in self.devices)
        return (own, 0) if self.on_gpu else ((0,) * len(own), own[0])

    def split(self, plan: DevicePlan) -> None:
        """Put the blocks on their devices. Errors: `UserError` where two stages share a parameter or buffer."""
        named = blocks.chain(self._spec)
        stages = [[named[i] for i in stage] for stage in plan.stages]
        blocks.refuse_shared(enumerate(stages), "devices", "set model_parallel lower")
        modules = [[block for _, block in stage] for stage in stages]
        self._split = OverDevices(modules, self.devices, plan.micros, least_samples(named))
        self._plan = plan
        self._split.install(self._spec.model)

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        if self._split:
            self._split.install(model)

    def remove(self, model: torch.nn.Module) -> None:
        if self._split:
            self._split.leave(model)

    def of_batch(self, index: int) -> torch.device:
        """Return the device of array ``index`` of a batch: x on the first, targets on the last, where the loss is.

        But a task of the model file may use x beside the outputs: then it is on the last too, and copied in parts.
        """
        return self.home if index == 0 and self._spec.task is None else self.devices[-1]

    def tensors(self, batch: Batch, where: torch.device | None = None) -> tuple[torch.Tensor, ...]:
        """Return the arrays on their devices; floating ones in the parameters' type, as Keras casts (not float64)."""
        return self.uploads.take(batch) if where is None else Uploads(lambda _: where, self.dtype).take(batch)

    def places(self) -> dict[int, int]:
        """Return the stage of each parameter of a split model, by the parameter's id."""
        stages = self._split.stages if self._split else []
        return {id(p): number for number, stage in enumerate(stages) for block in stage for p in block.parameters()}

    def on_its_device(self, flat_N: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's vector on the device of its parameters."""
        return flat_N.to(self.devices[bucket.place])

    def ops(self) -> list[Ops]:
        return [Ops(device) for device in self.devices] if self._split else []

    def describe(self) -> dict[str, str]:
        words = {"device": ", ".join(str(d) for d in self.devices)}
        if self._split is None or self._plan is None:
            return words
        found = self._split.bubble()
        return {**words, "split": f"{self._plan.words()}, a micro-batch in {self._split.micros} parts",
                "bubble": f"{self._plan.step.idle_share:.1%} predicted, "
                          + ("not measured" if found is None else f"{found:.1%} measured")}

    def caveats(self) -> list[str]:
        if self._split is None or self._split.micros == 1:
            return []
        norms = _normalised(self._spec.model)
        found = ["BatchNorm computes its statistics over each part of a micro-batch"] if norms else []
        if self._changing:
            more = ", ..." if len(self._changing) > 3 else ""
            found.append(f"buffers of {', '.join(self._changing[:3])}{more} change with each part of a micro-batch")
        draws = any(modules.drops(m) for m in self._spec.model.modules())
        return found + (["dropout draws differ with split_micro_batches"] if draws else [])


def _normalised(module: torch.nn.Module) -> bool:
    return any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules())


def _beside_batchnorm(model: torch.nn.Module, buffers: Sequence[str]) -> list[str]:
    """Return the modules other than BatchNorm that have one of these buffers, each by name and class."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in buffers)
    modules = {name: model.get_submodule(name) for name in owners}
    return [f"{name or 'the model'} ({type(module).__name__})" for name, module in modules.items()
            if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]


def least_samples(named: blocks.Named) -> int:
    """Return the fewest samples of a part: BatchNorm needs more than one value per channel."""
    return 2 if any(_normalised(block) for _, block in named) else 1
