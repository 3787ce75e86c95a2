"""One TensorFlow/Keras 3 training step behind `hvdtrain.protocols.Step`.

Owns the order of calls and what is kept from one to the next. The graphs are in `graph`, losses in `task`, metrics
in `metrics`, the optimizer in `optim`, names and files in `state`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import amp, placement, shared, state, sync_batchnorm
from hvdtrain.backends.tensorflow.chain import Chain, chain_of
from hvdtrain.backends.tensorflow.graph import Gradients, Update
from hvdtrain.backends.tensorflow.metrics import Evaluator
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.split import Split, measured
from hvdtrain.backends.tensorflow.task import ClassNumbers, loss_name, make_task
from hvdtrain.backends.tensorflow.trial import Trial
from hvdtrain.cluster.exit import agreed
from hvdtrain.config import Config
from hvdtrain.data.empty import StandIn
from hvdtrain.errors import UserError
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.keras import compiled
from hvdtrain.misfit import told
from hvdtrain.parallel import plan
from hvdtrain.precision.policy import FP32, Precision
from hvdtrain.precision.scaler import LossScale
from hvdtrain.protocols import Batch, Pair, ParamSpec


def create_step(spec: Any, config: Config, control: Any, steps_per_epoch: int, precision: Precision = FP32,
                sample: Callable[[int], Any] | None = None, data: Any = None) -> TensorFlowStep:
    """A step over ``spec.model`` on this rank's device or devices.

    A model that has no variables yet is built from ``sample(1)`` of the run's ``data``, which knows how nested inputs
    lie. With ``model_parallel`` it is collective: the step is made in host memory, every rank measures its blocks on
    ``sample(n)`` (n samples as numpy arrays; without it the model file's example), and all agree on one cut.
    """
    compiled.begin(spec.model, data)
    if config.model_parallel == 1:
        return TensorFlowStep(spec, config, control.rank, steps_per_epoch, precision, sample)
    samples = sample or spec.example

    def make() -> tuple[TensorFlowStep, Chain]:
        placement.split_devices(config.model_parallel)
        if samples is None:
            raise UserError("model_parallel without samples to measure blocks with", "data, or example(B) in the "
                            "model file", "give the model file an example(B)")
        with tf.device(placement.HOST):
            step = TensorFlowStep(spec, config, control.rank, steps_per_epoch, precision, sample)
        return step, chain_of(spec)

    step, chain = agreed(control, make, "model")
    optimizer = step._opt.optimizer

    def measure() -> Any:
        with told(spec.model, samples(2)):
            return measured(chain, optimizer, config, control, samples)

    found = agreed(control, measure, "split")
    step.split(Split(chain, plan.agree(found, config, control), optimizer))
    return step


class TensorFlowStep:
    """Implements `hvdtrain.protocols.Step`.

    Where the collectives are graph nodes, `forward_backward` of the last micro-batch returns only when the sums have
    arrived: the waiting is inside it, and `exchange` reports the seconds that the graph measured.
    """

    def __init__(self, spec: Any, config: Config, rank: int, steps_per_epoch: int, precision: Precision = FP32,
                 sample: Callable[[int], Any] | None = None) -> None:
        placement.require_tensorflow()
        self.model: keras.Model = spec.model
        compiled.build(spec, sample)
        if not self.model.trainable_variables:
            raise UserError("the model has no trainable variable", "at least one", "set trainable on a layer")
        amp.compute_in(self.model, precision.own)
        self._float32 = amp.remarks(self.model)
        self._rank, self.precision = rank, precision
        self.scale = LossScale(config.loss_scale, precision.scaled)
        self._words = {"loss": loss_name(spec, config)}
        self._task = make_task(spec, config)
        self._class_numbers = ClassNumbers(spec, config)
        self._metrics = Evaluator(spec, config, self._task)
        self._opt = Optimization(config, self.model, steps_per_epoch)
        self._tensors: list[tf.Tensor] | None = None
        self._started = False
        self.waited_s = self._waited_in_step_s = self._squares = 0.0
        sync_batchnorm.release(self.model)
        self._sync = sync_batchnorm.Across() if config.sync_batchnorm else None
        self._stand_in = StandIn()
        self._parts = config.accumulate > 1 or config.micro_batch > 0 or config.balance != "off"
        self._trial: Trial | None = None
        self._left = False
        self._split: Split | None = None
        self.table = ""
        self._n_seen = self._n_seen_before = 0
        self._undoable = config.nan_guard == "skip" or self.scale.on
        self._buffers = shared.Buffers(self.model)
        self.asynchronous = placement.on_gpu(self.model)
        placement.seed_model(state.seed_states(self.model), rank)

    # --- the exchange ------------------------------------------------------------------------------------------

    def params(self) -> list[ParamSpec]:
        """Trainable variables in the model's own order."""
        return [ParamSpec(name, tuple(v.shape), keras.backend.standardize_dtype(v.dtype),
                          self._split.place(v) if self._split else 0)
                for name, v in state.named(self.model.trainable_variables).items()]

    def made_of(self) -> list[str]:
        """One line for each variable of model and optimizer, and the schedule."""
        return shared.made_of(self.model, self._opt)

    def split(self, split: Split) -> None:
        """Take a model that was spread over devices; before `attach`. ``table``: the cut for people."""
        if self._sync and sync_batchnorm.norms(self.model):
            raise UserError("sync_batchnorm with model_parallel, whose parts of a micro-batch each have statistics",
                            "one of the two", "set sync_batchnorm: false, or model_parallel: 1")
        self._split, self.table = split, split.plan.table()
        self._buffers = shared.Buffers(self.model)
        self.asynchronous = placement.on_gpu(self.model)
        split.join()

    def attach(self, reducer: Reducer) -> None:
        """Prepare the graphs for this reducer; they are traced at the first batch."""
        self._reducer = reducer
        if self._sync:
            self._sync.take(self.model, reducer)
        self._gradients = Gradients(self.model, self._task, reducer, undoable=self._undoable,
                                    scaled=self._rank in self.precision.scaled, split=self._split)
        self._update = Update(self.model, self._opt.optimizer, reducer, self._split)

    def join(self) -> None:
        """Have the layers compute in this rank's type and BatchNorm take its moments over the ranks, once more."""
        if self._left:
            amp.compute_in(self.model, self.precision.own)
            if self._sync:
                self._sync.take(self.model, self._reducer)
            if self._split:
                self._split.join()
            self._left = False

    def leave(self) -> None:
        """Give the layers back their own types and moments."""
        amp.give_back(self.model)
        sync_batchnorm.release(self.model)
        if self._split:
            self._split.leave()
        self._left = True

    def plain_sgd(self) -> bool:
        """Whether the optimizer is SGD without momentum."""
        optimizer = self._opt.optimizer
        return type(optimizer) is keras.optimizers.SGD and not optimizer.momentum

    def share_initial(self) -> None:
        """Give every rank rank 0's weights and optimizer state; collective."""
        shared.share_initial(self.model, self._opt, self._reducer)

    def sync_buffers(self) -> None:
        """Replace BatchNorm statistics and their like by their mean over the samples of all ranks; collective."""
        shared.sync_buffers(self.model, self._reducer, self._n_seen)
        self._n_seen = self._n_seen_before = 0

    def zero(self) -> None:
        """Forget the gradients of the step before."""
        self._reducer.begin()
        self._gradients.begin(self.scale.of(self._rank))
        self._tensors, self._started, self.waited_s, self._waited_in_step_s = None, False, 0.0, 0.0
        self._n_seen_before = self._n_seen
        self._buffers.keep()

    def discard(self) -> None:
        """Undo what the step did to buffers and compressor state, where it may be left out; there will be no update."""
        self._gradients.discard()
        self._buffers.put_back()
        self._n_seen = self._n_seen_before

    def forward_backward(self, batch: Batch, scale: float, last: bool) -> Pair:
        """Add the gradient of ``loss_sum * scale``; the graph of the ``last`` micro-batch also exchanges."""
        samples = len(tf.nest.flatten(batch)[0])
        self._n_seen += samples
        if self._sync:
            self._sync.begin(self.scale.of(self._rank), samples > 0)
            if samples:
                self._stand_in.saw(batch)
            else:
                batch, scale = self._stand_in.instead(batch), 0.0
        with self._class_numbers.checked(tuple(batch)):
            waited_s = 0.0
            if last:
                loss_sum, weight, self._tensors, report = self._gradients.last(tuple(batch), scale)
                waited_s, self._squares = report.numpy().tolist()
            else:
                loss_sum, weight = self._gradients.add(tuple(batch), scale)
        self.waited_s = waited_s + (self._sync.waited_s() if self._sync else 0.0)
        self._waited_in_step_s += self.waited_s
        if last and not (self._gradients.in_graph or self._reducer.alone):
            self._start()
        return (loss_sum, weight) if samples else (0.0, 0.0)

    def spare(self, batch: Batch) -> None:
        """Keep a sample to compute on where a micro-batch has none (`hvdtrain.data.empty`)."""
        self._stand_in.saw(batch)

    def trial(self, batch: Batch) -> None:
        """Compute a batch's gradient for its time alone, in a graph of its own without an exchange."""
        self._once(batch)

    def _once(self, batch: Batch) -> list[tf.Tensor]:
        """This rank's own gradients of a batch, after which all is as it was."""
        if self._trial is None:
            self._trial = Trial(self.model, lambda parts: self._gradients.alone(parts))
        with self._class_numbers.checked(tuple(batch)), sync_batchnorm.local_statistics(self._sync):
            return self._trial(batch)

    def bytes_to_come(self) -> int:
        """Nothing: the optimizer's state is there."""
        return 0

    def device_s(self) -> None:
        """None: a call of a graph returns when its results are there."""

    def exchange(self) -> float:
        """Complete the sums (of zeros, if this rank had no sample); return the seconds waited."""
        if self._tensors is None:
            self._tensors, report = self._gradients.zeros()
            self._waited_in_step_s, self._squares = report.numpy().tolist()
        if self._gradients.in_graph or self._reducer.alone:
            return self._waited_in_step_s
        begin = time.perf_counter()
        if not self._started:
            self._start()
        self._tensors = self._reducer.finish()
        waited_s = time.perf_counter() - begin
        self._squares = self._reducer.squares(self._tensors)
        return waited_s

    def _start(self) -> None:
        """Put all buckets on a wire that is outside the graph."""
        for i, flat_N in enumerate(self._tensors or []):
            self._reducer.start(i, flat_N)
        self._started = True

    def squares(self) -> float:
        """Squares of this rank's part of the sums; they come with them."""
        return self._squares

    def skipped(self) -> bool:
        """False: the sums are looked at before their update, on a GPU too."""
        return False

    def culprit(self, batch: Batch) -> str:
        """The first variable that this batch gives a gradient which is not finite, or ""."""
        names = iter(state.named(self.model.trainable_variables))
        return next((n for n, g in zip(names, self._once(batch)) if not bool(tf.reduce_all(tf.math.is_finite(g)))), "")

    def apply(self, clip_norm: float, check: bool) -> tuple[bool, float]:
        """Clip by the global norm and update; not if the norm is not finite, which a loss scale makes it look for."""
        assert self._tensors is not None, "apply before exchange"
        return self._update(self._tensors, clip_norm, check or self.scale.on)

    # --- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> None:
        """Add one batch to the metrics' totals."""
        with self._class_numbers.checked(tuple(batch)):
            self._metrics.add(tf.nest.map_structure(tf.convert_to_tensor, tuple(batch)))

    def eval_totals(self) -> dict[str, np.ndarray]:
        """float64[k] state of each metric this rank saw; they start anew."""
        return self._metrics.take()

    def eval_results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Metrics from summed totals."""
        return self._metrics.results(totals)

    # --- schedule, state -----------------------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self._opt.rate()

    def end_epoch(self) -> None:
        """Nothing: Keras' schedules count updates."""

    def describe(self) -> dict[str, str]:
        """Loss, optimizer, schedule, device, in words."""
        device = {"device": "gpu" if self.asynchronous else "cpu", **(self._split.describe() if self._split else {})}
        compute = {**self.precision.describe(), **self._float32}
        return {**self._words, **self._opt.describe(), **device, **compute, **self.scale.describe()}

    def caveats(self) -> list[str]:
        """Layers whose result depends on how a batch is cut (law 2), or whose type is too narrow."""
        found = []
        layers = self.model._flatten_layers()
        if any(layer.trainable for layer in sync_batchnorm.norms(self.model)):
            if not self._sync:
                found.append("BatchNorm takes its statistics over each rank's own samples, without sync_batchnorm: "
                             "true")
            elif self._parts:
                found.append("BatchNorm takes its statistics over each micro-batch of all ranks")
        if state.seed_states(self.model):
            found.append("dropout draws differ with the number of ranks")
        if self._split:
            found += self._split.caveats(bool(state.seed_states(self.model)), bool(sync_batchnorm.norms(self.model)))
        if self.precision.own != "fp16" and any(layer.compute_dtype == "float16" for layer in layers):
            found.append("layers compute in float16 and the loss is not scaled: small gradients may vanish")
        return found + self.precision.caveats()

    def state(self) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Groups "model" and "optimizer" (with its count of updates); the optimizer's name and its base rate."""
        groups = {"model": state.arrays(self.model.weights), "optimizer": state.arrays(self._opt.optimizer.variables)}
        own = {"optimizer": type(self._opt.optimizer).__name__, "base_lr": self._opt.base_lr}
        return groups, {**own, **self.scale.state()}

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`; a base rate that is configured otherwise now takes effect."""
        own = type(self._opt.optimizer).__name__
        if rest.get("optimizer", own) != own:
            raise UserError(f"the checkpoint was made with {rest['optimizer']}", own,
                            "resume with the optimizer of that run")
        state.load("model", self.model.weights, groups["model"])
        state.load("optimizer", self._opt.optimizer.variables, groups["optimizer"])
        self._opt.resume(rest.get("base_lr"))
        self.scale.load(rest)
        self._n_seen = self._n_seen_before = 0

    def rank_state(self) -> dict[str, np.ndarray]:
        """Random generators and compressor state of this rank."""
        return {**state.random_arrays(self.model), **self._reducer.saved()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; say what of the compressor's state does not fit."""
        state.load_random(self.model, own)
        return self._reducer.restore(own)

    def export(self, directory: Any) -> list[str]:
        """Write model.safetensors and Keras' own file; return their names."""
        with amp.own_types(self.model):
            return state.export(self.model, self._opt.optimizer, directory)
