"""``python -m hvdtrain doctor``: options, table and list of problems.

Looks at this host alone, at the ranks of its launcher, or at one rank per host under a launcher of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots
from hvdtrain.cluster.launchers import prepare as launch_detect
from hvdtrain.cluster.launchers.prepare import Wishes, add_options, check, prepare, wishes
from hvdtrain.cluster.launchers.spec import laid_over
from hvdtrain.commands.doctor import cluster_checks, cluster_facts, facts, gather, network_checks
from hvdtrain.commands.doctor.checks import diagnose
from hvdtrain.commands.doctor.facts import FRAMEWORKS, NOTE, SLOWS, STOPS, Facts, Problem, known, merge, stops
from hvdtrain.commands.doctor.library_checks import short
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.processes import orderly_signals
from hvdtrain.core.terminal import facts as facts_table
from hvdtrain.core.terminal import say
from hvdtrain.core.units import format_bytes

TIMEOUT_S = 60.0
"""How long a job may take to come together, beside the time for packages to load."""

MOST_S = 86400.0


def main(argv: list[str]) -> int:
    """Look, print and return 1 where something would stop a run, else 0. Errors: `UserError` for wrong options."""
    args = parser().parse_args(argv)
    if not 0 < args.timeout <= MOST_S:
        raise UserError(f"--timeout is {args.timeout:g}", "seconds above 0, at most a day", "correct --timeout")
    try:
        os.getcwd()
    except OSError:
        raise UserError("the current folder no longer exists, and programs cannot start in it",
                        "a folder that exists", "change to an existing folder") from None
    launched = launch_facts(os.environ)
    hosts = launch_detect.hosts_of(args.hosts, args.hostfile)
    program = (launch_detect.interpreter(), "-m", "hvdtrain", "doctor", "--facts", "--timeout", f"{args.timeout:g}",
               *(["--cluster"] if args.cluster else []))
    one_each = wishes(args, tuple(HostSlots(host.name, 1) for host in hosts), program)
    check(one_each)
    if hosts and launched.kind != "solo":
        raise UserError(f"-H under {launched.launcher}, which has already placed the ranks", "one of the two",
                        "leave -H and --hostfile out, or start doctor without a launcher")
    if args.part:
        report = gather.part(os.environ, launched, args.timeout, args.cluster)
        if report is not None:
            say(gather.wrap(report))
        return 0
    if args.facts:
        say(gather.STAGE)
    if launched.kind != "solo":
        return gather.under_launcher(os.environ, launched, args.timeout, lambda report: show(report, args, True),
                                     args.cluster)
    with orderly_signals():
        return show(_over(hosts, one_each, args) if hosts else _here(args), args, False)


def _here(args: argparse.Namespace) -> gather.Report:
    host = facts.collect(os.environ)
    return [host | {"cluster": cluster_facts.find(os.environ)} if args.cluster else host], []


def show(report: gather.Report, args: argparse.Namespace, launched: bool) -> int:
    """Print the report as the options say; return the exit status."""
    hosts, problems = report
    if args.facts:
        say(gather.wrap(report))
        return 0
    found = merge([*problems, *diagnose(hosts), *(cluster_checks.diagnose(hosts) if args.cluster else [])])
    if args.json:
        say(json.dumps({"hosts": hosts, "problems": [asdict(p) for p in found]}))
    else:
        say(text(hosts, found, launched))
    return int(stops(found))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hvdtrain doctor", allow_abbrev=False,
        description="Print versions, builds, GPUs, network and memory of this host, and set-up "
                    "problems with the commands that fix them. With hosts: one rank on each under the "
                    "real launcher. Exit status 1 if a problem would stop a run.",
        epilog="For example: python -m hvdtrain doctor -H fast:4,old:2")
    add_options(made)
    made.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS",
                      help=f"time for the hosts to connect (default {TIMEOUT_S:g})")
    made.add_argument("--cluster", action="store_true", help="also check PMI types of srun, NTP, huge pages, user "
                      "limits, firewalls between hosts, and number and driver of GPUs")
    made.add_argument("--json", action="store_true", help="print facts and problems as one line of JSON")
    made.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)  # how doctor -H asks its ranks
    made.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # the process of a rank that starts MPI
    return made


def _over(hosts: tuple[HostSlots, ...], one_each: Wishes, args: argparse.Namespace) -> gather.Report:
    """Return the report of one rank per host; of this host alone, with the reason, where they cannot be started.

    Errors: `UserError` for what a launcher refuses for every user: a wrong option, no fault of this machine.
    """
    machine = launch_detect.here()
    try:
        tool, _ = launch_detect.find(args.launcher, machine, one_each.hosts)
    except UserError as error:
        return gather.alone(error.got, error.do)
    spec, _ = prepare(one_each, machine, tool)
    command = LAUNCHERS[tool.launcher].command
    command(replace(spec, as_root=False))
    try:
        words, env = command(spec)
    except UserError as error:  # root, whom Open MPI refuses
        return gather.alone(error.got, error.do)
    return gather.ask(hosts, words, laid_over(machine.env, env), args.timeout,
                     args.timeout + gather.REPORT_S)


WORDS = {STOPS: "would stop a run", SLOWS: "would slow a run", NOTE: "information"}
"""What a severity means, as it is printed."""


def rows(hosts: Sequence[Facts]) -> list[tuple[str, str]]:
    """Return (fact, value) in order; a value that differs between hosts has a line for each group of them."""
    found = [("hosts", ", ".join(f"{h['host']} ({count(h['slots'], 'rank')})" for h in hosts))]
    for title, key, absent, show in _SHOWN:
        groups: dict[str, list[str]] = {}
        for host in hosts:
            value = show(host, host[key]) if known(host[key]) else str(host[key] or absent)
            groups.setdefault(value, []).append(host["host"])
        if len(groups) > 1:
            value = "\n".join(f"{', '.join(who)}: {value or 'none'}" for value, who in groups.items())
        if value:
            found.append((title, value))
    told = {host["host"]: host["cluster"] for host in hosts if known(host.get("cluster"))}
    for title, key in cluster_checks.ROWS if told else ():
        lines = {name: cluster_checks.row(one, key) for name, one in told.items()}
        same = len(set(lines.values())) == 1
        if any(lines.values()):
            found.append((title, next(iter(lines.values())) if same else "\n".join(
                f"{name}: {value or 'none'}" for name, value in lines.items())))
    return found


def findings(problems: Sequence[Problem], hosts: Sequence[Facts]) -> list[str]:
    """Return lines for the problems, worst first, each with its remedy; unfolded, so that commands can be copied."""
    lines: list[str] = []
    for p in problems:
        where = "" if len(hosts) < 2 else "all hosts: " if len(p.hosts) >= len(hosts) else f"{', '.join(p.hosts)}: "
        lines += [f"{p.severity}: {where}{p.got}.", f"    {p.do[:1].upper()}{p.do[1:]}."]
    counts = [f"{sum(p.severity == s for p in problems)} {WORDS[s]}" for s in (STOPS, SLOWS, NOTE)
              if any(p.severity == s for p in problems)]
    return [*lines, "hvdtrain doctor: " + (", ".join(counts) or "no problem found")]


def text(hosts: Sequence[Facts], problems: Sequence[Problem], plain: bool) -> str:
    """Return the whole text; ``plain``: narrow, without a terminal; without rich lines in place of a box."""
    try:
        shown = facts_table("hvdtrain doctor", rows(hosts), plain)
    except ImportError:
        shown = "\n".join(f"{name}: {line}" for name, value in rows(hosts) for line in value.splitlines())
    return "\n".join([shown, *network_checks.text(hosts), *findings(problems, hosts)])


def _framework(host: Facts, found: Any) -> str:
    parts = [found.get("version", ""), f"CUDA {found['cuda']}" if found.get("cuda") else "",
             f"ROCm {found['hip']}" if found.get("hip") else "",
             f"NCCL {found['nccl']}" if found.get("nccl") else "",
             f"for {' '.join(found['arch'])}" if found.get("arch") else "",
             f"sees {count(len(found['devices']), 'GPU')}" if found.get("devices") else "",
             f"{found['at']}: {found['error']}" if "error" in found else ""]
    return ", ".join(filter(None, parts))


def _horovod(host: Facts, found: Any) -> str:
    parts = []
    for name in FRAMEWORKS:
        if known(host[name]) and "horovod_built" in host[name]:
            wants = host["horovod_mpi"].get(name) or []
            linked = f" ({', '.join(wants)})" if isinstance(wants, list) and wants else ""
            parts.append(f"{name} with {' '.join(host[name]['horovod_built']) or 'nothing'}{linked}")
    return f"{found}: {'; '.join(parts) or 'no framework'}"


def _mpi(host: Facts, found: Any) -> str:
    if "library" not in found:
        return f"{found['at']}: {found['error']}"
    return f"{short(found['library'])} ({', '.join(found['libmpi'])}), mpi4py {found['version']}"


def _mpirun(host: Facts, found: Any) -> str:
    return f"{found['path']}, " + (found["error"] if "error" in found else f"{found['flavour']} {found['version']}")


def _mpi_moves(host: Facts, found: Any) -> str:
    ucx = "UCX where it finds a fast network" if found["ucx"] else "its own transports, not UCX"
    gpus = "could read GPU memory directly; hvdtrain uses pinned host memory" if found["cuda"] else (
        "cannot read GPU memory directly")
    return f"{ucx}; {gpus}"


def _launcher(host: Facts, found: Any) -> str:
    sees = f", MPI sees {found['world']}" if found["kind"] == "mpi" and found["world"] is not None else ""
    return f"{found['name']}, {count(found['size'], 'process', 'processes')}{sees}"


def _gpu(host: Facts, found: Any) -> str:
    if "devices" not in found:
        return f"{found['at']}: {found['error']}"
    kinds: dict[str, int] = {}
    for d in found["devices"]:
        kind = f"{d['name']} (sm_{d['capability']}, {format_bytes(d['memory_bytes'])})"
        kinds[kind] = kinds.get(kind, 0) + 1
    shown = "" if host["visible"] is None else f", CUDA_VISIBLE_DEVICES={host['visible']}"
    each = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "no device"
    return f"{each}, driver {found['driver']} (CUDA {found['cuda']}){shown}"


def _interfaces(host: Facts, found: Any) -> str:
    return ", ".join(f"{row['name']} {row['address']}/{row['network'].partition('/')[2]}"
                     + (f" {row['mbit_s']} Mbit/s" if row["mbit_s"] else "") + ("" if row["up"] else " (down)")
                     for row in found if row["name"] != "lo") or "loopback only"


def _used(host: Facts, found: Any) -> str:
    return ", ".join(f"{row['name']} ({row['network']})" for row in network_checks.usable(host)) or "none of them"


def _container(host: Facts, found: Any) -> str:
    return f"{found['kind']}, by {found['by']}" + (", user ids are mapped" if found["namespaced"] else "")


def _limits(host: Facts, found: Any) -> str:
    cores, memory = found["cores"], found["memory_bytes"]
    return ", ".join([count(cores, "core") if cores else "no CPU quota",
                      format_bytes(memory) if memory else "no memory limit"])


def _peers(host: Facts, found: Any) -> str:
    tried = {"CMA": found["cma"], "files in memory": found["files"]}
    off = ", CMA is switched off" if found["single_copy_off"] else ""
    scope = "" if found["ptrace_scope"] is None else f", ptrace_scope {found['ptrace_scope']}"
    return f"{', '.join(f'{name} {word}' for name, word in tried.items())} (between {found['between']}){scope}{off}"


def _clock(host: Facts, found: Any) -> str:
    if 0 in host["ranks"]:
        return "the reference for the other hosts"
    return f"{1e3 * found['offset_s']:+.2f} ms from rank 0's clock, error at most {1e3 * found['within_s']:.2f} ms"


_SHOWN: tuple[tuple[str, str, str, Callable[[Facts, Any], str]], ...] = (
    ("python", "python", "", lambda host, found: f"{found}, {host['executable']}"),
    ("system", "system", "", lambda host, found: str(found)),
    ("hvdtrain", "hvdtrain", "", lambda host, found: str(found)),
    ("torch", "torch", "", _framework),
    ("tensorflow", "tensorflow", "", _framework),
    ("Horovod", "horovod", "not installed", _horovod),
    ("MPI library", "mpi", "mpi4py is not installed", _mpi),
    ("mpirun", "mpirun", "none", _mpirun),
    ("MPI transports", "mpi_moves", "unknown: not reported", _mpi_moves),
    ("started by", "launcher", "", _launcher),
    ("GPUs", "gpu", "none", _gpu),
    ("own name is", "addresses", "", lambda host, found: ", ".join(found)),
    ("interfaces", "interfaces", "", _interfaces),
    ("between hosts", "interfaces", "", _used),
    ("container", "container", "none", _container),
    ("limits", "limits", "", _limits),
    ("neighbours", "peers", "", _peers),
    ("cores", "cores", "", lambda host, found: f"{found:g}"),
    ("memory", "memory_bytes", "", lambda host, found: format_bytes(found)),
    ("/dev/shm", "shm_bytes", "",
     lambda host, found: f"{format_bytes(found)} free" + (f" of {format_bytes(host['shm_total'])}" if known(
         host["shm_total"]) else "")),
    ("clock", "clock", "", _clock))
"""(title, fact, what is shown where it is None, how it is shown where it is known); an unknown one shows why."""
