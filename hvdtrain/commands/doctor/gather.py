"""Facts of all hosts of a job, gathered by its ranks, and the launch of one rank per host.

A rank is two processes: one that starts MPI and gathers, and its parent, which survives what happens there (MPI_Init
may end a process, or hang in it with Python's lock held) and reports. The first rank of each host looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.cluster import boot, clocks, horovod, links
from hvdtrain.cluster.control import flush_streams
from hvdtrain.cluster.launchers.prepare import LOOPBACK
from hvdtrain.cluster.launchers.spec import HostSlots, is_address
from hvdtrain.cluster.machine.usage import cpu_quota
from hvdtrain.cluster.topology import affinity
from hvdtrain.comm.transport_sweep import NO_MPI
from hvdtrain.commands.doctor import checks, cluster_facts, facts, library_checks, network_checks, peers, probes
from hvdtrain.commands.doctor.facts import FRAMEWORKS, PROBE_S, STOPS, UNKNOWN, Facts, Problem
from hvdtrain.config import ExchangeConfig
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.core.processes import CapturedChild
from hvdtrain.core.protocols import Control
from hvdtrain.core.terminal import say

GATHER_S = PROBE_S + 30.0
"""How long the job may take from its start to rank 0's answer."""

LINK_S = 10.0
"""Longest wait for one message between two hosts."""

REPORT_S = PROBE_S + GATHER_S
"""How much longer the processes in MPI wait than their parents: rank 0's has reported and ended the job by then."""

DONE = "hvdtrain-doctor-done"
"""A line of a part's output that says: this rank has given rank 0 all that it wants."""


def under_launcher(env: Mapping[str, str], launched: LaunchFacts, timeout_s: float,
                   show: Callable[[Report], int], cluster: bool = False) -> int:
    """Start this rank's part and ``show`` the report on rank 0; return 0, or end rank 0 with another status.

    The job has ``timeout_s`` to start and `GATHER_S` to gather; else rank 0 shows its own host and why. Rank 0 ends at
    once: an orderly end would start MPI in this process, to meet the other ranks, and MPI may be what does not work.
    Another rank whose part failed stays until that end: a launcher that sees a rank leave ends all of them, and rank 0,
    which may still be waiting for this one, would report nothing.
    """
    words = [sys.executable, "-m", "hvdtrain", "doctor", "--part", "--timeout", f"{timeout_s:g}",
             *(["--cluster"] if cluster else [])]
    code, output, errors = run(words, env, timeout_s, GATHER_S)
    if launched.rank > 0:
        if code != 0 and DONE not in output and not _of_unlike_mpis(env):
            _tell_of_host(launched, code, errors)
            time.sleep(timeout_s + REPORT_S)
        return 0
    report = answer(output)
    status = show(report or _alone(env, launched, _how(code, output, timeout_s) + last_words(errors)))
    if status or report is None:
        flush_streams()
        os._exit(status or 1)
    return 0


def part(env: Mapping[str, str], launched: LaunchFacts, timeout_s: float, cluster: bool = False) -> Report | None:
    """Return the report on rank 0, else None: this rank's part in MPI. ``cluster``: with its facts. Collective."""
    own_env = dict(env)  # before the start gives this rank its device
    control = _start(launched, timeout_s + REPORT_S)
    say(STAGE)
    hosts = _gather(control, own_env, cluster)
    say(DONE)
    return (hosts, []) if control.rank == 0 else None


def _start(launched: LaunchFacts, timeout_s: float) -> Control:
    """Return the control plane, its waits bounded by ``timeout_s``; without MPI, over a framework's Horovod."""
    if launched.kind != "gloo":
        return boot.start_control(launched, timeout_s)
    reasons = {name: horovod.horovod_reason(name) for name in FRAMEWORKS}
    usable = next((name for name, reason in reasons.items() if reason is None), None)
    if usable is None:
        raise horovod.HorovodUnavailable(next(filter(None, reasons.values())))
    return boot.start_control(launched, timeout_s, horovod.start_horovod(usable, ExchangeConfig(), launched))


