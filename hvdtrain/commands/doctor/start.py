"""One rank per host under the real launcher, and the facts that rank 0 sends back.

Owns the doctor's children (the launcher; a rank's part in MPI), their bounds and the reading of their answer. What the
launcher's command line is, `hvdtrain.cluster.launchers` knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from hvdtrain.cluster.launchers.prepare import LOOPBACK
from hvdtrain.cluster.launchers.spec import HostSlots, is_address
from hvdtrain.commands.doctor import facts
from hvdtrain.commands.doctor.facts import Facts
from hvdtrain.commands.doctor.probes import whole_text
from hvdtrain.commands.doctor.problem import STOPS, Problem
from hvdtrain.core.processes import Child

ANSWER = "hvdtrain-doctor-facts "
"""Begins the one line of output that is rank 0's answer."""

STAGE = "hvdtrain-doctor-stage"
"""A line of output that says: it has started; the rest is work."""

TELLING = re.compile(r"hvdtrain:|ssh|denied|refused|resolve|route|timed out|host key|error|not found|no such|slots|root"
                     r"|not compatible|different", re.IGNORECASE)
"""Of a launcher's many lines, those that are likely to say what is wrong."""

LAST_LINES = 4
POLL_S = 0.1

Report = tuple[list[Facts], list[Problem]]


def ask(hosts: Sequence[HostSlots], words: Sequence[str], env: Mapping[str, str], timeout_s: float,
        more_s: float) -> Report:
    """Run the launcher's command line ``words``, which starts a rank on each of ``hosts``; their facts and problems.

    It has ``timeout_s`` to start the ranks and ``more_s`` from then. Where no answer came: this host's own facts, and
    what the launcher said.
    """
    code, output, errors = run(words, env, timeout_s, more_s)
    told = answer(output)
    if told is None:
        problem = failed(hosts, words, code, f"{errors}\n{output}", timeout_s)
        return [facts.collect(os.environ)], [problem]
    found, problems = told
    return with_slots(found, hosts, socket.gethostname()), problems


def alone(got: str, do: str) -> Report:
    """This host's facts, where the launcher could not even be found."""
    return [facts.collect(os.environ)], [Problem(STOPS, (socket.gethostname(),), got, do)]


def wrap(report: Report) -> str:
    """The line that `answer` reads."""
    hosts, problems = report
    return ANSWER + json.dumps([hosts, [[p.severity, list(p.hosts), p.got, p.do] for p in problems]])


def answer(output: str) -> Report | None:
    """Rank 0's report in a job's output; None where there is none that is whole. Pure."""
    for line in output.splitlines():
        _, mark, text = line.partition(ANSWER)  # a launcher may put a tag before it
        with contextlib.suppress(ValueError, TypeError):
            if mark:
                hosts, problems = json.loads(text)
                return hosts, [Problem(severity, tuple(names), got, do) for severity, names, got, do in problems]
    return None


def with_slots(found: Sequence[Facts], hosts: Sequence[HostSlots], here: str) -> list[Facts]:
    """The hosts' facts with the slots of the entries that are for them; ``here`` is this host's name. Pure.

    A host is found by its name: not every launcher keeps the order of the list. Entries that are no host's name (an
    address, an alias) go to the ranks of the hosts that no entry names, in their order.
    """
    slots, left = [0] * len(found), []
    for entry in hosts:
        at = next((i for i, host in enumerate(found) if _is_named(host, entry.name, here)), None)
        if at is None:
            left.append(entry)
        else:
            slots[at] += entry.slots
    ranks = sorted((rank, i) for i, host in enumerate(found) if not slots[i] for rank in host["ranks"])
    for (_, i), entry in zip(ranks, left):
        slots[i] += entry.slots
    return [host | {"slots": n or 1} for host, n in zip(found, slots)]


def _is_named(host: Facts, name: str, here: str) -> bool:
    """Whether ``name`` is a host's own name, with or without its domain, or one of its addresses."""
    own = str(host["host"])
    if name in LOOPBACK:
        return own == here
    rows = host["interfaces"] if isinstance(host["interfaces"], list) else []
    if is_address(name):
        return any(row["address"] == name for row in rows)
    full = "." in name and "." in own
    return name.lower() == own.lower() if full else name.lower().partition(".")[0] == own.lower().partition(".")[0]


def failed(hosts: Sequence[HostSlots], words: Sequence[str], code: int | None, said: str, timeout_s: float) -> Problem:
    """The problem of a launch without an answer, with the last lines that the launcher said. Pure."""
    how = f"did not answer within {timeout_s:g} s" if code is None else f"ended with exit status {code} and no answer"
    others = [host.name for host in hosts if host.name not in (*LOOPBACK, socket.gethostname())]
    do = (f"try each host by itself: ssh -o BatchMode=yes -o ConnectTimeout=10 {others[0]} true; then see what "
          "python -m hvdtrain doctor says on it" if others else "see what python -m hvdtrain doctor says without -H")
    return Problem(STOPS, tuple(host.name for host in hosts),
                   f"{os.path.basename(words[0])} {how}{last_words(said)}", do)


def last_words(said: str) -> str:
    """What to quote of a child's words: "; it said: ..." with the telling lines, else the last; "" for none. Pure."""
    lines = list(dict.fromkeys(line.strip() for line in said.splitlines() if re.search(r"\w", line)))
    telling = [line for line in lines if TELLING.search(line)]
    quoted = telling[:LAST_LINES] or lines[-LAST_LINES:]
    return "; it said: " + " / ".join(line[:200].rstrip(".") for line in quoted) if quoted else ""


def run(words: Sequence[str], env: Mapping[str, str], first_s: float, more_s: float) -> tuple[int | None, str, str]:
    """(exit status, output, errors) of a child; nothing of it is left behind.

    It has ``first_s`` until it prints `STAGE` and ``more_s`` from then; the status is None where that was not enough.
    Open files go to the child: hydra's ranks talk to it through one.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        with Child(words, env, stdout=out, stderr=err, close_fds=False) as child:
            code = _wait(child, out, first_s, more_s)
        return code, whole_text(out), whole_text(err)


def _wait(child: Child, out: IO[str], first_s: float, more_s: float) -> int | None:
    """The exit status, None where there is none in time."""
    ends_at, begun = time.monotonic() + first_s, False
    while time.monotonic() < ends_at:
        if child.ends_within(POLL_S):
            return child.process.returncode
        size = os.fstat(out.fileno()).st_size
        if not begun and size and STAGE.encode() in os.pread(out.fileno(), size, 0):
            ends_at, begun = time.monotonic() + more_s, True
    return None
