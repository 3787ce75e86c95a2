"""The sweep: fits of a made-up wire with its own clock, bounds in time, and the same results on lockstep ranks."""

import math

import numpy as np
import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.cluster.control import SoloControl
from hvdtrain.comm import compressors, sweep
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld, ring_bytes
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.units import MIB

KINDS = ["allgather", "allreduce float32", "alltoall"]
PARAMS = [ParamSpec("w", (64, 96), "float32"), ParamSpec("b", (96,), "float32"), ParamSpec("v", (96, 32), "float32")]


class Clock:
    """Seconds that pass only when somebody lets them."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("hvdtrain.comm.sweep.time.perf_counter", lambda: self.now)


class Wire(NullCollectives):
    """Two ranks of which one is here; each call lasts ``alpha_s + bytes * beta`` by kind, ``burst`` bytes pass free.

    The allowance fills again with time, as a token bucket's does.
    """

    host = True
    overlaps = False
    in_graph = False

    def __init__(self, clock, alpha_s, beta, burst=0.0, own_memory=False):
        super().__init__(0, 2)
        self.clock, self.alpha_s, self.beta, self.burst = clock, alpha_s, beta, burst
        self.tokens, self.filled_at, self.calls, self.given = burst, 0.0, [], 0
        self.own_memory = own_memory

    def buffer(self, n, dtype):
        self.given += n if self.own_memory else 0
        return np.zeros(n, dtype) if self.own_memory else None

    def allreduce(self, flat_N, name, op="sum"):
        return self._pass("allreduce", flat_N, name, super().allreduce(flat_N, name))

    def allgather(self, x_K, name):
        return self._pass("allgather", x_K, name, super().allgather(x_K, name))

    def alltoall(self, x_PK, name):
        return self._pass("alltoall", x_PK, name, super().alltoall(x_PK, name))

    def _pass(self, kind, x, name, done):
        nbytes = ring_bytes(kind, x.nbytes, 2)
        self.calls.append((kind, name, x.shape))
        self.clock.now += self.alpha_s
        if self.beta:
            self.tokens = min(self.burst, self.tokens + (self.clock.now - self.filled_at) / self.beta)
            free = min(self.tokens, nbytes)
            self.clock.now += (nbytes - free) * self.beta
            self.tokens, self.filled_at = self.tokens - free, self.clock.now
        return done


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


# --- links ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("alpha_s, beta", [(2e-5, 1e-10), (1e-4, 8e-9), (1e-3, 8e-8), (1e-2, 8e-7), (0.2, 0.0)])
def test_a_wire_is_found_as_it_is_within_the_time(clock, alpha_s, beta):
    wire = Wire(clock, alpha_s, beta)
    links = sweep.measure_links(wire, Ops(), SoloControl(), KINDS)
    assert list(links) == KINDS
    for link in links.values():
        assert link.seconds(4096) == pytest.approx(alpha_s + 4096 * beta, rel=1e-3)
        assert link.seconds(64 * MIB) == pytest.approx(alpha_s + 64 * MIB * beta, rel=1e-3)
    least_s = sum((7 * alpha_s + 6 * size * beta) for size in (16384,) for _ in KINDS)  # two sizes are always measured
    assert clock.now <= max(1.3 * sweep.BUDGET_S, least_s)
    assert {name for _, name, _ in wire.calls} == {
        "auto.link.allgather", "auto.link.allreduce.float32", "auto.link.alltoall"}


def test_a_slow_call_ends_the_growth(clock):
    wire = Wire(clock, 0.4, 0.0)
    sweep.measure_links(wire, Ops(), SoloControl(), ["alltoall"], 100.0)
    assert {shape for _, _, shape in wire.calls} == {(2, 512), (2, 2048)}, "the two sizes that a fit needs, no more"


@pytest.mark.parametrize("rate_mbit", [100, 1000])
def test_a_burst_that_passes_free_does_not_hide_the_rate(clock, rate_mbit):
    """The token bucket of a rate-limited link: 1 MB goes through at once, then the rate holds."""
    beta = 8e-6 / rate_mbit
    links = sweep.measure_links(Wire(clock, 1e-4, beta, burst=1e6), Ops(), SoloControl(), KINDS)
    for link in links.values():
        assert link.seconds(38e6) == pytest.approx(38e6 * beta, rel=0.35)
    assert clock.now < 1.6 * sweep.BUDGET_S


def test_sums_are_measured_in_memory_of_the_wire(clock):
    wire = Wire(clock, 1e-4, 1e-9, own_memory=True)
    sweep.measure_links(wire, Ops(), SoloControl(), ["allreduce float32"])
    assert wire.given == sum(sweep.SIZES) // 4


# --- compressors ---------------------------------------------------------------------------------------------------

def measured(size, config=None, params=PARAMS, bucket_mb=0.01):
    config = config or Config()
    return LockstepWorld(size).run(lambda control, wire: sweep.measure(
        wire, Ops(), control, plan_buckets(params, bucket_mb), config))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_find_the_same(size):
    found = measured(size)
    assert all(other == found[0] for other in found)
    names = [cost.name for cost in found[0].costs]
    assert names == list(compressors.choices()) and not found[0].refused
    assert found[0].costs[0].codec_s == 0 and all(cost.codec_s > 0 for cost in found[0].costs[1:])
    for link in found[0].links.values():
        assert link.alpha_s >= 0 and link.beta_s_per_byte >= 0 and math.isfinite(link.seconds(1e9))
    assert set(found[0].links) == {t.kind for cost in found[0].costs for t in cost.traffic}


@pytest.mark.parametrize("size", [2, 3])
def test_what_goes_over_the_wire_is_what_compressors_say(size):
    plan = plan_buckets(PARAMS, 0.01)
    assert len(plan) == 3
    for cost in measured(size)[0].costs:
        compressor = compressors.create(cost.name, Config())
        assert cost.wire_bytes == sum(compressor.wire_bytes(bucket, size) for bucket in plan)
        assert sum(t.wire_bytes for t in cost.traffic) == cost.wire_bytes
        assert all(t.calls >= 1 for t in cost.traffic) and any(not t.later for t in cost.traffic)


def test_each_compressor_is_timed_on_the_buckets_that_it_gets():
    one, three = plan_buckets(PARAMS, 1.0), plan_buckets(PARAMS, 0.01)
    found = LockstepWorld(2).run(lambda control, wire: sweep.measure(
        wire, Ops(), control, three, Config(), lambda name: one if name == "int8" else three))
    assert len(one) == 1 and {cost.name: max(t.calls for t in cost.traffic) for cost in found[0].costs} == {
        **dict.fromkeys(compressors.choices(), 3), "int8": 1}


def test_a_large_model_is_sampled_and_scaled(monkeypatch):
    monkeypatch.setattr(sweep, "MOST_ELEMENTS", 2000)
    params = [ParamSpec(f"w{i}", (32, 32), "float32") for i in range(10)]
    plan = plan_buckets(params, 1e-3)
    assert len(plan) == 10 and len(sweep._sample(plan)) == 2
    cost = measured(2, params=params, bucket_mb=1e-3)[0].costs[0]
    assert cost.wire_bytes == 10 * 4096
    assert [(t.calls, t.wire_bytes) for t in cost.traffic] == [(10, 10 * 4096)]
    assert sweep._sample(plan[:1]) == plan[:1], "one bucket at least"


def test_types_that_no_compressor_takes_leave_none():
    found = measured(2, params=[ParamSpec("w", (50,), "float64")])[0]
    assert [cost.name for cost in found.costs] == ["none"]
    assert set(found.refused) == set(compressors.choices()) - {"none"}
    assert all("float64" in why for why in found.refused.values())


def test_momentum_of_topk_is_not_for_auto():
    found = measured(2, Config(exchange=ExchangeConfig(topk_momentum=0.9)))[0]
    assert "topk" not in [cost.name for cost in found.costs] and "changes the optimizer" in found.refused["topk"]


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_graph_is_timed_as_a_graph(in_graph):
    """A backend that compiles traces once, with what it is given, and then runs what it traced."""
    traced = []

    class Compiling(Ops):
        def compiled(self, fn):
            kept = []

            def call(*args):
                if not kept:
                    traced.append(len(args[0]))
                    kept.append(fn(*args))
                return kept[0]
            return call

    def work(control, wire):
        wire.in_graph = in_graph
        return sweep.measure(wire, Compiling(), control, plan_buckets(PARAMS, 0.01), Config())

    found = LockstepWorld(2).run(work)
    assert traced == ([3] * 2 * len(found[0].costs) if in_graph else [])
    assert all(cost.traffic for cost in found[0].costs)


@pytest.mark.parametrize("overlaps, calls", [(True, [1, 1]), (False, [2, 2])])
def test_buckets_start_up_together_where_the_wire_goes_on_by_itself(clock, overlaps, calls):
    """Two buckets with a matrix each; powersgd asks twice, the second time with what it got first."""
    wire = Wire(clock, 1e-4, 1e-9)
    wire.overlaps = overlaps
    params = [ParamSpec(name, (64, 64), "float32") for name in "ab"]
    found = sweep.measure(wire, Ops(), SoloControl(), plan_buckets(params, 0.01), Config())
    cost = next(cost for cost in found.costs if cost.name == "powersgd")
    assert [(t.kind, t.later, t.calls, t.wire_bytes) for t in cost.traffic] == [
        ("allreduce float32", False, calls[0], 2 * 4 * 4 * 64), ("allreduce float32", True, calls[1], 2 * 4 * 4 * 64)]


# --- buckets -------------------------------------------------------------------------------------------------------

MANY = [ParamSpec(f"w{i}", (256, 256), "float32") for i in range(32)]  # 8 MiB of 256 KiB each


def test_a_wire_with_a_long_start_takes_large_buckets(clock):
    got, why = sweep.pick_bucket_mb(Wire(clock, 5e-3, 1e-9), Ops(), SoloControl(), MANY)
    assert got == 8.0 and why.startswith("an exchange, measured: 1 MiB 48.39 ms, 2 MiB 28.39 ms"), why
    assert clock.now < 1.3 * sweep.BUDGET_S


def test_a_wire_that_overlaps_keeps_the_last_bucket_small(clock):
    wire = Wire(clock, 1e-4, 1e-8)
    wire.overlaps = True
    got, why = sweep.pick_bucket_mb(wire, Ops(), SoloControl(), MANY)
    assert got == 1.0 and "plus the last bucket" in why


def test_a_slow_wire_is_predicted(clock):
    got, why = sweep.pick_bucket_mb(Wire(clock, 1e-4, 8e-8), Ops(), SoloControl(), MANY)
    assert got == 8.0 and why.startswith("an exchange, predicted from the link: 1 MiB 671.9 ms")
    assert clock.now < 1.3 * sweep.BUDGET_S


def test_memory_of_the_wire_is_not_used_up_by_trials(clock):
    wire = Wire(clock, 1e-4, 1e-9, own_memory=True)
    assert "predicted" in sweep.pick_bucket_mb(wire, Ops(), SoloControl(), MANY)[1]
    assert wire.given == sum(sweep.SIZES) // 4 + 1


def test_nothing_to_pick(clock):
    wire = Wire(clock, 1e-4, 1e-9)
    assert sweep.pick_bucket_mb(wire, Ops(), SoloControl(), PARAMS) == (1.0, "from 1 MiB on it is a single bucket")
    assert sweep.pick_bucket_mb(NullCollectives(), Ops(), SoloControl(), MANY)[1] == "one rank sends nothing"
    assert not wire.calls


def test_ranks_pick_the_same_bucket():
    params = [ParamSpec(f"w{i}", (256, 256), "float32") for i in range(10)]
    got = LockstepWorld(3).run(lambda control, wire: sweep.pick_bucket_mb(wire, Ops(), control, params))
    assert got[0] == got[1] == got[2] and got[0][0] in (1.0, 2.0, 4.0)
