"""Hooks of mkdocs: the navigation, the pages made at build, and links that leave docs/.

Leaves the text of the pages to generate.py and pages.py, and the look of the site to mkdocs.yml.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
TREE = DOCS.parent
sys.path[:0] = [str(DOCS), str(TREE)]

import pages  # noqa: E402

ORDER = {
    "Home": ["index.md"],
    "Tutorials": ["first-run", "your-data", "two-machines", "from-horovod", "mixed-gpus", "restarts", "planning"],
    "How-to": ["tasks", "data", "augment", "models", "hugging-face", "loss-and-metrics", "evaluate-more", "schedules",
               "callbacks", "fine-tune", "unused-parameters", "checkpoints", "trackers", "recipes", "compile",
               "device-split", "keras", "horovod-torch", "convert", "launch", "clusters", "slurm",
               "containers", "doctor", "migrate/README"],
    "Reference": ["settings", "cli", "api", "exit-codes", "environment", "combinations", "verified", "records",
                  "report", "horovod-torch"],
    "Explanation": ["exchange", "mixed-hosts", "zero", "pipeline", "memory", "reliability", "where-time-goes"],
    "Benchmarks": ["results", "two-hosts"],
    "FAQ": ["faq.md"],
    "Design": ["design.md", "gpu.md", "contributing.md", "changelog.md", "security.md", "conduct.md"],
}
"""Sections and the order of their pages; a page that is not named comes last in the section of its folder."""

COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md",
          "security.md": "SECURITY.md", "conduct.md": "CODE_OF_CONDUCT.md"}
"""Page -> file of the tree that it is made from."""

MADE: dict[str, Callable[[], str]] = {f"reference/{name}.md": make for name, make in pages.PAGES.items()}
"""Page -> the function that returns its text."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|`[^`]*`|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
"""A link or picture: mark of a picture, label (which may hold a picture), target."""


def navigation(pages: Iterable[str]) -> list[dict[str, Any]]:
    """Return the sections with their pages: those of `ORDER` that are among ``pages``, then all others."""
    left = sorted(pages)
    found: dict[str, list[str]] = {}
    for section, names in ORDER.items():
        folder = section.lower()
        wanted = [name if name.endswith(".md") else f"{folder}/{name}.md" for name in names]
        found[section] = [name for name in wanted if name in left]
        left = [name for name in left if name not in found[section]]
    for name in left:
        folder = name.partition("/")[0]
        found[next((s for s in ORDER if s.lower() == folder), "Design")].append(name)
    return [{section: names[0] if len(names) == 1 else list(names)} for section, names in found.items() if names]


def moved(text: str, source: str, page: str) -> str:
    """Return Markdown of the file ``source`` of the tree with its links as the page ``page`` of the site needs them.

    A link to a file that the site does not show becomes the code ``path``.
    """
    pages = {path: name for name, path in COPIED.items()}

    def target(link: str) -> str:
        path, mark, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:") or not path:
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path in pages:
            path = pages[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:
            return ""
        return posixpath.relpath(path, posixpath.dirname(page) or ".") + mark + anchor

    def rewritten(match: re.Match[str]) -> str:
        label, link = LINK.sub(rewritten, match[2]), target(match[3])
        return f"{match[1]}[{label}]({link})" if link else label

    blocks = re.split(r"(^```.*?^```|`[^`\n]+`(?!\]))", text, flags=re.M | re.S)
    return "".join(block if i % 2 else LINK.sub(rewritten, block)
                   for i, block in enumerate(blocks))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages made at build, and set the navigation."""
    from mkdocs.structure.files import File

    for page, source in COPIED.items():
        text = moved((TREE / source).read_text(encoding="utf-8"), source, page)
        files.append(File.generated(config, page, content=text))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    config.nav = navigation(file.src_uri for file in files.documentation_pages())
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of a stored page that leave docs/."""
    name = page.file.src_uri
    return markdown if name in COPIED or name in MADE else moved(markdown, f"docs/{name}", name)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load something from another host."""
    from mkdocs.exceptions import PluginError

    loaded = re.findall(r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=\"?(?:https?:)?//[^\">\s]+|<link\b[^>]*"
                        r"rel=\"?(?:stylesheet|preconnect|preload)[^>]*href=\"?(?:https?:)?//[^\">\s]+", output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads from another host: {loaded[0]}")
    return output
