"""``python -m hvdtrain bench``: pick a benchmark. Others are in a checkout (``python -m benchmarks``)."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.launcher import launch_facts

BENCHES = {
    "wire": "time and bandwidth of each collective by size (columns of nccl-tests); under mpirun, or alone",
    "compressors": "time, bytes and error of the gradient compressors; one process, no transport needed",
    "scale": "strong and weak scaling on this host, against copies at once and as predicted; starts the jobs",
}
MOVED = ("eager", "step", "mixed", "input", "case", "whatif", "pipeline", "finite", "saves", "memory", "accuracy")

USAGE = """usage: python -m hvdtrain bench BENCH [options]

Measures this machine. Each bench prints a table and, with --jsonl FILE, appends a record per row with versions,
hosts, transport and seed.

benches:
{benches}

For example: mpirun -np 2 python -m hvdtrain bench wire --framework torch --max 64M
python -m hvdtrain bench BENCH --help prints a bench's options.
In a checkout, python -m benchmarks runs the other benches: whole steps, accuracy, other trainers.
"""


def main(argv: list[str]) -> int:
    """Run a bench; return its exit status. `UserError` for a name that is none."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(benches="\n".join(f"  {name:12} {text}" for name, text in BENCHES.items())))
        return 0
    name, *rest = argv
    if name in MOVED:
        return forward(f"bench {name}", name, rest)
    if name not in BENCHES:
        raise UserError(f"there is no bench {name!r}", nearest(name, BENCHES), "see python -m hvdtrain bench --help")
    return importlib.import_module(f"hvdtrain.commands.bench.{name}").main(rest)


def forward(old: str, name: str, argv: list[str]) -> int:
    """Run ``python -m benchmarks NAME`` for the former command ``old``. `UserError` outside of a checkout."""
    if not (ROOT.parent / "benchmarks" / "__main__.py").is_file():
        raise UserError(f"python -m hvdtrain {old} has moved to benchmarks/, which is not installed",
                        f"python -m benchmarks {name}, in a checkout of hvdtrain", "clone it and run that there")
    if launch_facts(os.environ).rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("always", DeprecationWarning)
            warnings.warn(f"python -m hvdtrain {old} is now python -m benchmarks {name}", DeprecationWarning,
                          stacklevel=2)
    if str(ROOT.parent) not in sys.path:
        sys.path.append(str(ROOT.parent))
    return importlib.import_module("benchmarks.__main__").run([name, *argv])


UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that prints defaults other than empty ones."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises `UserError` where the other prints its usage and exits."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"python -m {command}", description=description, allow_abbrev=False,
                         formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("argument ", "", 1), "", self._help())

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options in ``argv``; `UserError` for an unknown one, with the nearest name."""
        args, rest = self.parse_known_args(list(argv))
        if rest:
            name = rest[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
            expected = nearest(name, known) if name.startswith("-") else "options such as --repeats 20"
            raise UserError(f"there is no option {rest[0]}", expected, self._help())
        return args

    def common(self, repeats: int) -> None:
        """Add --repeats, --markdown and --jsonl."""
        self.add_argument("--repeats", type=whole("--repeats", 1), default=repeats, metavar="N",
                          help="timed repeats; the median is reported")
        self.reports("row")

    def reports(self, each: str) -> None:
        """Add --markdown and --jsonl; ``each``: the unit of a record."""
        self.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
        self.add_argument("--jsonl", default="", metavar="FILE", help=f"append a JSON record per {each} to this file")

    def waits(self, default_s: float, what: str) -> None:
        """Add --timeout, in seconds; ``what`` it bounds."""
        self.add_argument("--timeout", type=number("--timeout", 0, 1e6), default=default_s, metavar="S", help=what)

    def _help(self) -> str:
        return f"see {self.prog} --help"


def one_of(option: str, choices: Iterable[str]) -> Callable[[str], str]:
    """Return a type: one of ``choices``."""
    known = list(choices)

    def read(text: str) -> str:
        if text not in known:
            raise UserError(f"{option} is {text!r}", nearest(text, known), f"correct {option}")
        return text

    return read


def some_of(option: str, choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type: a comma-separated list of ``choices``, each once."""
    single = one_of(option, choices)

    def read(text: str) -> list[str]:
        return list(dict.fromkeys(single(part.strip()) for part in text.split(",")))

    return read


def whole(option: str, least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a type: a whole number from ``least`` to ``most``."""
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,18}", text.strip()) or not least <= int(text) <= most:
            raise UserError(f"{option} is {text!r}", f"a whole number from {least} to {most}", f"correct {option}")
        return int(text)

    return read


def number(option: str, above: float, most: float) -> Callable[[str], float]:
    """Return a type: a number above ``above``, ``most`` at most."""
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not above < value <= most:
            raise UserError(f"{option} is {text!r}", f"a number above {above:g}, {most:g} at most",
                            f"correct {option}")
        return value

    return read


def size(option: str) -> Callable[[str], int]:
    """Return a type: bytes such as 4096, 4K, 64M or 1G (powers of 1024)."""
    def read(text: str) -> int:
        match = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
        n = int(match[1]) * UNITS[match[2].upper()] if match else 0
        if n < 1:
            raise UserError(f"{option} is {text!r}", "bytes such as 4096, 4K, 64M or 1G", f"correct {option}")
        return n

    return read


def shapes(option: str) -> Callable[[str], Any]:
    """Return a type: shapes of parameters such as 2048x512,2048."""
    def read(text: str) -> tuple[tuple[int, ...], ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(r"[1-9]\d{0,9}(x[1-9]\d{0,9})*", part) for part in parts):
            raise UserError(f"{option} is {text!r}", "shapes such as 2048x512,2048", f"correct {option}")
        return tuple(tuple(int(n) for n in part.split("x")) for part in parts)

    return read
