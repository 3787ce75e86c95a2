"""``python -m hvdtrain launch``: start a job on several hosts, under the launcher found here.

This process becomes the launcher, or with ``--restarts`` its supervisor (`hvdtrain.commands.launch.supervisor`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots, LauncherProgram, LaunchSpec
from hvdtrain.cluster.launchers.mpich import LAST
from hvdtrain.cluster.launchers.prepare import Here, add_options, find, here, hosts_of, interpreter, prepare, wishes
from hvdtrain.cluster.launchers.spec import (
    AGENT_VARIABLES,
    BINDINGS,
    DEFAULT_SSH,
    laid_over,
    parse_ssh,
    place,
    valid_name,
)
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.liveness.causes import is_cause
from hvdtrain.commands import COMMANDS
from hvdtrain.commands.launch import kubernetes
from hvdtrain.commands.launch.job import job_of
from hvdtrain.commands.launch.restart_policy import HostCandidate
from hvdtrain.commands.launch.supervisor import Supervisor, SupervisorEnvironment, say
from hvdtrain.core.errors import UserError
from hvdtrain.reports.survivor import Writer

MOST_RESTARTS = 1_000_000


def main(argv: list[str]) -> int:
    """Become the launcher, or print its command line; returns only after a dry run or a supervised job."""
    args, program = parse(argv)
    if args.launcher == kubernetes.NAME:
        return kubernetes.main(args)
    kubernetes.refuse(args)
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
    if args.out and args.restarts is None and args.launcher != kubernetes.NAME:
        raise UserError("--out is given without --restarts", "both, or neither", "add --restarts N")
    if not words:
        raise UserError("there is no program" + ("" if at < len(argv) else ": the command line has no --"),
                        "-- and the program of each rank, such as: -- train --epochs 3", "add it at the end")
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
    environment = SupervisorEnvironment(launching.command, launching.candidates, launching.placed, say, start_s,
                                        causes.ends_at(limit_s), tool.flavour == "openmpi",
                                        machine.names)
    environment.page = (pages := Writer()).start
    say(f"files in {job.out}, by {tool.launcher}")
    try:
        return Supervisor(job, args.restarts, environment).run()
    finally:
        pages.end()


def rank_program(words: Sequence[str]) -> tuple[str, ...]:
    """Return the program after ``--`` as a rank runs it: our commands under this interpreter, others unchanged."""
    if words[0] == "launch":
        raise UserError("the program is launch itself", "the program of each rank, such as train", "name that after --")
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
    return f"hvdtrain launch: {ranks} on {where or 'the hosts of the allocation'}, by {spec.tool.launcher}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain launch", allow_abbrev=False, usage="%(prog)s [options] -- PROGRAM ...",
        description="Start PROGRAM on every rank: a command of hvdtrain (train, verify, bench, ...) or any program.",
        epilog="For example: python -m hvdtrain launch -H fast:4,old:2 -- train --epochs 3")
    add_options(parser, kubernetes.NAME)
    parser.add_argument("-np", "--np", type=int, default=0, help="number of ranks (default: all slots)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]",
                        help="also pass this variable; may be repeated")
    parser.add_argument("--bind", choices=BINDINGS, default="none", help="binding of a rank (default none)")
    parser.add_argument("--cores-per-rank", type=int, default=1,
                        help="with --bind core: cores of each rank (default 1)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots or cores")
    parser.add_argument("--restarts", type=int, default=None, metavar="N",
                        help="supervise the job and restart it after a failure, at most N times; 0: no "
                        "restart, but SIGTERM saves the run and ends it with status 75")
    parser.add_argument("--out", default="", metavar="FOLDER",
                        help="with --restarts, for programs other than train: the run's folder")
    parser.add_argument("--dry-run", action="store_true", help="print the command or the manifests, run nothing")
    kubernetes.add_options(parser)
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
                        "check the program; one argument of more than 128 KiB is too long") from None


ANSWER_S = 10.0
"""Longest wait for a host's answer."""

MOST_BYTES = 1 << 20
"""Of an answer; the rest is not read."""

UNREACHED = 255
"""ssh's own status where it did not get there."""


