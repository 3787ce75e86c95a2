"""Shard every global batch over ranks for training loops written by hand, exactly also for unequal shares: `shard`.

Owns this rank's batches, the scale of its loss, and `check_step`, by which an optimizer refuses a loss without scale.
With a loss scaled by n_r * P / W, ``DistributedOptimizer(op=Average)``'s mean over P ranks is the mean over the global
batch of W samples:

    (1 / P) sum_r (n_r P / W) (1 / n_r) sum_i l_i  =  (1 / W) sum_i l_i
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hvdtrain.cluster import boot
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Control
from hvdtrain.data.ledger import Comparison
from hvdtrain.data.sources import Source
from hvdtrain.planning.batch.sampler import BatchShares, at_least, epoch_order, random_bits
from hvdtrain.torch.samples import readable, shuffles, source_of

_OURS = ("batch_size", "batch_sampler", "sampler", "generator")
_OPTIONS = ("pin_memory", "worker_init_fn", "prefetch_factor", "persistent_workers", "timeout",
            "multiprocessing_context")


def shard(dataset: Any, global_batch: int, *, shuffle: bool | None = None, seed: int = 0,
          collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int | None = None,
          drop_last: bool | None = None, shares: Sequence[float] | None = None, train: bool = True,
          rank: int | None = None, size: int | None = None, **options: Any) -> ShardedLoader:
    """Return this rank's share of every global batch of ``dataset``; collective, with equal arguments on all ranks.

    ``dataset``: all samples on every rank, as a map-style `Dataset`, a tensor or array, a tuple of them, or a
    `DataLoader`, whose dataset, ``collate_fn``, order, ``drop_last``, ``num_workers`` and ``pin_memory`` hold where no
    argument replaces them. ``global_batch``: samples of a step over all ranks. ``shuffle``: in each epoch, from (seed,
    epoch) alone; by default while training. ``drop_last``: no short last batch. ``shares``: weights of the ranks'
    shares, equal by default. ``options``: further arguments of `DataLoader`, as ``pin_memory=True``.

    ``train``: all ranks get as many batches, a rank without samples of one gets a single sample of it, and the loss
    goes through `ShardedLoader.scale`. With ``train=False`` the rank gets its own samples only: sums over them, added
    up over ranks, are exact. ``rank``, ``size``: those of the job by default. Errors: `UserError`.
    """
    given, dataset = (dataset, dataset.dataset) if isinstance(dataset, DataLoader) else (None, dataset)
    if given is not None and isinstance(dataset, (list, tuple)):
        dataset = Subset(cast(Dataset, dataset), range(len(dataset)))  # not columns, as for a tuple
    source = source_of(dataset)
    if given is not None:
        names = ("pin_memory", "worker_init_fn") if num_workers is not None else _OPTIONS
        options = {**{name: getattr(given, name) for name in names}, **options}
        shuffle = shuffles(given) if shuffle is None else shuffle
        drop_last = given.drop_last if drop_last is None else drop_last
        num_workers = given.num_workers if num_workers is None else num_workers
        if collate_fn is None and given.batch_sampler is not None:  # else it converts single samples
            collate_fn = given.collate_fn
    for name in _OURS:
        if name in options:
            raise UserError(f"shard with {name}", "the samples that hvd.shard picks",
                            f"leave {name} out: global_batch, shuffle and seed decide")
    control = boot.current_control()
    if rank is None or size is None:
        if control is None:
            raise UserError("shard() before hvd.init()", "rank and size", "call hvd.init() first")
        rank, size = control.rank, control.size
    elif control is not None and (control.rank, control.size) != (rank, size):
        control = None
    if shares is not None and len(shares) != size:
        raise UserError(f"{count(len(shares), 'share')} for {count(size, 'rank')}", "one for each rank",
                        "give shares as many numbers as there are ranks")
    plan = _Plan(source, global_batch, BatchShares.of([1.0] * size if shares is None else shares), rank,
                 train if shuffle is None else shuffle, seed, bool(drop_last), train)
    if control is not None:
        plan.check_alike(control)
    samples, collate_fn = readable(dataset, collate_fn)
    generator = torch.Generator()
    loader = DataLoader(samples, batch_sampler=plan, collate_fn=collate_fn, num_workers=num_workers or 0,
                        generator=generator, **options)
    return ShardedLoader(dataset, plan, loader, generator, control)


class _Plan:
    """The samples of this rank in each step of an epoch, as the batch sampler of a `DataLoader`."""

    def __init__(self, source: Source, global_batch: int, cut: BatchShares, rank: int, shuffle: bool, seed: int,
                 drop_last: bool, train: bool) -> None:
        at_least("global_batch", global_batch, 1)
        self.samples, self.global_batch, self._cut, self.rank = len(source), int(global_batch), cut, rank
        self.size, self.shuffle, self.seed = len(cut.shares_P), shuffle, seed
        self.drop_last, self.train = drop_last, train
        self._source, self.epoch, self.start = source, 0, 0
        cut.offsets(0)
        self.steps = self.samples // global_batch if drop_last else -(-self.samples // global_batch)
        if self.steps == 0:
            raise UserError(f"{count(self.samples, 'sample')} for a global batch of {global_batch}",
                            "at least one whole batch" if drop_last and self.samples else "at least one sample",
                            "lower global_batch, or leave drop_last out" if drop_last and self.samples else
                            "check the path and the filters of the data")

    def check_alike(self, control: Control) -> None:
        """Compare the arguments and some samples over all ranks; collective. Errors: `UserError`."""
        arguments = {"samples": self.samples, "global_batch": self.global_batch, "shares": self._cut.shares_P,
                     "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last, "train": self.train}
        rows = control.gather(arguments)
        for name in arguments:
            found = [row[name] for row in rows]
            if any(value != found[0] for value in found):
                raise UserError(f"ranks called hvd.shard with {name} {', '.join(map(str, found))}",
                                "the same data and arguments on every rank",
                                "give all samples to every rank: hvd.shard divides them")
        Comparison(self._source, self.samples, self.seed).begin(control, np.arange(0), ())

    def counts(self, step: int) -> tuple[int, int]:
        """Return this rank's samples and those of all ranks in ``step``."""
        total = min(self.global_batch, self.samples - step * self.global_batch)
        offsets = self._cut.offsets(total)
        return int(offsets[self.rank + 1] - offsets[self.rank]), total

    def own_steps(self, start: int = 0) -> list[int]:
        """Return the steps from ``start`` in which this rank gets a batch."""
        return [step for step in range(start, self.steps) if self.train or self.counts(step)[0]]

    def __len__(self) -> int:
        return len(self.own_steps())

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(epoch_order(self.samples, self.seed, self.epoch, self.shuffle), self.start)

    def _batches(self, order: np.ndarray, start: int) -> Iterator[list[int]]:
        for step in self.own_steps(start):
            whole = order[step * self.global_batch:][:self.global_batch]
            offsets = self._cut.offsets(len(whole))
            mine = whole[offsets[self.rank]:offsets[self.rank + 1]]
            yield (mine if len(mine) else whole[:1]).tolist()


