"""``python -m hvdtrain build``: options, and the order of facts, plan, wheel, install, verify, record."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.cluster.machine import software as detect
from hvdtrain.commands.build_horovod import tools, verify, wheel
from hvdtrain.commands.build_horovod.child_log import ChildFailed, Display, clock
from hvdtrain.commands.build_horovod.plan import HOROVOD_VERSION, BuildPlan, plan
from hvdtrain.core.errors import UserError

FRAMEWORKS = ("torch", "tensorflow")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(prog="python -m hvdtrain build", description=(
        "Build Horovod against the frameworks, MPI and CUDA of this environment, install it, and check it "
        "with a 2-rank allreduce in each framework. Built wheels are kept in $XDG_CACHE_HOME/hvdtrain "
        "(~/.cache/hvdtrain)."))
    made.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS,
                      help="build for these only (default: all that are installed)")
    made.add_argument("--force", action="store_true", help="build and check again even if nothing has changed")
    made.add_argument("--no-verify", action="store_true", help="skip the allreduce checks")
    made.add_argument("--jobs", type=int, default=0, metavar="N",
                      help="parallel compilers (default: by cores and memory)")
    made.add_argument("--cpu", action="store_true", help="build without CUDA and NCCL even if a GPU is here")
    made.add_argument("--capabilities", type=str, default="", metavar="80,90",
                      help="compute capabilities to build for, without a GPU here; skips the checks")
    made.add_argument("--wheelhouse", type=Path, metavar="DIR",
                      help="take Horovod's wheel or source from this folder, filled by make wheelhouse")
    made.add_argument("--print-plan", action="store_true", help="print what would be built, and stop")
    return made


def main(argv: list[str]) -> int:
    """Run the command; return its exit status (1: a build or check failed). Errors: `UserError`."""
    args = parser().parse_args(argv)
    named = tuple(filter(None, args.capabilities.split(",")))
    if not all(re.fullmatch(r"[1-9]\d{1,2}", one) for one in named):
        raise UserError(f"got --capabilities {args.capabilities}", "compute capabilities without dots, such as 80,90",
                        "correct --capabilities")
    options = Options(frameworks=tuple(args.frameworks) if args.frameworks else None, force=args.force,
                           capabilities=tuple(sorted(named, key=int)), verify=not args.no_verify,
                           jobs=max(0, args.jobs), cpu_only=args.cpu, wheelhouse=args.wheelhouse)
    if args.print_plan:
        print(show(make_plan(options)))
        return 0
    return run(options)


@dataclass(frozen=True)
class Options:
    """``frameworks`` None: all installed ones. ``jobs`` 0: as many as fit.

    ``wheelhouse``: a folder to take a wheel and the source from before anything is fetched. ``capabilities``: of GPUs
    to build for where none is here (an image); then nothing can be checked.
    """

    frameworks: tuple[str, ...] | None = None
    force: bool = False
    verify: bool = True
    jobs: int = 0
    cpu_only: bool = False
    wheelhouse: Path | None = None
    capabilities: tuple[str, ...] = ()


def make_plan(options: Options) -> BuildPlan:
    """Return the plan for this machine; `UserError` where a named framework is not installed."""
    facts = detect.detect(options.frameworks, options.capabilities)
    for name in options.frameworks or ():
        if not any(f.name == name for f in facts.frameworks):
            raise UserError(f"got --frameworks {name}, which is not installed here",
                            "an installed framework", f'run pip install "hvdtrain[{name}]"')
    return plan(facts, options.cpu_only)


def show(plan: BuildPlan) -> str:
    """Return the plan as --print-plan prints it."""
    lines = [plan.title(), f"key    {plan.key}", f"cached {wheel.find(plan.key) or 'no'}"]
    return "\n".join([*lines, *(f"note   {n}" for n in plan.notes),
                      *(f"env    {k}={v}" for k, v in sorted(plan.env.items()) if v)])


def run(options: Options, say=print) -> int:
    """Bring this environment to a verified Horovod; return the exit status. Errors: `UserError`."""
    started = time.monotonic()
    todo = make_plan(options)
    say(todo.title())
    for note in todo.notes:
        say(f"note: {note}")
    log = wheel.root() / "logs" / f"{todo.key}.log"
    try:
        now = _ensure_installed(todo, options, log, say)
        if options.verify and not options.capabilities:
            now = _ensure_verified(todo, now, options.force, log.with_suffix(".check.log"), say)
    except ChildFailed as failure:
        say(failure.report())
        return 1
    say(f"horovod {now.horovod} is ready ({clock(time.monotonic() - started)})")
    return 0


def _ensure_installed(todo: BuildPlan, options: Options, log: Path, say) -> verify.BuildRecord:
    have = verify.installed()
    if have is not None and have.key == todo.key and not options.force:
        say("already installed: the Horovod here was built for this environment")
        return have
    with wheel.lock(todo.key, lambda: say("waiting: another process is building the same wheel")):
        if options.wheelhouse is not None:
            wheel.take_over(options.wheelhouse, todo.key)
        built = None if options.force else wheel.find(todo.key)
        if built is not None:
            say(f"cached wheel: {built}")
        else:
            built = _build(todo, options.jobs, log, say)
        wheel.install(built, log, wheel.child_env(todo))
        now = verify.BuildRecord(
            key=todo.key, wheel_sha256=wheel.sha256_of(built),
            horovod=HOROVOD_VERSION, python=todo.facts.python_tag,
            frameworks={f.dist: f.version for f in todo.facts.frameworks},
            mpi=f"{todo.mpi.flavour} {todo.mpi.version}" if todo.mpi else "", cuda=todo.cuda)
        verify.write(now)
    return now


def _build(todo: BuildPlan, jobs: int, log: Path, say) -> Path:
    """Compile, and print progress. Looks for the tools first: a missing cmake is reported at once."""
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


def _ensure_verified(todo: BuildPlan, now: verify.BuildRecord, force: bool, log: Path, say) -> verify.BuildRecord:
    """Run the checks, unless the record says that this very wheel passed them in this environment."""
    if now.verified and not force:
        say(f"verified before: {'; '.join(now.verified)}")
        return now
    log.write_text(f"# {todo.title()}\n")
    passed = verify.run_all(todo, log, wheel.child_env(todo), say)
    now = replace(now, verified=passed)
    verify.write(now)
    return now
