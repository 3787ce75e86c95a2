"""The page about a run: made from any directory of a run, whole or torn; small, closed, and right about the story."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
from html.parser import HTMLParser

import numpy as np
import pytest
import told_runs

from hvdtrain.commands import report as cli
from hvdtrain.core import records as schema
from hvdtrain.core.errors import UserError
from hvdtrain.reports import html as report
from hvdtrain.reports.html import curves, facts, headline, page, shapes, story
from hvdtrain.reports.html import log as run_log
from hvdtrain.reports.html.page import server_of
from hvdtrain.reports.html.sections import course, learning, trace
from hvdtrain.reports.html.shapes import TimeAxis
from hvdtrain.reports.survivor import SILENT


class Told(HTMLParser):
    """A page's resources that a browser would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.words = ""
        self._quiet = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._quiet = tag in ("script", "style")
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")
                       and not str(value).startswith(("#", "data:,"))]

    def handle_data(self, data):
        self.words += "" if self._quiet else data


@pytest.fixture(scope="module")
def throttled(tmp_path_factory):
    return told_runs.throttled(tmp_path_factory.mktemp("runs") / "throttled")


def chapters(path):
    return {one.question: " ".join([one.answer, *one.points]) for one in story.tell(facts.gather(path))}


def test_a_page_tells_the_story_at_its_top(throttled):
    told = Told((path := report.write(throttled)).read_text(encoding="utf-8"))
    assert path == throttled / "report.html" and told.loads == [] and path.stat().st_size < 300_000
    assert "could not be drawn" not in told.words
    said = chapters(throttled)
    assert "all 400 steps, through 1 restart" in said["Result"]
    assert "1 restart cost 30 steps repeated, 1.4 s between attempts" in said["Cost"]
    assert said["Stragglers"].startswith("Rank 3 on b is the straggler: 98 %")
    assert "rank 3, with the same global batch, the run would be 7 % faster than now" in said["Stragglers"]
    assert "killed (SIGKILL)" in said["Failures"]
    assert "At step 190 attempt 1 failed" in said["Failures"]
    assert "restarted from step 160" in said["Failures"]
    assert "look for other work on its host" in said["Recommendations"]
    assert "Rank 2 on b was killed: look at that host's system log" in said["Recommendations"]
    assert sum(map(int, re.findall(r"(\d+) %", said["Cost"]))) == 100
    for words in said.values():
        assert words.split(".")[0] in told.words


@pytest.mark.parametrize("words, told", [
    ("rank 2 on host h1, ended, in step 1844, phase 'backward and exchange' since 1 s, there waiting in Horovod's "
     "allreduce 'b0' since 1 s: its process has ended without a word.",
     "rank 2 on h1 ended without a message in step 1,844, while in backward and exchange"),
    ("rank 0 on host h, ended: its process was killed (SIGKILL)", "rank 0 on h was killed (SIGKILL)"),
    ("the network is down: no answer", "the network is down: no answer"),
])
def test_a_death_is_told_in_one_clear_sentence(words, told):
    assert run_log.plain(words) == told


def test_a_crash_is_marked_when_it_came_and_not_when_it_was_noticed():
    one = run_log.RunAttempt(100.0, 123.0, cause="lost", trained_s=108.0, parts={"notice": 2.0, "kill": 0.5})
    assert one.fault_s == 120.5
    assert run_log.RunAttempt(100.0, 123.0, cause="lost").fault_s == 123.0


def test_a_part_too_small_to_be_seen_is_drawn_all_the_same():
    row = shapes.bar("rank 0", {"m0": 1e5, "m1": 2e5, "m2": 1e8}, 1.2e8, {}, "")
    ends = [one.left + one.width for one in row.segments]
    assert [one.width for one in row.segments[:2]] == [shapes.SEEN] * 2
    assert [one.left for one in row.segments[1:]] == ends[:2] and ends[2] == pytest.approx(100 * 1.003e8 / 1.2e8)


def test_the_critical_path_is_told_in_words_without_its_crumbs(tmp_path):
    log = told_runs.Log(tmp_path)
    log.start(steps=400)
    log.train(10)
    log.record("trace", path="t.gz", steps=[4, 8], within_s=0.0, events=9, dropped=0, bytes=9, overlap_percent=[],
               critical=[[0, "forward", 0.01], [1, "exchange g0-3.grad.b0.r0", 0.0099], [1, "sum", 0.0001]])
    part = trace.make(facts.gather(tmp_path))
    assert part.lead.startswith("Steps 4 to 8, early in the run") and part.lead.endswith("a mean step took 20 ms.")
    rows = part.blocks[-1].rows
    assert [row.label for row in rows] == ["1. forward", "2. exchange of gradients, bucket 0", "1 link under 1 %"]


