"""``python -m hvdtrain plan``: probe every rank's speed with this model and print who would compute what.

Takes the options of ``train``, and is started as the training would be, under the same launcher.
"""

from __future__ import annotations

import os
from dataclasses import replace

USAGE = """usage: python -m hvdtrain plan [options of train]

Probes how fast every rank of this job computes the model, and prints the part of the global batch that each would get
(balance: static). Trains nothing and writes no run. Start it as the training would be, for example:

  mpirun -np 4 python -m hvdtrain plan --model torch_models.resnet:build --global_batch 256

Measures anew; --rebalance.max_micro_batch 64,64,16,16 sets ceilings of memory by hand.
python -m hvdtrain train --help tells all options.
"""


def main(argv: list[str]) -> int:
    """Plan as ``argv`` says; return 0."""
    if any(a in ("-h", "--help") for a in argv):
        print(USAGE, end="")
        return 0
    from hvdtrain.cli.train import parse

    config = parse(argv)
    if config is None:
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from hvdtrain.assemble import assemble
    from hvdtrain.callbacks.balance import Balance
    from hvdtrain.callbacks.meter import Meter
    from hvdtrain.cluster import exit_calls

    options = replace(config.rebalance, probe_cache=False)
    with exit_calls.told():
        run = assemble(replace(config, balance="static", shares=[], resume="", rebalance=options))
        Balance(Meter(1)).plan(run)
    return 0
