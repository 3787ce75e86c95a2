"""Protocols of a model beyond its gradients: buffers, metrics, checkpointed state, transforms, memory of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.core.protocols.run import Head, Place, Shard
from hvdtrain.core.protocols.tensors import Optimizer
from hvdtrain.core.protocols.types import Batch


class Writable(NamedTuple):
    """A buffer that forward passes may write to. ``kind``: of its dtype, as numpy has it."""

    dtype: str
    kind: str
    shape: tuple[int, ...]

    @property
    def position(self) -> bool:
        """Return whether it is one whole number: where it is gathered, the position in a queue."""
        return self.kind in "iu" and all(n == 1 for n in self.shape)


class Buffers(Protocol):
    """Variables of ranks outside the gradient exchange: initial values, and what forward passes write to.

    Statistics are BatchNorm's; `hvdtrain.engine.written_state` decides about all others.
    """

    def share(self) -> None:
        """Give every rank rank 0's variables, optimizer state included; collective."""

    def sync(self) -> list[str]:
        """Average statistics by the ranks' samples since the last time; return the others that differed. Collective.

        Those get the value of the lowest rank that saw a sample.
        """

    def keep(self) -> None:
        """Note the values of now, from which `noticed` and `combine` tell what is written."""

    def discard(self) -> None:
        """Undo what the step did to them."""

    def writable(self) -> dict[str, Writable]:
        """Return what forward passes may write to, statistics aside, by name."""

    def statistics(self) -> list[str]:
        """Return the names of statistics."""

    def aliases(self) -> dict[str, str]:
        """Return names, of all ranks' blocks, by others that a model may declare them by (Keras' paths)."""

    def noticed(self) -> list[str]:
        """Return those of `writable`, not tracked yet, that this rank has written to since `keep`.

        Not those that have another shape by now, such as caches that have grown.
        """

    def track(self, names: Iterable[str]) -> None:
        """Have `keep` note these always; those of other ranks' blocks are ignored."""

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        """Reduce these over ranks (`hvdtrain.comm.reducer.written.combine`); collective.

        ``samples``: of this rank since `keep`; None: as `hvdtrain.core.protocols.Stage` has counted them.
        """