def test_every_part_is_on_the_page(throttled):
    assert [one.name for one in page.sections(facts.gather(throttled))] == list(page.slots.ORDER)


def test_a_log_that_a_crash_has_torn_is_read_as_far_as_it_goes(tmp_path):
    log = told_runs.Log(tmp_path)
    log.start(steps=400)
    log.train(100)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 102, "lo')
    said = chapters(tmp_path)
    end = headline.verdict(facts.gather(tmp_path))
    assert end.pill == "aborted" and end.headline.startswith("Aborted at step 100 of 400")
    assert "1 line of the log could not be read" in said["Failures"]
    assert re.search("Continue with --resume auto.*there is no checkpoint", said["Recommendations"])


def test_a_text_that_is_no_unicode_ends_no_page(tmp_path):
    """Python reads the name of a file that is no UTF-8 as lone surrogates, which JSON keeps."""
    log = told_runs.Log(tmp_path)
    log.start(steps=400)
    log.record("note", text="no room in /data/\udcff/run")
    assert "no room in /data/?/run" in report.write(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize("error, told", [
    (SILENT, "The run failed: rank 0 ended without a message."), ("KeyboardInterrupt", "The run failed: interrupted."),
    ("ValueError: no such thing.", "The run failed: an exception. rank 0: ValueError: no such thing."),
])
def test_an_end_is_called_what_it_was(error, told, tmp_path):
    log = told_runs.Log(tmp_path)
    log.record("start", world_size=1, steps=400)
    log.record("failed", error=error, rank=0)
    said = chapters(tmp_path)
    assert said["Result"].startswith(told) and ".." not in said["Result"]
    assert ("Fix the error" in said["Recommendations"]) is error.startswith("ValueError")


def test_a_completed_run_whose_log_was_deleted_tells_its_steps(tmp_path):
    (tmp_path / "completed.json").write_text('{"steps": 100}')
    assert headline.verdict(facts.gather(tmp_path)).headline.startswith("Trained 100 steps")
    log = told_runs.Log(tmp_path)
    log.train(90)
    (tmp_path / "completed.json").write_text("{}")
    assert headline.verdict(facts.gather(tmp_path)).headline.startswith("Trained 90 steps")


def test_a_run_that_stopped_early_says_where_and_by_what(tmp_path):
    (tmp_path / "completed.json").write_text('{"steps": 52, "stop": "early stop: loss 0.4 for 3 evaluations"}')
    log = told_runs.Log(tmp_path)
    log.start(steps=900)
    log.train(52)
    said = chapters(tmp_path)["Result"]
    assert said.startswith("The run stopped early at step 52 of 900, by early stop: loss 0.4 for 3 evaluations.")


def test_time_in_a_queue_is_no_training(tmp_path):
    """Records of the second job before its "start", with collectives auto a transport too, are not of the first."""
    (tmp_path / "completed.json").write_text("{}")
    log = told_runs.Log(tmp_path)
    log.start(steps=100)
    log.train(50)
    log.record("end", epoch=0, stop="requeue: SIGUSR2 (rank 0)", metrics={}, ledger={}, memory={})
    log.now += 601.0
    log.record("wire", stage="rule", choice="shared", reason="one host")
    log.record("environment", attempt=1)
    log.start(steps=100)
    log.train(100)
    found = facts.gather(tmp_path)
    first, second = found.attempts
    assert (first.cause, first.ended_well) == ("requeue", True) and first.end_s < second.begin_s - 599
    training = [span for span in course._attempts(found, course.axis_of(found)).spans if span.kind == "training"]
    assert [span.words for span in training] == ["attempt 1, 4 ranks: steps 0 to 50, 4.5 s",
                                                 "attempt 2, 4 ranks: steps 50 to 100, 4.5 s"]
    assert "Trained 100 steps in 9.9 s" in headline.verdict(found).headline
    assert "1 restart cost 10 min 00 s between attempts" in chapters(tmp_path)["Cost"]
    first.lost = 1
    assert "1 restart cost 1 step repeated, 10 min" in " ".join(story._cost(found).points)


def test_percentages_of_one_card_have_one_basis(throttled):
    said = story._held_up(facts.gather(throttled)).answer
    assert re.findall(r"[\d.]+ %[^,.]*", said)[1:] == ["16.9 % of all recorded time"]


def test_a_wait_without_its_seconds_is_left_out(tmp_path):
    log = told_runs.Log(tmp_path)
    log.start(steps=400)
    log.record("seconds", from_step=0, window_s=5.0, ranks=[], waits=[[0, None, 2.0], [0, 1, None], [0, 1, 2.0]])
    assert facts.gather(tmp_path).spent.waits == {(0, 1): 2.0}


def test_a_run_that_goes_on_says_so(tmp_path, monkeypatch):
    log = told_runs.Log(tmp_path)
    log.start(steps=400)
    log.train(100)
    monkeypatch.setattr(facts, "_holds", lambda pid, path: True)
    found = facts.gather(tmp_path)
    found.looked_s = log.now + 1.0
    end = headline.verdict(found)
    assert end.pill == "running" and "step 100 of 400" in end.headline and "left" in end.words


def test_only_the_process_that_holds_the_directory_is_a_running_run(tmp_path):
    assert not facts._holds(os.getpid(), tmp_path)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        assert facts._holds(os.getpid(), tmp_path)
    finally:
        os.close(handle)


def test_stages_of_a_pipeline_are_named_on_the_page(tmp_path):
    log = told_runs.Log(tmp_path)
    cut = {"order": "1f1b", "copies": [[1, 0], [2, 3]], "blocks": [["stem..b3", "b4..head"]] * 2}
    log.record("start", world_size=4, hosts=told_runs.HOSTS, pipeline=cut, steps=400, config={})
    log.record("seconds", from_step=0, window_s=5.0, ranks=[{"compute": 4.0, "wait": 1.0}] * 4, waits=[])
    found = facts.gather(tmp_path)
    assert [found.stage(rank) for rank in range(4)] == [
        "stage 1 of replica 0", "stage 0 of replica 0", "stage 0 of replica 1", "stage 1 of replica 1"]
    told = Told(page.of_runs([tmp_path])).words
    assert "could not be drawn" not in told
    for words in ("stage 0 of replica 1", "stem..b3", "4 ranks in 2 pipelines"):
        assert words in told, words
    for wrong in ({"copies": [[0, 1]]}, {"copies": [[0, "x"], 3]}, [], {"copies": cut["copies"], "blocks": 7}):
        log.record("start", world_size=4, pipeline=wrong, steps=400, config={})
        assert "could not be drawn" not in Told(page.of_runs([tmp_path])).words
    log.record("start", world_size=4, pipeline=None, steps=400, config={})
    assert facts.gather(tmp_path).stage(0) == ""


def test_an_error_is_named_as_the_end(tmp_path):
    log = told_runs.Log(tmp_path)
    log.start(steps=400)
    log.train(60)
    log.record("failed", error="ValueError: a bad shape", rank=1)
    end = headline.verdict(facts.gather(tmp_path))
    assert end.pill == "failed" and "rank 1 on a: ValueError: a bad shape" in end.words
    assert "Fix the error" in chapters(tmp_path)["Recommendations"]


def test_a_log_of_the_first_version_gives_a_page_that_says_what_it_lacks(tmp_path):
    lines = [{"event": "start", "time": 10.0, "step": 0, "world_size": 2, "hosts": "1 host: vm (ranks 0-1, 2 cores)",
              "notes": [], "framework": "torch", "wire": "shared", "config": {"global_batch": 64}},
             *({"event": "step", "time": 10.0 + i, "step": i, "loss": 2.0 / i, "lr": 0.1, "samples_per_s": None,
                "phases_s": {"data": 0.1, "compute": 2.0, "wait": 1.0, "update": 0.3}} for i in range(1, 9)),
             {"event": "end", "time": 20.0, "step": 8, "epoch": 1, "stop": "", "metrics": {"loss": 0.3}}]
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    told = Told(page.of_runs([tmp_path])).words
    assert "could not be drawn" not in told and "only the phases of rank 0's steps" in told
    assert "Stopped at step 8" in told


def test_a_page_is_made_of_what_is_left_of_a_run(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        report.write(tmp_path)
    with pytest.raises(UserError, match="no directory"):
        report.write(tmp_path / "gone")
    (tmp_path / "config.yaml").write_text("global_batch: 128\n")
    told = Told(report.write(tmp_path).read_text()).words
    assert "Nothing was trained" in told and "global_batch" in told


ODD = [None, "text", -1, 1e400, [], {}, [None], {"a": [1, {}]}, "<script>alert(1)</script>", True]


@pytest.mark.parametrize("seed", range(4))
def test_odd_records_never_end_a_page_and_are_escaped(seed, tmp_path):
    """Every documented value of every event holds something else than it should."""
    choose = random.Random(seed)
    with (tmp_path / "log.jsonl").open("w") as file:
        for i in range(120):
            name = choose.choice(list(schema.EVENTS))
            values = {key: choose.choice(ODD) for key in schema.EVENTS[name].values}
            file.write(
                json.dumps(
                    {"event": name, "time": choose.choice([i, None, "x"]), "step": choose.choice([i, None]), **values}
                )
                + "\n"
            )
    (tmp_path / "history.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    key: choose.choice(ODD)
                    for key in ("attempt", "cause", "words", "rank", "time", "seconds", "step_end")
                }
            )
            + "\n"
            for _ in range(4)
        )
    )
    (tmp_path / "completed.json").write_text(choose.choice(["[]", "{", '{"notes": 3}', "{}"]))
    text = page.of_runs([tmp_path])
    assert "</html>" in text and "<script>alert" not in text


