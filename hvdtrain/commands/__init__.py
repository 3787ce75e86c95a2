"""Command line: picks the sub-command and guards the exit. Its own ``--help`` imports the standard library only."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

COMMANDS = {
    "init": "write a project to start from: script, configuration, hostfile and Slurm script",
    "train": "train a model (the default: without arguments, the built-in recipe)",
    "evaluate": "print the metrics of a run's model on any data",
    "predict": "write the outputs of a run's model for each sample to a file",
    "export": "write a run's model for serving: ONNX, SavedModel, Keras or PyTorch",
    "plan": "print each rank's share of the batch; --memory: memory plan; --inventory: time and cost elsewhere",
    "launch": "start a job on a list of hosts, with the command line of the installed MPI",
    "report": "write an HTML report of a run: result, cost, stragglers, failures, recommendations",
    "checkpoints": "list, verify or remove a run's checkpoints, or export the weights of one",
    "doctor": "list set-up problems, here or on a list of hosts, with the commands that fix them",
    "verify": "check that a model gets the same results on 1, 2, 3, ... ranks",
    "migrate": "convert a script of Horovod, tf.distribute, Keras, DDP or Accelerate: a diff, or code",
    "convert": "convert weights and optimizer state between a PyTorch model and its Keras twin",
    "build": "build, install and check Horovod for the frameworks and the MPI found here",
    "bench": "benchmark transports and compressors on this cluster",
}

USAGE = """usage: hvdtrain [command] [options]   (or python -m hvdtrain [command] [options])

Without a command: train the built-in recipe, a CNN on scikit-learn's digits.
Ranks come from the launcher: horovodrun -np 4 python -m hvdtrain, or mpirun -np 4 python -m hvdtrain.

commands:
{commands}

python -m hvdtrain COMMAND --help prints a command's options.
"""


def script() -> int:
    """Run the command line of the console script ``hvdtrain``; return the exit status."""
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run a command line; return the exit status (2: a mistake the user can fix)."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {name:11} {text}" for name, text in COMMANDS.items())))
        return 0
    if argv and argv[0] == "--version":
        from hvdtrain.core import __version__

        print(__version__)
        return 0
    from hvdtrain.cluster.exit import run_guarded
    from hvdtrain.core.launcher import launch_facts

    return run_guarded(lambda: _dispatch(argv), launch_facts(os.environ))


def _dispatch(argv: list[str]) -> int:
    from hvdtrain.core.errors import UserError, nearest

    name, rest = ("train", argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if name == "chaos":  # of an earlier release
        return _home("bench").forward("chaos", "chaos", rest)
    if name not in COMMANDS:
        raise UserError(f"there is no command {name!r}", nearest(name, COMMANDS), "see python -m hvdtrain --help")
    from hvdtrain.cluster import quiet

    quiet.watch_import()
    return _home(name).main(rest)


def _home(name: str) -> Any:
    """Return the module of a command: the file of its name, or ``cli`` of the folder of its name."""
    folder = "build_horovod" if name == "build" else name
    module = importlib.import_module(f"hvdtrain.commands.{folder}")
    return importlib.import_module(f"{module.__name__}.cli") if hasattr(module, "__path__") else module
