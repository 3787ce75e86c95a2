"""The page in a real browser: no error, no request, both themes, as wide as a phone; and one that follows a run."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
import threading

import pytest
import told_runs

from hvdtrain.reports.html import facts, page
from hvdtrain.reports.html.page import server_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

FIRST = """<script>window.seen = [];
addEventListener("error", e => seen.push(e.message));
addEventListener("securitypolicyviolation", e => seen.push(e.violatedDirective));
for (const k of ["error", "warn"]) console[k] = (...a) => seen.push(a.join(" "));</script>"""
"""Stands before all of a page's own scripts: takes down what goes wrong in them."""

LAST = """<script>addEventListener("load", () => {
const ground = () => getComputedStyle(document.body).backgroundColor, area = document.querySelector(".chart .area");
const told = {seen: seen, wide: innerWidth, over: document.documentElement.scrollWidth - innerWidth, first: ground()};
if (area) {
  const box = area.getBoundingClientRect();
  const place = {bubbles: true, clientX: box.left + box.width / 2, clientY: box.top};
  area.dispatchEvent(new PointerEvent("pointermove", place));
  told.tip = document.getElementById("tip").textContent;
  for (const [kind, part] of [["pointerdown", 0.25], ["pointermove", 0.5], ["pointerup", 0.75]])
    area.dispatchEvent(new PointerEvent(kind, {...place, button: 0, clientX: box.left + part * box.width}));
  told.zoomed = area.querySelector("svg").getAttribute("viewBox");
}
document.getElementById("theme").click();
told.second = ground();
told.requests = performance.getEntriesByType("resource").map(e => e.name);
parent.postMessage(JSON.stringify(told), "*");
});</script>"""
"""Does what a person does: points at a curve, presses the switch; and writes down what came of it."""


FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<script>addEventListener("message", e => document.documentElement.dataset.told = e.data);</script>
<iframe src="page.html" width="{width}" height="900" style="border:0"></iframe>"""
"""A window of any width: the browser's own is never as narrow as a phone."""


def browse(address, tmp_path, *options):
    """Return (the page after its scripts, what the browser said)."""
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            "--enable-logging=stderr",
            "--disable-background-networking",
            *options,
            address,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout, done.stderr


def look(text, tmp_path, width, *options):
    """Return what was found in the page ``text``, and what the browser's console said."""
    path = tmp_path / "page.html"
    path.write_text(
        text.replace("<head>", f"<head>{FIRST}", 1).replace("</body>", f"{LAST}</body>", 1), encoding="utf-8"
    )
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    dom, said = browse(frame.as_uri(), tmp_path, "--window-size=1300,1000", *options)
    return json.loads(html.unescape(re.search(r'data-told="([^"]*)"', dom)[1])), re.findall(r".*CONSOLE.*", said)


@pytest.mark.parametrize("dark, width", [(False, 1180), (True, 390)])
def test_a_page_has_no_error_and_no_request_in_both_themes(dark, width, tmp_path):
    text = page.of_facts(facts.gather(told_runs.throttled(tmp_path / "run")))
    theme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    told, console = look(text, tmp_path, width, *theme)
    assert console == [] and told["seen"] == [] and told["requests"] == []
    assert told["wide"] == width and told["over"] <= 0
    grounds = ["rgb(251, 250, 248)", "rgb(20, 23, 28)"]
    assert [told["first"], told["second"]] == (grounds[::-1] if dark else grounds)
    assert told["tip"].startswith("step ") and "train " in told["tip"]
    assert [round(float(number)) for number in told["zoomed"].split()] == [250, 0, 500, 1000]


def test_runs_side_by_side_have_no_error(tmp_path):
    runs = [facts.gather(told_runs.throttled(tmp_path / name)) for name in ("a", "b")]
    told, console = look(page.of_several(runs), tmp_path, 390)
    assert console == [] and told["seen"] == [] and told["requests"] == [] and told["over"] <= 0


def test_a_live_page_renews_itself(tmp_path):
    found, calls = facts.gather(told_runs.throttled(tmp_path / "run")), itertools.count(1)
    server = server_of(lambda: page.of_facts(found, live=True).replace("Trained 400", f"Trained {next(calls)}", 1))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        dom, said = browse(f"http://127.0.0.1:{server.server_address[1]}/", tmp_path, "--virtual-time-budget=7000")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert re.findall(r".*CONSOLE.*", said) == []
    assert int(re.search(r"<h1>Trained (\d+)", dom)[1]) >= 2
