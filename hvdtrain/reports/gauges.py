"""Keeps the last value of each number as Prometheus' text format has it, and answers with it on a loopback port."""

from __future__ import annotations

import http.server
import re
import socketserver
import threading
from typing import Any

HOST = "127.0.0.1"


class Gauges:
    """Last values by name and labels; ``text()`` is the whole in the exposition format, version 0.0.4."""

    def __init__(self, **labels: Any) -> None:
        """``labels``: of every value."""
        self._labels = labels
        self._rows: dict[str, dict[str, float]] = {}

    def set(self, name: str, value: float, /, **labels: Any) -> None:
        """Set one value; characters that Prometheus does not take in names become "_"."""
        row = ",".join(f'{_word(key)}="{_quoted(str(text))}"' for key, text in {**self._labels, **labels}.items())
        self._rows.setdefault(_word(f"hvdtrain_{name}"), {})[row] = float(value)

    def text(self) -> str:
        """Return the values of each name together, as the format asks."""
        return "".join(f"# TYPE {name} gauge\n" + "".join(f"{name}{{{row}}} {value!r}\n" for row, value in rows.items())
                       for name, rows in list(self._rows.items()))


class Server(socketserver.ThreadingTCPServer):
    """Answers GET /metrics on a port of the loopback address with what ``page()`` returns, until `stop`.

    Port 0 takes a free one (``server_address``). OSError where the port is taken.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int, page: Any) -> None:
        self.page = page
        super().__init__((HOST, port), _Answer)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Free the port."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Answer(http.server.BaseHTTPRequestHandler):
    timeout = 10.0
    server: Server

    def do_GET(self) -> None:  # noqa: N802  (the standard library's name)
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing among the run's lines."""


def _word(text: str) -> str:
    text = re.sub(r"[^a-zA-Z0-9_]", "_", text)
    return f"_{text}" if text[:1].isdigit() else text


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
