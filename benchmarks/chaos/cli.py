"""``python -m benchmarks chaos``: break a supervised training again and again, and show that nothing was lost.

Owns the options, the undisturbed run that it is compared with, and the report. `benchmarks.chaos.plan` draws the faults
from a seed, `benchmarks.chaos.campaign` brings them about.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos import cuts, judge, look
from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.job import Job
from benchmarks.chaos.plan import Amounts, draw
from benchmarks.chaos.space import disk
from hvdtrain.cluster.launchers.prepare import hosts_of
from hvdtrain.commands import train, verify
from hvdtrain.core import comparison, terminal
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

STEPS_A_FAULT, LEAST_STEPS, MOST_STEPS = 30, 90, 600
"""The default length of a training. In longer ones rounding alone grows: 3,000 steps of the Keras perceptron at lr
0.002, in one process and its batch cut into 3 parts, are 2.7e-4 apart. Several shorter ones can each be judged."""

DEFAULTS = ("--optimizer.name", "SGD", "--lr", "0.002")
"""Used where no optimizer is named: over thousands of steps a larger rate magnifies rounding beyond all judgement."""

KEEP = 5
BOUNDS = "--timeout and --steps bound it"
HEARTBEAT_S = 5
DISK_ROOM = 16
"""Checkpoints that a small file system has room for, beside `DISK_BYTES` for logs."""
DISK_BYTES = 64 << 20

OWNED = {"out": "--out of chaos", "resume": "nothing: chaos resumes", "max_steps": "--steps of chaos",
         "epochs": "--steps of chaos", "shares": "--hold-ranks, or nothing: chaos draws them",
         "balance": "nothing: measured shares differ from run to run"}
"""Keys of the training that chaos sets, and what stands for them."""


def main(argv: list[str]) -> int:
    """Run the campaign; 0 only if nothing was lost, 1 otherwise."""
    args, words = read(argv)
    amounts = Amounts(args.kills, args.freezes, args.disk_full, args.flips)
    host, most = _hosts(args)
    if args.cuts:
        cuts.check(args.out)
    total = amounts.total + args.cuts
    steps = args.steps or min(max(LEAST_STEPS, STEPS_A_FAULT * total), MOST_STEPS)
    work = _work(args.out)
    options = [*words, "--max_steps", str(steps), "--epochs", "1000000", "--progress", "off",
               "--checkpoint.every_steps", str(args.every_steps), "--checkpoint.keep", str(KEEP),
               "--heartbeat_timeout_s", str(HEARTBEAT_S)]
    plan = draw(amounts, most, args.hold_ranks, args.seed)
    say(f"chaos: {count(total, 'fault')}, seed {args.seed}, {count(steps, 'step')}, "
        + (f"{count(most, 'rank')} at all times" if args.hold_ranks else f"1 to {count(most, 'rank')}")
        + f"; files in {work}")
    with orderly_signals():
        quiet = [*words, "--max_steps", str(steps), "--epochs", "1000000", "--progress", "off"]
        ranks = most if args.hold_ranks else 1
        reference = verify.completed("the undisturbed run", ranks, quiet, work / "undisturbed", args.timeout,
                                     BOUNDS)
        room = DISK_BYTES + DISK_ROOM * _checkpoint_bytes(reference)
        (work / "runs").mkdir()
        campaigns: list[Campaign] = []
        with disk(work / "runs", bool(args.disk_full), room) as full:
            if args.disk_full:
                say(f"chaos: a full disk is {full.words}")
            if plan:
                job = Job(work, host, [*(("--oversubscribe",) if most > 1 else ()), *args.launch_args], options)
                campaigns.append(Campaign(job, work / "runs", args.every_steps, args.hang, full, say))
                campaigns[-1].run(plan, most, (1,) * most)
            if args.cuts:
                say(f"chaos: {args.cuts} cuts of the network between two hosts made of this machine, one rank on each")
                campaigns.append(cuts.campaign(work / "cuts", args.launch_args, options, args.every_steps, args.hang,
                                               HEARTBEAT_S, say))
                campaigns[-1].run(cuts.draw_cuts(args.cuts, args.seed), len(cuts.HOSTS), (1,) * len(cuts.HOSTS))
            return _report(args, campaigns, total, reference, quiet, work)


def _report(args: argparse.Namespace, campaigns: Sequence[Campaign], planned: int, reference: Path,
            quiet: Sequence[str], work: Path) -> int:
    """Say what happened and what came of it; 1 if anything was lost."""
    record = look.completed(reference) or {}
    weights = verify.weights_of(reference)

    @functools.cache  # it trains again, in a directory of its own
    def limit() -> comparison.Tolerance:
        return comparison.tolerance(weights, in_parts, verify.parts_of(quiet))

    def in_parts(parts: int) -> comparison.Weights:
        cut = [*quiet, "--accumulate", str(parts), "--micro_batch", "0"]
        return verify.weights_of(verify.completed(f"the undisturbed run in {parts} parts", 1, cut, work
                                                  / f"undisturbed-{parts}-parts", args.timeout, BOUNDS))

    outcomes = [outcome for campaign in campaigns for outcome in campaign.outcomes]
    legs = [leg for campaign in campaigns for leg in campaign.legs]
    trouble = "; ".join(campaign.trouble for campaign in campaigns if campaign.trouble)
    found = judge.findings(outcomes, planned, trouble, legs, record)
    caveats = verify.caveats_of([reference, *(leg.out for leg in legs)])
    for campaign in campaigns:
        bits = args.hold_ranks
        if isinstance(campaign, cuts.CutCampaign):
            found += cuts.findings(campaign.cuts)
            bits = False  # a host that was lost twice is left out once: ranks are not held
        found += judge.same_weights(campaign.legs, weights, verify.weights_of, bits, limit, caveats)
    terminal.show("faults", judge.HEADERS, judge.table(outcomes))
    for finding in found:
        say(("      " if finding.good else "LOST  ") + finding.words)
    lost = [finding for finding in found if not finding.good]
    say(f"chaos: {len(lost)} of {len(found)} findings are bad; see {work}" if lost else "chaos: nothing was lost")
    return int(bool(lost))


def _checkpoint_bytes(out: Path) -> int:
    return sum(path.stat().st_size for path in (out / "checkpoints").rglob("*") if path.is_file())


def _hosts(args: argparse.Namespace) -> tuple[str, int]:
    """Return (this host's name in the list, most ranks). `UserError` for other hosts, whose ranks cannot be seen."""
    hosts = hosts_of(args.hosts, [])
    if len(hosts) > 1:
        raise UserError(f"-H names {len(hosts)} hosts", "one, this one: chaos finds ranks by their processes",
                        "use -H localhost:N")
    host, most = (hosts[0].name, hosts[0].slots) if hosts else ("localhost", 2)
    most = args.np or most
    if most < 1:
        raise UserError(f"-np is {most}", "1 or more ranks", "correct -np")
    return host, most


def _work(out: str) -> Path:
    """Return a new directory for everything; `UserError` where ``out`` is there and not empty."""
    if not out:
        return Path(tempfile.mkdtemp(prefix="hvdtrain-chaos-"))
    path = Path(os.path.abspath(out))
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UserError(f"{out} is not empty", "a new directory", "choose another --out")
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error}", "a writable folder", "choose another --out") from None
    return path


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, the training's words); `UserError` for what does not go together."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    args = _parser().parse_args(list(argv[:at]))
    words = list(argv[at + 1:])
    if not words or words[0] != "train":
        raise UserError("no training stands after --", "-- train and its options", "write: chaos --kills 20 -- train")
    for name in ("kills", "freezes", "disk_full", "flips", "cuts", "steps"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}", "0 or more", "correct it")
    if args.kills + args.freezes + args.disk_full + args.flips + args.cuts < 1:
        raise UserError("no fault is asked for", "one at least", "add --kills 20")
    if args.every_steps < 1 or not args.hang > 0 or not args.timeout > 0:
        raise UserError(f"--every-steps is {args.every_steps}, --hang {args.hang:g}, --timeout {args.timeout:g}",
                        "1 or more steps, and seconds above 0", "correct them")
    config = train.parse(words[1:])
    if config is None:
        raise UserError("the training is asked for help", "one that trains", "take that option away")
    words = ["train", *train.by_keys(words[1:])]
    given = {word[2:].partition("=")[0].rstrip("+") for word in words[1:] if word.startswith("--")}
    for name in sorted(given & set(OWNED)):
        raise UserError(f"the training sets --{name}, which is for chaos to set", OWNED[name], f"leave --{name} out")
    return args, [*(() if verify.names_optimizer(words, os.environ) else DEFAULTS), *words[1:]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks chaos", allow_abbrev=False, usage="%(prog)s [options] -- train ...",
        description="Train under launch --restarts, on ranks and shares that change, and break it again and again: "
                    "kill ranks (half of the kills in saves and while it starts), launcher or supervisor, freeze "
                    "ranks, fill the disk, change bits of checkpoints, cut the network. Then compare with a run that "
                    "nobody disturbed. Status 0 only if nothing was lost.")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs (default 0)")
    parser.add_argument("--freezes", type=int, default=0, help="ranks stopped for good by SIGSTOP")
    parser.add_argument("--disk-full", type=int, default=0, help="times that no checkpoint can be written for a while")
    parser.add_argument("--flips", type=int, default=0, help="bits changed in the newest checkpoint")
    parser.add_argument("--cuts", type=int, default=0,
                        help="cuts of the network between two hosts, in turn permanent and repaired in time, in a "
                             "training of their own; needs root, which makes the hosts of this machine")
    parser.add_argument("--seed", type=int, default=0, help="of the plan (default 0)")
    parser.add_argument("-H", "--hosts", action="append", default=[], help="this host and its ranks: localhost:3")
    parser.add_argument("-np", "--np", type=int, default=0, help="most ranks (default 2)")
    parser.add_argument("--hold-ranks", action="store_true",
                        help="never change ranks and shares; the final weights must then be equal to the bit")
    parser.add_argument("--steps", type=int, default=0,
                        help=f"steps of the training (default {STEPS_A_FAULT} a fault, from {LEAST_STEPS} to "
                             f"{MOST_STEPS}); where it is complete before the last fault, another one follows")
    parser.add_argument("--every-steps", type=int, default=3, help="steps between saves (default 3)")
    parser.add_argument("--hang", type=float, default=120.0, metavar="SECONDS",
                        help="without a sign of life for so long it hangs (default 120)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of the undisturbed run (default 1800)")
    parser.add_argument("--out", default="", help="a new directory for everything (default: a temporary one, kept)")
    parser.add_argument("--launch-args", type=str.split, default=[], metavar="WORDS", help="more options of launch")
    return parser
