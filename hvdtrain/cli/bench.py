"""``python -m hvdtrain bench``: picks the bench and calls it. The work is in ``hvdtrain.bench``, one file per bench."""

from __future__ import annotations

import importlib

from hvdtrain.errors import UserError, nearest

BENCHES = {
    "wire": "time and bandwidth of each collective by size (columns of nccl-tests); under mpirun, or alone",
    "eager": "one call of hvdtrain.tensorflow outside of graphs, against the same of Horovod; under mpirun",
    "step": "whole training steps, also against plain PyTorch, Keras and their other trainers (--peers)",
    "mixed": "ranks of different speed: scaling efficiency of hvdtrain and its peers",
    "input": "a folder of pictures read on several numbers of ranks, against torch's DataLoader and tf.data",
    "case": "a recipe on several numbers of ranks: time of an epoch, memory, speed-up, exchange, what ZeRO saves",
    "whatif": "a step without one of its ranks: as estimated in a run, and as measured without that rank",
    "pipeline": "a model cut over ranks, against PyTorch's own pipeline and against whole copies, under one quota",
    "finite": "CPU time that looking whether summed gradients are finite costs; under mpirun, or alone",
    "saves": "what checkpoints cost the training that they are taken of; under mpirun, or alone",
    "memory": "most memory that a rank holds while it trains, unsharded and under ZeRO; starts a job for each",
    "compressors": "time, bytes and error of the gradient compressors; one process, no wire needed",
    "accuracy": "what a compressor does to a model's accuracy at the same number of steps",
}

USAGE = """usage: python -m hvdtrain bench BENCH [options]

Measures on the machine it runs on. Each bench prints a table and, with --jsonl FILE, appends a record per row with
versions, hosts, wire and seed.

benches:
{benches}

For example: mpirun -np 2 python -m hvdtrain bench wire --framework torch --max 64M
python -m hvdtrain bench BENCH --help tells a bench's options.
"""


def main(argv: list[str]) -> int:
    """Run a bench; return its exit status. `UserError` for a name that is none."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(benches="\n".join(f"  {name:12} {text}" for name, text in BENCHES.items())))
        return 0
    name, *rest = argv
    if name not in BENCHES:
        raise UserError(f"there is no bench {name!r}", nearest(name, BENCHES), "see python -m hvdtrain bench --help")
    return importlib.import_module(f"hvdtrain.bench.{name}").main(rest)
