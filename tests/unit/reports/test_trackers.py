"""Trackers: what they are given, what their tools read back, and that none of them ends or holds up a run."""

import csv
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import all_of, make_run, reporting, walk
from small_runs import config, fitted, lockstep, make_model, samples

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import Config
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Record
from hvdtrain.core.records import numbers, settings
from hvdtrain.engine.assemble import assemble
from hvdtrain.reports import trackers
from hvdtrain.reports import trackers as beside
from hvdtrain.reports.trackers.csv import Csv
from hvdtrain.reports.trackers.prometheus import HOST, Prometheus

FILES = sorted(Path(trackers.__file__).parent.glob("[a-z]*.py"))


def record(event, step=3, **values):
    return Record(event, step, 1000.5, values)


def tracked(tmp_path, *entries, run=None, **changes):
    """Return a run of ten steps and two evaluations, told to these trackers."""
    run = run or make_run(tmp_path, log_every=5, trackers=list(entries), **changes)
    all_of(walk(run, reporting(run, *trackers.make(run))))
    run.records.close(run)
    return run


# --- what is read out of records -----------------------------------------------------------------------------------

def test_numbers_by_name_and_rank():
    assert numbers(record("step", loss=0.5, grad_norm=None, samples=8, phases_s={"data": 1.0}, epoch=1)) == {
        "train/loss": 0.5, "train/epoch": 1.0}
    assert numbers(record("eval", epoch=1, metrics={"accuracy": 0.75}, samples_per_s=9.0)) == {
        "test/epoch": 1.0, "test/accuracy": 0.75}
    row = {"rss_bytes": 7, "memory": {"gradients": 4}, "throttled": ["power"], "more_gpus": [{"power_w": 1.0}],
           "power_w": None}
    assert numbers(record("system", ranks=[row, {"rss_bytes": 8}])) == {
        "system/rss_bytes/rank0": 7.0, "system/memory/gradients/rank0": 4.0, "system/rss_bytes/rank1": 8.0}
    seconds = record("seconds", from_step=0, window_s=4.0, ranks=[{"input": 1.0, "wait": 3.0}, {}], waits=[[0, 1, 3.0]])
    assert numbers(seconds) == {"percent_of_time/input/rank0": 25.0, "percent_of_time/wait/rank0": 75.0}


def test_an_event_of_a_users_own_is_tracked_and_words_are_not():
    assert numbers(record("mine", temperature=21.5, on=True, word="x", of_ranks=[1, 2], huge=10**400)) == {
        "mine/temperature": 21.5, "mine/of_ranks/rank0": 1.0, "mine/of_ranks/rank1": 2.0}
    assert numbers(record("note", text="x")) == {} == numbers(record("clocks", ranks=[{"offset_s": 1.0}]))


def test_settings_are_the_configuration_and_the_world():
    found = settings(record("start", config=Config(lr=0.5).to_dict(), world_size=4, hosts="1 host", framework="numpy"))
    assert found["lr"] == 0.5 and found["optimizer.name"] == "auto" and found["world_size"] == 4
    assert found["metrics"] == "['accuracy']" and found["deterministic"] is False
    assert settings(record("environment", versions={"numpy": "2"}, differs={"lr": 1}, mpi=None, hosts=[{}])) == {
        "versions.numpy": "2", "mpi": "None"}
    assert settings(record("step", loss=1.0)) == {}


# --- which there are -----------------------------------------------------------------------------------------------

def test_each_is_one_short_file():
    names = ["csv", "mlflow", "prometheus", "tensorboard", "wandb"]
    assert [path.stem for path in FILES] == trackers.choices() == names
    assert max(path.read_text().count("\n") for path in FILES) <= 70


@pytest.mark.parametrize("entries, words", [
    (["tensorbord"], "did you mean 'tensorboard'"),
    (["csv", "csv"], "'csv' twice"),
    (["csv:x"], "expected csv"),
    (["prometheus:metrics.txt"], "expected prometheus, prometheus:PORT or prometheus:FILE.prom"),
    (["prometheus:65536"], "expected prometheus, prometheus:PORT or prometheus:FILE.prom"),
    (["prometheus:0"], "expected prometheus, prometheus:PORT or prometheus:FILE.prom"),
    (["wandb:a/b"], "wandb:PROJECT"),
])
def test_what_is_no_tracker_is_refused(entries, words):
    with pytest.raises(UserError, match=words):
        Config(trackers=entries).check()