def _gather(control: Control, env: Mapping[str, str], cluster: bool) -> list[Facts]:
    """Return the hosts' facts in order of their lowest rank; collective."""
    places = control.gather((control.node, facts.attempt(facts.boot_id), sorted(affinity()), cpu_quota()))
    keys = [place[:2] for place in places]
    rounds = clocks.measure(control)
    looks = keys.index(keys[control.rank]) == control.rank
    reached = _reached(control, keys)
    own = [facts.collect(env)] if looks else []
    if cluster:
        _add_cluster(control, env, own)
    rows: list[list[Facts]] = control.gather(own)
    found = []
    for rank, row in enumerate(rows):
        for host in row:
            ranks = [r for r, key in enumerate(keys) if key == keys[rank]]
            cores = {core for r in ranks for core in places[r][2]}  # mpirun may have bound each rank to its own
            host |= {"ranks": ranks, "slots": len(ranks), "cores": min(len(cores), places[rank][3])}
            tried = peers.worst([one for r, one in enumerate(reached) if r in ranks and one])
            if tried:
                host["peers"] = facts.neighbours(env, "ranks", tried)
            host["clock"] = clocks.offset(rounds, rank) if len(set(keys)) > 1 else None
            if isinstance(host["launcher"], dict):
                host["launcher"]["world"] = control.size
            found.append(host)
    _add_links(found)
    return found


def _add_cluster(control: Control, env: Mapping[str, str], own: list[Facts]) -> None:
    """Add the cluster's facts to ``own``, this host's where this rank looks, and try every host's ports; collective."""
    opened = facts.attempt(cluster_facts.OpenPort) if own else None
    port = opened if isinstance(opened, cluster_facts.OpenPort) else None
    pairs = [(row["address"], row["network"]) for host in own for row in network_checks.usable(host)]
    offers = control.gather((own[0]["boot"], own[0]["host"], port.number, pairs) if port else None)
    for host in own:
        host["cluster"] = cluster_facts.find(env)
        others = [offer[1:] for offer in offers if offer and offer[:2] != (host["boot"], host["host"])]
        to = cluster_facts.targets([network for _, network in pairs], others)
        host["cluster"]["ports"] = facts.attempt(lambda: cluster_facts.connect(to))
    control.gather(None)  # all have tried
    if port:
        port.close()


def _add_links(hosts: Sequence[Facts]) -> None:
    """Measure the links between hosts, last: a network that loses large messages stops there; collective."""
    if len(hosts) < 2:
        return
    pairs = facts.attempt(lambda: links.measure(boot.mpi_comm(), [host["ranks"] for host in hosts],
                                                timeout_s=LINK_S)) if boot.has_mpi() else UNKNOWN + NO_MPI
    for place, host in enumerate(hosts):
        host["links"] = pairs if isinstance(pairs, str) else [network_checks.link_row(link) for link in pairs
                                                              if link.hosts[0] == place]


def _reached(control: Control, keys: Sequence[object]) -> list[dict[str, str] | None]:
    """Return what each rank found of the memory of the next one on its host, None for a rank alone; collective."""
    offer = facts.attempt(peers.Offer)
    offers = control.gather(None if isinstance(offer, str) else offer.facts)
    on_host = [rank for rank, key in enumerate(keys) if key == keys[control.rank]]
    near = on_host[(on_host.index(control.rank) + 1) % len(on_host)]
    tries = near != control.rank and offers[near] is not None
    found = control.gather(peers.reach(offers[near]) if tries else None)
    if not isinstance(offer, str):
        offer.close()  # all have tried
    return found


def _of_unlike_mpis(env: Mapping[str, str]) -> bool:
    """Return whether the launcher's MPI is not mpi4py's: then no rank started MPI, and each may leave at any time."""
    found = probes.run_all({"mpi4py": probes.program("mpi4py")}, env, PROBE_S)["mpi4py"]
    return any(library_checks.world({"host": "", "launcher": facts.launcher(env), "mpi": found}, True))


def _tell_of_host(launched: LaunchFacts, code: int | None, errors: str) -> None:
    """Print what this rank heard, which rank 0 cannot; of ranks that only waited in vain, the first of each host."""
    if code is not None or launched.local_rank <= 0:
        how = ("ended" if code is not None else "timed out") + (last_words(errors) or " and printed nothing")
        os.write(2, f"hvdtrain: rank {launched.rank} on host {socket.gethostname()} {how}\n".encode())


def _how(code: int | None, output: str, timeout_s: float) -> str:
    if code is not None:
        return "did not connect"
    if STAGE in output:
        return f"did not answer within {GATHER_S:g} s"
    return f"did not connect within {timeout_s:g} s"


