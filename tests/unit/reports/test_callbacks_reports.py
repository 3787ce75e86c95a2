"""Reports of callbacks: the log, the throughput, and the progress on a terminal or in lines."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_run import all_of, make_run, reporting, walk
from small_runs import FRAMEWORKS, config, make_model, samples

from hvdtrain.commands import report
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.events import Event
from hvdtrain.core.terminal import say
from hvdtrain.core.timeline import StepTotals
from hvdtrain.engine import summary
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.seconds import Throughput
from hvdtrain.reports import progress
from hvdtrain.reports.html import page, story
from hvdtrain.reports.jsonl import Jsonl
from hvdtrain.reports.progress.line import Line, OwnTerminal
from hvdtrain.trainer import Trainer


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


# --- jsonl ---------------------------------------------------------------------------------------------------------

def test_jsonl(run, tmp_path):
    run.config = Config(log_every=4)
    log = reporting(run, Jsonl(run))
    losses = [math.nan if step == 4 else 1.0 / step for step in range(1, 11)]
    for step in walk(run, log, losses=losses):
        if step == 4:
            run.state.outcome.bad_ranks = [2]
            log.on(Event.NON_FINITE, run)
    records = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert [(r["event"], r["step"]) for r in records] == [
        ("start", 0), ("step", 4), ("non_finite", 4), ("eval", 5), ("step", 8), ("eval", 10), ("end", 10)]
    assert records[0]["config"] == run.config.to_dict() and records[0]["world_size"] == 1
    assert (
        records[1]["loss"] is None
        and records[4]["loss"] == 1 / 8
        and set(records[4]["phases_s"]) == set(StepTotals.NAMES)
    )
    assert records[2]["ranks"] == [2] and records[3]["metrics"] == {"loss": 0.5, "accuracy": 0.75}
    assert all(r["time"] > 1e9 for r in records)


def test_jsonl_goes_on_where_a_run_was_resumed(run, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n')
    reporting(run, Jsonl(run)).on(Event.FIT_END, run)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def read(path):
    """Return the records of a log but its remarks, each of them whole."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["event"] != "note"]


@pytest.fixture
def disk(tmp_path):
    """Return a file system of 64 KiB of its own; only root may mount one."""
    root = tmp_path / "disk"
    root.mkdir()
    if not (os.geteuid() == 0 and shutil.which("mount")):
        pytest.skip("only root may mount a file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", root], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield root
    subprocess.run(["umount", root], check=True)


def test_a_full_disk_costs_no_record_and_tears_none(disk, capsys):
    run = make_run(disk, log_every=1)
    reporting(run, Jsonl(run))
    filler = disk / "filler"
    run.record("first")
    for number in range(40):
        if number == 3:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass
        if number == 35:
            filler.unlink()
        run.record("mine", number=number, text="x" * 700)  # lines that do not end where the disk's pages do
        read(disk / "log.jsonl")
    assert [r.get("number") for r in read(disk / "log.jsonl")] == [None, *range(40)]
    said = capsys.readouterr().out
    assert said.count("log.jsonl cannot be written") == 1 == said.count("log.jsonl is written again")
    run.records.close(run)
    assert capsys.readouterr().out == ""


def test_a_disk_that_is_read_only_for_a_while_costs_no_record(disk, capsys):
    run = make_run(disk, log_every=1)
    reporting(run, Jsonl(run))
    for number in range(6):
        if number in (2, 4):
            subprocess.run(["mount", "-o", f"remount,{'ro' if number == 2 else 'rw'}", disk], check=True)
        run.record("mine", number=number)
    assert [r["number"] for r in read(disk / "log.jsonl")] == list(range(6))
    assert capsys.readouterr().out.count("Read-only file system") == 1


