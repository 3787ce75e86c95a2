"""The contenders of `benchmarks step` and `benchmarks mixed`: hvdtrain in its variants and its peers, by name.

Owns the registry and what a contender's file gets and gives. Each file of this folder has a ``prepare(setup, ...)``
that builds a whole training job the way that library's own documentation shows it. The peers measured here are the one
place beside the backends where Horovod and the frameworks are imported; everything is imported inside functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.workloads import Workload, part
from hvdtrain.core.errors import UserError, nearest

Batches = list[tuple[np.ndarray, ...]]

IDLE_S = 24 * 3600.0
"""Bound of a contender's own waits: a job that is suspended between two rounds must not run into it. The bench has
bounds of its own.
"""


@dataclass(frozen=True)
class Cut:
    """Partition of a model over a job's ranks.

    ``names``: the blocks that the second and further chunks begin with, and ``places``: the rank at each place of the
    pipeline; empty where the contender is to find them.
    """

    order: str = "1f1b"
    micro_batches: int = 0
    chunks: int = 1
    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setup:
    """Arguments of every contender: the same on all ranks but for the place of the rank and its ``batches``."""

    workload: Workload
    framework: str
    batch: int
    seed: int
    threads: int
    control: Any
    arrays: tuple[np.ndarray, ...]
    batches: Batches
    iface: str = ""
    powersgd_rank: int = 4
    exchange: tuple[str, ...] = ()
    scratch: str = ""
    rebalance: tuple[str, ...] = ()
    emulate_speed: tuple[float, ...] = ()
    cut: Cut = Cut()

    @property
    def whole_batches(self) -> Batches:
        """The batches of all ranks together, for a job whose ranks are one replica."""
        return part(self.arrays, self.batch * self.control.size, 0, 1)

    def begin(self) -> None:
        """Threads and seeds, before anything of the framework has started."""
        from hvdtrain import backends
        from hvdtrain.core import rng

        rng.seed(self.seed, 0)
        backend = backends.load(self.framework)
        backend.setup(self.threads, False)
        backend.seed(self.seed, 0)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to train.

    ``step(i)``: one whole training step on batch i of the rank. ``loss()``: of the last step, the mean over this
    rank's samples (``global_loss``: over all ranks' samples already). ``params()``: the trainable parameters as numpy
    arrays. ``sync()``: wait for the device. ``samples()``: of this rank in the last step, where they are not always
    the batch. ``whatif()``: what hvdtrain estimates of a step without each rank; collective. ``split``: each rank has a
    part of the model, so that ``params`` and ``loss`` of the ranks add up. ``pipeline``: how a model is cut over the
    ranks. ``spent()``: seconds of this rank so far by phase, and in ``step``, and what it sent, in bytes. ``marks()``:
    what it stamped in each step since it was last asked, in seconds. ``gradient_bytes``: of one step's gradients.
    ``run``: hvdtrain's own.
    """

    step: Callable[[int], Any]
    loss: Callable[[], float]
    params: Callable[[], list[np.ndarray]]
    wire: str
    sync: Callable[[], None] = lambda: None
    global_loss: bool = False
    notes: list[str] = field(default_factory=list)
    samples: Callable[[], int] | None = None
    whatif: Callable[[], dict[str, Any]] | None = None
    split: bool = False
    pipeline: dict[str, Any] | None = None
    spent: Callable[[], dict[str, float]] | None = None
    marks: Callable[[], dict[str, list[float]]] | None = None
    gradient_bytes: int = 0
    run: Any = None


@dataclass(frozen=True)
class Contender:
    """An entry of the registry.

    ``file``: in this folder; ``options``: keyword arguments of its ``prepare``. ``needs``: module that must be
    installed. ``alone``: runs as one process, whatever the number of ranks. ``peer``: not ours. ``env``: what its job
    has otherwise than the others in its environment. ``exchanges``: its ranks train one model, not each its own.
    """

    name: str
    file: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    alone: bool = False
    peer: bool = True
    env: dict[str, str] = field(default_factory=dict)
    exchanges: bool = True

    def prepare(self, setup: Setup) -> Prepared:
        """Build the job; collective over its ranks."""
        return importlib.import_module(f"{__name__}.{self.file}").prepare(setup, **self.options)

    @property
    def compression(self) -> str:
        """By what its gradients are compressed; "" where none are exchanged, and for auto, which may take any."""
        found = str(self.options.get("compression", self.options.get("hook", "none")))
        return "" if found == "auto" or self.options.get("wire") == "null" or not self.exchanges else found

    @property
    def exact(self) -> bool:
        """Return whether it sums gradients as they are, so that all such contenders take the same steps."""
        return self.compression == "none"

    @property
    def compiled(self) -> bool:
        """Return whether it is compiled, or tries to be: it is compared with peers that are."""
        return bool(self.options.get("compiled") or self.options.get("compile"))

    @property
    def cuts(self) -> bool:
        """Return whether its ranks are one replica, each with a part of it."""
        return bool(self.options.get("pipeline")) or self.file == "pipelining"

    def ranks(self, asked: int) -> int:
        """Return processes of its job where ``asked`` are asked for."""
        return 1 if self.alone else asked

    def lacks(self, framework: str) -> str:
        """Why it cannot run here, "" where it can. Looks for files, imports no framework."""
        if self.needs == "horovod":
            from hvdtrain.cluster.horovod import horovod_reason

            return horovod_reason(framework) or ""
        missing = bool(self.needs) and importlib.util.find_spec(self.needs) is None
        return f"{self.needs} is not installed; pip install 'hvdtrain[bench]'" if missing else ""


