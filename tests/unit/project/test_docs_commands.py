"""Commands shown in README.md and docs/ are ones that exist: options parse, targets and files are there."""

import ast
import re
import shlex

import pytest

from benchmarks.__main__ import BENCHES
from benchmarks.chaos import cli as chaos
from hvdtrain.commands import COMMANDS, checkpoints, train, verify
from hvdtrain.commands.bench.cli import BENCHES as ON_CLUSTERS
from hvdtrain.commands.launch import cli as launch
from hvdtrain.core import ROOT

TREE = ROOT.parent
PAGES = [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").rglob("*.md"))]


def written(page: str) -> set[str]:
    """Return the names of the files that a page tells the reader to write."""
    return set(re.findall(r"```python\n# (\w+\.py)", (TREE / page).read_text())) | {"script.py"}


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every line in a fenced block or a code span that starts one of our commands."""
    found = []
    for page in PAGES:
        text = page.read_text()
        spans = re.findall(r"`([^`\n]+)`", text)
        for block in re.findall(r"```\w*\n(.*?)```", text, re.S):
            spans += block.splitlines()
        ours = r"(make |(mpirun|horovodrun|python|\.venv/bin/python)\s.*(hvdtrain|benchmarks|\.py|tests/run))"
        where = page.relative_to(TREE).as_posix()
        found += [(where, re.split(r" #| [|]{2} ", s)[0].strip()) for s in spans if re.match(ours, s.strip())]
    return found


def test_there_are_commands_to_check():
    assert len(commands()) > 10


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_command_of_the_docs_exists(page, line):
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (TREE / "Makefile").read_text(), re.M)
        assert all(w in targets for w in words[1:] if "=" not in w), f"{page}: {line}"
        return
    if "benchmarks" in words:
        name, options = words[words.index("benchmarks") + 1], words[words.index("benchmarks") + 2:]
        assert name in {*BENCHES, "--help"}, f"{page}: {line}"
        if name == "chaos" and options[-1] != "...":
            assert chaos.read(options)[1] is not None
        return
    if "hvdtrain" not in words:
        scripts = [w.partition("::")[0] for w in words if ".py" in w or w == "tests/run"]
        beside = (TREE, (TREE / page).parent)
        assert scripts and all(s in written(page) or any((at / s).exists() for at in beside) for s in scripts), page
        return
    rest = words[words.index("hvdtrain") + 1:]
    if rest in (["--help"], ["COMMAND", "--help"]):
        return
    command, options = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else ("train", rest)
    assert command in COMMANDS, f"{page}: {line}"
    assert command != "bench" or options[0] in {*ON_CLUSTERS, "--help"}, f"{page}: {line}"
    if command == "checkpoints":
        assert checkpoints.arguments(options).run
    if command == "launch" and "..." not in options:
        assert launch.parse(options)[1]
    if command == "verify":
        options = verify._parser().parse_known_args(options)[1]
    if command in ("train", "verify"):
        if "--config" in options:  # a file the reader has; its keys are checked in test_docs_config.py
            at = options.index("--config")
            del options[at:at + 2]
        assert train.parse([o for o in options if o != "..."], env={}) is not None, f"{page}: {line}"


MPI_SAYS = ("MPI_Init failed", "There are not enough slots available in the system",
            "mpirun has detected an attempt to run as root")
"""Headings of docs/faq.md that are messages of an MPI."""


def test_messages_of_the_faq_are_those_of_the_code():
    """Each heading that begins with a message is in the code, names and numbers aside."""
    texts = [node.value for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    shown = re.findall(r"^### `([^`]+)`", (TREE / "docs" / "faq.md").read_text(), re.M)
    messages = [message for message in shown if message not in MPI_SAYS]
    assert len(messages) > 8
    for message in messages:
        for piece in re.split(r": |\.\.\.|\(|\)|[0-9]+|jinja2|mpirun|host a|--epoch|errno =", message):
            piece = piece.strip(" ,:")
            assert len(piece) < 5 or any(piece in text for text in texts), f"{message}: {piece!r}"
