"""``python -m benchmarks``: picks a benchmark and guards the exit. Imports nothing else for ``--help``."""

from __future__ import annotations

import importlib
import os
import sys

BENCHES = {
    "eager": "one call of hvdtrain.tensorflow outside of graphs, against the same of Horovod; under mpirun",
    "step": "whole training steps, also against plain PyTorch, Keras and their other trainers (--peers)",
    "mixed": "ranks of different speed: scaling efficiency of hvdtrain and its peers",
    "input": "a folder of pictures read on several numbers of ranks, against torch's DataLoader and tf.data",
    "case": "a recipe on several numbers of ranks: time of an epoch, memory, speed-up, exchange, what ZeRO saves",
    "whatif": "a step without one of its ranks: as estimated in a run, and as measured without that rank",
    "forecast": "steps as the simulator predicts them, and as measured: hosts, transports, compressors, partitions",
    "pipeline": "a model cut over ranks, against PyTorch's own pipeline and against whole copies, under one quota",
    "limits": "runs that a time limit or a budget ends: how much of it each uses; starts a job for each",
    "finite": "CPU time that looking whether summed gradients are finite costs; under mpirun, or alone",
    "saves": "what checkpoints cost the training that they are taken of; under mpirun, or alone",
    "memory": "most memory that a rank holds while it trains, unsharded and under ZeRO; starts a job for each",
    "accuracy": "what a compressor does to a model's accuracy at the same number of steps",
    "chaos": "inject faults into a supervised training and check that nothing is lost",
}

USAGE = """usage: python -m benchmarks NAME [options]

Measures on the machine it runs on, in a checkout of hvdtrain. Most print a table and, with --jsonl FILE, append a
record per row with versions, hosts, wire and seed.

benchmarks:
{benches}

For example: python -m benchmarks step --workload tiny --np 2 --peers
python -m benchmarks NAME --help prints a benchmark's options. Transports and compressors: python -m hvdtrain bench.
"""


def main(argv: list[str]) -> int:
    """Run a command line; return the exit status (2: a mistake the user can fix)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(benches="\n".join(f"  {name:9} {text}" for name, text in BENCHES.items())))
        return 0
    from hvdtrain.cluster.exit import run_guarded
    from hvdtrain.core.launcher import launch_facts

    return run_guarded(lambda: run(argv), launch_facts(os.environ))


def run(argv: list[str]) -> int:
    """Call the benchmark's own main. `UserError` for a name that is none."""
    from hvdtrain.cluster import quiet
    from hvdtrain.core.errors import UserError, nearest

    name, *rest = argv
    if name not in BENCHES:
        raise UserError(f"there is no benchmark {name!r}", nearest(name, BENCHES), "see python -m benchmarks --help")
    quiet.watch_import()
    return importlib.import_module("benchmarks.chaos.cli" if name == "chaos" else f"benchmarks.{name}").main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
