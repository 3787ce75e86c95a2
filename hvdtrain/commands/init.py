"""``python -m hvdtrain init``: write a project to start from: model and data, configuration, hostfile and Slurm script.

Owns the text of these files. Reads nothing, and never overwrites a file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from hvdtrain.backends import installed
from hvdtrain.core.errors import UserError
from hvdtrain.core.terminal import say

SCRIPT = '''\
"""Model and data of this project. Run it in this folder, on one rank or on several:

    python script.py
    mpirun -np 2 python script.py --epochs 5
"""

import sys

import numpy as np
{imports}


def build(width=64):
    """Return the model; its arguments are `model_args` of config.yaml."""
{model}


def load(samples=2000):
    """Return ((x, y), (x_test, y_test)). Replace these made-up points of 10 classes by {data}."""
    random = np.random.default_rng(0)
    centers = 2 * random.standard_normal((10, 32))
    y = random.integers(0, 10, samples)
    x = (centers[y] + random.standard_normal((samples, 32))).astype("float32")
    test = samples // 5
    return (x[test:], y[test:]), (x[:test], y[:test])


if __name__ == "__main__":
    from hvdtrain.commands import main

    sys.exit(main(["train", "--config", "config.yaml", *sys.argv[1:]]))
'''

TORCH = {
    "imports": "import torch",
    "model": """\
    return torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))""",
    "data": "your arrays or torch Datasets"}

TENSORFLOW = {
    "imports": "import keras",
    "model": """\
    layers = keras.layers
    return keras.Sequential([keras.Input((32,)), layers.Dense(width, activation="relu"), layers.Dense(10)])""",
    "data": "your arrays, a PyDataset or a tf.data.Dataset"}

SCRIPTS = {"torch": TORCH, "tensorflow": TENSORFLOW}

CONFIG = """\
# python -m hvdtrain train --help explains every key. A key on the command line wins: python script.py --lr 0.01
model: script.py:build
model_args: {width: 64}
data: script.py:load
epochs: 3
global_batch: 64          # samples of one step over all ranks
optimizer: Adam
lr: 0.002
checkpoint: {every: auto, keep: 3}
"""

HOSTFILE = """\
# One line for each host: its name and its number of ranks. Rank 0 is on the first host.
# python -m hvdtrain launch --hostfile hostfile -- train --config config.yaml
localhost slots=2
"""

SBATCH = """\
#!/usr/bin/env bash
#SBATCH --job-name=hvdtrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --requeue
#SBATCH --open-mode=append
# Edit the lines above, then: sbatch run.sbatch. GPUs: add #SBATCH --gpus-per-node=4. Options of train may follow.
# 180 s before the time limit the run saves and ends with status 75; the job is requeued and resumes in its directory.
set -uo pipefail

python=${PYTHON:-@PYTHON@}
task=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # the array's own id would requeue all its tasks
task=${task:-$SLURM_JOB_ID}
out=${OUT:-$PWD/runs/slurm-$task}           # on a file system that all hosts share

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
trap 'asked=1; [[ -z ${job:-} ]] || kill -USR2 "$job"' USR2 TERM
"$python" -m hvdtrain launch --restarts 3 -- train --config config.yaml --out "$out" --resume auto "$@" &
job=$!
[[ -z ${asked:-} ]] || kill -USR2 "$job"    # the signal came before the job's process id was known
while :; do                                 # a signal interrupts wait
    wait "$job" && status=0 || status=$?
    kill -0 "$job" 2>/dev/null || break
done
# After scancel the job is COMPLETING, and a requeue would bring it back.
[[ $status != 75 || $(squeue -h -j "$task" -o %T) == @(CANCELLED|COMPLETING) ]] || scontrol requeue "$task"
exit "$status"
"""


def main(argv: list[str]) -> int:
    """Write the files; `UserError` where one of them exists or cannot be written."""
    args = _parser().parse_args(argv)
    folder = Path(args.dir)
    framework = args.framework or (installed() or ["torch"])[0]
    files = {"script.py": SCRIPT.format(**SCRIPTS[framework]), "config.yaml": CONFIG, "hostfile": HOSTFILE,
             "run.sbatch": SBATCH.replace("@PYTHON@", shlex.quote(sys.executable))}
    there = [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise UserError(f"{folder} already holds {', '.join(there)}", "a folder without these files",
                        "name another DIR, or remove them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}", "a writable folder",
                        "name another DIR") from None
    say(f"wrote {', '.join(files)} to {folder} ({framework})")
    at = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    say(f"next: {at}mpirun -np 2 python script.py")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain init", allow_abbrev=False,
        description="Write a project to start from: script.py (model and data), config.yaml, a hostfile and run.sbatch "
        "for Slurm. No file is overwritten.")
    parser.add_argument("dir", nargs="?", default=".", metavar="DIR", help="the folder (default: the current one)")
    parser.add_argument("--framework", choices=tuple(SCRIPTS),
                        help="framework of script.py (default: the installed one; PyTorch if both are installed)")
    return parser