def test_a_write_that_stops_in_the_middle_leaves_no_half_line(run, tmp_path, monkeypatch):
    write = os.write
    reporting(run, Jsonl(run))
    room = [100]

    def fills_up(descriptor, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        n = write(descriptor, data[:room[0]])
        room[0] -= n
        return n

    with monkeypatch.context() as patch:
        patch.setattr("hvdtrain.checkpoint.files.os.write", fills_up)
        for number in range(4):
            run.record("mine", number=number)
        assert room == [0] and len(read(tmp_path / "log.jsonl")) == 1
    run.records.close(run)
    assert [r["number"] for r in read(tmp_path / "log.jsonl")] == list(range(4))


def test_a_line_that_a_crash_has_torn_stays_alone(run, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n{"event": "st')
    reporting(run, Jsonl(run))
    run.record("end")
    first, torn, last = (tmp_path / "log.jsonl").read_text().splitlines()
    assert torn == '{"event": "st' and json.loads(last)["event"] == "end"


def test_a_log_that_stays_unwritable_keeps_so_many_records_and_counts_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hvdtrain.reports.jsonl.MOST_WAITING", 5)
    run = make_run(tmp_path / "gone")
    reporting(run, Jsonl(run))
    for number in range(8):
        run.record("mine", number=number)
    (tmp_path / "gone").mkdir()
    run.record("mine", number=8)
    assert [r["number"] for r in read(tmp_path / "gone" / "log.jsonl")] == [4, 5, 6, 7, 8]
    assert capsys.readouterr().out.count("log.jsonl cannot be written") == 1
    run.records.close(run)
    assert "5 records of log.jsonl could not be written and are lost" in capsys.readouterr().out


def test_numbers_of_numpy_are_numbers(run, tmp_path):
    reporting(run, Jsonl(run))
    run.record("mine", a=np.float32(0.5), b=np.float32("nan"), c=[np.int64(3), np.array(2.0)])
    run.records.close(run)
    row = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert (row["a"], row["b"], row["c"]) == (0.5, None, [3, 2.0])


def test_a_record_that_is_not_json_ends_no_run(run, tmp_path, capsys):
    reporting(run, Jsonl(run))
    for _ in range(2):
        run.record("odd", table={(1, 2): 3})
    run.record("mine")
    assert [r["event"] for r in read(tmp_path / "log.jsonl")] == ["mine"]
    assert capsys.readouterr().out.count("a odd record is not JSON") == 1


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_a_directory_that_is_deleted_in_mid_run_costs_the_run_nothing(framework, tmp_path):
    out = tmp_path / "run"

    class Deletes(Callback):
        def step_end(self, run):
            if run.state.cursor.step == 2:
                shutil.rmtree(out)

    settings = config(epochs=1, global_batch=8, out=str(out), log_every=1)
    Trainer(settings).fit(make_model(framework), samples(40), callbacks=[Deletes()])
    assert (out / "completed.json").exists() and (out / "model" / "model.safetensors").exists()


# --- throughput, progress ------------------------------------------------------------------------------------------

def test_throughput_is_that_of_a_window(run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hvdtrain.engine.callbacks.seconds.time.perf_counter", lambda: clock[0])
    meter, seen = Throughput(window=2), []
    meter.on(Event.EPOCH_START, run)
    for step_s in (1.0, 1.0, 4.0, 4.0, 4.0):
        clock[0] += step_s
        run.timeline.totals.step(step_s, 8)
        meter.on(Event.STEP_END, run)
        seen.append(run.state.samples_per_s)
    assert seen == [8.0, 8.0, 16 / 5, 2.0, 2.0]
    clock[0] += 1000  # an evaluation is not training
    meter.on(Event.EPOCH_START, run)
    clock[0] += 1.0
    run.timeline.totals.step(1.0, 8)
    meter.on(Event.STEP_END, run)
    assert run.state.samples_per_s == 8.0


@pytest.mark.parametrize(
    "kind, terminal, launched, made",
    [
        ("off", True, False, []),
        ("plain", True, False, [progress.PlainProgress]),
        ("rich", False, True, [progress.ProgressBar]),
        ("auto", True, False, [progress.ProgressBar]),
        ("auto", False, False, [progress.PlainProgress]),
        ("auto", True, True, [progress.PlainProgress]),
    ],
)
def test_progress_by_kind(monkeypatch, kind, terminal, launched, made):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    kinds = [type(c) for c in progress.make(Config(progress=kind), launched)]
    monkeypatch.undo()
    assert kinds == made


@pytest.mark.parametrize(
    "steps, config, total",
    [
        (5, {"epochs": 3}, 15),
        (5, {"epochs": 3, "max_steps": 7}, 7),
        (5, {"epochs": 1, "max_steps": 7}, 5),
        (None, {"epochs": 3}, None),
        (None, {"max_steps": 7}, 7),
        (5, {"epochs": 0}, None),
    ],
)
def test_steps_of_the_whole_run(tmp_path, steps, config, total):
    run = make_run(tmp_path, steps=steps, **config)
    reporting(run).on(Event.FIT_START, run)
    assert run.records.latest["start"].values["steps"] == total


@pytest.mark.parametrize("steps", [5, None])
def test_lines(tmp_path, capsys, monkeypatch, steps):
    clock = [0.0]
    monkeypatch.setattr("hvdtrain.reports.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("hvdtrain.core.records.time.monotonic", lambda: clock[0])
    run = make_run(tmp_path, steps=steps, epochs=2)
    run.state.samples_per_s = 1234.5
    for _ in walk(run, reporting(run, progress.PlainProgress(seconds=3.0))):
        clock[0] += 1.0
    lines = capsys.readouterr().out.splitlines()
    total = "/10" if steps else ""
    assert lines[0] == f"step 1{total}  epoch 1/2  loss 1.0000  lr 0.1  1,234 samples/s"
    assert lines[1].startswith(f"step 4{total}  epoch 1/2  loss 0.2500") and lines[1].endswith(
        "eta 0:00:06" if steps else "samples/s"
    )
    assert lines[2] == "epoch 1/2  step 5  test loss 0.5000  accuracy 0.7500  1,234 samples/s"
    assert [line.split()[1] for line in lines] == [f"1{total}", f"4{total}", "1/2", f"7{total}", f"10{total}", "2/2"]


@pytest.mark.parametrize("steps", [5, None])
def test_bar(tmp_path, capsys, steps):
    run = make_run(tmp_path, steps=steps, epochs=2)
    all_of(walk(run, reporting(run, progress.ProgressBar(Line(OwnTerminal())))))
    assert "epoch 1/2  step 5  test loss 0.5000  accuracy 0.7500" in capsys.readouterr().out


class Broken:
    """A stdout that takes nothing any more, as after ``| head`` or on a full disk."""

    def __init__(self, error, terminal):
        self.error, self.terminal = error, terminal

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error

    def isatty(self):
        return self.terminal


STDOUTS = {"full": Broken(OSError(28, "No space left on device"), True), "closed": Broken(ValueError("closed"), True),
           "nobody reads": Broken(BrokenPipeError(32, "Broken pipe"), True), "a pipe": Broken(OSError(5, "I/O"), False),
           "none": None}


@pytest.mark.parametrize("stdout", STDOUTS)
@pytest.mark.parametrize("made", [lambda: progress.ProgressBar(Line(OwnTerminal())), progress.PlainProgress])
def test_a_broken_stdout_ends_no_run(tmp_path, monkeypatch, made, stdout):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", STDOUTS[stdout])
    run = make_run(tmp_path, epochs=2)
    progress.make(Config(), False)
    assert len(all_of(walk(run, reporting(run, made())))) == 10
    monkeypatch.setattr(sys, "stdout", STDOUTS[stdout])
    summary.show(run)
    monkeypatch.setattr(sys, "stdout", STDOUTS[stdout])
    say("nothing")


def test_commands_in_advice_are_code_and_all_else_is_escaped():
    shown = page._environment().from_string("{{ said|commands }}").render(
        said="<b>: see python -m hvdtrain doctor -H, or --balance auto")
    assert shown == ('&lt;b&gt;: see <code tabindex="0">python -m hvdtrain doctor -H</code>, or '
                     '<code tabindex="0">--balance auto</code>')
    assert set(page.COMMAND.findall(Path(story.__file__).read_text(encoding="utf-8"))) == {
        "--resume auto", "--restarts 3", "python -m hvdtrain plan", "python -m hvdtrain doctor -H"}


@pytest.mark.parametrize("out", [".", "pipe"])
def test_the_report_replaces_files_only(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(UserError, match="is not a file"):
        report.main([str(tmp_path), "--out", out])


def test_a_report_goes_through_a_link(tmp_path, monkeypatch, capsys):
    (tmp_path / "link").symlink_to("page.html")
    monkeypatch.setattr("hvdtrain.reports.html.write", lambda *runs, out: page.put(out, "page"))
    report.main([str(tmp_path), "--out", str(tmp_path / "link")])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "page.html").read_text() == "page"
    assert capsys.readouterr().out == f"{tmp_path / 'link'}\n"
