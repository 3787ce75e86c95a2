"""The table of facts and the list of problems, as text.

Owns what is shown and how: a fact that is alike on all hosts is told once. `rows` and `findings` are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.doctor.facts import FRAMEWORKS, Facts, known
from hvdtrain.doctor.mpi_checks import short
from hvdtrain.doctor.problem import NOTE, SLOWS, STOPS, Problem

WORDS = {STOPS: "would stop a run", SLOWS: "would slow it", NOTE: "to know"}
"""What a severity means, as it is printed."""


def rows(hosts: Sequence[Facts]) -> list[tuple[str, str]]:
    """(fact, value) in order; a value that differs between hosts has a line for each group of them."""
    found = [("hosts", ", ".join(f"{h['host']} ({h['slots']} rank{'s' if h['slots'] != 1 else ''})" for h in hosts))]
    for title, show in _SHOWN:
        told = {f"{h['host']}#{i}": show(h) for i, h in enumerate(hosts)}
        values = list(told.values())
        if not any(values):
            continue
        if len(set(values)) == 1:
            found.append((title, values[0]))
        else:
            names = {key: key.rpartition("#")[0] for key in told}
            groups: dict[str, list[str]] = {}
            for key, value in told.items():
                groups.setdefault(value or "none", []).append(names[key])
            found.append((title, "\n".join(f"{', '.join(who)}: {value}" for value, who in groups.items())))
    return found


def findings(problems: Sequence[Problem], hosts: Sequence[Facts]) -> list[str]:
    """Lines for the problems, worst first, each with its remedy below it; unfolded, so that commands can be copied."""
    lines: list[str] = []
    for p in problems:
        where = "" if len(hosts) < 2 else "all hosts: " if len(p.hosts) >= len(hosts) else f"{', '.join(p.hosts)}: "
        lines += [f"{p.severity}: {where}{p.got}.", f"    {p.do[:1].upper()}{p.do[1:]}."]
    counts = [f"{sum(p.severity == s for p in problems)} {WORDS[s]}" for s in (STOPS, SLOWS, NOTE)
              if any(p.severity == s for p in problems)]
    return [*lines, "hvdtrain doctor: " + (", ".join(counts) or "nothing found that would stop or slow a run")]


def text(hosts: Sequence[Facts], problems: Sequence[Problem], plain: bool) -> str:
    """All of it; ``plain``: without a terminal, 64 columns, which leaves room for a launcher's tag before each line.

    Where rich does not load, which the doctor may be asked about, the facts are lines without a box.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return "\n".join([*(f"{name}: {line}" for name, value in rows(hosts) for line in value.splitlines()),
                          *findings(problems, hosts)])
    console = Console(highlight=False, force_terminal=False if plain else None, width=64 if plain else None)
    table = Table(box=box.ROUNDED if console.is_terminal else box.ASCII, show_header=False, title="hvdtrain doctor")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(hosts):
        table.add_row(name, Text(value))  # as it is: rich would read [brackets] as markup
    with console.capture() as captured:
        console.print(table)
    return "\n".join([captured.get().rstrip(), *findings(problems, hosts)])


def _plain(key: str) -> Callable[[Facts], str]:
    return lambda host: "" if host[key] is None else str(host[key])


def _framework(name: str) -> Callable[[Facts], str]:
    def show(host: Facts) -> str:
        found = host[name]
        if not known(found):
            return found or ""
        parts = [found.get("version", ""), f"CUDA {found['cuda']}" if found.get("cuda") else "",
                 f"ROCm {found['hip']}" if found.get("hip") else "",
                 f"NCCL {found['nccl']}" if found.get("nccl") else "",
                 f"for {' '.join(found['arch'])}" if found.get("arch") else "",
                 f"sees {len(found['devices'])} GPU(s)" if found.get("devices") else "",
                 f"{found['at']}: {found['error']}" if "error" in found else ""]
        return ", ".join(filter(None, parts))

    return show


