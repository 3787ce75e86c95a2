"""`benchmarks chaos --cuts`: the plan of the cuts, the verdict on each, and where none can be made; cuts no network."""

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.chaos import cli as chaos
from benchmarks.chaos import cuts, inject, judge, look
from benchmarks.chaos.aim import Attempt
from benchmarks.chaos.campaign import Leg, Lost, Outcome
from benchmarks.chaos.plan import CUT, OUTAGE, RANK, STEP, Fault
from hvdtrain.core.errors import UserError


def test_every_other_cut_is_mended_in_time_and_the_seed_decides_the_rest():
    plan = cuts.draw_cuts(6, 3)
    assert [fault.kind for fault in plan] == [CUT, OUTAGE] * 3 and [fault.number for fault in plan] == list(range(6))
    assert all((fault.ranks, fault.shares, fault.moment) == (2, (1, 1), STEP) for fault in plan)
    assert plan == cuts.draw_cuts(6, 3) != cuts.draw_cuts(6, 4)
    assert plan[:2] == cuts.draw_cuts(2, 3), "more cuts leave the first ones as they are"


@pytest.mark.parametrize("when", [0.0, 0.5, 0.999])
def test_a_cut_that_must_be_survived_leaves_tcp_as_long_again(when):
    seconds = cuts.lasts(Fault(1, OUTAGE, STEP, RANK, 0.0, when, 2, (1, 1)), 5.0)
    assert 1.0 <= seconds and 2 * seconds < 5.0


def told(*hosts, kind="unreachable"):
    return [{"kind": kind, "host": host, "rank": i} for i, host in enumerate(hosts)]


ROW = {"attempt": 2, "cause": "unreachable", "host": "host1"}


@pytest.fixture
def cut(tmp_path):
    return cuts.Cut(tmp_path / "cuts-1" / "attempts" / "002", 6.2)


def test_a_cut_that_both_sides_saw_and_ended_for_is_good(cut):
    found = cuts.judged(cut, ROW, told("host0", "host1"))
    assert found.good and found.words == ("cuts-1, attempt 2, cut off: each host called the other unreachable, and no "
                                          "rank was left on either 6.2 s later")


@pytest.mark.parametrize(("left", "row", "causes", "said"), [
    ((1,), ROW, told("host0", "host1"), "ranks 1 lived on 6.2 s later"),
    ((), None, told("host0", "host1"), "the supervisor took it for nothing"),
    ((), {**ROW, "cause": "hang"}, told("host0", "host1"), "the supervisor took it for hang"),
    ((), {**ROW, "host": ""}, told("host0", "host1"), "the supervisor named no host"),
    ((), ROW, told("host1"), "nobody called host0 unreachable"),
    ((), ROW, told("host0", "host1", kind="lost"), "nobody called host0 and host1 unreachable"),
])
def test_a_cut_that_was_not_named_or_left_a_rank_is_bad(cut, left, row, causes, said):
    found = cuts.judged(cuts.Cut(cut.folder, cut.seconds, left), row, causes)
    assert not found.good and found.words.endswith(f"cut off: {said}")


def test_cuts_are_judged_by_what_lies_in_the_run_s_folder(cut):
    """An attempt without a line in the history and without a cause is nobody's, not a good one."""
    cut.folder.mkdir(parents=True)
    assert not cuts.findings([cut])[0].good
    (cut.folder.parent.parent / "history.jsonl").write_text(
        '{"attempt": 1, "cause": "lost", "host": "host1"}\n{"attempt": 2, "cause": "unreachable", "host": "host0"}\n')
    for rank in range(2):
        (cut.folder / f"cause-000{rank}.json").write_text(
            f'{{"kind": "unreachable", "text": "", "rank": {rank}, "host": "host{rank}", "step": 3, "time": 1.0}}')
    assert cuts.findings([cut])[0].good


