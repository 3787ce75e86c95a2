"""``sys.exit()`` in a callable of the user's: one message that names it, status 1; elsewhere it keeps its meaning."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import config, make_model, samples

from hvdtrain.cluster.exit import end, run_guarded
from hvdtrain.config import DataConfig
from hvdtrain.core.errors import ExitCalled
from hvdtrain.core.launcher import SOLO
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.trainer import Trainer

HERE = r"\(\S*test_exit_calls.py, line \d+\)"


class Leaves(Callback):
    """A callback that ends the program."""

    def step_end(self, run):
        sys.exit(3)


class Source:
    """Data that ends the program when it is read for the ``at``-th time."""

    def __init__(self, at):
        self.left = at

    def __len__(self):
        return 40

    def fetch(self, indices_n):
        self.left -= 1
        if self.left == 0:
            leave()
        return np.zeros((len(indices_n), 12), np.float32), np.zeros(len(indices_n), np.int64)


def leave():
    raise SystemExit


def load(split):
    """Stand for a data callable that wants arguments of its own."""
    import argparse

    argparse.ArgumentParser(prog="load").parse_args(["--samples", "many"])


def build():
    """Stand for a model callable."""
    sys.exit("no weights")


def leaves_in_forward(framework):
    """Return a model that ends the program when it computes."""
    if framework == "torch":
        import torch

        class Leaving(torch.nn.Linear):
            def forward(self, x):
                sys.exit(4)

        return Leaving(12, 5)
    import keras

    class Leaving(keras.layers.Dense):
        armed = False

        def call(self, x):
            if self.armed:
                sys.exit(4)
            return super().call(x)

    layer = Leaving(5)
    model = keras.Sequential([keras.Input((12,)), layer])
    layer.armed = True
    return model


def fit(network=None, samples_=samples(40), callbacks=(), **changes):
    """Return an epoch of five steps; ``changes`` of the configuration."""
    return Trainer(config(epochs=1, global_batch=8, **changes)).fit(network, samples_, callbacks=callbacks)


PLACES = {
    "callback": (lambda: fit(make_model("numpy"), callbacks=[Leaves()]), r"Leaves\.step_end", "status 3"),
    "fetch": (lambda: fit(make_model("numpy"), Source(4)), r"Source\.fetch", "status 0"),
    "fetch ahead": (lambda: fit(make_model("numpy"), Source(4), data=DataConfig(prefetch=2)), r"Source\.fetch",
                    "status 0"),
    "data callable": (lambda: fit(make_model("numpy"), None, data=DataConfig(f"{__file__}:load")), "load", "status 2"),
    "model callable": (lambda: fit(None, model=f"{__file__}:build"), "build", "status 1 and the message 'no weights'"),
    "forward in torch": (lambda: fit(leaves_in_forward("torch")), r"\S*Leaving\.forward", "status 4"),
    "call in Keras": (lambda: fit(leaves_in_forward("tensorflow")), r"\S*Leaving\.call", "status 4"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_callable_and_its_status_are_named(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if place.endswith(("torch", "Keras")):
        pytest.importorskip("torch" if place.endswith("torch") else "tensorflow")
    make, name, status = PLACES[place]
    with pytest.raises(ExitCalled, match=rf"^{name} {HERE} ended the program with {status} in the middle of a run; "):
        make()
    assert not (tmp_path / "runs").exists() or not list(tmp_path.rglob("completed.json"))


def test_it_ends_a_process_with_status_1_and_one_message(capfd):
    assert run_guarded(lambda: fit(make_model("numpy"), None, data=DataConfig(f"{__file__}:load")), SOLO) == 1
    said = capfd.readouterr().err
    assert said.count("hvdtrain: load (") == 1 and "Traceback" not in said


def test_sys_exit_outside_of_a_run_keeps_its_meaning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def script():
        fit(make_model("numpy"))
        sys.exit(5)

    assert run_guarded(script, SOLO) == 5


def test_a_signal_handler_still_ends_a_single_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def handler(number, frame):
        sys.exit(128 + number)

    class Signalled(Callback):
        def step_end(self, run):
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit) as left:
            fit(make_model("numpy"), callbacks=[Signalled()])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert left.value.code == 128 + signal.SIGUSR1


def test_an_interrupt_stays_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Interrupts(Callback):
        def step_end(self, run):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(make_model("numpy"), callbacks=[Interrupts()])


def test_a_message_that_nobody_reads_changes_no_status(monkeypatch):
    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=lambda: None))
    assert end(ExitCalled("x ended the program"), SOLO) == 1


LAST = """
import atexit, gc, os, threading, time
from hvdtrain.cluster import boot
from hvdtrain.core.launcher import launch_facts

atexit.register(lambda: print(gc.get_freeze_count() > 1000))
boot.start_control(launch_facts(os.environ), 10.0)
"""
FILE = """
class Cycle:
    def __init__(self):
        self.own, self.file = self, open("rows.csv", "w")
        self.file.write("1,2")


cycle = Cycle()
"""
BLOCKED = """
pipe = open(os.pipe()[1], "wb")
threading.Thread(target=lambda: pipe.write(bytes(1 << 20)), daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("more, skips", [("", True), (FILE, False), (BLOCKED, False)], ids=("none", "file", "blocked"))
def test_a_process_ends_without_collections_and_loses_no_data(more, skips, tmp_path):
    """Nor waits for a thread that is blocked in a write."""
    done = subprocess.run([sys.executable, "-c", LAST + more], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == f"{skips}\n", done.stderr
    if more == FILE:
        assert (tmp_path / "rows.csv").read_text() == "1,2", "only the garbage collector closes a file in a cycle"
