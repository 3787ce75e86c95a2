"""Words that users read follow the glossary of CONTRIBUTING.md: string literals of the package, templates and docs.

A phrase is listed in the sense that the field has another word for. Text in backticks is exempt: names of keys,
commands, files and fields stay as they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

INSTEAD = {
    "report, print, log": r"(?:is|are|was|were) (?:told|said)|says so",
    "fix": r"mend(?:s|ed|ing)?",
    "estimate, compute": r"reckon(?:s|ed|ing)?",
    "again, from scratch": r"anew|once more",
    "transport, link": r"(?:the|an?|each|every|over|which|no) wires?|wire (?:ms|in use)",
    "heterogeneous, different": r"unlike (?:ranks|devices|speeds?|shares|depth|parts|learning rates)|another than",
    "straggler": r"who held whom up|(?:hold|holds|holding|held) (?:all |the )?(?:others?|ranks|training) up|held up",
    "share": r"(?:its|own|equal|unequal|other|relative) parts? of (?:a|the|each) (?:batch|data|step)|"
             r"parts? of (?:a|the|each) (?:global )?batch|(?:equal|unequal) parts|parts? that exceeds?",
    "shard": r"part of the (?:state|parameters)|each rank its part|writes its part|its part of the (?:state|model)",
    "replica": r"cop(?:y|ies) of the model|(?:every|whole|unlike) cop(?:y|ies)|rank of a copy|copies of \w+ depth|"
               r"(?:share|ranks|batch) (?:for|of) each copy",
    "training trajectory, same results": r"(?:same|training|one|the) curve|curve of (?:the|a) run",
    "partition": r"(?:is|are|was|be|model) cut (?:over|into|between|otherwise)|cut (?:over|across) (?:ranks|devices)|"
                 r"(?:model|batch) is cut|cutting the model|split over devices|another cut",
    "synchronize": r"copies (?:meet|met)|do not meet|not meet in",
    "agreement": r"the votes?|voted|a vote",
    "resume, continue": r"(?:go|goes|going|gone|went) on (?:with|at|from|without)|(?:training|run|it) (?:goes|went) on",
    "in the background": r"beside (?:training|the run|backward)|thread beside",
    "placeholder": r"stand-ins?",
    "with an error message": r"refused in words",
    "round-robin, interleaved": r"in turns?",
    "activation checkpointing": r"recomputed blocks|blocks recomputed|blocks to recompute|recompute blocks",
    "run report, time breakdown": r"page about (?:a|the) run|where the time went|seconds and their causes",
    "single-rank throughput, scaling efficiency": r"solo speeds?|of solo",
    "unpartitioned": r"(?:train|build)s? the model whole|builds? the model in parts",
    "host": r"machine beneath",
    "disable": r"nobody watches",
    "available": r"(?:cannot|can|could not) be had",
    "unknown": r"cannot be told",
    "custom": r"of one's own",
    "every N": r"so many (?:steps|seconds|epochs)",
    "compute": r"takes? its statistics",
}
FORBIDDEN = {word: re.compile(rf"\b(?:{phrases})\b", re.IGNORECASE) for word, phrases in INSTEAD.items()}

TO_DO: set[str] = set()
"""Pages of docs/ that still have such phrases. It only shrinks: a page that is clean has to leave it."""

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]


def phrases(text: str) -> list[str]:
    """Return the forbidden phrases in ``text``, each with what to write."""
    plain = re.sub(r"\s+", " ", text)
    return [f"{found[0]!r}: write {word}" for word, pattern in FORBIDDEN.items() for found in pattern.finditer(plain)]


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string literal but docstrings; what an f-string computes is "{}"."""
    tree = ast.parse(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def without_names(text: str) -> str:
    """Return ``text`` without code: fenced blocks and what stands in backticks."""
    return re.sub(r"`[^`\n]*`", "`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def test_messages_and_help_of_the_package_use_the_words_of_the_field():
    found = [f"{path.relative_to(ROOT)}:{line}: {one}" for path in sorted(ROOT.glob("hvdtrain/**/*.py"))
             for line, text in literals(path.read_text(encoding="utf-8")) if " " in text
             for one in phrases(without_names(text))]
    assert not found, "\n".join(found)


def test_no_message_repeats_a_word():
    twice = re.compile(r"(?<![\w-])([a-z]{3,}(?: [a-z]+){0,3}) \1\b")
    found = [f"{path.relative_to(ROOT)}:{line}: {one[0]}" for path in sorted(ROOT.glob("hvdtrain/**/*.py"))
             for line, text in literals(path.read_text(encoding="utf-8")) for one in twice.finditer(text)]
    assert not found, "\n".join(found)


def test_templates_of_the_report_use_the_words_of_the_field():
    found = [f"{path.name}: {one}" for path in sorted(ROOT.glob("hvdtrain/reports/html/templates/*"))
             for one in phrases(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_docs_use_the_words_of_the_field(page):
    found = phrases(without_names((ROOT / page).read_text(encoding="utf-8")))
    if page in TO_DO:
        assert found, f"{page} is clean: take it out of TO_DO"
    else:
        assert not found, "\n".join(found)


def test_pages_to_do_exist():
    assert set(PAGES) >= TO_DO


@pytest.mark.parametrize("text", ["each rank writes its part", "training goes on", "a model that is cut over ranks"])
def test_a_replaced_phrase_is_found(text):
    assert phrases(text) and phrases(text.upper().replace(" ", "\n")) and not phrases(without_names(f"`{text}`"))