def test_this_machine_s_own_network_is_never_cut(monkeypatch):
    monkeypatch.setattr(cuts.subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        with pytest.raises(ValueError, match="own network"):
            cuts.Link(own)
    finally:
        os.close(own)


@pytest.fixture
def alone():
    """Return the one rank of an attempt that goes without the other host."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield look.Rank(child.pid, 0, os.getpid(), look._stat(child.pid)[2])
    child.kill()
    child.wait()


def test_an_attempt_without_the_other_host_is_ended_and_is_no_hit(alone, tmp_path):
    found = cuts.CutCampaign(None, tmp_path, 3, 5.0, inject.LimitedFiles(), lambda text: None, "cuts")
    fault = cuts.draw_cuts(1, 0)[0]
    found.outcomes.append(Outcome(fault))
    assert look.alive(alone) and not found._harm(fault, Attempt([alone], look.Eye(tmp_path), time.monotonic()))
    assert not look.alive(alone) and not found.cuts


@pytest.mark.parametrize(("works", "complete", "hit"), [
    (("down", "up"), False, True),
    ((), False, False), (("down",), True, False), (("down",), False, None),
])
def test_a_link_that_went_with_its_job_is_no_fault_of_the_run(works, complete, hit, alone, tmp_path, monkeypatch):
    """``works``: what can be done to the link; ``hit`` None: the run is lost, since no attempt can follow."""
    class Job:
        out = tmp_path
        ranks = staticmethod(lambda: [])

    @contextlib.contextmanager
    def both(ranks):
        yield [1, 2]

    monkeypatch.setattr(cuts, "networks", both)
    monkeypatch.setattr(cuts, "Link", lambda network: type("L", (), {"set": lambda self, word: word in works})())
    if complete:
        (tmp_path / "completed.json").write_text("{}")
    found = cuts.CutCampaign(Job(), tmp_path, 3, 5.0, inject.LimitedFiles(), lambda text: None, "cuts")
    fault = cuts.draw_cuts(1, 0)[0]
    attempt = Attempt([alone], look.Eye(tmp_path), time.monotonic())
    if hit is None:
        with pytest.raises(Lost, match="put up again"):
            found._harm(fault, attempt)
    else:
        assert found._harm(fault, attempt) == hit and len(found.cuts) == hit


def test_the_table_has_both_kinds():
    rows = judge.table([Outcome(fault, True, STEP, True, 2.0, 1) for fault in cuts.draw_cuts(2, 0)])
    assert [row[:4] for row in rows] == [["network cut", "1", "1", "1"],
                                         ["network cut, mended in time", "1", "1", "1"]]


def test_what_rounding_is_allowed_is_measured_once_for_all_trainings(monkeypatch, tmp_path):
    """Two campaigns whose weights are not the undisturbed run's to the bit; nothing is good here but the weights."""
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "completed.json").write_text('{"steps": 3, "ledger": {}}')
    trained, said = [], []
    monkeypatch.setattr(chaos.verify, "weights_of", lambda out: {"w": np.full(3, 1.0 + 1e-6 * (out.name == "leg"))})
    monkeypatch.setattr(chaos.verify, "completed", lambda _name, _ranks, _words, out, *_: trained.append(out) or out)
    monkeypatch.setattr(chaos.verify, "caveats_of", lambda outs: [])
    monkeypatch.setattr(chaos.verify, "parts_of", lambda words: 1)
    monkeypatch.setattr(chaos, "say", said.append)
    leg = Leg(tmp_path / "leg", {"steps": 3}, set(), set())
    both = [type("C", (), {"outcomes": [], "legs": [leg], "trouble": ""})() for _ in range(2)]
    args = chaos.read(["--cuts", "1", "--", "train"])[0]
    assert chaos._report(args, both, 0, tmp_path / "undisturbed", [], tmp_path) == 1
    assert sum("is rounding" in words for words in said) == 2
    assert trained and len(trained) == len(set(trained))


def test_where_no_hosts_can_be_made_nothing_runs(monkeypatch, tmp_path):
    out = tmp_path / "out"
    argv = ["--cuts", "2", "--out", str(out), "--", "train"]
    monkeypatch.setattr(cuts, "_words", lambda script: ("sh", "-c", "echo two_hosts: skipped: needs root >&2; exit 77"))
    with pytest.raises(UserError, match="--cuts cannot make two hosts here: two_hosts: skipped: needs root"):
        chaos.main(argv)
    monkeypatch.setattr(cuts.hvdtrain, "__file__", str(tmp_path / "hvdtrain" / "__init__.py"))
    with pytest.raises(UserError, match="the source tree"):
        chaos.main(argv)
    assert not out.exists()


def test_files_that_the_other_host_cannot_see_are_refused(monkeypatch):
    monkeypatch.setattr(cuts, "rig", lambda: None)
    cuts.check("/dev/shared")
    with pytest.raises(UserError, match="/dev/shm of its own"):
        cuts.check("/dev/shm/x")


@pytest.mark.parametrize("argv", [["--cuts", "-1", "--", "train"], ["--cuts", "0", "--", "train"]])
def test_wrong_numbers_of_cuts_are_mistakes(argv):
    with pytest.raises(UserError, match="--cuts is -1|no fault is asked for"):
        chaos.main(argv)
