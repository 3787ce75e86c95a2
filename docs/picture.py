"""Draws the pictures of README.md and docs/ as SVG on standard output; they load nothing from elsewhere.

    mpirun -np 2 python -m hvdtrain train --epochs 6 | python docs/picture.py run > docs/reference/run.svg
    python docs/picture.py layers > docs/layers.svg
    python docs/picture.py efficiency > docs/benchmarks/efficiency.svg

`layers` reads the import contract of setup.cfg, `efficiency` a row of docs/benchmarks/results.md.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = re.compile(r"^epoch \d+/|^\| (ranks|speed|test accuracy|scaling efficiency) ")
"""Lines of a run that tell a reader what it did; its picture has no others, and at most `MOST_LINES`."""
MOST_LINES = 14
FONT = 'font-family="system-ui,-apple-system,Segoe UI,Roboto,sans-serif"'


def run() -> str:
    """Return the picture of a run's output, read from standard input."""
    from rich.console import Console

    lines = [line.strip("| ") for line in sys.stdin.read().splitlines() if KEPT.search(line)]
    lines = ["$ mpirun -np 2 python -m hvdtrain train --epochs 6", *lines][:MOST_LINES]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=max(len(line) for line in lines) + 1, file=nowhere)
        for line in lines:
            console.print(re.sub(r"  \|$", "", line))  # the console colours numbers and paths
        return re.sub(r"@font-face\s*{.*?}", "", console.export_svg(title="hvdtrain"), flags=re.DOTALL)


def layers() -> str:
    """Return the picture of the package's layers: imports go downward only."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    text = next(parser[name]["layers"] for name in parser.sections()
                if name.startswith("importlinter:contract") and "layers" in parser[name])
    rows = [re.split(r"\s*[|:]\s*", line.strip()) for line in text.split("\n") if line.strip()]
    width, high, gap = 720, 44, 8
    boxes = []
    for y, names in enumerate(rows):
        each = (width - gap * (len(names) - 1)) / len(names)
        for x, name in enumerate(names):
            left, top = x * (each + gap), y * (high + gap)
            boxes.append(f'<rect x="{left:.1f}" y="{top}" width="{each:.1f}" height="{high}" rx="8" fill="#e4edfb" '
                         f'stroke="#2563c9"/><text x="{left + each / 2:.1f}" y="{top + 28}" text-anchor="middle" '
                         f'font-size="15" fill="#1d2129">{escape(name.removeprefix("hvdtrain."))}</text>')
    return _svg(width, len(rows) * (high + gap) - gap, boxes, "Packages of hvdtrain; each imports only from below")


def efficiency() -> str:
    """Return the bar chart of the scaling efficiency with one rank at 40 % of a core."""
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if re.match(r"\| ResNet\S*, PyTorch, one rank at 40 %", line))
    own, peers = row.split("|")[2:4]
    found = [(f"hvdtrain, balance: {name}", float(value)) for value, name in re.findall(r"(\d+) %\W+(\w+)", own)]
    found += [("Horovod, tuned" if name.endswith("tuned") else name, float(value))
              for name, value in re.findall(r"(\w[\w ]*?) (\d+) %", peers)]
    marks = []
    for y, (name, value) in enumerate(sorted(found, key=lambda one: -one[1])):
        color = "#2563c9" if name.startswith("hvdtrain") else "#a3acba"
        marks.append(f'<text x="192" y="{y * 34 + 20}" text-anchor="end" font-size="14" fill="#5b6472">{escape(name)}'
                     f'</text><rect x="200" y="{y * 34}" width="{4.4 * value:.0f}" height="26" rx="5" fill="{color}"/>'
                     f'<text x="{208 + 4.4 * value:.0f}" y="{y * 34 + 19}" font-size="14" fill="#5b6472">'
                     f'{value:.0f} %</text>')
    return _svg(700, 34 * len(found), marks, "Scaling efficiency, one of two ranks at 40 % of a core")


def _svg(width: int, height: int, marks: list[str], title: str) -> str:
    inside = "\n".join(marks)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f"{FONT}>\n<title>{escape(title)}</title>\n{inside}\n</svg>")


if __name__ == "__main__":
    print({"run": run, "layers": layers, "efficiency": efficiency}[sys.argv[1]]())
