"""Readings of a rank's host: its process, made-up GPUs, its memory by kind, and where a run runs."""

import doctest
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import CLASSES, FRAMEWORKS, config, fitted, lockstep, make_model, samples, solo

from hvdtrain.cluster.machine import usage
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.units import KINDS
from hvdtrain.engine import machine as environment
from hvdtrain.engine.callbacks import system
from hvdtrain.engine.machine import Reader

STATUS = "Name:\tpython\nVmRSS:\t  2048 kB\nRssShmem:\t 4 kB\nThreads:\t7\nVmSwap:\t0 kB\n"


def test_a_process_is_read_from_the_kernel(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(STATUS)
    walls, busy = iter([0.0, 2.0, 2.0]), iter([1.0, 4.0, 4.0])
    read = usage.Process(str(tmp_path), lambda: next(walls), lambda: next(busy))
    assert read.reading() == {"rss_bytes": 2 << 20, "swap_bytes": 0, "threads": 7, "cpu_percent": 150.0,
                              "quota_percent": None}
    assert read.reading()["cpu_percent"] is None  # no time has passed


@pytest.mark.parametrize("group, folder", [("0::/a/b", "a"), ("3:cpu,cpuacct:/a", "cpu,cpuacct/a"),
                                           ("4:memory:/a\n0::/", ".")], ids=["version 2", "version 1", "no quota"])
def test_a_quota_that_is_used_up_is_told(tmp_path, group, folder):
    """The outer group has the quota; the inner one of version 2 counts no periods."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(group + "\n")
    (tmp_path / folder / "b").mkdir(parents=True)
    (tmp_path / folder / "b/cpu.stat").write_text("usage_usec 5\n")
    stat, counts = tmp_path / folder / "cpu.stat", folder != "."
    stat.write_text("nr_periods 100\nnr_throttled 50\n" if counts else "usage_usec 9\n")
    read = usage.Process(str(tmp_path), cgroup=str(tmp_path))
    assert read.reading()["quota_percent"] is None  # no period has passed
    stat.write_text("nr_periods 300\nnr_throttled 200\n" if counts else "usage_usec 10\n")
    assert read.reading()["quota_percent"] == (75.0 if counts else None)


def test_what_a_kernel_does_not_tell_is_none(tmp_path):
    found = usage.Process(str(tmp_path)).reading()
    assert [found[name] for name in ("rss_bytes", "swap_bytes", "threads")] == [None] * 3


class Nvml:
    """A made-up library with two GPUs: the second one is old, and tells neither power nor why its clock is low."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, driver=True):
        self.driver = driver

    def nvmlInit(self):
        if not self.driver:
            raise OSError("no driver")

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-b": 1}[name]

    def nvmlSystemGetDriverVersion(self):
        return b"580.1"

    def nvmlDeviceGetMemoryInfo(self, i):
        return SimpleNamespace(total=(i + 1) * 1000, used=100)

    def nvmlDeviceGetUtilizationRates(self, i):
        return SimpleNamespace(gpu=90 - i)

    def nvmlDeviceGetClockInfo(self, i, which):
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, i, which):
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, i):
        if i:
            raise OSError("not supported")
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetTemperature(self, i, sensor):
        return 71

    def nvmlDeviceGetPowerUsage(self, i):
        if i:
            raise OSError("not supported")
        return 350500


def test_made_up_gpus_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    both = usage.Gpus({})
    first, second = both.readings()
    assert first == {"utilisation_percent": 90, "sm_mhz": 1200, "most_sm_mhz": 1980, "power_w": 350.5,
                     "throttled": ["power cap", "hardware thermal"], "temperature_c": 71, "used_bytes": 100}
    assert (second["power_w"], second["throttled"], second["utilisation_percent"]) == (None, None, 89)
    assert both.driver() == "580.1"
    assert [gpu["utilisation_percent"] for gpu in usage.Gpus({"CUDA_VISIBLE_DEVICES": "GPU-b"}).readings()] == [89]
    assert usage.total_bytes({"CUDA_VISIBLE_DEVICES": "1"}) == 2000 and usage.total_bytes({}) == 1000


@pytest.mark.parametrize("library", [Nvml(driver=False), None], ids=["no driver", "no library"])
def test_without_gpus_there_are_no_readings(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    gpus = usage.Gpus({})
    assert (gpus.readings(), gpus.driver(), usage.total_bytes({})) == ([], None, 0) and gpus.why


def test_words_of_modules():
    assert doctest.testmod(usage).attempted and not doctest.testmod(usage).failed
    assert doctest.testmod(environment).attempted and not doctest.testmod(environment).failed


def test_what_differs_from_the_defaults():
    changed = Config(model_args={"depth": 2}, exchange=ExchangeConfig(bucket_mb=4.0))
    assert environment.differs(changed) == {"model_args.depth": 2, "exchange.bucket_mb": 4.0}
    assert environment.differs(Config()) == {}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_memory_by_kind_is_that_of_the_tensors(framework):
    run = fitted(solo(config(epochs=1, global_batch=8), make_model(framework), samples(16)))
    read = Reader(run).reading(run)
    held = read["memory"]
    weights = (12 * 16 + 16 + 16 * CLASSES + CLASSES) * 4
    assert set(held) == set(KINDS) and read["rss_bytes"] > 1e7 and read["threads"] >= 1
    assert held["parameters"] == weights and held["activations"] is None and held["workspace"] > 0
    assert held["gradients"] == (weights if framework == "torch" else None)


class Seen:
    """A placeholder for a run's records that keeps them."""

    def __init__(self):
        self.records = []

    def __call__(self, event, **values):
        self.records.append((event, values))


def test_all_ranks_are_read_when_rank_0_says_so(monkeypatch):
    """Rank 0's clock is a second a call here, so that a reading is due every few steps; the others never ask."""
    seen, seconds = Seen(), iter(range(10_000))

    def work(run):
        monkeypatch.setattr(run, "record", seen if run.control.rank == 0 else lambda event, **values: None)
        own = next(c for c in run.callbacks if isinstance(c, system.System))
        own._clock = (lambda: float(next(seconds))) if run.control.rank == 0 else (lambda: 0.0)
        fitted(run)
        return own._reader

    done = lockstep(2, config(epochs=2, global_batch=8), lambda rank: make_model("numpy"), samples(80), work)
    assert done == [None, None]
    found = [values["ranks"] for event, values in seen.records if event == "system"]
    assert len(found) >= 3 and all(len(ranks) == 2 for ranks in found)
    events = [event for event, _ in seen.records]
    assert events.index("environment") < events.index("system")
    told = dict(seen.records)["environment"]
    assert told["versions"]["numpy"] == np.__version__ and told["differs"]["global_batch"] == 8
    assert [host["ranks"] for host in told["hosts"]] and len(told["devices"]) == 2
    assert os.environ.get("HVDLAUNCH_ATTEMPT") or told["attempt"] is None