AS_IT_COMES = {"OMPI_MCA_mpi_yield_when_idle": "0"}
"""Open MPI's default. That waiting ranks yield where cores are short is hvdtrain's doing: bare Horovod has not got it,
"horovod-tuned" has."""

_PEERS: dict[str, list[Contender]] = {
    "torch": [
        Contender("ddp", "ddp"),
        Contender("ddp+fp16", "ddp", {"hook": "fp16"}),
        Contender("ddp+powersgd", "ddp", {"hook": "powersgd"}),
        Contender("ddp-compiled", "ddp", {"compiled": True}),
        Contender("accelerate", "accelerate", needs="accelerate"),
        Contender("fabric", "fabric", needs="lightning_fabric"),
        Contender("pipelining", "pipelining"),
        Contender("horovod", "horovod_torch", needs="horovod", env=AS_IT_COMES),
        Contender("horovod-tuned", "horovod_torch", needs="horovod"),
        Contender("hvdtrain.torch", "horovod_torch", {"module": "hvdtrain.torch"}, needs="horovod", peer=False),
        Contender("plain", "plain_torch", alone=True),
        Contender("plain-compiled", "plain_torch", {"compiled": True}, alone=True),
        Contender("plain-each", "plain_torch", peer=False, exchanges=False),
    ],
    "tensorflow": [
        Contender("horovod", "horovod_tensorflow", needs="horovod", env=AS_IT_COMES),
        Contender("horovod-tuned", "horovod_tensorflow", needs="horovod"),
        Contender("mwms", "mwms"),
        Contender("keras-fit", "keras_fit", needs="horovod", peer=False),
        Contender("keras-fit-unguarded", "keras_fit", {"check_every": 0}, needs="horovod", peer=False),
        Contender("keras-fit-guarding", "keras_fit", {"check_every": 1}, needs="horovod", peer=False),
        Contender("plain", "plain_tensorflow", alone=True),
        Contender("plain-compiled", "plain_tensorflow", {"compiled": True}, alone=True),
        Contender("plain-each", "plain_tensorflow", peer=False, exchanges=False),
    ],
}
_OURS = re.compile(r"hvdtrain(?:-(?P<wire>[a-z]+))?(?:\+(?P<compression>[a-z0-9]+))?(?:@(?P<balance>[a-z]+))?"
                   r"(?:/(?P<kind>whole|zero1|zero2|compiled|remat1|remat2|pipeline))?")


def peers(framework: str) -> list[str]:
    """Names of the peers of ``framework``, without our own that stand beside them, compiled ones, and ones that cut."""
    return [contender.name for contender in _PEERS[framework]
            if contender.peer and not contender.compiled and not contender.cuts]


def contender(name: str, framework: str) -> Contender:
    """Return contender ``name``: a peer, or ``hvdtrain[-WIRE][+COMPRESSION][@BALANCE][/KIND]``, KIND whole, zero1,
    zero2, compiled, remat1, remat2 or pipeline; `UserError` for any other."""
    ours = _OURS.fullmatch(name)
    if ours:
        wire, compression, balance = ours["wire"] or "auto", ours["compression"] or "none", ours["balance"] or "off"
        for what, value, choices in (("collectives", wire, _choices("collectives")),
                                     ("compression", compression, _choices("compression")),
                                     ("balance", balance, _choices("balance"))):
            if value not in choices:
                raise UserError(f"contender {name}: there are no {what} {value!r}", nearest(value, choices),
                                "correct --contenders")
        unlike = {} if balance == "off" else {"balance": balance}
        kind = ours["kind"] or ""
        if kind.startswith("remat"):
            unlike["remat"] = f"every:{kind[-1]}"
        elif kind == "pipeline":
            unlike["pipeline"] = True
        elif kind:
            unlike |= {"compile": "auto"} if kind == "compiled" else {"adam": kind}
        return Contender(name, "ours", {"wire": wire, "compression": compression, **unlike},
                         "horovod" if wire == "horovod" else "", peer=False)
    found = next((c for c in _PEERS[framework] if c.name == name), None)
    if found is None:
        known = ["hvdtrain", "hvdtrain-WIRE", "hvdtrain+COMPRESSION", "hvdtrain@BALANCE", "hvdtrain/zero1",
                 "hvdtrain/compiled", "hvdtrain/remat2", "hvdtrain/pipeline", *(c.name for c in _PEERS[framework])]
        raise UserError(f"there is no contender {name!r} for {framework}", nearest(name, known), "correct --contenders")
    return found


def _choices(key: str) -> tuple[str, ...]:
    """Return the values that the configuration allows for ``key``."""
    from hvdtrain.config import Config

    if key == "compression":
        from hvdtrain.comm.compressors import names

        return (*names(), "auto")
    return typing.get_args(typing.get_type_hints(Config)[key])
