"""The one line of progress: what it says at which width, where it may be drawn, and what it leaves on a screen."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import select
import struct
import termios
import time
from types import SimpleNamespace

import pytest
from screen import Screen

from hvdtrain.core.terminal import say
from hvdtrain.reports import progress
from hvdtrain.reports.progress import line
from hvdtrain.reports.progress.line import Standing

FULL = Standing(140, 300, 1, 3, 0.12345, 12345.6, 87.4, 83.0)


def text(styled):
    return "".join(part for part, _ in styled)


def words(styled):
    return re.split(r"\s{2,}", re.sub("━+", "━", text(styled)).strip())


@pytest.mark.parametrize("columns, said", [
    (120, ["epoch 2/3", "━", "140/300", "loss 0.1235", "12,346 samples/s", "87 % efficiency", "eta 1:23"]),
    (80, ["ep 2/3", "━", "140/300", "loss 0.1235", "12.3k/s", "87 % eff", "eta 1:23"]),
    (60, ["ep 2/3", "━", "140/300", "loss 0.1235", "12.3k/s", "eta 1:23"]),
    (45, ["━", "140/300", "loss 0.1235", "eta 1:23"]),
    (30, ["140/300", "loss 0.1235", "eta 1:23"]),
    (20, ["140/300", "loss 0.1235"]),
    (4, ["140/"]),
])
def test_the_least_telling_gives_way_to_the_width(columns, said):
    assert words(line.line(FULL, columns)) == said


@pytest.mark.parametrize("standing", [
    FULL, Standing(0, 300, 0, 3), Standing(7, None, 0, 3, 1.0), Standing(300, 300, 3, 3, math.nan, 10.0),
])
@pytest.mark.parametrize("doing", ["", "evaluating  0:07"])
@pytest.mark.parametrize("columns", [1, 10, 27, 79, 200])
def test_the_line_fills_the_width_to_the_last_column(standing, doing, columns):
    """Text written after it, such as another rank's last line, then begins on a line of its own."""
    assert len(text(line.line(standing, columns, doing))) == columns
    assert len(text(line.silent(doing, columns, 3))) == columns


def test_the_line_of_a_run_that_evaluates():
    assert words(line.line(FULL, 60, "evaluating  0:07")) == ["epoch 2/3", "━", "140/300", "evaluating", "0:07"]
    assert "epoch 3/3" in text(line.line(Standing(300, 300, 3, 3), 60)), "there is no fourth of three epochs"


@pytest.mark.parametrize("step, part", [(0, 0.0), (150, 0.5), (299, 0.98), (300, 1.0)])
def test_the_bar_shows_the_part_that_is_done(step, part):
    drawn = line.line(Standing(step, 300, 0, 3), 100)
    done, left = (sum(t.count("━") for t, style in drawn if style == named) for named in ("green", "bright_black"))
    assert done / (done + left) == pytest.approx(part, abs=0.02)
    assert (left == 0) == (step == 300), "a run at its last step looks as such, and no other"


@pytest.mark.parametrize("number, said", [(0.5, "0.5"), (7, "7"), (987.4, "987"), (999.6, "1k"), (12345.6, "12.3k"),
                                          (4.56e6, "4.56M"), (7.2e10, "72G")])
def test_speeds_in_few_letters(number, said):
    assert line.short(number) == said


@pytest.mark.parametrize("seconds, said", [(-1, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_times_in_few_letters(seconds, said):
    assert line.clock(seconds) == said


def test_the_time_that_is_left_follows_the_speed_of_now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("hvdtrain.reports.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
    remaining = progress.Remaining(10_000)
    clock[0] += 50.0  # the first step traces and compiles
    assert remaining.after(1) is None
    for step in range(2, 202):
        clock[0] += 1.0
        left_s = remaining.after(step)
    assert left_s == pytest.approx(10_000 - 201, rel=0.01), "the first step is no measure"
    for step in range(202, 402):
        clock[0] += 0.5  # faster from here on
        left_s = remaining.after(step)
    assert left_s == pytest.approx((10_000 - 401) * 0.5, rel=0.02)
    assert progress.Remaining(None).after(5) is None and progress.Remaining(5).after(1) is None


@pytest.mark.parametrize("env, moves", [
    ({"TERM": "xterm-256color"}, True), ({"TERM": "dumb"}, False), ({}, False), ({"TERM": "unknown"}, False),
    ({"TERM": "xterm", "CI": "true"}, False), ({"TERM": "xterm", "CI": ""}, True),
])
def test_where_a_line_may_move(env, moves):
    assert line.moves(env) is moves


@pytest.fixture
def tty():
    """Our end and the other end of a pseudo-terminal of 60 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_what_is_printed_stays_above_the_line(tty, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(60)

    def shows(*rows):
        """Wait until the rows that are not empty are these; the system may take its time to deliver them."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if select.select([tty[0]], [], [], 0.01)[0]:
                screen.feed(os.read(tty[0], 1 << 16).decode())
            found = [re.sub("━+", "━", row.rstrip()) for row in screen.lines if row.strip()]
            if found == list(rows):
                return True
        return False

    terminal = line.OwnTerminal()
    terminal._stream = os.fdopen(os.dup(tty[1]), "w")
    drawn = line.Line(terminal)
    drawn.say("reading the data  0:04")
    assert shows("⠙ reading the data  0:04"), screen.lines
    say("note: one")
    drawn.show(Standing(1, 10, 0, 2, 0.5))
    say("epoch 1/2  test loss 0.25")
    above, first = ["note: one", "epoch 1/2  test loss 0.25"], "epoch 1/2  ━  1/10  loss 0.5000"
    assert shows(*above, first), screen.lines
    os.write(tty[1], "another rank's words\r\n".encode())  # by somebody who knows of no line
    drawn.show(Standing(2, 10, 0, 2, 0.5))
    assert shows(*above, first, "another rank's words", "epoch 1/2  ━  2/10  loss 0.5000"), screen.lines
    drawn.close()
    drawn.show(Standing(3, 10, 0, 2, 0.5))
    drawn.say("late")
    os.write(tty[1], b"the end\r\n")
    assert shows(*above, first, "another rank's words", "the end"), screen.lines
