"""Command lines of a supervisor's attempts, the hosts of now, and which of them answer over ssh. Decides nothing."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots, LauncherProgram
from hvdtrain.cluster.launchers.prepare import Here, hosts_of, prepare, wishes
from hvdtrain.cluster.launchers.spec import AGENT_VARIABLES, DEFAULT_SSH, LaunchSpec, laid_over, parse_ssh, place
from hvdtrain.cluster.liveness.causes import is_cause
from hvdtrain.commands.launch.restart_policy import HostCandidate
from hvdtrain.core.errors import UserError

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
        self.hosts = hosts_of(args.hosts, args.hostfile)
        if not self.hosts and not machine.in_slurm and args.np:
            self.hosts = (HostSlots("localhost", args.np),)
        self.said: set[str] = set()

    def spec(self, hosts: tuple[HostSlots, ...], program: tuple[str, ...], told: Mapping[str, str]) -> LaunchSpec:
        """Return one launch on exactly ``hosts``; ``told``: variables for the ranks. Prints each note once."""
        args = self.args
        asked = wishes(args, hosts, program, ranks=0 if hosts else args.np, env=tuple(args.env), bind=args.bind,
                       cores_per_rank=args.cores_per_rank, oversubscribe=args.oversubscribe)
        spec, notes = prepare(asked, dataclasses.replace(self.machine, env={**self.machine.env, **told}), self.tool)
        for note in notes:
            if note not in self.said:
                self.said.add(note)
                with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads any more
                    print(f"note: {note}", file=sys.stderr, flush=True)
        return spec

    def command(self, hosts: tuple[HostSlots, ...], program: tuple[str, ...],
                told: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return (the launcher's words, its whole environment)."""
        words, env = LAUNCHERS[self.tool.launcher].command(self.spec(hosts, program, told))
        return words, laid_over({**self.machine.env, **told}, env)

    def placed(self, hosts: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
        """Return ``-np`` ranks on some hosts, fewer where their slots do not suffice; all slots without ``-np``."""
        slots = sum(host.slots for host in hosts)
        if not hosts or not self.args.np:
            return hosts
        return place(hosts, self.args.np if self.args.oversubscribe else min(self.args.np, slots),
                     self.args.oversubscribe)

    def candidates(self, where: Path | None) -> list[HostCandidate]:
        """Return the hosts of now: after a failed attempt host files are read again, and other hosts are asked.

        ``where``: that attempt's folder, which receives the causes that lie in a folder of that name elsewhere; None
        before the first one.
        """
        if where is not None:
            with contextlib.suppress(UserError):  # somebody may be writing it just now
                self.hosts = hosts_of(self.args.hosts, self.args.hostfile) or self.hosts
        far = [host for host in self.hosts if host.name not in self.machine.names]
        if where is None or not far or self.tool.launcher == "srun":
            return [HostCandidate(host, here=host not in far) for host in self.hosts]
        answers = ask(far, self._ssh(), _look(where))
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
        return DEFAULT_SSH


def _look(where: Path) -> str:
    """Return the command that shows the causes in an attempt's folder; its status is 0 where the folder exists."""
    return shlex.join(["find", str(where), "-maxdepth", "1", "-name", "cause-*.json", "-exec", "cat", "{}", "+"])


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