def test_a_package_that_is_not_installed_is_named_on_all_ranks(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # what an offline run of W&B leaves in the current directory is no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(UserError, match="trackers has wandb, and wandb is not installed.*Run pip install wandb, or"):
        trackers.check_installed(["wandb"])
    trackers.check_installed(["csv"])


def test_on_two_ranks_the_first_alone_tracks_and_what_it_lacks_ends_both(tmp_path):
    setting = config(global_batch=8, max_steps=6, log_every=2, out=str(tmp_path / "run"), trackers=["csv"])
    lockstep(2, setting, lambda rank: make_model("numpy"), samples(24), fitted)
    assert [row["step"] for row in table(tmp_path / "run" / "csv" / "train.csv")] == ["2", "4", "6"]
    lacking = replace(setting, out=str(tmp_path / "no"), trackers=["no/such.py:make"])
    told = []

    def refused(control, wire):
        with pytest.raises(UserError, match="trackers: there is no file no/such.py") as error:
            assemble(lacking, make_model("numpy"), samples(24), control, wire)
        told.append(str(error.value))

    LockstepWorld(2).run(refused, timeout_s=30.0)
    assert len(told) == 2 and told[0] == told[1] and not (tmp_path / "no").exists()


# --- each of them --------------------------------------------------------------------------------------------------

def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_goes_on_after_a_crash_and_takes_new_columns(tmp_path):
    run = tracked(tmp_path, "csv")
    folder = tmp_path / "csv"
    assert [(row["step"], row["loss"]) for row in table(folder / "train.csv")] == [("5", "0.2"), ("10", "0.1")]
    assert [(row["step"], row["accuracy"]) for row in table(folder / "test.csv")] == [("5", "0.75"), ("10", "0.75")]
    assert {"setting": "lr", "value": "0.002"} in table(folder / "settings.csv")
    with (folder / "train.csv").open("a") as file:
        file.write("1001.5,11,0.0,0.0")  # and then the process was killed
    again = Csv(run, "")
    for step, values in ((11, {"loss": 0.25}), (12, {"loss": 0.2, "grad_norm": 2.0}), (13, {"loss": 0.125})):
        again.write(record("step", step, **values))
    rows = table(folder / "train.csv")
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in rows[2:]] == [
        ("11", "0.25", ""), ("12", "0.2", "2.0"), ("13", "0.125", "")]


def exposed(text):
    """{name{labels}: value} of Prometheus' text format."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines() if not line.startswith("#")}


def test_prometheus_writes_a_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.reports.trackers.prometheus.APART_S", 0.0)
    run = tracked(tmp_path, "prometheus", f"prometheus:{tmp_path}/other.prom")
    text = (tmp_path / "metrics.prom").read_text()
    assert text == (tmp_path / "other.prom").read_text()
    found = exposed(text)
    label = f'{{run="{tmp_path.name}"}}'
    assert found[f"hvdtrain_train_loss{label}"] == 0.1 and found[f"hvdtrain_test_accuracy{label}"] == 0.75
    assert found[f"hvdtrain_running{label}"] == 0 and found[f"hvdtrain_step{label}"] == 10
    assert text.count("# TYPE hvdtrain_train_loss gauge\n") == 1 and ',lr="0.002",' in text
    assert not list(tmp_path.glob(".*")) and not run.notes


def test_prometheus_answers_on_the_loopback_address_while_the_run_goes_on(tmp_path):
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    run = make_run(tmp_path)
    tracker = Prometheus(run, str(port))
    try:
        tracker.write(record("system", ranks=[{"rss_bytes": 7}, {"rss_bytes": 8}]))
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
            found = exposed(answer.read().decode())
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        with pytest.raises(OSError, match="in use"):
            Prometheus(run, str(port))
    finally:
        tracker.close()
    assert found[f'hvdtrain_system_rss_bytes{{rank="1",run="{tmp_path.name}"}}'] == 8
    with pytest.raises(OSError):
        socket.create_connection((HOST, port), timeout=10)


def test_words_that_prometheus_must_have_quoted(tmp_path):
    out = tmp_path / 'a "b"\\'
    out.mkdir()
    tracker = Prometheus(make_run(out), str(tmp_path / "x.prom"))
    tracker.write(record("1 f@5", value=float("inf")))
    assert '\nhvdtrain_1_f_5_value{run="a \\"b\\"\\\\"} +Inf\n' in (tmp_path / "x.prom").read_text()


TENSORBOARD = """
import json, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_trackers import record, tracked
from hvdtrain.reports.trackers.tensorboard import Tensorboard
out = Path(sys.argv[1])
run = tracked(out, "tensorboard")
again = Tensorboard(run, "")
again.write(record("start", 7))  # it resumes from a checkpoint of step 7
again.write(record("step", 8, loss=0.5))
again.close()
imported = sorted({"tensorflow", "torch", "keras"} & set(sys.modules))
sys.modules["tensorboard.compat.notf"] = sys.modules["json"]  # so that the reader does without TensorFlow too
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata, plugin_data_pb2
read = EventAccumulator(str(out / "tensorboard")).Reload()
content = read.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
print(json.dumps([imported, {tag: [[e.step, e.value] for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]},
                  hparams["lr"].number_value, hparams["optimizer.name"].string_value, run.notes]))
