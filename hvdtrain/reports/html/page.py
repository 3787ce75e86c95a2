"""Render the report page: facts, story, sections, templates; and serve it to one's own browser.

The page is one file: style and script are in it, and its content policy forbids it to load anything.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hvdtrain.core import __version__, whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import not_installed
from hvdtrain.core.terminal import say
from hvdtrain.reports.html import headline, story
from hvdtrain.reports.html import sections as slots
from hvdtrain.reports.html.facts import RunFacts, gather
from hvdtrain.reports.html.shapes import Prose, Section
from hvdtrain.reports.html.words import moment

FOLDER = Path(__file__).parent / "templates"

COMMAND = re.compile(r"((?:python -m hvdtrain [a-z]+(?: -H)?)|(?:--[a-z_]+(?:\.[a-z_]+)* [a-z0-9_.]+\b))")
"""Commands and options in a recommendation, which the page shows as code that a click copies."""


def of_runs(paths: Sequence[Path], live: bool = False) -> str:
    """Return the page of one run, or of several side by side. ``live``: it asks its server for what is new."""
    runs = [gather(path) for path in paths]
    return of_facts(runs[0], live) if len(runs) == 1 else of_several(runs, live)


def of_facts(facts: RunFacts, live: bool = False) -> str:
    """Return the page of one run."""
    return _render("run.html", live, facts=facts, title=facts.name, end=headline.verdict(facts),
                   head=headline.title_parts(facts), tiles=headline.tiles(facts), story=story.tell(facts),
                   sections=sections(facts))


def of_several(runs: Sequence[RunFacts], live: bool = False) -> str:
    """Return the page of several runs side by side."""
    from hvdtrain.reports.html import compare

    return _render("compare.html", live, title=" and ".join(one.name for one in runs[:2]), found=compare.compare(runs))


def sections(facts: RunFacts) -> list[Section]:
    """Return the page's parts in order. One that cannot be drawn from what the files hold says so in its place."""
    found = []
    for name in slots.ORDER:
        try:
            section = importlib.import_module(f"{slots.__name__}.{name}").make(facts)
        except Exception as error:  # records of any version and of others' making may hold anything
            words = f"This section could not be drawn from the run's files ({type(error).__name__}: {error})."
            section = Section(name, name.capitalize(), "", [Prose([words])])
        if section is not None:
            found.append(section)
    return found


def put(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o644)


def _render(template: str, live: bool, **values: Any) -> str:
    text = str(_environment().get_template(template).render(live=live, version=__version__, made=moment(time.time()),
                                                            **values))
    return text.encode("utf-8", "replace").decode()  # a name of a file that is no UTF-8 becomes lone surrogates


@lru_cache
def _environment() -> Any:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup, escape
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "markupsafe"):
            raise
        raise not_installed("a report", "jinja2", "report") from None

    made = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                       lstrip_blocks=True)
    made.globals["raw_file"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))  # our own files only
    made.filters["json"] = lambda value: Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
    made.filters["at"] = lambda value: f"{value:.2f}"
    made.filters["commands"] = lambda text: Markup(COMMAND.sub(r'<code tabindex="0">\1</code>', str(escape(text))))
    return made


LOOPBACK = "127.0.0.1"
OWN_NAMES = (LOOPBACK, "localhost")


def serve(runs: Sequence[Path], port: int = 0) -> int:
    """Show the page of ``runs`` until interrupted; 0. `UserError` where there is no run or the port is taken."""
    of_runs(runs, live=True)  # what cannot be shown is told at once
    if not 0 <= port < 65536:
        raise UserError(f"--port is {port}", "0 to 65535", "correct --port")
    try:
        server = server_of(lambda: of_runs(runs, live=True), port)
    except OSError as error:
        raise UserError(f"port {port} of {LOOPBACK} is not available: {error.strerror}", "a free port",
                        "choose another --port, or omit it") from None
    with server:
        say(f"http://{LOOPBACK}:{server.server_address[1]}/  (Ctrl+C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def server_of(make: Callable[[], str], port: int = 0) -> ThreadingHTTPServer:
    """Return a server, not yet serving, that gives ``make()`` to who asks from this machine."""

    class Handler(BaseHTTPRequestHandler):
        """Answers one request."""

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name not in OWN_NAMES:
                self._answer(403, "this page answers requests to the loopback address only")
            elif self.path not in ("/", "/body"):
                self._answer(404, "there is one page here: /")
            else:
                try:
                    self._answer(200, make(), "text/html")
                except (OSError, UserError) as error:
                    self._answer(503, str(error))

        def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
            data = text.encode(errors="replace")  # a name of a file need not be UTF-8
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # whoever asked has gone
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # the base class's name
            """Print nothing: a page that renews itself asks every few seconds."""

    server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    server.daemon_threads = True
    return server
