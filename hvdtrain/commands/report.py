"""``python -m hvdtrain report RUN [RUN...]``: write the report of a run, or of several side by side."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from hvdtrain.checkpoint.downloads import copied, refuse
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import is_url, redacted
from hvdtrain.core.terminal import say


def main(argv: list[str]) -> int:
    """Write the report, or serve it during training. Errors: `UserError` for what is no run or cannot be written."""
    args = _parser().parse_args(argv)
    if args.watch:
        for run in args.run:
            refuse("report --watch RUN", run)
        from hvdtrain.reports.html.page import serve

        return serve([Path(run) for run in args.run], args.port)
    from hvdtrain.reports.html import write

    out = Path(args.out) if args.out else None
    if out is not None and out.exists() and not out.is_file():  # a rename would replace a pipe or a device
        raise UserError(f"--out is {args.out}, which is not a file", "a file or a new name", "choose another --out")
    if out is None and is_url(args.run[0]):
        raise UserError(f"report of {redacted(args.run[0])} has no place to write", "a file", "add --out report.html")
    try:
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(copied(run, everything=True)) if is_url(run) else Path(run)
                    for run in args.run]
            path = write(*runs, out=Path(os.path.realpath(out)) if out else None)  # a link such as /dev/stdout stays
    except OSError as error:
        raise UserError(f"the page cannot be written: {error}", "runs that can be read and a place to write",
                        "choose another --out") from None
    say(str(out or path))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain report",
        description="Write report.html: result, cost, stragglers, failures and recommendations of a run. One file that "
        "loads nothing, made from the run's directory alone, also after a crash or during training.")
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run's directory or URL; several: side by side")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: report.html in the first RUN)")
    parser.add_argument("--watch", action="store_true",
                        help="write no file: serve the report on a loopback address and refresh it during training")
    parser.add_argument("--port", type=int, default=0, help="with --watch: its port (default: any that is free)")
    return parser
