"""``bench compressors``: time, bytes and error of each gradient compressor on the buckets of a model.

One process: time is that of one rank over a transport that costs nothing, errors are those of P ranks in lockstep.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain import backends
from hvdtrain.cluster.topology import affinity, compute_threads
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.compressors import create, names
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.comm.sweep import exchange, settle
from hvdtrain.commands.bench import cli, session
from hvdtrain.commands.bench.session import require
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core import terminal
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.protocols import (
    AllGather,
    AllToAll,
    Array,
    Collectives,
    Compressor,
    Control,
    Handle,
    Ops,
    ParamSpec,
    Request,
)
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.terminal import spread
from hvdtrain.core.units import format_number

FRAMEWORKS = ("torch", "tensorflow", "numpy")
WARM_UPS = 2
SAMPLES = 64
"""Samples that a made-up gradient is summed over, as of a batch of this size."""
LOCKSTEP_S = 3600.0
"""Longest wait of a rank for another, which computes on the same cores."""

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Subject:
    """Buckets of a model, and the gradient of every rank for each, float32 (P, N) on the host."""

    name: str
    params: int
    bucket_mb: float
    buckets: tuple[Bucket, ...]
    gradients: tuple[np.ndarray, ...]

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.gradients[0])


def mlp_shapes(in_features: int, hidden: Sequence[int], classes: int) -> Shapes:
    widths = [in_features, *hidden, classes]
    return [shape for n, m in zip(widths, widths[1:]) for shape in ((m, n), (m,))]


def resnet_shapes(channels: int = 3, width: int = 16, depth: int = 3, classes: int = 10) -> Shapes:
    """3x3 convolutions without biases, each with a norm: the stem, then three stages of blocks of two; logits."""
    found: list[tuple[int, ...]] = []
    before = channels
    for layer in range(1 + 3 * 2 * depth):
        after = width * 2 ** (max(0, layer - 1) // (2 * depth))
        found += [(after, before, 3, 3), (after,), (after,)]
        before = after
    return [*found, (classes, before), (classes,)]


def gpt_shapes(vocab: int, context: int, width: int, depth: int) -> Shapes:
    """Embeddings, blocks (norm, attention, norm, mlp), last norm and logits."""
    def linear(n: int, m: int) -> list[tuple[int, ...]]:
        return [(m, n), (m,)]

    norm: list[tuple[int, ...]] = [(width,), (width,)]
    block = [*norm, *linear(width, 3 * width), *linear(width, width), *norm, *linear(width, 4 * width),
             *linear(4 * width, width)]
    return [(vocab, width), (context, width), *block * depth, *norm, (vocab, width)]


WORKLOADS: dict[str, tuple[str, Shapes]] = {
    "mlp": ("1024-2048-2048-1536-10 perceptron, 9.46M parameters", mlp_shapes(1024, [2048, 2048, 1536], 10)),
    "resnet": ("small ResNet for 32x32x3 images, 0.27M parameters", resnet_shapes()),
    "gpt": ("decoder, 4 blocks of width 256, 64 tokens, 3.22M parameters", gpt_shapes(96, 64, 256, 4)),
}
"""Models of `benchmarks.workloads`: description, and parameter shapes as in `torch_models`, in their order."""


def subject(name: str, shapes: Shapes, bucket_mb: float, ranks: int, seed: int) -> Subject:
    """Return the buckets of parameters of these shapes; equal arguments give equal gradients."""
    params = [ParamSpec(f"p{i}", tuple(shape), "float32") for i, shape in enumerate(shapes)]
    buckets = plan_buckets(params, bucket_mb)
    rows = [np.stack([np.concatenate([gradient(params[i].shape, seed, i, rank).ravel() for i in b.params])
                      for rank in range(ranks)]) for b in buckets]
    return Subject(name, sum(p.n for p in params), bucket_mb, tuple(buckets), tuple(rows))


def gradient(shape: tuple[int, ...], seed: int, index: int, rank: int) -> np.ndarray:
    """Return a float32 gradient made as a dense layer's is: deltas times rectified activations of `SAMPLES`.

    Ranks share half of the deltas' variance, as batches of the same data do. Its rank is `SAMPLES` at most, its entries
    have heavier tails than a normal distribution: white noise would be no gradient.
    """
    common, own = np.random.default_rng([seed, index]), np.random.default_rng([seed, index, rank + 1])
    rows, columns = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    deltas = (common.standard_normal((SAMPLES, rows)) + own.standard_normal((SAMPLES, rows))) / SAMPLES
    if len(shape) == 1:
        return deltas.sum(0).astype(np.float32)
    inputs = np.maximum(own.standard_normal((SAMPLES, columns)), 0)
    return (deltas.T.astype(np.float32) @ inputs.astype(np.float32)).reshape(shape)


def measure(name: str, config: Config, subject: Subject, ops: Ops, graph: Callable[..., Any] | None, repeats: int,
            steps: int) -> dict[str, Any]:
    """Return the record of one compressor; ``graph``: makes graphs, or None. `UserError` if sums do not suffice."""
    compressor = create(name, config)
    if compressor.reductions:
        raise UserError(f"{name} needs from the transport {', '.join(sorted(compressor.reductions))}",
                        "a compressor that sums", "correct --compressors")
    parts = 1e3 * np.array(_seconds(compressor, ops, subject, graph, repeats))
    ms = spread(parts.sum(1))
    encode, decode = (None, None) if graph else (float(x) for x in np.median(parts, 0))
    size = subject.ranks
    sent, plain = (sum(c.wire_bytes(b, size) for b in subject.buckets) for c in (compressor, create("none", config)))
    first, mean = errors(compressor, ops, subject, steps)
    return {"compressor": name, "describe": compressor.describe(), "time_ms": ms.pop("median"),
            **{f"{k}_ms": v for k, v in ms.items()}, "encode_ms": encode, "decode_ms": decode,
            "bytes_sent": sent, "ratio": plain / sent if sent else None,
            "error_first": first, "error_mean": mean, "error_steps": steps, "repeats": repeats,
            "in_graph": graph is not None}


class _Timed(Transport):
    """Transport that separates a bucket's encoding, up to its last request, from its decoding."""

    encode_s = decode_s = _since = 0.0

    def issue(self, request: Request, name: str) -> Handle:
        sent = request.x_K if isinstance(request, AllGather) else (
            request.x_PK if isinstance(request, AllToAll) else request.flat_N)
        settle(self.ops, sent)
        self.encode_s += time.perf_counter() - self._since
        handle = super().issue(request, name)
        self._since = time.perf_counter()
        return handle

    def time(self, reducer: Reducer, flat_N: Array) -> None:
        """Exchange the one bucket of ``reducer``; sets ``encode_s`` and ``decode_s``."""
        self.encode_s, self._since = 0.0, time.perf_counter()
        total_N, = exchange(reducer, [flat_N])
        settle(self.ops, total_N)
        self.decode_s = time.perf_counter() - self._since


