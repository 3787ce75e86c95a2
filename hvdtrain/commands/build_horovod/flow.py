"""The recipe of ``python -m hvdtrain build``: facts, plan, wheel, install, verify, record.

Owns the order and what is said on the terminal. Every step lives in its own file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.cluster.machine import software as detect
from hvdtrain.commands.build_horovod import cache, record, tools, verify, wheel
from hvdtrain.commands.build_horovod.plan import HOROVOD_VERSION, Plan, plan
from hvdtrain.commands.build_horovod.progress import Display, clock
from hvdtrain.commands.build_horovod.run import ChildFailed
from hvdtrain.core.errors import UserError


@dataclass(frozen=True)
class Options:
    """What the user asked for: ``frameworks`` None means all installed ones, ``jobs`` 0 as many as fit.

    ``wheelhouse``: a folder to take a wheel and the source from (``build.wheelhouse``) before anything is fetched.
    ``capabilities``: of GPUs to build for where none is here (an image); then nothing can be checked.
    """

    frameworks: tuple[str, ...] | None = None
    force: bool = False
    verify: bool = True
    jobs: int = 0
    cpu_only: bool = False
    wheelhouse: Path | None = None
    capabilities: tuple[str, ...] = ()


def make_plan(options: Options) -> Plan:
    """The plan for this machine; UserError where a named framework is not installed."""
    facts = detect.detect(options.frameworks, options.capabilities)
    for name in options.frameworks or ():
        if not any(f.name == name for f in facts.frameworks):
            raise UserError(f"got --frameworks {name}, which is not installed here",
                            "an installed framework", f"run pip install -r requirements/{name}-cpu.txt")
    return plan(facts, options.cpu_only)


def show(plan: Plan) -> str:
    """The plan in words, as --print-plan shows it."""
    lines = [plan.title(), f"key    {plan.key}", f"cached {cache.find(plan.key) or 'no'}"]
    return "\n".join([*lines, *(f"note   {n}" for n in plan.notes),
                      *(f"env    {k}={v}" for k, v in sorted(plan.env.items()) if v)])


def run(options: Options, say=print) -> int:
    """Bring this environment to a verified Horovod; returns the exit status. Raises UserError on a user's
    mistake.
    """
    started = time.monotonic()
    todo = make_plan(options)
    say(todo.title())
    for note in todo.notes:
        say(f"note: {note}")
    log = cache.root() / "logs" / f"{todo.key}.log"
    try:
        now = _ensure_installed(todo, options, log, say)
        if options.verify and not options.capabilities:
            now = _ensure_verified(todo, now, options.force, log.with_suffix(".check.log"), say)
    except ChildFailed as failure:
        say(failure.report())
        return 1
    say(f"horovod {now.horovod} is ready ({clock(time.monotonic() - started)})")
    return 0


def _ensure_installed(todo: Plan, options: Options, log: Path, say) -> record.BuildRecord:
    """The record of the installed Horovod, after building or fetching its wheel where that is needed."""
    have = record.installed()
    if have is not None and have.key == todo.key and not options.force:
        say("already installed: the Horovod here was built for exactly this")
        return have
    with cache.lock(todo.key, lambda: say("waiting: another process is building the same wheel")):
        if options.wheelhouse is not None:
            cache.take_over(options.wheelhouse, todo.key)
        built = None if options.force else cache.find(todo.key)
        if built is not None:
            say(f"cached wheel: {built}")
        else:
            built = _build(todo, options.jobs, log, say)
        wheel.install(built, log, wheel.child_env(todo))
        now = record.BuildRecord(
            key=todo.key, wheel_sha256=wheel.sha256_of(built),
            horovod=HOROVOD_VERSION, python=todo.facts.python_tag,
            frameworks={f.dist: f.version for f in todo.facts.frameworks},
            mpi=f"{todo.mpi.flavour} {todo.mpi.version}" if todo.mpi else "", cuda=todo.cuda)
        record.write(now)
    return now


def _build(todo: Plan, jobs: int, log: Path, say) -> Path:
    """Compile, showing progress; the tools are asked for first, so that nobody waits minutes to learn that
    cmake is missing.
    """
    line = tools.missing()
    if line:
        raise UserError(line.removeprefix("error: "))
    wheel.check_build_needs()
    jobs = jobs or wheel.default_jobs()
    say(f"building with {jobs} compilers, log: {log}")
    display = Display("horovod")
    try:
        built = wheel.build(todo, log, jobs, display)
    except ChildFailed:
        display.end("failed")
        raise
    display.end("built")
    return built


def _ensure_verified(todo: Plan, now: record.BuildRecord, force: bool, log: Path, say) -> record.BuildRecord:
    """Run the checks, unless the record says that this very wheel passed them in this environment."""
    if now.verified and not force:
        say(f"verified before: {'; '.join(now.verified)}")
        return now
    log.write_text(f"# {todo.title()}\n")
    passed = verify.run_all(todo, log, wheel.child_env(todo), say)
    now = replace(now, verified=passed)
    record.write(now)
    return now
