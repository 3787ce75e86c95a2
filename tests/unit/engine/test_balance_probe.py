"""The probe with made-up devices: what is timed, what an out-of-memory means, and what is remembered."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.control import SoloControl
from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.machine import memory
from hvdtrain.cluster.topology import HostRanks
from hvdtrain.config import Config, RebalanceConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import balance_probe as cache
from hvdtrain.engine import balance_probe as probe
from hvdtrain.planning.linear import LinearTime, least


class Device:
    """Trials advance a clock of its own by ``line``, and fail above ``room`` samples."""

    def __init__(self, line, room=10**9, per_sample=10, kind="cuda"):
        self.line, self.room, self.per_sample, self.now, self.tried = line, room, per_sample, 0.0, []
        self.facts, self.to_come = DeviceFacts(kind, "made up", "sm_80", 1000), 0

    def trial(self, batch):
        self.tried.append(batch)
        if batch > self.room:
            raise MemoryError
        self.now += self.line.seconds(batch, 1)

    def backend(self):
        return SimpleNamespace(out_of_memory=lambda error: isinstance(error, MemoryError), peak_bytes=self.peak,
                               hold_bytes=lambda n: None, free_cached=lambda: None)

    def peak(self, work):
        work()
        return 100 + self.per_sample * self.tried[-1]


def run_of(device, monkeypatch, **config):
    monkeypatch.setattr(probe.time, "perf_counter", lambda: device.now)
    config.setdefault("rebalance", RebalanceConfig(probe_cache=False))
    settings = Config(**{"global_batch": 64, **config})
    return SimpleNamespace(
        config=settings, spelled=settings, control=SoloControl("here"), devices=[device.facts],
        parts=SimpleNamespace(stage=SimpleNamespace(trial=device.trial),
                              optimizer=SimpleNamespace(bytes_to_come=lambda: device.to_come)),
        feed=SimpleNamespace(sample=lambda n, cursor: n, samples=None), state=SimpleNamespace(cursor=None),
        topology=SimpleNamespace(host_of=lambda rank: HostRanks("here", (0,), 1)))


def test_the_line_and_the_ceiling_are_found(monkeypatch):
    device = Device(LinearTime(0.01, 0.001))
    (speed,) = probe.probe(run_of(device, monkeypatch, global_batch=32), device.backend())
    assert speed.line.a_s == pytest.approx(0.01) and speed.line.c_s == pytest.approx(0.001)
    assert speed.sizes == (16, 32) and not speed.remembered
    assert speed.ceiling == (900 - 100) // 10, "nine tenths of 1000 bytes, 100 of them the model's"
    device.to_come = 300
    assert probe.probe(run_of(device, monkeypatch, global_batch=32), device.backend())[0].ceiling == 50


def test_a_size_that_would_have_the_kernel_end_the_process_is_not_tried(monkeypatch):
    device = Device(LinearTime(0.01, 0.001), kind="cpu")
    monkeypatch.setattr(memory, "host_peak_bytes", device.peak)
    for budget, sizes, ceiling in ((800, (32, 64), 70), (5000, (32, 64, 128), 490)):
        monkeypatch.setattr(memory, "host_budget_bytes", lambda local, budget=budget: budget)
        monkeypatch.setattr(probe, "sizes_of", lambda share, n, limit: [32, 64, 128])
        (speed,) = probe.probe(run_of(device, monkeypatch, global_batch=64), device.backend())
        assert speed.sizes == sizes and speed.ceiling == ceiling


def test_out_of_memory_is_met_and_backed_off(monkeypatch):
    device = Device(LinearTime(0.01, 0.001), room=40)
    (speed,) = probe.probe(run_of(device, monkeypatch), device.backend())
    assert speed.sizes == (32,) and speed.ceiling == 32
    for room, sizes in ((20, (8, 16)), (3, (2,)), (1, (1,))):
        small = Device(LinearTime(0.01, 0.001), room=room)
        (speed,) = probe.probe(run_of(small, monkeypatch), small.backend())
        assert (speed.sizes, speed.ceiling) == (sizes, max(sizes)), "halves and quarters of 32"
    with pytest.raises(UserError, match="out of memory with a micro-batch of 1 on rank 0"):
        none = Device(LinearTime(0.01, 0.001), room=0)
        probe.probe(run_of(none, monkeypatch), none.backend())


def test_a_size_that_runs_out_while_it_is_timed_is_left_out(monkeypatch):
    device = Device(LinearTime(0.01, 0.001))
    run = run_of(device, monkeypatch)
    trial = run.parts.stage.trial

    def later(batch):
        if batch == 64 and 64 in device.tried:
            raise MemoryError
        trial(batch)

    run.parts.stage.trial = later
    (speed,) = probe.probe(run, device.backend())
    assert speed.sizes == (32,) and speed.ceiling == 32


def test_other_errors_pass(monkeypatch):
    device = Device(LinearTime(0.01, 0.001))
    run = run_of(device, monkeypatch)
    run.parts.stage.trial = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        probe.probe(run, device.backend())


def test_verified_goes_down_until_it_works(monkeypatch):
    device = Device(LinearTime(0.01, 0.001), room=50)
    run = run_of(device, monkeypatch)
    assert probe.verified(run, device.backend(), 100, 16) == 40, "100, 80, 64, 51, 40"
    assert device.tried == [100, 80, 64, 51, 40]
    assert probe.verified(run, device.backend(), 16, 16) == 16


@given(share=st.integers(1, 10_000), n=st.integers(1, 20_000), limit=st.integers(0, 100))
def test_sizes_are_within_batch_and_limit(share, n, limit):
    sizes = probe.sizes_of(share, n, limit)
    assert sizes == sorted(set(sizes)) and sizes
    assert all(min(2, limit or n, n) <= b <= min(limit or n, n) for b in sizes)


def test_a_limit_of_the_user_holds(monkeypatch):
    device = Device(LinearTime(0.01, 0.001))
    run = run_of(device, monkeypatch, rebalance=RebalanceConfig(probe_cache=False, max_micro_batch=[8]), micro_batch=20)
    (speed,) = probe.probe(run, device.backend())
    assert max(device.tried) == 8 and speed.ceiling == 8


def test_what_was_measured_is_reused_if_one_measurement_confirms_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "key", lambda run, sample: "k")
    first = Device(LinearTime(0.01, 0.001))
    options = {"rebalance": RebalanceConfig(), "global_batch": 32}
    (measured,) = probe.probe(run_of(first, monkeypatch, **options), first.backend())
    again = Device(LinearTime(0.0105, 0.00105))
    (known,) = probe.probe(run_of(again, monkeypatch, **options), again.backend())
    assert known.remembered and again.tried.count(16) == 1, "that one for its memory"
    assert known.line.c_s == pytest.approx(0.00105), "corrected by the measurement that confirmed it"
    assert measured.line.c_s == pytest.approx(0.001)
    limited = Device(LinearTime(0.01, 0.001))
    options["rebalance"] = RebalanceConfig(max_micro_batch=[4])
    (less,) = probe.probe(run_of(limited, monkeypatch, **options), limited.backend())
    assert not less.remembered and less.ceiling == 4 and max(limited.tried) == 4
    options["rebalance"] = RebalanceConfig()
    other = Device(LinearTime(0.02, 0.002))
    (anew,) = probe.probe(run_of(other, monkeypatch, **options), other.backend())
    assert not anew.remembered and anew.line.c_s == pytest.approx(0.002) and anew.ceiling == 80


def test_out_of_memory_while_confirming_is_met_like_any(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "key", lambda run, sample: "k")
    options = {"rebalance": RebalanceConfig(), "global_batch": 32}
    roomy = Device(LinearTime(0.01, 0.001))
    probe.probe(run_of(roomy, monkeypatch, **options), roomy.backend())
    tight = Device(LinearTime(0.01, 0.001), room=20)
    (speed,) = probe.probe(run_of(tight, monkeypatch, **options), tight.backend())
    assert not speed.remembered and speed.ceiling == 16


# --- the file ----------------------------------------------------------------------------------------------

TIMES = (4, 8), (0.014, 0.018)


def test_times_come_back_from_their_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.load("a") is None
    cache.save("a", *TIMES)
    assert cache.load("a") == TIMES
    assert [p.name for p in (tmp_path / "hvdtrain" / "probe").iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", "null", '"x"', "9" * 5000, "[" * 5000,
                                  json.dumps({"sizes": [], "seconds": []}), json.dumps({"sizes": [1], "seconds": []}),
                                  json.dumps({"sizes": [-1], "seconds": [1]}),
                                  json.dumps({"sizes": [1], "seconds": ["x"]}),
                                  json.dumps({"sizes": [1], "seconds": [10**400]}),
                                  '{"sizes": [1], "seconds": [NaN]}', '{"sizes": [1.5], "seconds": [1]}'])
def test_a_damaged_file_is_as_none(text, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.save("a", *TIMES)
    (tmp_path / "hvdtrain" / "probe" / "a.json").write_text(text)
    assert cache.load("a") is None


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "hvdtrain").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.save("a", *TIMES)
    assert cache.load("a") is None


def test_a_ceiling_is_known_to_runs_with_no_more_room(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.ceiling("a", "adam", 1000) == 0
    cache.save_ceiling("a", "adam", 1000, 12)
    cache.save("a", *TIMES)
    assert cache.ceiling("a", "adam", 1040) == 12 and cache.load("a") == TIMES
    assert cache.ceiling("a", "adam", 2000) == cache.ceiling("a", "sgd", 1000) == 0
    (tmp_path / "hvdtrain" / "probe" / "a-memory.json").write_text('{"micro_batch": "12"}')
    assert cache.ceiling("a", "adam", 1000) == 0


# --- memory ------------------------------------------------------------------------------------------------

def test_the_ceiling_is_on_the_line_through_two_peaks():
    assert memory.ceiling((10, 20), (200, 300), 500) == 40
    assert memory.ceiling((10, 20), (200, 300), 150) == 10, "it did run"
    assert memory.ceiling((10, 20), (300, 300), 500) == memory.ceiling((10, 10), (1, 2), 5) == 0
    assert memory.ceiling((10, 20), (200, 300), 0) == 0
    assert least(0, 0) == 0 and least(0, 5, 3) == 3


def test_the_host_and_its_control_group_tell_what_is_left(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "group"
    (proc / "self").mkdir(parents=True)
    (group / "memory").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (proc / "self" / "status").write_text("VmHWM:\t 150 kB\nVmRSS:\t  100 kB\n")
    assert memory.host_budget_bytes(2, str(proc), str(group)) == 1024 * 100 + int(0.8 * 4000 * 1024 / 2)
    (group / "memory" / "memory.limit_in_bytes").write_text("204800\n")
    (group / "memory" / "memory.usage_in_bytes").write_text("102400\n")
    assert memory.host_budget_bytes(1, str(proc), str(group)) == 1024 * 100 + int(0.8 * 102400)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    assert memory.host_budget_bytes(1, str(proc), str(group)) == 1024 * 100 + int(0.8 * 102400)
    assert memory.host_peak_bytes(lambda: None, str(proc)) == 150 * 1024
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/job/step\n0::/slice\n")
    (group / "memory" / "job" / "step").mkdir(parents=True)
    (group / "memory" / "job" / "memory.limit_in_bytes").write_text("51200\n")
    (group / "memory" / "job" / "memory.usage_in_bytes").write_text("0\n")
    assert memory.host_budget_bytes(1, str(proc), str(group)) == 1024 * 100 + int(0.8 * 51200)
    assert memory.host_budget_bytes(1, str(tmp_path / "nothing"), str(group)) == 0
    assert memory.host_peak_bytes(lambda: None, str(tmp_path / "nothing")) == 0


def test_a_peak_of_this_process_is_seen():
    grown = memory.host_peak_bytes(lambda: bytearray(64 << 20).count(1))
    assert grown == 0 or grown - memory.host_peak_bytes(lambda: None) > 32 << 20