@dataclass(eq=False)
class _Batch:
    """A batch that was read: ``own`` of its ``total`` samples are this rank's.

    ``scaled``: `scale` was called for it. ``used``: a backward pass went through that scale. ``due``: no optimizer has
    stepped since the batch was read.
    """

    own: int
    total: int
    scaled: bool = False
    used: bool = False
    due: bool = True


class ShardedLoader:
    """The batches of `shard`, one epoch per iteration; an iteration from which nothing was trained does not count."""

    def __init__(self, dataset: Any, plan: _Plan, loader: DataLoader, generator: torch.Generator,
                 control: Control | None) -> None:
        self.dataset = dataset
        self._plan, self._loader, self._generator, self._control = plan, loader, generator, control
        self._epoch, self._start, self._step = 0, 0, 0
        self._trained = self._skipped = False
        self._batch: _Batch | None = None
        _loaders.add(self)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan
        if self._trained:
            self.set_epoch(self._epoch + 1)
        self._step, self._skipped, self._batch = self._start, False, None
        plan.epoch, plan.start = self._epoch, self._start
        self._generator.manual_seed(int(random_bits(plan.rank + 1, plan.seed, -1 - plan.epoch)[plan.rank] >> 1))
        _open.append(self)
        try:
            for batch, step in zip(self._loader, plan.own_steps(self._start)):
                self._skipped = self._skipped or self._batch is not None and not self._batch.scaled
                self._batch, self._step = _Batch(*plan.counts(step)), step + 1
                yield batch
        finally:
            _open.remove(self)
        if self._trained:
            self.set_epoch(self._epoch + 1)

    @property
    def local_samples(self) -> int:
        """Return this rank's samples in the batch read last; 0 where the batch is a placeholder."""
        return self._read("local_samples").own

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the number of the next iteration, which otherwise counts by itself; the same on all ranks."""
        at_least("epoch", epoch, 0)
        if epoch != self._epoch or self._trained:  # else at the position of load_state_dict
            self._start = self._step = 0
        self._epoch, self._trained = int(epoch), False

    def skip(self) -> None:
        """Leave the batch read last out of training; on every rank alike."""
        batch = self._read("skip()")
        batch.scaled, batch.due = True, False

    def scale(self, loss: torch.Tensor, weight: Any = None, *, reduction: str = "mean") -> torch.Tensor:
        """Return ``loss`` of the batch read last, so scaled that its mean over ranks is that of the global batch.

        ``loss``: the mean over this rank's samples, or with ``reduction="sum"`` their sum. ``weight``: the sum of this
        rank's weights (tokens that count) where the loss is a mean weighted by them; the weights are then summed over
        ranks, which makes the call collective. A rank without samples or weight adds exactly 0, also of a loss that is
        not finite. Scale before the next batch is read. Errors: `UserError`.
        """
        batch = self._read("scale(loss)")
        if not self._plan.train:
            raise UserError("scale(loss) of hvd.shard(..., train=False)", "batches to train on",
                            "leave train=False out; metrics are sums over samples, added up by hvd.allreduce")
        self._check(loss, reduction)
        if not self._trained:
            self._check_position()
            self._trained = True
        own, total = (batch.own, batch.total) if weight is None else self._weights(weight, batch)
        mine = own if reduction == "mean" else float(batch.own > 0)
        batch.scaled = True
        if not loss.requires_grad:
            batch.used = True
        return _Scale.apply(loss, mine * self._plan.size / total if total else 0.0, batch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, for any number of ranks: the epoch, and its batches up to the one read last."""
        step = self._step if self._trained else self._start
        epoch, step = (self._epoch + 1, 0) if step == self._plan.steps else (self._epoch, step)
        return {"epoch": epoch, "step": step, **self._order()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at the position of `state_dict`; on every rank. Errors: `UserError`."""
        for name, value in self._order().items():
            if state[name] != value:
                raise UserError(f"the position is one of {name} {state[name]}", f"{name} {value}",
                                "continue with the data and arguments that the position was saved with")
        self.set_epoch(state["epoch"])
        self._start = self._step = state["step"]

    def check_step(self, average: bool, ranks: int) -> None:
        """Raise `UserError` unless an optimizer's step over ``ranks`` gives the mean of the batch; see `check_step`."""
        batch = self._batch
        if batch is None or not batch.due or not self._plan.train:
            return
        if not batch.used:
            raise UserError("optimizer.step() on a batch of hvd.shard without batches.scale in the backward pass",
                            "batches.scale(loss).backward(): ranks have different numbers of samples",
                            "scale the loss; call batches.skip() for a batch that is left out on every rank, also by "
                            "break; read batches that are not trained on with hvd.shard(..., train=False)")
        if not average or ranks != self._plan.size:
            got = f"over {count(ranks, 'rank')}" if average else "with an op other than hvd.Average"
            raise UserError(f"DistributedOptimizer {got} for batches of hvd.shard",
                            f"the mean over {count(self._plan.size, 'rank')}",
                            "leave op and process_set out, or divide the data by hand")
        batch.due = False

    def _read(self, what: str) -> _Batch:
        if self._batch is None:
            raise UserError(f"{what} before a batch was read", "the batch that the loop is at",
                            "call it inside of `for ... in batches`")
        return self._batch

    def _check(self, loss: Any, reduction: str) -> None:
        if reduction not in ("mean", "sum"):
            raise UserError(f"reduction {reduction!r}", "mean or sum", "reduce the loss, and name how")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a loss of shape {list(loss.shape)}, {loss.dtype}" if isinstance(loss, torch.Tensor) else \
                f"a loss that is a {type(loss).__qualname__}"
            raise UserError(got, "a tensor of one number, the mean over this rank's samples",
                            'call batches.scale(loss.mean()), or batches.scale(loss.sum(), reduction="sum")')
        if self._skipped:
            raise UserError("a batch of hvd.shard was read and not scaled before the next one was",
                            "each batch scaled before the next is read, as the scale is that of the batch read last",
                            "read no batch ahead; call batches.skip() for one that is left out on every rank")

    def _check_position(self) -> None:
        """Compare the positions of all ranks at the first batch that an iteration trains on; collective."""
        if self._control is None:
            return
        rows = self._control.gather((self._epoch, self._step))
        if len(set(rows)) > 1:
            raise UserError("ranks are at different batches of hvd.shard: (epoch, batch) "
                            f"{', '.join(map(str, rows))}", "the same position on every rank",
                            "call set_epoch, load_state_dict and skip on every rank")

    def _weights(self, weight: Any, batch: _Batch) -> tuple[float, float]:
        """Return this rank's weight, 0 without samples, and that of all ranks; collective."""
        own = float(weight) if batch.own else 0.0
        if self._plan.size == 1:
            total = own
        elif self._control is None:
            raise UserError("scale(loss, weight) with rank and size of hvd.shard that are not the job's",
                            "all ranks, over which weights are summed", "leave rank and size out")
        else:
            total = float(self._control.sum(np.array([own if own >= 0 else math.nan]))[0])
        if not 0 <= total < math.inf:
            raise UserError(f"a weight of {own} on this rank, {total} in all", "finite numbers of at least 0",
                            "give scale the sum of the weights of this rank's samples")
        return own, total

    def _order(self) -> dict[str, int]:
        """Return what the order and number of samples in a step depend on."""
        plan = self._plan
        return {"samples": plan.samples, "global_batch": plan.global_batch, "seed": plan.seed,
                "shuffle": int(plan.shuffle), "drop_last": int(plan.drop_last)}


_loaders: weakref.WeakSet[ShardedLoader] = weakref.WeakSet()
_open: list[ShardedLoader] = []
"""Whose batches are being read, those of an inner loop last."""


def at_placeholder() -> bool:
    """Return whether the batch that the loop is at holds no sample of this rank."""
    batch = _open[-1]._batch if _open else None
    return batch is not None and batch.own == 0


def check_step(average: bool, ranks: int) -> None:
    """Raise `UserError` where an optimizer is to step on a batch of `shard` that it would not take the mean of.

    Called once for each update, after its backward passes and before their gradients are waited for. ``average``: the
    optimizer takes the mean over ``ranks``.
    """
    for loader in list(_loaders):
        loader.check_step(average, ranks)


class _Scale(torch.autograd.Function):
    """Multiply by a factor; 0 times a loss that is not finite passes no gradient, where others would be NaN."""

    @staticmethod
    def forward(loss: torch.Tensor, factor: float, batch: _Batch) -> torch.Tensor:
        return loss * factor if factor else torch.zeros_like(loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float, _Batch], output: torch.Tensor) -> None:
        loss, ctx.factor, ctx.batch = inputs
        ctx.passes = bool(ctx.factor) or bool(loss.isfinite())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        ctx.batch.used = True
        if ctx.passes:
            return grad * ctx.factor, None, None
        _fill(ctx)
        return None, None, None


def _fill(root: Any) -> None:
    """Give the parameters below a node of the graph gradients of 0 where they have none; Horovod's hooks need one."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "_NormaliseBackward":  # which other ranks wait in
            raise UserError("a loss without samples or weight that is not finite, through SyncBatchNorm",
                            "a finite one, whose gradient passes through the layer",
                            'call batches.scale(loss.sum(), reduction="sum"), which is 0 without samples')
        nodes += [below for below, _ in node.next_functions]
        param = getattr(node, "variable", None)
        if isinstance(param, torch.Tensor) and param.grad is None:
            param.grad = torch.zeros_like(param)
