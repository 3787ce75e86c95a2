"""A page that follows runs: a small server on the loopback address, for one's own browser.

Answers GET of the page alone, to requests that name the loopback address, so that no foreign page can read it through
the browser. Writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hvdtrain.core.errors import UserError
from hvdtrain.core.terminal import say
from hvdtrain.reports.html import page

LOOPBACK = "127.0.0.1"
OWN_NAMES = (LOOPBACK, "localhost")


def serve(runs: Sequence[Path], port: int = 0) -> int:
    """Show the page of ``runs`` until interrupted; 0. `UserError` where there is no run or the port is taken."""
    page.of_runs(runs, live=True)  # what cannot be shown is told at once
    if not 0 <= port < 65536:
        raise UserError(f"--port is {port}", "0 to 65535", "correct --port")
    try:
        server = server_of(lambda: page.of_runs(runs, live=True), port)
    except OSError as error:
        raise UserError(f"port {port} of {LOOPBACK} cannot be had: {error.strerror}", "a free port",
                        "choose another --port, or leave it out") from None
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
            """Give the page, or say why not."""
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name not in OWN_NAMES:
                self._answer(403, "this page answers to the loopback address only")
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

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
            """Print nothing: a page that renews itself asks every few seconds."""

    server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    server.daemon_threads = True
    return server