def _seconds(compressor: Compressor, ops: Ops, subject: Subject, graph: Callable[..., Any] | None,
             repeats: int) -> list[tuple[float, float]]:
    """Return (encoding, decoding) of all buckets on rank 0 in seconds, by repeat.

    In a graph the two cannot be separated: (the whole function, 0), with the time of null's allgather.
    """
    wire = NullCollectives(0, subject.ranks)
    each = [Reducer([bucket], compressor, wire, ops) for bucket in subject.buckets]
    wires = [_Timed(wire, ops) for _ in each]
    for one, timed in zip(each, wires):
        one.wires = [timed]
    reducer = Reducer(subject.buckets, compressor, wire, ops)
    whole = graph(lambda flats: exchange(reducer, flats)) if graph else None
    found = []
    for _ in range(WARM_UPS + repeats):
        flats = [ops.from_host(rows_PN[0].copy()) for rows_PN in subject.gradients]  # an exchange may write to them
        if whole is None:
            for one, timed, flat_N in zip(each, wires, flats):
                timed.time(one, flat_N)
            found.append((sum(w.encode_s for w in wires), sum(w.decode_s for w in wires)))
        else:
            begin = time.perf_counter()
            settle(ops, whole(flats)[-1])
            found.append((time.perf_counter() - begin, 0.0))
    return found[WARM_UPS:]