"""


def test_tensorboard_reads_the_curves_and_no_tensorflow_is_imported(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = subprocess.run([sys.executable, "-c", TENSORBOARD, str(tmp_path), str(Path(__file__).parent)], text=True,
                          timeout=60, capture_output=True, cwd=ROOT.parent / "tests" / "fixtures")
    assert done.returncode == 0, done.stderr
    imported, curves, lr, optimizer, notes = json.loads(done.stdout.splitlines()[-1])
    assert imported == [] == notes and lr == 0.002 and optimizer == "auto"
    assert curves["train/loss"] == [[5, pytest.approx(0.2)], [8, 0.5]], "step 10 of the lost part is forgotten"
    assert curves["test/accuracy"][0] == [5, 0.75]


def test_mlflow_keeps_one_run_in_a_folder_over_a_resume(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hvdtrain.reports.trackers.mlflow.APART_S", 0.0)
    run = tracked(tmp_path, "mlflow")
    run.config = replace(run.config, lr=0.5)
    run.state.cursor = run.state.cursor.advance(8)
    tracked(tmp_path, run=run)
    assert not run.notes
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("hvdtrain").experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == tmp_path.name
    assert found.data.params["lr"] == "0.002" and found.data.tags["lr"] == "0.5"
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in losses][:2] == [(5, 0.2), (10, 0.1)] and len(losses) > 2


@pytest.mark.slow
def test_wandb_logs_offline_without_a_key_and_keeps_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "run"
    out.mkdir()
    run = tracked(out, "wandb:mine")
    run.state.cursor = run.state.cursor.advance(8)
    tracked(out, run=run)
    assert not run.notes
    own_id = (out / "wandb.id").read_text()
    logs = sorted((out / "wandb").glob(f"offline-run-*-{own_id}*/*.wandb"))
    content = b"".join(path.read_bytes() for path in logs)
    assert len(logs) == 2 and b"train/loss" in content and b"mine" in content and b"optimizer.name" in content


# --- failures ------------------------------------------------------------------------------------------------------

class Trouble:
    """Fails or is slow on purpose."""

    def __init__(self, fails_at=0, waits_for=None):
        self.got, self.closed, self.fails_at, self.waits_for = [], False, fails_at, waits_for

    def write(self, record):
        if self.waits_for is not None:
            self.waits_for.wait(30)
        self.got.append(record.event)
        if len(self.got) == self.fails_at:
            raise ConnectionError("the server is gone")

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_said_once_and_closed(tmp_path, capsys):
    run, trouble = make_run(tmp_path), Trouble(fails_at=2)
    reporting(run, beside.Beside("tracker mine", lambda: trouble, "1 step"))
    for number in range(2000):
        run.record("mine", number=number)
        if trouble.closed and number > 3:
            break
        time.sleep(0.01)
    run.record("mine")
    run.records.close(run)
    text = "tracker mine fails (ConnectionError: the server is gone); training continues without it"
    assert run.notes == [text] and capsys.readouterr().out.count("server is gone") == 1
    assert trouble.got == ["mine", "mine"]


def test_what_cannot_be_made_is_said_at_the_latest_at_the_end(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def make(run):\n    return 3\n")
    run = tracked(tmp_path, f"{path}:make")
    assert len(run.notes) == 1 and "its callable returned a int without write(record) and close()" in run.notes[0]


def test_a_library_that_ends_the_program_ends_no_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import sys\ndef make(run):\n    sys.exit(9)\n")
    run = tracked(tmp_path, f"{path}:make")
    assert len(run.notes) == 1 and "fails (RuntimeError: SystemExit 9); training continues without it" in run.notes[0]


def test_a_slow_tracker_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "MOST_WAITING", 5)
    goes_on = threading.Event()
    run, trouble = make_run(tmp_path), Trouble(waits_for=goes_on)
    reporting(run, beside.Beside("tracker mine", lambda: trouble, "1 step", close_s=0.2))
    for number in range(20):
        run.record("mine", number=number)
    run.records.close(run)
    assert ["still writes 0.2 s after the end and is abandoned" in note for note in run.notes] == [True]
    goes_on.set()


def test_steps_that_come_too_soon_for_a_costly_tracker_are_left_out():
    got = Trouble()
    report = beside.Beside("tracker mine", lambda: got, "", apart_s=1.0)
    for time_s, event in ((0.0, "step"), (0.5, "eval"), (0.6, "step"), (1.0, "step"), (1.5, "step"), (1.6, "end")):
        report.write(Record(event, 1, time_s, {}))
    report.close()
    assert got.got == ["step", "eval", "step", "end"]


def test_records_that_a_slow_tracker_lacks_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "MOST_WAITING", 5)
    goes_on = threading.Event()
    run, trouble = make_run(tmp_path), Trouble(waits_for=goes_on)
    reporting(run, beside.Beside("tracker mine", lambda: trouble, "1 step"))
    for number in range(20):
        run.record("mine", number=number)
    goes_on.set()
    run.records.close(run)
    lost = 20 - len(trouble.got)
    assert lost >= 14 and trouble.closed and f"was too slow for {lost} records" in run.notes[0]
