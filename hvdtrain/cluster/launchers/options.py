"""The options that ``launch`` and ``doctor`` have in common, and what a launch is asked for by them.

Owns how ``--mpi-args`` is read. Starts nothing.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from hvdtrain.cluster.launchers import LAUNCHERS, Host
from hvdtrain.cluster.launchers.prepare import Wishes
from hvdtrain.cluster.launchers.ssh import parse_ssh
from hvdtrain.core.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the ranks go, and how the launcher gets there."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", action="append", default=[], help="hosts and their slots: fast:4,old:2")
    where.add_argument("--hostfile", action="append", default=[],
                       help="file of hosts: lines such as 'fast slots=4' or 'fast:4'")
    parser.add_argument("--launcher", choices=["auto", *LAUNCHERS], default="auto",
                        help="who starts the ranks (default auto: srun inside a Slurm allocation, else what mpirun is)")
    parser.add_argument("--ssh", help="the command that reaches a host, such as 'ssh -p 2222'")
    parser.add_argument("--iface", default="", help="the network interface to use, of one name on all hosts")
    parser.add_argument("--allow-run-as-root", action="store_true", help="tell Open MPI that running as root is meant")
    parser.add_argument("--mpi-args", action="append", default=[], metavar="WORDS",
                        help="more words for the launcher: --mpi-args='--mca pml ucx'; may be repeated")


def wishes(args: argparse.Namespace, hosts: tuple[Host, ...], program: tuple[str, ...], **more: Any) -> Wishes:
    """The options as `prepare` takes them, with the fields of `Wishes` that are one command's alone."""
    return Wishes(program=program, hosts=hosts, ssh=() if args.ssh is None else parse_ssh(args.ssh),
                  interface=args.iface, allow_root=args.allow_run_as_root, mpi_args=parse_mpi_args(args.mpi_args),
                  **more)


def parse_mpi_args(texts: Sequence[str]) -> tuple[str, ...]:
    """Split the options' texts into words as a shell would, without a shell; several add up.

    `UserError` where the launcher would take the first word, or what follows a lone colon, for the program.
    """
    try:
        words = tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise UserError(f"--mpi-args has {str(error).lower()}", "words as in a shell", "close the quotes") from None
    if words and not words[0].startswith("-"):
        raise UserError(f"--mpi-args begins with {words[0]!r}, which the launcher would take for the program",
                        "an option first, such as --mpi-args='--mca pml ucx'", "correct --mpi-args")
    if ":" in words or "--" in words:
        raise UserError("--mpi-args has a lone colon or --, after which the launcher looks for a program", "options",
                        "correct --mpi-args")
    return words