def test_what_was_computed_again_is_not_in_the_curve_that_stands(throttled):
    found = facts.gather(throttled)
    steps, _ = learning.standing(found, "loss")
    assert (np.diff(steps) > 0).all() and steps[-1] == 400
    gone, = learning.superseded(found, "loss")
    assert gone.faint and gone.x[0] == 162 and gone.x[-1] == 190


def test_a_million_points_keep_their_peak():
    y = np.zeros(1_000_000)
    y[123_456], y[777_777] = 9.0, np.nan
    x, mean, low, high = curves.thin(np.arange(1_000_000.0), y)
    assert len(x) == curves.MOST and np.nanmax(high) == 9.0 and np.isfinite(mean).all()
    text = json.dumps(curves.chart("t", "", [curves.Series("a", np.arange(1_000_000.0), y)]).paths)
    assert len(text) < 20_000


def test_runs_side_by_side_tell_what_was_set_otherwise(tmp_path, throttled):
    other = tmp_path / "other"
    log = told_runs.Log(other)
    log.start(lr=0.5)
    log.train(100, step_s=0.045)
    path = report.write(throttled, other, out=tmp_path / "both.html")
    told = Told(path.read_text())
    assert told.loads == [] and "times as fast as throttled" in " ".join(told.words.split())
    assert "Configuration differences" in told.words and "balance" in told.words