class LaunchCommands:
    """Command line of each attempt, from the options of ``launch``, and the hosts it may use."""

    def __init__(self, args: argparse.Namespace, machine: Here, tool: LauncherProgram) -> None:
        self.args, self.machine, self.tool = args, machine, tool
        self.hosts = hosts_of(args.hosts, args.hostfile) or machine.hosts
        if not self.hosts and not machine.in_slurm and args.np:
            self.hosts = (HostSlots("localhost", args.np),)
        self.said: set[str] = set()

    def spec(self, hosts: tuple[HostSlots, ...], program: tuple[str, ...], variables: Mapping[str, str]) -> LaunchSpec:
        """Return one launch on exactly ``hosts``; ``variables``: variables for the ranks. Prints each note once."""
        args = self.args
        asked = wishes(args, hosts, program, ranks=0 if hosts else args.np, env=tuple(args.env), bind=args.bind,
                       cores_per_rank=args.cores_per_rank, oversubscribe=args.oversubscribe)
        machine = dataclasses.replace(self.machine, env={**self.machine.env, **variables})
        spec, notes = prepare(asked, machine, self.tool)
        for note in notes:
            if note not in self.said:
                self.said.add(note)
                with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads any more
                    print(f"note: {note}", file=sys.stderr, flush=True)
        return spec

    def command(self, hosts: tuple[HostSlots, ...], program: tuple[str, ...],
                variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return (the launcher's words, its whole environment)."""
        words, env = LAUNCHERS[self.tool.launcher].command(self.spec(hosts, program, variables))
        return words, laid_over({**self.machine.env, **variables}, env)

    def placed(self, hosts: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
        """Return ``-np`` ranks on some hosts, fewer where their slots do not suffice; all slots without ``-np``."""
        slots = sum(host.slots for host in hosts)
        if not hosts or not self.args.np:
            return hosts
        return place(hosts, self.args.np if self.args.oversubscribe else min(self.args.np, slots),
                     self.args.oversubscribe)

    def candidates(self, where: Path | None) -> list[HostCandidate]:
        """Return the hosts of now: after a failed attempt host files are read again, and other hosts are asked.

        ``where``: that attempt's folder, which receives causes from other hosts; None before the first one.
        """
        if where is not None:
            with contextlib.suppress(UserError):  # somebody may be writing it just now
                self.hosts = hosts_of(self.args.hosts, self.args.hostfile) or self.hosts
        far = [host for host in self.hosts if host.name not in self.machine.names]
        if where is None or not far or self.tool.launcher == "srun":
            return [HostCandidate(host, here=host not in far) for host in self.hosts]
        answers = ask(far, self._ssh(), shlex.join(
            ["find", str(where), "-maxdepth", "1", "-name", "cause-*.json", "-exec", "cat", "{}", "+"]))
        for _, text in answers.values():
            _keep(where, text)
        return [HostCandidate(host, host not in far or answers[host.name][0] != UNREACHED, host not in far,
                          host not in far or answers[host.name][0] == 0) for host in self.hosts]

    def _ssh(self) -> tuple[str, ...]:
        if self.args.ssh is not None:
            return parse_ssh(self.args.ssh)
        for name in AGENT_VARIABLES.get(self.tool.launcher, ()):
            words = self.machine.env.get(name, "").split()
            if words and name.lower().endswith(("agent", "exec")):
                return tuple(words)
        found = self.machine.allocation
        return (found.agent,) if found is not None and found.agent else DEFAULT_SSH


def ask(hosts: Sequence[HostSlots], ssh: Sequence[str], command: str,
        bound_s: float = ANSWER_S) -> dict[str, tuple[int, str]]:
    """Return (status, answer) of a command on each host, all at once, within ``bound_s``; `UNREACHED` for no answer."""
    children = {}
    for host in hosts:
        with contextlib.suppress(OSError):
            children[host.name] = subprocess.Popen(
                [*ssh, host.name, command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True)
    ends_at = time.monotonic() + bound_s
    found = {host.name: (UNREACHED, "") for host in hosts}
    for name, child in children.items():
        try:
            text, _ = child.communicate(timeout=max(0.0, ends_at - time.monotonic()))
            found[name] = (child.returncode, text[:MOST_BYTES].decode(errors="replace"))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, 9)
            with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
                child.communicate(timeout=1.0)
    return found


def _keep(where: Path, text: str) -> None:
    for line in text.splitlines():
        with contextlib.suppress(OSError, ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and is_cause(row) and 0 <= row["rank"] < 1 << 20:
                path = where / f"cause-{row['rank']:04d}.json"
                if not path.exists():
                    path.write_text(line + "\n", encoding="utf-8")
