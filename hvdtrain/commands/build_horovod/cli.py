"""``python -m hvdtrain build``: build, install and verify Horovod for this environment.

Owns the options. The work is in ``hvdtrain.commands.build_horovod``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hvdtrain.commands.build_horovod import flow
from hvdtrain.core.errors import UserError

FRAMEWORKS = ("torch", "tensorflow")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(prog="python -m hvdtrain build", description=(
        "Build Horovod against the frameworks, MPI and CUDA of this environment, install it, and check it "
        "with a 2-rank allreduce in each framework. Built wheels are kept in $XDG_CACHE_HOME/hvdtrain "
        "(~/.cache/hvdtrain)."))
    made.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS,
                      help="build for these only (default: all that are installed)")
    made.add_argument("--force", action="store_true", help="build and check again though nothing has changed")
    made.add_argument("--no-verify", action="store_true", help="leave the allreduce checks out")
    made.add_argument("--jobs", type=int, default=0, metavar="N",
                      help="compilers at once (default: by cores and memory)")
    made.add_argument("--cpu", action="store_true", help="build without CUDA and NCCL even if a GPU is here")
    made.add_argument("--capabilities", type=str, default="", metavar="80,90",
                      help="compute capabilities to build for, where no GPU is here; nothing is checked then")
    made.add_argument("--wheelhouse", type=Path, metavar="DIR",
                      help="take Horovod's wheel or source from this folder, which make wheelhouse filled")
    made.add_argument("--print-plan", action="store_true", help="say what would be built, and stop")
    return made


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status (1: a build or check failed). Raises UserError on a user's
    mistake.
    """
    args = parser().parse_args(argv)
    named = tuple(filter(None, args.capabilities.split(",")))
    if not all(re.fullmatch(r"[1-9]\d{1,2}", one) for one in named):
        raise UserError(f"got --capabilities {args.capabilities}", "compute capabilities without dots, such as 80,90",
                        "correct --capabilities")
    options = flow.Options(frameworks=tuple(args.frameworks) if args.frameworks else None, force=args.force,
                           capabilities=tuple(sorted(named, key=int)), verify=not args.no_verify,
                           jobs=max(0, args.jobs), cpu_only=args.cpu, wheelhouse=args.wheelhouse)
    if args.print_plan:
        print(flow.show(flow.make_plan(options)))
        return 0
    return flow.run(options)
