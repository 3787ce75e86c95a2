"""Folder of wheels from which ``make setup WHEELHOUSE=DIR`` installs without a network; `wheel.take_over` reads it.

Horovod lies below ``horovod``, by its cache key, where pip does not look: pip would take one built for something else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.commands.build_horovod import cli, wheel
from hvdtrain.commands.build_horovod.child_log import ChildFailed
from hvdtrain.core.errors import UserError

PIP_TIMEOUT_S = 3600.0


def add_horovod(folder: Path, key: str) -> Path | None:
    """Copy the cached wheel of ``key`` to where `wheel.take_over` looks; None where it was not built."""
    built = wheel.find(key)
    return None if built is None else wheel.copy(built, folder / "horovod" / key / built.name)


def add_source(into: Path) -> Path:
    """Copy Horovod's source package to the folder ``into``, fetched where the cache has none.

    Errors: `ChildFailed` without a network, `UserError` for a package with another digest.
    """
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return wheel.copy(wheel.fetch_source(env, wheel.root() / "logs" / "source.log"), into / wheel.SOURCE)


def listing(folder: Path) -> tuple[list[str], int]:
    """Return a line for each file below ``folder`` with its size in MiB, and the bytes of all."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    sizes = [p.stat().st_size for p in files]
    return [f"{n / 2**20:7.2f} MiB  {p.relative_to(folder)}" for p, n in zip(files, sizes)], sum(sizes)


def download(folder: Path, pins: Sequence[str], extra_index: str = "") -> list[list[str]]:
    """Return pip's calls that fill ``folder`` with the wheels of these files of pins; the second if the first fails."""
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "-w", str(folder),
             "--find-links", str(folder), *(word for name in pins for word in ("-r", name))]
    other = [*words, "--timeout", "15", "--retries", "1", "--extra-index-url", extra_index]
    return [words, other] if extra_index else [words]


def fill(folder: Path, pins: Sequence[str], extra_index: str, options: cli.Options) -> int:
    """Fill ``folder``; return the exit status, 1 where pip did not find all. What lies there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for words in download(folder.absolute(), pins, extra_index):
        if subprocess.run(words, stdin=subprocess.DEVNULL, timeout=PIP_TIMEOUT_S).returncode == 0:
            break
    else:
        print("error: pip did not find a wheel for every pin", file=sys.stderr)
        return 1
    key = cli.make_plan(options).key
    if add_horovod(folder, key) is None:
        print(f"note: there is no built Horovod for {key}; run python -m hvdtrain build, then this again")
    try:
        add_source(folder / "horovod")
    except (ChildFailed, UserError) as error:
        print(f"note: Horovod's source package is not available ({error})")
    lines, total = listing(folder)
    print("\n".join([*lines, f"{total / 2**20:7.2f} MiB in {folder}"]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.commands.build_horovod.wheelhouse",
                                     description="Fill a folder with wheels for machines without a network.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-r", dest="pins", action="append", required=True, help="a file of pins")
    parser.add_argument("--frameworks", nargs="+", help="frameworks of the built Horovod")
    parser.add_argument("--cpu", action="store_true", help="the Horovod without CUDA")
    parser.add_argument("--extra-index", default="", help="extra index for pins that pip's own indexes lack")
    args = parser.parse_args(argv)
    options = cli.Options(frameworks=tuple(args.frameworks) if args.frameworks else None, cpu_only=args.cpu)
    return fill(args.folder, args.pins, args.extra_index, options)


if __name__ == "__main__":
    sys.exit(main())
