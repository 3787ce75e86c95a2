"""Missing ranks when a wait times out: what ranks publish of themselves, and the message made of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from hvdtrain.cluster.liveness import pulse
from hvdtrain.cluster.liveness.pulse import RankStatus, verdict

WAIT = "sum of the control plane"


def seen(rank, step=7, phase="vote", wait=WAIT, state="", phase_s=20.0):
    return RankStatus(rank, "a", step, phase, phase_s, wait, 19.0 if wait else 0.0, state)


@pytest.mark.parametrize("rows, who", [
    ([seen(0), seen(1, wait="", phase="step_end of Mine"), seen(2)], [1]),
    ([seen(0), seen(1, wait="", state="stopped by a signal"), seen(2, wait="", phase="update")], [1]),
    ([seen(0), seen(1, state="stopped by a signal"), seen(2)], [1]),
    ([seen(0, wait="", phase="x"), seen(1, wait="", phase="x"), seen(2, wait="", phase="data", step=7)], [2]),
    ([seen(0), seen(1, wait="bcast of the control plane"), seen(2)], [1]),
    ([seen(0), seen(1, wait=""), seen(2)], [1]),
    ([seen(0), seen(1, state="ended"), seen(2, state="in an uninterruptible system call")], [1]),
])
def test_the_missing_rank_is_named(rows, who):
    text = verdict(rows, 0)
    assert text.startswith("Missing: ") and [r for r in range(3) if f"rank {r} on host a" in text] == who
    row = rows[who[0]]
    assert f"in step 7, phase {row.phase!r} since 20 s" in text and row.state in text


def test_nobody_near_is_missing_where_all_wait_alike():
    text = verdict([seen(0), seen(1)], 1, "Missing (not visible from here): rank 2 on host b.")
    assert text.startswith("All visible ranks are in the same phase: rank 1") and "host b" in text
    assert verdict([seen(0)], 0) == ""


def test_the_rank_that_the_others_wait_for_accuses_nobody():
    rows = [seen(0), seen(1, wait=""), seen(2)]
    assert verdict(rows, 0).startswith("Missing: rank 1") and verdict(rows, 2).startswith("Missing: rank 1")
    assert verdict(rows, 1).startswith("All other visible ranks wait for this one: rank 1 on host a")


class Peers:
    """The control plane of a made-up job whose rank 1 is another process of this host, and rank 2 lies elsewhere."""

    rank, size, node = 0, 3, "a"

    def __init__(self, row):
        self.row = row

    def gather(self, own):
        return [own, self.row, ("b", "/proc/1/fd/3", b"x" * 16)]


def neighbour(pipe):
    """Rank 1: opens its page, says where it is, and sleeps."""
    class Control:
        rank, size, node = 1, 2, "a"

        def gather(self, own):
            pipe.send(own)
            return [("a", "", b""), own]

    pulse.start(Control())
    pulse.at("step_end of Mine", 41)
    with pulse.waiting("Horovod's broadcast 'initial.w'"):
        pipe.send("there")
        pipe.recv()
    pipe.send("on")
    time.sleep(60)


def test_a_neighbour_is_read_without_its_help(monkeypatch):
    monkeypatch.setattr(pulse, "_own", None)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=neighbour, args=(theirs,), daemon=True)
    other.start()
    try:
        pulse.start(Peers(ours.recv()))
        assert ours.recv() == "there"
        pulse.at("vote", 42)
        assert "rank 1 on host a, in step 41, phase 'step_end of Mine'" in pulse.missing()
        assert "there waiting in Horovod's broadcast 'initial.w'" in pulse.missing()
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        assert "rank 1 on host a, stopped by a signal" in pulse.missing()
        os.kill(other.pid, signal.SIGCONT)
        ours.send("go on")
        assert ours.recv() == "on" and "waiting" not in pulse.missing()
        other.kill()
        other.join()
        assert "rank 1 on host a, ended, in step 41" in pulse.missing()
    finally:
        other.kill()


def test_ranks_of_other_hosts_are_known_by_their_last_vote(monkeypatch):
    monkeypatch.setattr(pulse, "_own", None)
    pulse.start(Peers(("b", "", b"")))
    assert pulse.missing() == ("Missing, or waiting for a missing rank (not visible from here): rank 1 on host b, "
                               "rank 2 on host b; they have reached agreement in no step yet.")
    pulse.heard(12)
    assert "they reached the last agreement in step 12, 0 s ago" in pulse.missing()


def test_without_a_pulse_nothing_is_said(monkeypatch):
    monkeypatch.setattr(pulse, "_own", None)
    pulse.at("vote", 3)
    with pulse.waiting("x"):
        pulse.heard(3)
    assert pulse.missing() == ""
