"""Check hvdtrain on this machine's GPU, or as far as that goes on its CPU: one table and one JSON file.

Runs from the source tree with whatever Python has PyTorch here; modules that it lacks come from a folder of wheels
(`wheelhouse`), unpacked into a temporary folder. Each row is a job of its own with a limit, and the whole has one, so
that nothing waits for ever. Exit status: 0 where all rows passed or were skipped, 1 where one failed, 2 for a mistake
on the command line. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import building
import children
import machine as machines
import report
import rows as table_of

WHOLE_S = 465.0
"""Of the whole check; 8 minutes are promised."""


def options(argv: list[str]) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description="Check hvdtrain on this machine's GPU.")
    parser.add_argument("--python", default="", help="the interpreter with PyTorch; empty: looked for")
    parser.add_argument("--wheels", default="", help="folder that `make gpu-wheels` filled, for what is not installed")
    parser.add_argument("--out", default="runs/gpu-check", help="folder of the table, the JSON file and the logs")
    parser.add_argument("--rows", default="", help="names of rows with commas between; empty: all")
    parser.add_argument("--limit-s", type=float, default=WHOLE_S, help="seconds of the whole check")
    parser.add_argument("--no-build", action="store_true", help="do not build Horovod")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Check, write, and return the exit status."""
    args, begin = options(argv), time.monotonic()
    wheels = Path(args.wheels).resolve() if args.wheels else None
    try:
        rows = table_of.chosen([name for name in args.rows.split(",") if name])
        if wheels and not wheels.is_dir():
            raise ValueError(f"there is no folder {wheels}; fill it with `make gpu-wheels WHEELS={args.wheels}`")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as aside:
        here = machines.prepare(args.python, wheels, Path(aside), os.environ)
        print("\n".join(in_words(here)), flush=True)
        check = Check(here, out, Path(aside), begin + args.limit_s)
        outcomes = []
        for row in rows:
            if "horovod" in row.needs and "horovod" in here.lacks and not args.no_build:
                building.build(here, wheels, Path(aside), out, check.left_s() - 2 * row.limit_s)
            outcomes.append(check.row(row))
            print(report.table(outcomes[-1:]), flush=True)
    seconds = time.monotonic() - begin
    closing = f"{report.closing(outcomes)} in {seconds:.0f} s"
    text = "\n".join([*in_words(here), "", report.table(outcomes), "", closing])
    (out / "gpu-check.txt").write_text(text + "\n", encoding="utf-8")
    report.write(out / "gpu-check.json", {**here.facts, "unpacked": here.unpacked}, outcomes, seconds)
    print(f"\n{text}\n\n{out / 'gpu-check.txt'} and {out / 'gpu-check.json'}", flush=True)
    return report.status(outcomes)


class Check:
    """Runs rows one after the other until ``ends_at`` (`time.monotonic`)."""

    def __init__(self, here: machines.Machine, out: Path, aside: Path, ends_at: float) -> None:
        self._here, self._out, self._aside, self._ends_at = here, out, aside, ends_at
        (out / "logs").mkdir(exist_ok=True)

    def left_s(self) -> float:
        """Return the seconds that are left of the whole."""
        return self._ends_at - time.monotonic()

    def row(self, row: table_of.Row) -> report.Outcome:
        """Return what came of a row, which is skipped where something that it needs is not there."""
        why = table_of.lacking(row, self._here.lacks)
        limit_s = min(row.limit_s, self.left_s() - 2 * children.GRACE_S)
        if not why and limit_s < min(10.0, row.limit_s):
            why = "the time of the whole check was used up"
        if why:
            return report.Outcome(row.name, report.SKIPPED, why)
        folder, log = self._aside / row.name, self._out / "logs" / f"{row.name}.log"
        folder.mkdir()
        log.unlink(missing_ok=True)
        said = folder / "said.json"
        launcher = [*self._here.mpirun, "-np", str(row.ranks)] if row.ranks > 1 else []
        argv = [*launcher, self._here.python, str(Path(__file__).with_name("job.py")), row.name, str(said)]
        threads = str(max(1, len(os.sched_getaffinity(0)) // row.ranks))
        ended = children.run(argv, log, limit_s, self._here.env | {"OMP_NUM_THREADS": threads}, folder)
        return report.of_job(row.name, ended.code, ended.seconds, limit_s, report.read(said), ended.last_lines())


def in_words(here: machines.Machine) -> list[str]:
    """Return the lines above the table: what was found on this machine."""
    facts = here.facts
    if not facts:
        return [here.lacks.get("torch", "nothing was found")]
    gpus = [f"{g['name']} (sm_{g['capability'].replace('.', '')}, {g['memory_bytes'] / 2**30:.0f} GiB)"
            for g in facts["gpus"]]
    lines = [f"python  {facts['python']} ({'.'.join(map(str, facts['version']))}), PyTorch {facts['torch']}",
             f"gpu     {', '.join(gpus) or 'none: ' + here.lacks['gpu']}",
             f"mpi     {facts.get('mpi', 'none: ' + here.lacks.get('mpi', ''))}"
             + (f", {facts['mpirun']}" if "mpirun" in facts else "")]
    return lines + [f"wheels  unpacked {', '.join(here.unpacked)}" if here.unpacked else "wheels  none was needed"]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, on whose way a row's job is ended
    sys.exit(main(sys.argv[1:]))