def _alone(env: Mapping[str, str], launched: LaunchFacts, how: str) -> Report:
    """Return this host's facts and what kept the job from starting, unless the facts themselves show that."""
    host = facts.collect(env) | {"slots": max(1, launched.local_size)}
    if any(library_checks.world(host, True)) or any(checks.series(host, True)):
        return [host], []
    do = ("run python -m hvdtrain doctor without a launcher on every host, and read the launcher's messages; "
          "MPI needs open ports between the hosts and one MPI on all of them")
    return [host], [Problem(STOPS, (socket.gethostname(),), f"the ranks of {launched.launcher} {how}", do)]


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
    """Run the launcher's command line ``words``, which starts a rank on each of ``hosts``; return their facts and
    problems.

    It has ``timeout_s`` to start the ranks and ``more_s`` from then. Without an answer: this host's own facts, and the
    output of the launcher.
    """
    code, output, errors = run(words, env, timeout_s, more_s)
    report = answer(output)
    if report is None:
        problem = failed(hosts, words, code, f"{errors}\n{output}", timeout_s)
        return [facts.collect(os.environ)], [problem]
    found, problems = report
    return with_slots(found, hosts, socket.gethostname()), problems


def alone(got: str, do: str) -> Report:
    """Return this host's facts, where the launcher could not even be found."""
    return [facts.collect(os.environ)], [Problem(STOPS, (socket.gethostname(),), got, do)]


def wrap(report: Report) -> str:
    """Return the line that `answer` reads."""
    hosts, problems = report
    return ANSWER + json.dumps([hosts, [[p.severity, list(p.hosts), p.got, p.do] for p in problems]])


def answer(output: str) -> Report | None:
    """Return rank 0's report from a job's output; None where there is none that is whole. Pure."""
    for line in output.splitlines():
        _, mark, text = line.partition(ANSWER)  # a launcher may put a tag before it
        with contextlib.suppress(ValueError, TypeError):
            if mark:
                hosts, problems = json.loads(text)
                return hosts, [Problem(severity, tuple(names), got, do) for severity, names, got, do in problems]
    return None


def with_slots(found: Sequence[Facts], hosts: Sequence[HostSlots], here: str) -> list[Facts]:
    """Return the hosts' facts with the slots of their entries; ``here`` is this host's name. Pure.

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
    """Return whether ``name`` is a host's own name, with or without its domain, or one of its addresses."""
    own = str(host["host"])
    if name in LOOPBACK:
        return own == here
    rows = host["interfaces"] if isinstance(host["interfaces"], list) else []
    if is_address(name):
        return any(row["address"] == name for row in rows)
    full = "." in name and "." in own
    return name.lower() == own.lower() if full else name.lower().partition(".")[0] == own.lower().partition(".")[0]


def failed(hosts: Sequence[HostSlots], words: Sequence[str], code: int | None, said: str, timeout_s: float) -> Problem:
    """Return the problem of a launch without an answer, with the last lines of the launcher. Pure."""
    how = f"did not answer within {timeout_s:g} s" if code is None else f"ended with exit status {code} and no answer"
    others = [host.name for host in hosts if host.name not in (*LOOPBACK, socket.gethostname())]
    do = (f"try each host by itself: ssh -o BatchMode=yes -o ConnectTimeout=10 {others[0]} true; then run "
          "python -m hvdtrain doctor on that host" if others else "run python -m hvdtrain doctor without -H")
    return Problem(STOPS, tuple(host.name for host in hosts),
                   f"{os.path.basename(words[0])} {how}{last_words(said)}", do)


def last_words(said: str) -> str:
    """Return "; its output: ..." with the telling lines of a child's output, else the last; "" for none. Pure."""
    lines = list(dict.fromkeys(line.strip() for line in said.splitlines() if re.search(r"\w", line)))
    telling = [line for line in lines if TELLING.search(line)]
    quoted = telling[:LAST_LINES] or lines[-LAST_LINES:]
    return "; its output: " + " / ".join(line[:200].rstrip(".") for line in quoted) if quoted else ""


def run(words: Sequence[str], env: Mapping[str, str], first_s: float, more_s: float) -> tuple[int | None, str, str]:
    """Run a child that has ``first_s`` until it prints `STAGE` and ``more_s`` from then.

    Return (exit status, output, errors), the status None where that was not enough. Open files go to the child: hydra's
    ranks talk to it through one.
    """
    with CapturedChild(words, env, close_fds=False) as child:
        code, ends_at, begun = None, time.monotonic() + first_s, False
        while code is None and time.monotonic() < ends_at:
            if child.ends_within(POLL_S):
                code = child.process.returncode
            elif not begun and STAGE in child.texts()[0]:
                ends_at, begun = time.monotonic() + more_s, True
        child.end()
        output, errors = child.texts()
        return code, output, errors