class Evaluator(Protocol):
    """Metrics with totals of each rank, most of which are sums."""

    def add(self, batch: Batch) -> None:
        """Add one batch to the running totals."""

    def totals(self) -> dict[str, Any]:
        """Return the additive float64[k] state of each metric this rank saw since the last call; resets them.

        A metric whose states are no sums has an object, with ``places``: the number of each batch's global batch.
        """

    def results(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return metrics by name, from totals that were summed over ranks, or lists of the ranks' objects."""

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the model's outputs for a batch, with or without targets, by name (`data.layout.named_outputs`)."""


class ModelState(Protocol):
    """Gives a checkpoint the state of model and optimizer, and takes it back."""

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Return (groups of named arrays: "model", "optimizer"; JSON-able rest), the same on every rank.

        The arrays are copies, in the memory that ``place`` gives for them, or new ones. Where it gives None for one,
        that may be a view of what is trained, good until the next step.
        """

    def state_bytes(self) -> int:
        """Return about how many bytes `state` has once the optimizer has made its part, which some do in step 1."""

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`; what does not fit raises `UserError` and changes nothing."""

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        """Load the group "model" of `state` alone; the optimizer stays as it is. Errors as of `load`."""

    def take(self, optimizer: Optimizer, spans: Sequence[tuple[int, int]]) -> None:
        """Keep the state of ``optimizer``, which is over ``spans`` of the tensors (`Params.sliced`), from now on.

        `state` and `load` then are of the group "model" alone, and of the JSON-able rest.
        """

    def slices(self, place: Place | None = None) -> Iterator[Shard]:
        """Yield what this rank owns of the group "optimizer" after `take`, by the names and shapes of an unsharded run.

        Over all ranks every element comes exactly once. What belongs to a whole tensor or to the optimizer (counts of
        steps) comes from the owner of the tensor's first element, or from rank 0. ``place`` as in `state`.
        """

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        """Return what this rank needs of a checkpoint's group "optimizer" after `take`: (name, begin, end).

        ``heads``: what the group holds, without values. Errors: `UserError` for state of other tensors than these.
        """

    def load_slices(self, values: Mapping[str, np.ndarray]) -> None:
        """Undo `slices`: ``values`` has the (end - begin,) elements of each entry of `wanted`, by name."""

    def rank_state(self) -> dict[str, np.ndarray]:
        """Return this rank's random generators."""

    def load_rank(self, own: dict[str, np.ndarray]) -> None:
        """Undo `rank_state`."""

    def final(self) -> AbstractContextManager[None]:
        """Return what has the weights in its body that a training ends with: such as averages, else those trained."""

    def export(self, directory: Path) -> list[str]:
        """Write the final model in safetensors and the framework's native format; return the file names. OSError."""

    def try_export(self) -> str:
        """Raise `UserError` for what `export` could not write; return what it will leave out and why, or "".

        Cheap: writes nothing and copies no weights.
        """


class ModelFacts(Protocol):
    """Compares what a run has read of its model with the model as callbacks leave it."""

    def renew(self) -> None:
        """Take the model as it is now for unchanged."""

    def changes(self) -> list[str]:
        """Return what callbacks changed of the model since the last call or `renew`, a sentence each; [] for nothing.

        Cheap: no array is read. In one order, so that ranks can compare.
        """

    def follow(self, changes: Sequence[str], note: Callable[[str], None]) -> int | None:
        """Go along with ``changes``; return the index of the first parameter that joins `Params`, None for none.

        ``note``: takes a remark for the summary. Errors: `UserError` for a change that the run cannot follow.
        """

    def set_frozen(self, epoch: int) -> list[str]:
        """Freeze and unfreeze what the key ``freeze`` names for the ``epoch`` that begins, counted from 0.

        Returns the names of those that are trained from now on, unless `changes` is to find them.
        """

    def late(self) -> str:
        """Return the name of a parameter that a step unfroze while it computed, or ""; cheap."""

    def take_in(self, names: Sequence[str]) -> int | None:
        """Add parameters to `Params`; return the index of the first one, None for none. `UserError` as `follow`."""

    def extend(self, first: int, spans: Sequence[tuple[int, int]] | None) -> None:
        """Update the parameters from index ``first`` on too, and keep their state in checkpoints.

        ``spans``: the elements [begin, end) of each that are this rank's, None: all of them.
        """

    def resume(self, rest: Mapping[str, Any]) -> list[list[str]]:
        """Bring the model to what the JSON-able part of a checkpoint tells of changes that its run had followed.

        Returns lists of names for `take_in` and `extend`, one after another.
        """


class Transform(Protocol):
    """Changes how a model computes, and takes that back: placement, precision, sync_batchnorm, a user's own.

    ``collective``: forward passes then wait for other ranks; such a transform is not in place while samples are tried.
    """

    collective: bool

    def install(self, model: Any, blocks: Sequence[Any]) -> None:
        """Change ``model`` in place, where that is not done; ``blocks``: its parts as the file names them, or none."""

    def remove(self, model: Any) -> None:
        """Give the model back as its user made it."""

    def describe(self) -> dict[str, str]:
        """Return what it does in words, for the summary."""

    def caveats(self) -> list[str]:
        """Return what of law 2 it bends, in words."""


class Compile(Transform, Protocol):
    """Computes a model in other ways than its user wrote: through a compiler, in another memory layout.

    ``options``: what may be tried, in this order; each is tried on top of those that were kept. ``chosen``: those in
    use, () for the model as its user made it. From `install` on nothing but `use` changes what is computed, so that a
    transform installed later (remat) may wrap the model's blocks as they are then.
    """

    options: Sequence[str]
    chosen: tuple[str, ...]

    def refusal(self, option: str) -> str:
        """Return why ``option`` is not even tried with this model on this machine, in words; "" where it is."""

    def use(self, options: Collection[str]) -> None:
        """Compute in these ways from now on; called between steps. Compiles nothing by itself."""

    def prepare(self, work: Callable[[], None], until: float) -> str:
        """Compile what `use` has named while ``work`` computes a micro-batch (`Stage.trial`), which it calls once.

        ``until``: `time.monotonic` after which no more is compiled. Returns what is left as it was and why, in words;
        "" where nothing is. Exchanges nothing. Errors: those of ``work``, or of a compiler where nothing of the option
        is of use then.
        """


@dataclass(frozen=True)
class BlockCost:
    """Savings and cost of activation checkpointing of one block, for a micro-batch that was tried.

    ``saved_bytes``: activations that the block keeps from forward to backward, less what recomputing has to keep (its
    inputs that nobody else keeps). ``forward_s``: seconds of its forward pass, which is made again.
    ``inner_bytes``: what comes back for the time of the block's own backward, since only one block is recomputed at a
    time: 0 where that is not known.
    """

    name: str
    saved_bytes: int
    forward_s: float
    inner_bytes: int = 0


class Remat(Transform, Protocol):
    """Recomputes chosen blocks of a model in backward (activation checkpointing), exactly.

    The gradients have the bits that they have without it (CPU, fp32), random masks are the same, buffers are updated
    once, and the random state after a step is the same. ``names``: the model's blocks in the order of its forward
    pass. ``chosen``: those that are recomputed.
    """

    names: Sequence[str]
    chosen: tuple[str, ...]

    def refusal(self, name: str) -> str:
        """Return why block ``name`` cannot be recomputed exactly, in words; "" where it can."""

    def choose(self, names: Collection[str]) -> None:
        """Recompute these blocks and no others from the next step on; called between steps, also before the first."""

    def costs(self, batch: Batch) -> list[BlockCost]:
        """Measure every block on ``batch`` (numpy arrays (B, ...)), in the order of ``names``; all is as before then.

        Exchanges nothing; blocks that `refusal` names are not among the results.
        """
