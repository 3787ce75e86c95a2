"""``python -m hvdtrain bench``: pick a benchmark. All others are in benchmarks/ of a checkout (``python -m
benchmarks``).
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.launcher import launch_facts

BENCHES = {
    "wire": "time and bandwidth of each collective by size (columns of nccl-tests); under mpirun, or alone",
    "compressors": "time, bytes and error of the gradient compressors; one process, no transport needed",
}
MOVED = ("eager", "step", "mixed", "input", "case", "whatif", "pipeline", "finite", "saves", "memory", "accuracy")

USAGE = """usage: python -m hvdtrain bench BENCH [options]

Measures on the machine it runs on. Each bench prints a table and, with --jsonl FILE, appends a record per row with
versions, hosts, wire and seed.

benches:
{benches}

For example: mpirun -np 2 python -m hvdtrain bench wire --framework torch --max 64M
python -m hvdtrain bench BENCH --help prints a bench's options.
In a checkout, python -m benchmarks runs the other benches: whole steps, accuracy, other trainers.
"""


def main(argv: list[str]) -> int:
    """Run a bench; return its exit status. `UserError` for a name that is none."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(benches="\n".join(f"  {name:12} {text}" for name, text in BENCHES.items())))
        return 0
    name, *rest = argv
    if name in MOVED:
        return forward(f"bench {name}", name, rest)
    if name not in BENCHES:
        raise UserError(f"there is no bench {name!r}", nearest(name, BENCHES), "see python -m hvdtrain bench --help")
    return importlib.import_module(f"hvdtrain.commands.bench.{name}").main(rest)


def forward(old: str, name: str, argv: list[str]) -> int:
    """Run ``python -m benchmarks NAME`` for the former command ``old``. `UserError` outside of a checkout."""
    if not (ROOT.parent / "benchmarks" / "__main__.py").is_file():
        raise UserError(f"python -m hvdtrain {old} has moved to benchmarks/, which is not installed",
                        f"python -m benchmarks {name}, in a checkout of hvdtrain", "clone it and run that there")
    if launch_facts(os.environ).rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("always", DeprecationWarning)
            warnings.warn(f"python -m hvdtrain {old} is now python -m benchmarks {name}", DeprecationWarning,
                          stacklevel=2)
    if str(ROOT.parent) not in sys.path:
        sys.path.append(str(ROOT.parent))
    return importlib.import_module("benchmarks.__main__").run([name, *argv])