def errors(compressor: Compressor, ops: Ops, subject: Subject, steps: int) -> tuple[float, float]:
    """Return the relative error norms, over all buckets, of the first sum and of the mean sum of ``steps`` equal
    gradients.

    The second shows error feedback: what one step leaves out, a later one sends.
    """
    exact = [rows_PN.sum(0, dtype=np.float64) for rows_PN in subject.gradients]

    def apart(sums: Sequence[np.ndarray], times: int) -> float:
        return sum(float(np.square(sum_N / times - exact_N).sum()) for sum_N, exact_N in zip(sums, exact))

    def train(control: Control, wire: Collectives) -> tuple[float, float]:
        reducer, first = Reducer(subject.buckets, compressor, wire, ops), 0.0
        totals = [np.zeros(b.n) for b in subject.buckets] if control.rank == 0 else []
        for step in range(steps):
            reducer.begin()
            sums = exchange(reducer, [ops.from_host(rows_PN[control.rank].copy()) for rows_PN in subject.gradients])
            for total_N, sum_N in zip(totals, sums):
                total_N += ops.to_host(sum_N)
            first = apart(totals, 1) if step == 0 else first
        return first, apart(totals, steps)

    first, mean = LockstepWorld(subject.ranks).run(train, LOCKSTEP_S)[0]
    norm = sum(float(np.square(exact_N).sum()) for exact_N in exact)
    return math.sqrt(first / norm), math.sqrt(mean / norm)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 0."""
    args = parse(argv)
    if launch_facts(os.environ).size > 1:
        raise UserError(f"bench compressors was started on {launch_facts(os.environ).size} ranks",
                        "one process, which simulates all ranks", "leave the launcher out and set --ranks")
    ops, graph, threads = _start(args)
    session.check(args.jsonl)
    environment = session.environment("", 1, "", args.seed, threads, args.framework)
    config = _config(args)
    for model, shapes in [("shapes", args.shapes)] if args.shapes else [(w, WORKLOADS[w][1]) for w in args.workload]:
        what = subject(model, shapes, args.bucket_mb, args.ranks, args.seed)
        facts = {"workload": what.name, "params": what.params, "buckets": len(what.buckets),
                 "bucket_mb": what.bucket_mb, "simulated_ranks": what.ranks}
        rows = []
        for name in args.compressors:
            rows.append(measure(name, config, what, ops, graph, args.repeats, args.steps))
            if args.jsonl:
                session.append(args.jsonl, {"bench": "compressors", **environment, **facts, **rows[-1]})
        headers = ("compressor", "ms a step", "encode", "decode", "bytes sent", "fp32 / sent", "error, 1 sum",
                   f"mean of {args.steps}")
        terminal.show(_title(what, args.framework, threads, graph is not None), headers, [cells(r) for r in rows],
                   args.markdown)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; `UserError` for a bad one."""
    usual = ExchangeConfig()
    summing = [name for name in names() if not create(name, Config()).reductions]
    parser = cli.Parser("hvdtrain bench compressors",
                            "Time to encode and decode, bytes sent and error of each gradient "
                            "compressor. One process simulates the ranks of --ranks. Encoding "
                            "is the work up to the compressor's last request to the transport, decoding the work after "
                            "the last answer. ms a step is their sum, the only time that TensorFlow's graph shows.")
    parser.add_argument("--framework", type=cli.one_of("--framework", FRAMEWORKS), default="torch",
                        metavar="|".join(FRAMEWORKS), help="framework of the compressed arrays; tensorflow: in a graph")
    parser.add_argument("--compressors", type=cli.some_of("--compressors", summing), default=",".join(summing),
                        metavar="A,B", help="which")
    parser.add_argument("--workload", type=cli.some_of("--workload", WORKLOADS), metavar="A,B",
                        default=",".join(WORKLOADS),
                        help="whose parameters: " + "; ".join(f"{w}: {text}" for w, (text, _) in WORKLOADS.items()))
    parser.add_argument("--shapes", type=cli.shapes("--shapes"), default=None, metavar="2048x512,2048",
                        help="parameters of these shapes instead")
    parser.add_argument("--ranks", type=cli.whole("--ranks", 2, 16), default=2, metavar="P",
                        help="number of simulated ranks")
    parser.add_argument("--steps", type=cli.whole("--steps", 1, 10000), default=10, metavar="N",
                        help="steps with the same gradient, for the error of their mean")
    parser.add_argument("--bucket_mb", type=cli.number("--bucket_mb", 0, 2**20), default=usual.unmeasured_mb,
                        metavar="MIB", help="size of a bucket")
    parser.add_argument("--powersgd_rank", type=cli.whole("--powersgd_rank", 1), metavar="R",
                        default=usual.powersgd_rank, help="exchange.powersgd_rank")
    parser.add_argument("--topk_ratio", type=cli.number("--topk_ratio", 0, 1), default=usual.topk_ratio,
                        metavar="X", help="exchange.topk_ratio")
    parser.add_argument("--seed", type=cli.whole("--seed", 0, 2**32 - 1), default=0, metavar="N",
                        help="of the gradients")
    parser.add_argument("--threads", type=cli.whole("--threads", 0, 4096), default=0, metavar="N",
                        help="compute threads; 0: one for each core")
    parser.common(repeats=10)
    return parser.parse(argv)


def _start(args: argparse.Namespace) -> tuple[Ops, Callable[..., Any] | None, int]:
    """(ops, what makes a graph or None, threads)."""
    require(args.framework)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    backend = backends.load(args.framework)
    threads = compute_threads(len(affinity()), os.cpu_count() or 1, 1, args.threads)
    backend.setup(threads, False)
    ops = backend.Ops()
    return ops, getattr(ops, "compiled", None), threads


def _config(args: argparse.Namespace) -> Config:
    exchange = ExchangeConfig(bucket_mb=args.bucket_mb, powersgd_rank=args.powersgd_rank, topk_ratio=args.topk_ratio)
    return Config(exchange=exchange).check()


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a record's row."""
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.1f}x"
    times = [format_number(row[key]) for key in ("time_ms", "encode_ms", "decode_ms")]
    return [row["describe"], *times, str(row["bytes_sent"]), ratio, f"{row['error_first']:.2e}",
            f"{row['error_mean']:.2e}"]


def _title(what: Subject, framework: str, threads: int, in_graph: bool) -> str:
    n = len(what.buckets)
    return (f"{what.name}: {what.params:,} parameters in {n} bucket{'s' if n > 1 else ''} of {what.bucket_mb:g} MiB; "
            f"{framework}{' in a graph' if in_graph else ''}, {threads} thread{'s' if threads > 1 else ''}, "
            f"{what.ranks} ranks")
