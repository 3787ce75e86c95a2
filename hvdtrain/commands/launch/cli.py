"""``python -m hvdtrain launch``: start a job on several hosts, under the launcher found here.

This process becomes the launcher, or with ``--restarts`` its supervisor (`hvdtrain.commands.launch.supervisor`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from hvdtrain.cluster.launchers import LAUNCHERS, LaunchSpec, LauncherProgram
from hvdtrain.cluster.launchers.mpich import LAST
from hvdtrain.cluster.launchers.prepare import Here, add_options, find, here, hosts_of, interpreter, prepare, wishes
from hvdtrain.cluster.launchers.spec import BINDINGS, laid_over, valid_name
from hvdtrain.commands.launch.hosts import LaunchCommands
from hvdtrain.commands.launch.job import job_of
from hvdtrain.commands.launch.supervisor import Supervisor, SupervisorEnvironment, say
from hvdtrain.core.errors import UserError
from hvdtrain.reports.survivor import Writer

MOST_RESTARTS = 1_000_000


def main(argv: list[str]) -> int:
    """Become the launcher, or print its command line; returns only after a dry run or a supervised job."""
    args, program = parse(argv)
    hosts = hosts_of(args.hosts, args.hostfile)
    machine = here()
    tool, notes = find(args.launcher, machine, hosts, may_lack=args.dry_run)
    if args.restarts is not None and not args.dry_run:
        return supervised(args, program, machine, tool, notes)
    asked = wishes(args, hosts, program, ranks=args.np, env=tuple(args.env), bind=args.bind,
                   cores_per_rank=args.cores_per_rank, oversubscribe=args.oversubscribe)
    spec, more = prepare(asked, machine, tool)
    words, env = LAUNCHERS[tool.launcher].command(spec)
    for line in (*notes, *more):
        print(f"note: {line}", file=sys.stderr)
    if args.dry_run:
        print("\n".join(shell_lines(words, env)))
        return 0
    print(headline(spec), file=sys.stderr, flush=True)
    sys.stdout.flush()
    _become(words, laid_over(machine.env, env))
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return (options, the program that each rank runs). `UserError` where nothing stands after ``--``."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    args = _parser().parse_args(list(argv[:at]))
    words = args.words = list(argv[at + 1:])
    if args.restarts is not None and not 0 <= args.restarts <= MOST_RESTARTS:
        raise UserError(f"--restarts is {args.restarts}", f"a number from 0 to {MOST_RESTARTS}", "correct it")
    if args.out and args.restarts is None:
        raise UserError("--out is given without --restarts", "both, or neither", "add --restarts N")
    if not words:
        raise UserError("there is no program" + ("" if at < len(argv) else ": no -- is on the line"),
                        "-- and what each rank runs, such as: -- train --epochs 3", "add it at the end")
    return args, rank_program(words)


def supervised(args: argparse.Namespace, program: tuple[str, ...], machine: Here, tool: LauncherProgram,
               notes: Sequence[str]) -> int:
    """Stay outside of MPI and launch, again where it may help; return the exit status."""
    if machine.inside:
        raise UserError(f"this is a process of a job already, started by {machine.inside}", "one launch, outside of it",
                        "take the outer launcher away, or the inner one")
    for line in notes:
        print(f"note: {line}", file=sys.stderr)
    launching = LaunchCommands(args, machine, tool)
    hosts = launching.placed(launching.hosts)
    launching.spec(hosts, program, {})  # refuses what cannot be launched before anything is made
    job = job_of(args.words, program, args.out, hosts)
    if job is None:
        return 0
    limit_s = job.config.time_limit_s() if job.config is not None else 0.0
    near = not hosts or hosts[0].name in machine.names
    start_s = job.config.control_timeout_s if near and job.config is not None else 0.0
    if not near:
        say(f"rank 0 is on {hosts[0].name}: {job.out} must be the same folder there and here")
    around = SupervisorEnvironment(launching.command, launching.candidates, launching.placed, say, start_s,
                    time.time() + limit_s if limit_s else 0.0, tool.flavour == "openmpi", machine.names)
    around.page = (pages := Writer()).start
    say(f"files in {job.out}, by {tool.launcher}")
    try:
        return Supervisor(job, args.restarts, around).run()
    finally:
        pages.end()


def rank_program(words: Sequence[str]) -> tuple[str, ...]:
    """Return the program after ``--`` as a rank runs it: our commands under this interpreter, others unchanged."""
    from hvdtrain.commands import COMMANDS

    if words[0] == "launch":
        raise UserError("the program is launch itself", "what each rank runs, such as train", "name that after --")
    if words[0] in COMMANDS or words[0].startswith("-"):
        return (interpreter(), "-m", "hvdtrain", *words)
    return tuple(words)


def shell_lines(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the launch as lines for a shell: the variables, then the command.

    `LAST` goes on the command's line: a shell hands variables on in an order of its own, env(1) puts a new one last.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items()) if name != LAST]
    last = ["env", "-u", LAST, f"{LAST}={env[LAST]}"] if LAST in env else []
    return [*exports, shlex.join([*last, *words])]


def headline(spec: LaunchSpec) -> str:
    where = ", ".join(map(str, spec.hosts[:8])) + (", ..." if len(spec.hosts) > 8 else "")
    ranks = f"{spec.ranks or 'as many'} {'rank' if spec.ranks == 1 else 'ranks'}"
    return f"hvdtrain launch: {ranks} on {where or 'the allocation, as it says'}, by {spec.tool.launcher}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain launch", allow_abbrev=False, usage="%(prog)s [options] -- PROGRAM ...",
        description="Start PROGRAM on every rank: a command of hvdtrain (train, verify, bench, ...) or any program.",
        epilog="For example: python -m hvdtrain launch -H fast:4,old:2 -- train --epochs 3")
    add_options(parser)
    parser.add_argument("-np", "--np", type=int, default=0, help="number of ranks (default: all slots)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]",
                        help="pass this variable too; may be repeated")
    parser.add_argument("--bind", choices=BINDINGS, default="none", help="what a rank is bound to (default none)")
    parser.add_argument("--cores-per-rank", type=int, default=1,
                        help="with --bind core: cores of each rank (default 1)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots or cores")
    parser.add_argument("--restarts", type=int, default=None, metavar="N",
                        help="stay, and start the job again after a failure, N times at most; 0: only stay, so that "
                        "SIGTERM saves the run and ends it with status 75")
    parser.add_argument("--out", default="", metavar="FOLDER",
                        help="with --restarts, for programs other than train: the run's folder")
    parser.add_argument("--dry-run", action="store_true", help="print the command, run nothing")
    return parser


def _become(words: Sequence[str], env: Mapping[str, str]) -> None:
    # Python ignores these two, and what is ignored stays so in every rank.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # A rank that reads the terminal would stop a job in the background.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    # horovodrun hands every name to a shell; a name that is none (an exported shell function's, or worse) stays here.
    kept = {name: value for name, value in env.items() if valid_name(name)}
    try:
        os.execvpe(words[0], list(words), kept)
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}", "a launcher that runs",
                        "see what it is; a command line of more than 128 KiB in one word is too long") from None