def test_a_long_pause_is_drawn_short():
    axis = TimeAxis([(0.0, 100.0), (100_000.0, 100_100.0)])
    assert axis.at(0) == 0 and axis.at(100) == pytest.approx(47.5) and axis.at(100_000) == pytest.approx(52.5)
    assert axis.at(100_100) == pytest.approx(100) and axis.breaks()[0].words == "nothing ran for 1 d 03 h"
    assert [words for _, words in axis.ticks()][:2] == ["0", "60 s"]


@pytest.mark.parametrize(
    "low, high, zero, log",
    [
        (0.1, 0.9, False, False),
        (1e-4, 2.0, False, True),
        (3.0, 3.0, False, False),
        (-5.0, 1e9, True, False),
        (0.0, 0.0, True, False),
    ],
)
def test_axes_hold_their_values_and_have_round_ticks(low, high, zero, log):
    axis = curves.fitting(low, high, zero)
    assert axis.log == log and -1e-6 <= axis.at(low) <= axis.at(high) <= 100 + 1e-6 and 2 <= len(axis.ticks) <= 12


def test_the_server_answers_this_machine_only():
    server = server_of(lambda: "<html>\udcff</html>")  # as in the name of a file that is no UTF-8
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        def ask(path, host):
            connection = http.client.HTTPConnection(*server.server_address, timeout=10)
            connection.request("GET", path, headers={"Host": host})
            status = connection.getresponse().status
            connection.close()
            return status

        assert server.server_address[0] == "127.0.0.1"
        assert [
            ask("/", "127.0.0.1:80"),
            ask("/body", "localhost"),
            ask("/etc", "localhost"),
            ask("/", "evil.example"),
        ] == [200, 200, 404, 403]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_command_writes_the_page_and_refuses_what_is_no_run(throttled, tmp_path, capsys):
    assert cli.main([str(throttled), "--out", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "x.html")
    with pytest.raises(UserError, match="cannot be written"):
        cli.main([str(throttled), "--out", str(tmp_path / "gone" / "x.html")])


def test_what_a_restarted_process_records_before_its_start_is_its_own(tmp_path):
    log = told_runs.Log(tmp_path)
    log.start()
    log.train(60)
    log.now, log.step = log.now + 20.0, 40
    log.record("environment", attempt=2)
    log.start()
    log.train(80)
    first, second = facts.gather(tmp_path).attempts
    assert first.end_s < second.begin_s and (first.step_end, first.lost, second.step_begin) == (60, 20, 40)
