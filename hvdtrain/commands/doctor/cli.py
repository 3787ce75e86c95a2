"""``python -m hvdtrain doctor``: what would stop or slow a run here, or on the hosts of a list.

Owns the options and which of the three ways it goes: this host alone, the ranks of a launcher that started it, or one
rank per host under a launcher that it starts. The work is in ``hvdtrain.commands.doctor``.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace

from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots
from hvdtrain.cluster.launchers import prepare as launch_detect
from hvdtrain.cluster.launchers.prepare import Wishes, add_options, check, prepare, wishes
from hvdtrain.cluster.launchers.spec import laid_over
from hvdtrain.commands.doctor import facts, gather, start, table
from hvdtrain.commands.doctor.checks import diagnose
from hvdtrain.commands.doctor.problem import merge, stops
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import say

TIMEOUT_S = 60.0
"""How long a job may take to come together, beside the time for packages to load."""

MOST_S = 86400.0


def main(argv: list[str]) -> int:
    """Look, print and return 1 where something would stop a run, else 0. `UserError` for options that are wrong."""
    args = parser().parse_args(argv)
    if not 0 < args.timeout <= MOST_S:
        raise UserError(f"--timeout is {args.timeout:g}", "seconds above 0, at most a day", "correct --timeout")
    try:
        os.getcwd()
    except OSError:
        raise UserError("the current folder is no longer there, and nothing that is started in it works",
                        "a folder that exists", "cd into one") from None
    launched = launch_facts(os.environ)
    hosts = launch_detect.hosts_of(args.hosts, args.hostfile)
    program = (launch_detect.interpreter(), "-m", "hvdtrain", "doctor", "--facts", "--timeout", f"{args.timeout:g}")
    one_each = wishes(args, tuple(HostSlots(host.name, 1) for host in hosts), program)
    check(one_each)
    if hosts and launched.kind != "solo":
        raise UserError(f"-H under {launched.launcher}, which has placed the ranks already", "one of the two",
                        "leave -H and --hostfile out, or start doctor without a launcher")
    if args.part:
        report = gather.part(os.environ, launched, args.timeout)
        if report is not None:
            say(start.wrap(report))
        return 0
    if args.facts:
        say(start.STAGE)
    if launched.kind != "solo":
        return gather.under_launcher(os.environ, launched, args.timeout, lambda report: show(report, args, True))
    with orderly_signals():
        return show(_over(hosts, one_each, args) if hosts else ([facts.collect(os.environ)], []), args, False)


def show(report: start.Report, args: argparse.Namespace, launched: bool) -> int:
    """Print the report in the form that was asked for; the exit status."""
    hosts, problems = report
    if args.facts:
        say(start.wrap(report))
        return 0
    found = merge([*problems, *diagnose(hosts)])
    if args.json:
        say(json.dumps({"hosts": hosts, "problems": [asdict(p) for p in found]}))
    else:
        say(table.text(hosts, found, launched))
    return int(stops(found))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m hvdtrain doctor", allow_abbrev=False,
        description="Show what a run would find here (versions, builds, GPUs, network, memory) and what would stop or "
                    "slow it, each with the command that fixes it. With hosts: one rank on each under the real "
                    "launcher. Exit status 1 if something would stop a run.",
        epilog="For example: python -m hvdtrain doctor -H fast:4,old:2")
    add_options(made)
    made.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS",
                      help=f"how long the hosts may take to come together (default {TIMEOUT_S:g})")
    made.add_argument("--json", action="store_true", help="print facts and problems as one line of JSON")
    made.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)  # how doctor -H asks its ranks
    made.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # the process of a rank that starts MPI
    return made


def _over(hosts: tuple[HostSlots, ...], one_each: Wishes, args: argparse.Namespace) -> start.Report:
    """The report of one rank per host; of this host alone, with the reason, where they cannot be started.

    What a launcher refuses whoever the user is, is a wrong option, and no fault of this machine: `UserError`.
    """
    machine = launch_detect.here()
    try:
        tool, _ = launch_detect.find(args.launcher, machine, one_each.hosts)
    except UserError as error:
        return start.alone(error.got, error.do)
    spec, _ = prepare(one_each, machine, tool)
    command = LAUNCHERS[tool.launcher].command
    command(replace(spec, as_root=False))
    try:
        words, env = command(spec)
    except UserError as error:  # root, whom Open MPI refuses
        return start.alone(error.got, error.do)
    return start.ask(hosts, words, laid_over(machine.env, env), args.timeout,
                     args.timeout + gather.REPORT_S)
