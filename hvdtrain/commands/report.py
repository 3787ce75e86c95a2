"""``python -m hvdtrain report RUN [RUN...]``: write the report of a run, or of several side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.core.errors import UserError
from hvdtrain.core.terminal import say


def main(argv: list[str]) -> int:
    """Write the report, or serve it during training. Errors: `UserError` for what is no run or cannot be written."""
    args = _parser().parse_args(argv)
    runs = [Path(run) for run in args.run]
    if args.watch:
        from hvdtrain.reports.html.page import serve

        return serve(runs, args.port)
    from hvdtrain.reports.html import write_of

    try:
        path = write_of(runs, Path(args.out) if args.out else None)
    except OSError as error:
        raise UserError(f"the page cannot be written: {error}", "runs that can be read and a place to write",
                        "choose another --out") from None
    say(str(path))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain report",
        description="Write report.html: result, cost, stragglers, failures and recommendations of a run. One file that "
        "loads nothing, made from the run's directory alone, also after a crash or during training.")
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run's directory; several are shown side by side")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: report.html in the first RUN)")
    parser.add_argument("--watch", action="store_true",
                        help="write no file: serve the report on a loopback address and refresh it during training")
    parser.add_argument("--port", type=int, default=0, help="with --watch: its port (default: any that is free)")
    return parser
