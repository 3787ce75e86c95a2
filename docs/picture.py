"""Turns a run's output into the README's picture: ``mpirun ... | python docs/picture.py TITLE > docs/run.svg``."""

import os
import re
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    """Read a terminal's text from standard input and write it as an SVG."""
    lines = sys.stdin.read().rstrip().splitlines()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=max(len(line) for line in lines) + 1, file=nowhere)
        console.print(Text("\n".join(lines)))
        # Without the template's links to fonts: a picture that loads nothing from elsewhere.
        print(re.sub(r"@font-face\s*{.*?}", "", console.export_svg(title=sys.argv[1]), flags=re.DOTALL))


if __name__ == "__main__":
    main()
