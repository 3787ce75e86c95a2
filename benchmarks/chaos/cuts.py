"""Cut networks: a training of its own on two hosts made of this machine, whose link is taken down and put up again.

Owns the plan of the cuts, the link, and the question whether each side named the other and ended. The hosts are network
namespaces that ``mpi_scripts/two_hosts.sh`` of the source tree makes for root; their processes are all seen from here.
Every other cut is fixed before anybody may call it one, and must be survived; the others last until no rank of the
attempt lives on either side. `draw_cuts` and `judged` are pure.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hvdtrain
from benchmarks.chaos import inject, look
from benchmarks.chaos.aim import Attempt
from benchmarks.chaos.campaign import Campaign, Lost
from benchmarks.chaos.job import Job
from benchmarks.chaos.judge import Finding
from benchmarks.chaos.look import Rank
from benchmarks.chaos.plan import CUT, OUTAGE, RANK, STEP, Fault
from hvdtrain.cluster.launchers.prepare import find, here
from hvdtrain.cluster.liveness import causes
from hvdtrain.core.errors import UserError
from hvdtrain.reports import jsonl as history

HOSTS = ("host0", "host1")
"""What the rig calls its hosts; each has one rank."""

LINK = "eth0"
AGENT = "/dev/shm/two_hosts/two_hosts_agent"
"""What stands for ssh between them, in a file system of the rig's own."""

SHORTEST, LONGEST = 0.2, 0.4
"""A cut that must be survived lasts so much of the bound: TCP may need as long again to find that it is over."""

ENDED_S = 20.0
"""From the bound to the end of all ranks, on a machine that has other things to do."""

AFTER_S = 30.0
"""From the end of a short cut to the next finished step."""

LOOK_S = 0.1
UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Cut:
    """A cut for good: the attempt's ``folder``, ``seconds`` until no rank lived, the ranks that were ``left`` then."""

    folder: Path
    seconds: float
    left: tuple[int, ...] = ()


def draw_cuts(count: int, seed: int) -> list[Fault]:
    """Draw ``count`` cuts in their order: for good and short ones in turn, between saves, of either host's end."""
    chance = random.Random(f"cuts {seed}")
    ranks = len(HOSTS)
    return [Fault(number, OUTAGE if number % 2 else CUT, STEP, RANK, chance.random(), chance.random(), ranks,
                  (1,) * ranks) for number in range(count)]


def lasts(fault: Fault, bound_s: float) -> float:
    """Return for how many seconds a short cut lasts, by its ``when``. Pure."""
    return bound_s * (SHORTEST + (LONGEST - SHORTEST) * fault.when)


def judged(cut: Cut, row: Mapping[str, Any] | None, told: Sequence[Mapping[str, Any]]) -> Finding:
    """Judge one cut for good by its line in the history and the causes that ranks or watchers left. Pure."""
    name = f"{cut.folder.parent.parent.name}, attempt {int(cut.folder.name)}, cut off"
    named = {one["host"] for one in told if one["kind"] == UNREACHABLE}
    wrong = []
    if cut.left:
        wrong.append(f"ranks {', '.join(map(str, cut.left))} lived on {cut.seconds:.1f} s later")
    if row is None or row.get("cause") != UNREACHABLE:
        wrong.append(f"the supervisor took it for {row.get('cause') if row else 'nothing'}")
    elif row.get("host") not in HOSTS:
        wrong.append(f"the supervisor named {row.get('host') or 'no host'}")
    if missing := sorted(set(HOSTS) - named):
        wrong.append(f"nobody called {' and '.join(missing)} unreachable")
    good = f"each host called the other unreachable, and no rank was left on either {cut.seconds:.1f} s later"
    return Finding(not wrong, f"{name}: {'; '.join(wrong) or good}")


def findings(cuts: Sequence[Cut]) -> list[Finding]:
    """Judge every cut for good, from what lies in its run's folder."""
    rows = {out: {row.get("attempt"): row for row in history.read_attempts(out)}
            for out in {cut.folder.parent.parent for cut in cuts}}
    return [judged(cut, rows[cut.folder.parent.parent].get(int(cut.folder.name)), causes.read(cut.folder))
            for cut in cuts]


def campaign(work: Path, launch: Sequence[str], words: Sequence[str], every: int, hang_s: float, bound_s: float,
             say: Callable[[str], None]) -> CutCampaign:
    """Return a campaign on two hosts whose files lie in ``work``, made here; the other arguments are `Campaign`'s."""
    work.mkdir()
    return CutCampaign(TwoHosts(rig(), work, launch, words), work, every, hang_s, inject.LimitedFiles(), say, "cuts",
                       bound_s=bound_s)


def check(out: str) -> None:
    """`UserError` where no cut can be made here, or files would lie in ``out``, out of the other host's sight."""
    rig()
    if Path(os.path.abspath(out or tempfile.gettempdir())).is_relative_to("/dev/shm"):
        raise UserError(f"the files are to lie in {out or tempfile.gettempdir()}, and each host has a /dev/shm of its "
                        "own", "a folder elsewhere", "choose another --out")