def _horovod(host: Facts) -> str:
    if not known(host["horovod"]):
        return host["horovod"] or "not installed"
    parts = []
    for name in FRAMEWORKS:
        if known(host[name]) and "horovod_built" in host[name]:
            wants = host["horovod_mpi"].get(name) or []
            linked = f" ({', '.join(wants)})" if isinstance(wants, list) and wants else ""
            parts.append(f"{name} with {' '.join(host[name]['horovod_built']) or 'nothing'}{linked}")
    return f"{host['horovod']}: {'; '.join(parts) or 'no framework'}"


def _mpi(host: Facts) -> str:
    found = host["mpi"]
    if not known(found):
        return str(found) if found else "mpi4py is not installed"
    if "library" not in found:
        return f"{found['at']}: {found['error']}"
    return f"{short(found['library'])} ({', '.join(found['libmpi'])}), mpi4py {found['version']}"


def _mpirun(host: Facts) -> str:
    found = host["mpirun"]
    if not known(found):
        return str(found or "none")
    return f"{found['path']}, " + (found["error"] if "error" in found else f"{found['flavour']} {found['version']}")


def _launcher(host: Facts) -> str:
    found = host["launcher"]
    if not known(found):
        return str(found or "")
    sees = f", MPI sees {found['world']}" if found["kind"] == "mpi" and found["world"] is not None else ""
    return f"{found['name']}, {found['size']} process{'es' if found['size'] != 1 else ''}{sees}"


def _gpu(host: Facts) -> str:
    found = host["gpu"]
    if not known(found):
        return str(found or "none")
    if "devices" not in found:
        return f"{found['at']}: {found['error']}"
    kinds: dict[str, int] = {}
    for d in found["devices"]:
        kind = f"{d['name']} (sm_{d['capability']}, {d['memory_bytes'] / 2**30:.0f} GiB)"
        kinds[kind] = kinds.get(kind, 0) + 1
    shown = "" if host["visible"] is None else f", CUDA_VISIBLE_DEVICES={host['visible']}"
    each = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "no device"
    return f"{each}, driver {found['driver']} (CUDA {found['cuda']}){shown}"


def _interfaces(host: Facts) -> str:
    found = host["interfaces"]
    if not known(found):
        return str(found)
    return ", ".join(f"{row['name']} {row['address']}/{row['network'].partition('/')[2]}"
                     + (f" {row['mbit_s']} Mbit/s" if row["mbit_s"] else "") + ("" if row["up"] else " (down)")
                     for row in found if row["name"] != "lo") or "loopback only"


def _bytes(key: str, unit: str, power: int) -> Callable[[Facts], str]:
    return lambda h: f"{h[key] / 2**power:.1f} {unit}" if known(h[key]) else str(h[key])


def _cores(host: Facts) -> str:
    return f"{host['cores']:g}" if known(host["cores"]) else str(host["cores"])


def _clock(host: Facts) -> str:
    clock = host["clock"]
    if not known(clock):
        return ""
    if 0 in host["ranks"]:
        return "the others' are compared with it"
    return f"{1e3 * clock['offset_s']:+.2f} ms from rank 0's, give or take {1e3 * clock['within_s']:.2f} ms"


def _addresses(host: Facts) -> str:
    found: Any = host["addresses"]
    return ", ".join(found) if isinstance(found, list) else str(found)


_SHOWN: tuple[tuple[str, Callable[[Facts], str]], ...] = (
    ("python", lambda h: f"{h['python']}, {h['executable']}"), ("system", _plain("system")),
    ("hvdtrain", _plain("hvdtrain")), ("torch", _framework("torch")), ("tensorflow", _framework("tensorflow")),
    ("Horovod", _horovod), ("MPI library", _mpi), ("mpirun", _mpirun), ("started by", _launcher), ("GPUs", _gpu),
    ("own name is", _addresses), ("interfaces", _interfaces), ("cores", _cores),
    ("memory", _bytes("memory_bytes", "GiB", 30)), ("/dev/shm", _bytes("shm_bytes", "MiB free", 20)), ("clock", _clock))
