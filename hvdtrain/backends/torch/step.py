"""One PyTorch training step: gradients accumulate in flat buckets, whose exchange overlaps backward.

Owns the flat gradient memory and the hooks. Each parameter's ``.grad`` becomes a view of its bucket as soon as
backward has made it, later micro-batches add to the view, and the optimizer reads it there; a post-accumulate hook
counts a bucket full during the last micro-batch's backward and hands it to the reducer. In a world of one rank
gradients stay where autograd puts them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch import amp, audit, placement, state, sync_batchnorm, trial
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.optim import Optimization
from hvdtrain.backends.torch.placement import DeviceClock
from hvdtrain.backends.torch.split import Layout
from hvdtrain.backends.torch.task import Metrics, make_task
from hvdtrain.backends.torch.update import Update
from hvdtrain.config import Config
from hvdtrain.data.empty import StandIn
from hvdtrain.errors import UserError
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.parallel.plan import Measured, Plan
from hvdtrain.precision.policy import FP32, Precision
from hvdtrain.precision.scaler import LossScale
from hvdtrain.protocols import Batch, Pair, ParamSpec


class TorchStep:
    """Implements `hvdtrain.protocols.Step`."""

    def __init__(self, spec: Any, config: Config, rank: int, steps_per_epoch: int, precision: Precision = FP32) -> None:
        self._layout = Layout(spec, config)
        self.device = self._layout.home
        self.asynchronous = self._layout.on_gpu
        self.waited_s = self._waited_in_step_s = 0.0
        self._clock = DeviceClock() if self.asynchronous else None
        self.model: torch.nn.Module = spec.model
        audit.check_model(self.model)
        sync_batchnorm.release(self.model)
        self._sync = sync_batchnorm.Across() if config.sync_batchnorm else None
        self._stand_in = StandIn()
        self._parts = config.accumulate > 1 or config.micro_batch > 0 or config.balance != "off"
        _train(self.model, {m: False for m in self.model.modules() if self.model.training and not m.training})
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if not named:
            raise UserError("the model has no trainable parameter", "at least one with requires_grad", "unfreeze one")
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        amp.check(self._dtype, precision.own)
        self.precision = precision
        self.scale = LossScale(config.loss_scale, precision.scaled)
        self._names = [n for n, _ in named]
        self._params = [p for _, p in named]
        self._task = make_task(spec, config)
        self._metrics = Metrics(spec, config, self._task)
        self._make_opt = partial(Optimization, config, steps_per_epoch=steps_per_epoch)
        self._opt = self._make_opt(params=self._params)
        self._buffers = Buffers(self.model)
        self._reducer: Reducer
        self._flats: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._left = False
        self._last = False
        self._lock = threading.Lock()
        self._rank = rank
        self._update = Update(self.device)

    # --- a split model -----------------------------------------------------------------------------------------

    @property
    def table(self) -> str:
        """The split of the model for people, "" where it is whole."""
        return self._layout.table

    def measure(self, sample: Callable[[int], Batch] | None, control: Any) -> Measured:
        """What this rank's blocks cost; see `Layout.measure`."""
        return self._layout.measure(self._task, sample, control.rank, control.size, getattr(control, "local_size", 1),
                                    self._tensors, self.precision.own)

    def split(self, plan: Plan) -> None:
        """Put the blocks on their devices; the optimizer is made anew, for the parameters as they are there."""
        self._layout.split(plan)
        of_name = dict(self.model.named_parameters())
        self._params = [of_name[n] for n in self._names]
        self._opt = self._make_opt(params=self._params)

    # --- the exchange ------------------------------------------------------------------------------------------

    def params(self) -> list[ParamSpec]:
        """Trainable parameters in the model's own order."""
        return [
            ParamSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch."), place)
            for n, p, place in zip(self._names, self._params, self._layout.places(self._params))
        ]

    def made_of(self) -> list[str]:
        """One line for each parameter and buffer, those outside the state_dict too."""
        return [*audit.made_of(self.model), f"optimizer {type(self._opt.optimizer).__name__}"]

    def attach(self, reducer: Reducer) -> None:
        """Allocate the buckets, cut them into a view for each parameter, and hook the parameters."""
        for hook in self._hooks:
            hook.remove()
        kept = dict(zip(self._reducer.buckets, self._flats)) if self._flats else {}
        self._reducer, self._flats, self._hooks, self._views, self._left = reducer, [], [], {}, False
        if self._sync:
            self._sync.take(self.model, reducer)
        if reducer.alone:
            return
        self._layout.spread(reducer)
        self._missing: list[set[int]] = [set() for _ in reducer.buckets]
        for bucket in reducer.buckets:
            flat_N = kept[bucket] if bucket in kept else self._layout.flat(reducer, bucket)
            self._flats.append(flat_N)
            for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes):
                param = self._params[i]
                self._views[i] = flat_N[offset:offset + param.numel()].view(shape)
                self._hooks.append(param.register_post_accumulate_grad_hook(self._hook(bucket.index, i)))

    def join(self) -> None:
        """Hook the parameters again, and take BatchNorm's statistics over the ranks."""
        self._layout.join()
        self._opt.joined()
        if self._left:
            self.attach(self._reducer)

    def leave(self) -> None:
        """Remove hooks and joint statistics."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        sync_batchnorm.release(self.model)
        self._layout.leave()
        self._left = True

    def _hook(self, bucket: int, index: int) -> Any:
        def full(param: torch.Tensor) -> None:
            with self._lock:  # of a split model each device has a thread in backward
                ready(param)

        def ready(param: torch.Tensor) -> None:
            if param.grad is not self._views[index]:
                self._take_in(index)
            if not self._last:
                return
            missing = self._missing[bucket]
            if index not in missing:  # its bucket may be on the wire with half of this gradient
                raise UserError(f"parameter {self._names[index]} received its gradient twice in one backward",
                                "one gradient for each parameter and backward",
                                "give torch.utils.checkpoint use_reentrant=False")
            missing.remove(index)
            if not missing:
                self._start(bucket)
        return full

    def _start(self, bucket: int) -> None:
        """Put a full bucket on the wire, in it the gradient of the loss as it is."""
        if self._factor != 1.0:
            self._flats[bucket].mul_(1.0 / self._factor)
        self._reducer.start(bucket, self._flats[bucket])

    @property
    def _factor(self) -> float:
        """What this rank's loss is multiplied by."""
        return self.scale.of(self._rank)

    def plain_sgd(self) -> bool:
        """Whether the optimizer is SGD without momentum."""
        return self._opt.plain_sgd()

    def _take_in(self, index: int) -> None:
        """Make a parameter's gradient the view of its bucket, and what it was so far the view's content.

        So the first micro-batch writes its gradient once: a view that is there from the start costs a pass to clear it
        and one more to add to it. A gradient that a task replaced (``model.zero_grad()``) comes in the same way.
        """
        param, view = self._params[index], self._views[index]
        if param.grad is None:
            view.zero_()
        else:
            view.copy_(param.grad)
        param.grad = view

    def share_initial(self) -> None:
        """Broadcast rank 0's parameters and buffers; collective."""
        self._buffers.share(self._reducer)

    def sync_buffers(self) -> None:
        """Make the buffers that ranks changed on their own (BatchNorm statistics) equal; collective."""
        self._buffers.sync(self._reducer)

    def zero(self) -> None:
        """Forget the gradients of the step before."""
        self._buffers.begin_step()
        self._reducer.begin()
        self._waited_in_step_s = 0.0
        if self._clock:
            self._clock.start()
        for param in self._params:
            param.grad = None
        if not self._reducer.alone:
            self._missing = [set(b.params) for b in self._reducer.buckets]

    def forward_backward(self, batch: Batch, scale: float, last: bool) -> Pair:
        """Add the gradient of ``loss_sum * scale``; hooks start the exchange on the ``last`` micro-batch."""
        self._last = last and not self._reducer.alone
        samples = len(batch[0])
        self._buffers.saw(samples)
        if self._sync:
            self._sync.begin(self._factor, samples > 0)
            if samples:
                self._stand_in.saw(batch)
            else:
                batch, scale = self._stand_in.instead(batch), 0.0
        loss_sum, weight = self._forward(batch)
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim() != 0:
            shape = tuple(getattr(loss_sum, "shape", ()))
            raise UserError(
                f"task returned a loss of type {type(loss_sum).__name__} and shape {shape}",
                "(loss_sum, weight) with a scalar loss_sum",
                "sum the loss in the model file's task",
            )
        (loss_sum * (scale * self._factor)).backward()
        self._last = False
        if self._sync:
            self.waited_s = self._sync.waited_s
            self._waited_in_step_s += self.waited_s
        return (loss_sum.detach(), weight) if samples else (0.0, 0.0)

    def _forward(self, batch: Batch) -> Pair:
        """The task's pair; `UserError` where the part of the batch is too small for BatchNorm."""
        try:
            with self._layout.computing(self.precision.own):
                return self._task(self.model, self._tensors(batch))
        except ValueError as error:
            if "Expected more than 1 value per channel when training" not in str(error):
                raise
            raise UserError(f"a micro-batch of {len(batch[0])} sample on rank {self._rank} with BatchNorm, which takes "
                            "its statistics over more than one value per channel",
                            "at least 2 samples in each micro-batch of every rank",
                            "change global_batch, shares, accumulate or micro_batch, or use GroupNorm") from error

    def spare(self, batch: Batch) -> None:
        """Keep a sample to compute on where a micro-batch has none (`hvdtrain.data.empty`)."""
        self._stand_in.saw(batch)

    def trial(self, batch: Batch) -> None:
        """Compute a batch's gradient for its time alone."""
        self._once(batch)

    def culprit(self, batch: Batch) -> str:
        """The first parameter that this batch gives a gradient which is not finite, or ""."""
        found: list[int | None] = []
        for param in self._params:  # they hold the sums of all ranks, to which backward would add
            param.grad = None
        if self._sync and len(batch[0]) == 1:  # one rank's own statistics need more than one value
            batch = tuple(np.repeat(array, 2, axis=0) for array in batch)
        self._once(batch, lambda: found.append(trial.first_not_finite(self._params)))
        return "" if found[0] is None else self._names[found[0]]

    def _once(self, batch: Batch, then: Callable[[], None] | None = None) -> None:
        """Forward and backward after which all is as it was; ``then`` sees the gradients."""
        random = self._layout.random()
        with sync_batchnorm.local_statistics(self._sync):
            trial.trial(self.model, self._params, self._forward, batch, then)
        placement.synchronize(self._layout.devices)
        self._layout.load_random(random)

    def generators_kept(self) -> Any:
        """Around what must not move the model's own random generators; a model of PyTorch has none."""
        return contextlib.nullcontext()

    def bytes_to_come(self) -> int:
        """Two moments of every parameter, as Adam keeps them, unless there is state already or none will be.

        Of a split model those on the one GPU whose memory is probed.
        """
        if self._opt.optimizer.state or self.plain_sgd():
            return 0
        probed = [p for p in self._params if p.device == placement.device() or not self._layout.on_gpu]
        return 2 * sum(p.numel() * p.element_size() for p in probed)

    def device_s(self) -> float | None:
        """Between the events around the latest forward and backward that the device has ended; None on a CPU."""
        found_s = self._clock.seconds() if self._clock else None
        return found_s if found_s is None else max(0.0, found_s - self._waited_in_step_s)

    def exchange(self) -> float:
        """Hand over what backward left (all of it, if this rank had no sample), and wait for the sums."""
        if self._clock:
            self._clock.stop()
        if self._reducer.alone:
            for param in self._params:  # a parameter without a gradient has a zero one, as it has with several ranks
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                elif self._factor != 1.0:
                    param.grad.mul_(1.0 / self._factor)
            return 0.0
        begin = time.perf_counter()
        for bucket, missing in enumerate(self._missing):
            for index in missing:
                if self._params[index].grad is not self._views[index]:
                    self._take_in(index)
            if missing:
                self._start(bucket)
        for flat_N, sum_N in zip(self._flats, self._reducer.finish()):
            if sum_N.data_ptr() != flat_N.data_ptr():
                flat_N.copy_(sum_N)
        return time.perf_counter() - begin + self._waited_in_step_s

    # --- update, evaluation --------------------------------------------------------------------------------------

    def _sums(self) -> list[torch.Tensor]:
        """The summed gradients, where they lie."""
        return self._flats or [p.grad for p in self._params if p.grad is not None]

    def squares(self) -> float:
        """Squares of this rank's part of the sums; 0 where they are on a GPU, which would have to be waited for."""
        return 0.0 if self.asynchronous else self._reducer.squares(self._sums())

    def skipped(self) -> bool:
        """Whether the GPU left the last update out; by now it has decided."""
        return self._update.skipped()

    def apply(self, clip_norm: float, check: bool) -> tuple[bool, float]:
        """Clip by the global norm and update; not if the norm is not finite, which a loss scale makes it look for."""
        return self._update(self._opt, self._sums(), clip_norm, check or self.scale.on, self.asynchronous)

    def discard(self) -> None:
        """Undo what the step did to buffers and compressor state; there will be no update."""
        self._buffers.discard()
        self._reducer.discard()

    def evaluate(self, batch: Batch) -> None:
        """Add one batch to the metrics' totals; every module is in the mode it was in afterwards."""
        modes = {m: m.training for m in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self._layout.computing(self.precision.own):
                self._metrics.add(self.model, self._tensors(batch))
        finally:
            _train(self.model, modes)

    def eval_totals(self) -> dict[str, np.ndarray]:
        """float64[2] (sum, weight) of each metric this rank saw; they start anew."""
        return {name: np.array(pair, dtype=np.float64) for name, pair in self._metrics.take().items()}

    def eval_results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Weighted means."""
        return {name: float(s / w) if w else math.nan for name, (s, w) in totals.items()}

    def _tensors(self, batch: Batch, where: torch.device | None = None) -> tuple[torch.Tensor, ...]:
        """The arrays on their devices; floating ones in the parameters' dtype, as Keras casts (numpy's is float64)."""
        tensors = (torch.from_numpy(np.require(x, requirements=["C", "W"])) for x in batch)
        return tuple(
            t.to(where or self._layout.of_batch(i), self._dtype if t.is_floating_point() else None, non_blocking=True)
            for i, t in enumerate(tensors)
        )

    # --- schedule, state -----------------------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self._opt.rate()

    def end_epoch(self) -> None:
        """Let per-epoch schedules move on."""
        self._opt.end_epoch()

    def describe(self) -> dict[str, str]:
        """Optimizer, schedule, device, in words."""
        return {**self._opt.describe(), **self._layout.describe(), **self.precision.describe(), **self.scale.describe()}

    def caveats(self) -> list[str]:
        """Layers whose result depends on how a batch is cut (law 2)."""
        whole = audit.caveats(self.model, self._sync is not None, self._parts)
        return [*whole, *self._layout.caveats(), *self.precision.caveats()]

    def state(self) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Groups "model" and "optimizer", and the scalars of optimizer and schedule."""
        groups = {"model": state.model_arrays(self.model), "optimizer": state.optimizer_arrays(self._opt, self._names)}
        return groups, {**self._opt.scalars(), **self.scale.state()}

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`; a checkpoint that does not fit changes nothing."""
        self._opt.check(rest)
        state.check_optimizer(self._names, groups["optimizer"])
        state.load_model(self.model, groups["model"])
        self._buffers.loaded()
        state.load_optimizer(self._opt, self._names, self._params, groups["optimizer"])
        self._opt.load_scalars(rest)
        self.scale.load(rest)

    def rank_state(self) -> dict[str, np.ndarray]:
        """Random generators and compressor state of this rank."""
        return {**state.random_arrays(), **self._layout.random(), **self._reducer.saved()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; say what of the compressor's state does not fit."""
        state.load_random(own)
        self._layout.load_random(own)
        return self._reducer.restore(own)

    def export(self, directory: Any) -> list[str]:
        """Write model.safetensors and model.pt (a state_dict, for ``torch.load(..., weights_only=True)``)."""
        from safetensors.torch import save_model

        save_model(self.model, str(Path(directory) / "model.safetensors"))
        torch.save({n: t.detach().cpu() for n, t in self.model.state_dict().items()}, Path(directory) / "model.pt")
        return ["model.safetensors", "model.pt"]


def _train(model: torch.nn.Module, modes: dict[torch.nn.Module, bool]) -> None:
    """Put the model into training mode, by its own method, but for the modules whose mode is given."""
    model.train()
    for module, training in modes.items():
        module.training = training