def rig() -> Path:
    """Return the program that makes the hosts, after it has made them once; `UserError` where that is impossible."""
    script = Path(hvdtrain.__file__).resolve().parent.parent / "mpi_scripts" / "two_hosts.sh"
    wanted = "Linux, root, namespaces, and the programs unshare, nsenter, mount, ip and tc"
    do = "run as root on a machine that allows them, or leave --cuts out"
    if not sys.platform.startswith("linux") or not script.is_file():
        raise UserError(f"--cuts finds no {script}", "Linux and the source tree, which has it",
                        "run in a clone of the repository, or leave --cuts out")
    try:
        tried = subprocess.run([*_words(script), "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               timeout=60, check=False)
        why = "" if tried.returncode == 0 else tried.stderr.strip() or f"{script.name} ended with {tried.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        raise UserError(f"--cuts cannot make two hosts here: {why}", wanted, do)
    tool, _ = find("auto", here(), ())
    if tool.flavour != "openmpi":
        raise UserError(f"--cuts found {tool.flavour or tool.launcher}", "Open MPI, which can be kept to the link",
                        "put its mpirun first on PATH, or leave --cuts out")
    return script


def _words(script: Path) -> tuple[str, ...]:
    return ("env", f"HOSTS={len(HOSTS)}", "SLOTS=1", str(script), "none")


class TwoHosts(Job):
    """A supervised training on the rig's hosts, one rank each. ``work``: where the hosts are listed and runs lie."""

    def __init__(self, script: Path, work: Path, launch: Sequence[str], words: Sequence[str]) -> None:
        # ob1 keeps to TCP: others find that the hosts share a memory. Yield: they share the processors too.
        own = ("--ssh", AGENT, "--iface", LINK, "--mpi-args=--mca pml ob1 --mca mpi_yield_when_idle 1")
        super().__init__(work, "", [*launch, *own], words, _words(script))

    def listed(self, ranks: int) -> str:
        """Both hosts, always."""
        return "".join(f"{name} slots=1\n" for name in HOSTS)


class Link:
    """End of the cable at a host, held by its network so that it can be fixed when nobody lives there any more."""

    def __init__(self, network: int) -> None:
        """Take over ``network``, an open descriptor; `ValueError` for this process' own network."""
        self._network = network
        if os.fstat(network).st_ino == os.stat("/proc/self/ns/net").st_ino:
            raise ValueError("a link of this machine's own network would be cut")

    def set(self, word: str) -> bool:
        """Take it "down" or put it "up"; whether that is done: it goes with the other host, whose job may be over."""
        done = subprocess.run(["nsenter", f"--net=/proc/self/fd/{self._network}", "ip", "link", "set", LINK, word],
                              pass_fds=(self._network,), capture_output=True, check=False, timeout=30)
        return done.returncode == 0


@contextlib.contextmanager
def networks(ranks: Sequence[Rank]) -> Iterator[list[int]]:
    """Open the networks that living ranks are in, each once, in the order of ranks; they are closed afterwards."""
    found: dict[int, int] = {}
    try:
        for rank in filter(look.alive, ranks):
            with contextlib.suppress(OSError):
                network = os.open(f"/proc/{rank.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                if found.setdefault(os.fstat(network).st_ino, network) != network:
                    os.close(network)
        yield list(found.values())
    finally:
        for network in found.values():
            os.close(network)


@dataclass
class CutCampaign(Campaign):
    """A campaign of cuts. ``bound_s``: heartbeat_timeout_s of the training. ``cuts``: those that were for good."""

    bound_s: float = 5.0
    cuts: list[Cut] = field(default_factory=list)

    def _harm(self, fault: Fault, attempt: Attempt) -> bool:
        """Cut one host's end of the link; whether ranks on both sides lived until then."""
        with networks(attempt.ranks) as open_ones:
            if len(open_ones) < len(HOSTS):
                # A host that was lost twice is left out of one attempt. The end of that one brings it back.
                for rank in attempt.ranks[:1]:
                    inject.kill(rank)
                self._aim.forget(attempt)
                return False
            link = Link(open_ones[int(fault.pick * len(open_ones))])
            if not link.set("down"):
                return False
            try:
                return self._short(fault, attempt, link) if fault.kind == OUTAGE else self._for_good(attempt)
            finally:
                if not link.set("up") and look.completed(self.job.out) is None:
                    raise Lost("the link that was cut could not be put up again")

    def _for_good(self, attempt: Attempt) -> bool:
        """Wait until no rank of the attempt lives on either side; whether it was not complete before."""
        began, folder = time.monotonic(), attempt.ranks[0].folder
        while True:
            left = [rank.rank for rank in self.job.ranks() if rank.folder == folder]
            seconds = time.monotonic() - began
            if look.completed(self.job.out) is not None:
                return False
            if not left or seconds > self.bound_s + ENDED_S:
                self.cuts.append(Cut(folder, seconds, tuple(left)))
                return True
            time.sleep(LOOK_S)

    def _short(self, fault: Fault, attempt: Attempt, link: Link) -> bool:
        """Repair the link in time and see the same attempt continue; whether it stood still while there was no link."""
        for_s, outcome = lasts(fault, self.bound_s), self.outcomes[-1]
        time.sleep(for_s / 2)
        step = attempt.eye.step()
        time.sleep(for_s / 2)
        held = attempt.eye.step() == step and look.completed(self.job.out) is None
        link.set("up")
        mended = time.monotonic()
        while held and time.monotonic() - mended < AFTER_S and all(map(look.alive, attempt.ranks)):
            if attempt.eye.step() > step:
                outcome.recovered, outcome.seconds, outcome.steps_lost = True, time.monotonic() - mended, 0
                break
            time.sleep(0.002)
        if held and not outcome.recovered:
            self._aim.forget(attempt)
        return held
