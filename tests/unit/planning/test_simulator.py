"""Properties of simulated steps and jobs: bandwidth, ranks, shares of samples, conservation of bytes, failures."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.planning.batch.plan import plan
from hvdtrain.planning.linear import LinearTime, Link
from hvdtrain.planning.pipeline.orders import order_of, play
from hvdtrain.planning.simulator import (
    Exchange,
    Failures,
    Host,
    Rank,
    Saves,
    Scene,
    Stages,
    host_links,
    job,
    step,
)

SECONDS = st.floats(1e-5, 1e-1)
TRANSPORTS = st.sampled_from(["mpi", "shared", "horovod"])
LINKS = st.builds(Link, st.floats(0, 1e-3), st.floats(1e-11, 1e-7))
RANKS = st.lists(st.builds(Rank, st.integers(0, 3), st.builds(LinearTime, st.floats(0, 1e-2), SECONDS),
                           st.integers(0, 64), st.integers(1, 4), st.floats(0, 1e-2), st.floats(0, 1e-2),
                           st.sampled_from([0.0, 0.05, 0.5])), min_size=1, max_size=9).map(tuple)
EXCHANGES = st.builds(Exchange, TRANSPORTS, st.lists(st.integers(1, 1 << 24), min_size=1, max_size=6).map(tuple),
                      LINKS, LINKS, st.booleans(), st.floats(0, 1e-2), st.floats(1e-3, 1), st.integers(0, 3),
                      st.sampled_from([0.0, 0.5, 1.0]), later_s=st.floats(0, 1e-2), copy_s=st.floats(0, 1e-2),
                      layer_bytes=st.sampled_from([(), (800, 1600)]), late=st.floats(0, 1))
"""All transports (mpi is flat, shared hierarchical), with and without compressors, ZeRO, overlap, sync_batchnorm."""

HOSTS = st.lists(st.builds(Host, st.sampled_from([0.0, 0.5, 1.0, 2.0])), max_size=4).map(tuple)


@st.composite
def scenes(draw, pipelines=True):
    """Draw a scene; half of those with an even number of ranks are pipelines of two stages."""
    ranks, exchange = draw(RANKS), draw(EXCHANGES)
    if not pipelines or len(ranks) % 2 or draw(st.booleans()):
        return Scene(ranks, exchange, hosts=draw(HOSTS))
    order, micros = draw(st.sampled_from(["1f1b", "gpipe"])), draw(st.integers(1, 6))
    seconds = draw(st.tuples(*[SECONDS] * 5))
    stages = tuple(Stages((r, r + 1), order, micros, seconds[:2], seconds[2:4], seconds[4:])
                   for r in range(0, len(ranks), 2))
    return Scene(ranks, replace(exchange, zero=0), stages, hosts=draw(HOSTS))


SCENES = scenes()
FEW = settings(max_examples=40, deadline=None)


def wider(link: Link, factor: float) -> Link:
    return Link(link.alpha_s, link.beta_s_per_byte / factor)


@FEW
@given(SCENES, st.floats(1, 1e6), st.booleans())
def test_more_bandwidth_never_slows_a_step(scene, factor, between):
    old, name = scene.exchange, "between" if between else "within"
    new = replace(old, **{name: wider(getattr(old, name), factor)})
    assert step(replace(scene, exchange=new)).mid_s <= step(scene).mid_s * (1 + 1e-12)


@FEW
@given(RANKS, EXCHANGES, st.builds(LinearTime, st.floats(0, 1e-2), SECONDS), st.integers(8, 64))
def test_more_ranks_never_lower_the_throughput_at_infinite_bandwidth(ranks, exchange, line, n):
    """Whose compressor, if any, takes its time on one rank as well."""
    free = replace(exchange, within=Link(0, 0), between=Link(0, 0), codec_s=0.0, later_s=0.0, copy_s=0.0)
    encoded = replace(free, codec_s=exchange.codec_s, later_s=exchange.later_s, copy_s=exchange.copy_s)

    def planned(ranks):
        made = plan([rank.line for rank in ranks], n)
        parts = [replace(rank, samples=part.samples, parts=part.accumulate, spread=0.0, update_s=0.0, input_s=0.0)
                 for rank, part in zip(ranks, made.parts)]
        return step(Scene(tuple(parts), free)).samples_per_s

    assert planned((*ranks, Rank(0, line, 0))) >= planned(ranks) * (1 - 1e-12)
    same = tuple(replace(rank, spread=0.0, samples=rank.samples + 1) for rank in ranks)  # equal shares: one of a kind
    for each in (free, encoded) if len(same) > 1 else (free,):
        before = step(Scene(same, each)).samples_per_s
        assert step(Scene((*same, same[0]), each)).samples_per_s >= before * (1 - 1e-12)


@FEW
@given(SECONDS, SECONDS, EXCHANGES, st.integers(1, 6), st.integers(1, 3))
def test_more_replicas_of_a_pipeline_never_lower_the_throughput_at_infinite_bandwidth(first, second, exchange, micros,
                                                                                   copies):
    free = replace(exchange, within=Link(0, 0), between=Link(0, 0), codec_s=0.0, later_s=0.0, zero=0)

    def rate(copies):
        ranks = tuple(Rank(r % 2, LinearTime(0, 1e-3), 8 * (1 - r % 2)) for r in range(2 * copies))
        stages = tuple(Stages((r, r + 1), "1f1b", micros, (first, second), (second, first)) for r in range(
            0, 2 * copies, 2))
        return step(Scene(ranks, free, stages)).samples_per_s

    assert rate(copies + 1) >= rate(copies) * (1 - 1e-12)


@FEW
@given(scenes(pipelines=False), st.integers(0, 8))
def test_a_rank_removed_equals_that_rank_at_speed_0(scene, number):
    """It has no samples and takes part in the exchange alone, which is free here."""
    gone = number % len(scene.ranks)
    calm = [replace(rank, spread=0.0) for rank in scene.ranks]
    calm[gone] = replace(calm[gone], samples=0, parts=0, update_s=0.0, input_s=0.0, threads=0.0)
    free = replace(scene.exchange, within=Link(0, 0), between=Link(0, 0), codec_s=0.0, later_s=0.0, copy_s=0.0)
    kept = step(replace(scene, ranks=tuple(calm), exchange=free))
    if len(calm) > 1:
        removed = step(replace(scene, ranks=(*calm[:gone], *calm[gone + 1:]), exchange=free))
        assert removed.mid_s == pytest.approx(kept.mid_s, rel=1e-9)
        assert removed.samples_per_s == pytest.approx(kept.samples_per_s, rel=1e-9)
        assert removed.efficiency == pytest.approx(kept.efficiency, rel=1e-9)


@FEW
@given(SCENES, st.integers(1, 5))
def test_bytes_are_conserved(scene, pieces):
    """2 (P - 1) vectors travel by any algorithm, however they are cut into buckets and spread over hosts.

    Of a pipeline's P replicas each stage sums its share of the gradients.
    """
    old = replace(scene.exchange, zero=0, ratio=1.0, layer_bytes=())
    size, nbytes = len(scene.stages) or len(scene.ranks), sum(old.bucket_bytes)
    sent = step(replace(scene, exchange=old)).sent_bytes
    assert sum(sent) == pytest.approx(2 * (size - 1) * nbytes)
    cut = replace(old, bucket_bytes=tuple(b for b in old.bucket_bytes for _ in range(pieces)))
    assert sum(step(replace(scene, exchange=cut)).sent_bytes) == pytest.approx(pieces * sum(sent))
    sharded = replace(old, zero=2)  # the sums of gradients travel once, the updated parameters once
    assert step(replace(scene, exchange=sharded)).sent_bytes == pytest.approx(sent)
    half = replace(old, ratio=0.5)
    assert step(replace(scene, exchange=half)).sent_bytes == pytest.approx([x / 2 for x in sent])
    if len({rank.host for rank in scene.ranks}) == 1:
        assert sent[1] == 0


@FEW
@given(SCENES)
def test_the_parts_sum_to_the_step_and_none_is_negative(scene):
    found = step(scene)
    assert sum(found.parts.values()) == pytest.approx(found.mid_s)
    assert all(seconds >= -1e-12 for seconds in found.parts.values()), found.parts
    assert found.low_s <= found.mid_s <= found.high_s


def test_hierarchical_sums_send_less_between_hosts_than_flat_ones():
    ranks = tuple(Rank(r // 4, LinearTime(0, 1e-3), 8) for r in range(8))
    sent = {name: step(Scene(ranks, Exchange(name, (1000,)))).sent_bytes for name in ("mpi", "shared", "horovod")}
    assert sent["shared"] == (12000, 2000)  # 2 L-1 of each host, one vector out of each
    assert sent["mpi"] == (6000, 8000)
    assert sent["horovod"] == pytest.approx((10500, 3500))


def test_buckets_hide_behind_backward_except_for_the_last():
    exchange = Exchange("mpi", (1 << 20,) * 4, within=Link(0, 1e-9), overlaps=True)
    ranks = (Rank(0, LinearTime(0, 1e-2), 3),) * 2
    each_s = (1 << 20) * 1e-9  # each of two ranks sends half a vector to the other, twice
    assert step(Scene(ranks, exchange)).parts["exchange"] == pytest.approx(each_s)
    late = replace(exchange, overlaps=False)
    assert step(Scene(ranks, late)).parts["exchange"] == pytest.approx(4 * each_s)
    slow = replace(exchange, within=Link(0, 1e-8))  # 4 x 10 ms in 20 ms of backward, the first after 5 ms
    assert step(Scene(ranks, slow)).mid_s == pytest.approx(15e-3 + 40 * each_s)


def test_a_bucket_that_is_complete_early_is_encoded_after_those_before_it():
    """TensorFlow completes the first bucket last: no encoding is hidden then."""
    ranks = (Rank(0, LinearTime(0, 1e-2), 3),) * 2
    exchange = Exchange("mpi", (1 << 20,) * 2, within=Link(0, 1e-12), overlaps=True, codec_s=4e-3, ready=(1.0, 0.5))
    assert step(Scene(ranks, exchange)).parts["exchange"] == pytest.approx(4e-3, rel=0.01)
    assert step(Scene(ranks, replace(exchange, ready=(0.5, 0.9)))).parts["exchange"] == pytest.approx(2e-3, rel=0.01)


def test_ranks_that_share_cores_speed_up_when_one_ends():
    line = LinearTime(0, 1e-3)
    ranks = (Rank(0, line, 10), Rank(0, line, 10), Rank(0, line, 4))
    scene = Scene(ranks, Exchange("null", ()), hosts=(Host(2.0),))
    assert step(scene).mid_s == pytest.approx(4e-3 * 1.5 + 6e-3)
    assert step(replace(scene, hosts=(Host(1.0),))).mid_s == pytest.approx(24e-3)
    assert step(replace(scene, hosts=())).mid_s == pytest.approx(10e-3)


def test_stragglers_by_chance_cost_more_with_more_ranks():
    def wait(size):
        ranks = tuple(Rank(r, LinearTime(0, 1e-3), 10, spread=0.1) for r in range(size))
        return step(Scene(ranks, Exchange("null", ()))).parts["wait"] / 10e-3

    assert wait(1) == pytest.approx(0, abs=1e-9)
    # The largest of n normal draws: 0.56, 1.54 deviations above the mean for n = 2, 10.
    assert wait(2) == pytest.approx(0.056, rel=0.15) and wait(10) == pytest.approx(0.154, rel=0.15)


def test_background_input_sets_the_pace_once_it_is_slower_than_the_step():
    ranks = (Rank(0, LinearTime(0, 1e-3), 10, load_s=8e-3), Rank(0, LinearTime(0, 1e-3), 10, load_s=15e-3))
    found = step(Scene(ranks, Exchange("null", ())))
    assert found.mid_s == pytest.approx(15e-3) and found.parts["input"] == pytest.approx(5e-3)
    assert step(Scene(ranks[:1], Exchange("null", ()))).parts["input"] == 0


def test_a_pipeline_steps_as_its_order_is_played():
    one = Stages((0, 1), "1f1b", 4, (1e-3, 2e-3), (2e-3, 4e-3), (1e-4,))
    two = replace(one, ranks=(2, 3))
    ranks = tuple(Rank(r // 2, LinearTime(0, 1e-3), 16 * (1 - r % 2)) for r in range(4))
    exchange = Exchange("shared", (1 << 20,), between=Link(0, 1e-9))
    found = step(Scene(ranks, exchange, (one, two)))
    played = play([order_of("1f1b")(i, 2, 1, 4) for i in range(2)], one.forward_s, one.backward_s, one.travel_s)
    # Each half of the gradients is summed over two hosts, which takes the link as long as one sum of the whole.
    assert found.mid_s == pytest.approx(played.step_s + (1 << 20) * 1e-9)
    assert found.parts["compute"] == pytest.approx(np.mean(played.busy_s))
    assert found.sent_bytes == (0, 2 * (1 << 20))


def test_saves_and_failures_lengthen_a_job_as_the_formula_of_daly_has_it():
    ranks = (Rank(0, LinearTime(0, 0.01), 10), Rank(1, LinearTime(0, 0.01), 10))
    saves = Saves(blocks_s=2.0, every_steps=100)
    scene = Scene(ranks, Exchange("null", ()), saves=saves, failures=Failures(7200.0, 60.0), error=0.1)
    found = job(scene, 36000)
    whole_s = 3600 * math.exp(60 / 3600) * math.expm1(12 / 3600) * 3600 / 10
    assert found.mid_hours * 3600 == pytest.approx(whole_s)
    assert (found.low_hours, found.high_hours) == pytest.approx((0.9 * found.mid_hours, 1.1 * found.mid_hours))
    assert found.failures == pytest.approx(whole_s / 3600) and found.saves == 360
    assert found.step.parts["saves"] == pytest.approx(0.02)
    assert job(replace(scene, failures=None), 36000).mid_hours == pytest.approx(1.2)
    never = job(replace(scene, saves=None, failures=Failures(1.0, 60.0)), 36000)
    assert math.isinf(never.mid_hours)
    assert job(replace(scene, saves=None), 36000).mid_hours > found.mid_hours
    told = replace(scene, failures=Failures(7200.0, 60.0, lost_s=30.0))
    assert job(told, 36000).mid_hours == pytest.approx(1.2 / (1 - 90 / 3600))


def test_of_thousands_of_ranks_only_bounded_memory_is_held():
    """Each bucket is one operation over draws x ranks, whose product is bounded."""
    import tracemalloc

    ranks = tuple(Rank(r // 8, LinearTime(1e-3, 1e-3), 32, spread=0.05) for r in range(4096))
    scene = Scene(ranks, Exchange("shared", (1 << 22,) * 100, Link(1e-6, 1e-11), Link(1e-6, 1e-10), True))
    tracemalloc.start()
    found = step(scene)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20 and found.efficiency < 1


@given(TRANSPORTS, LINKS, st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(1, 1 << 24))
def test_a_measured_link_gives_back_the_seconds_that_were_measured(transport, link, hosts_P, nbytes):
    within, between = host_links(transport, hosts_P, link)
    ranks = tuple(Rank(host, LinearTime(0, 1e-3), 1) for host in hosts_P)
    found = step(Scene(ranks, Exchange(transport, (nbytes,), within, between)))
    assert found.parts["exchange"] == pytest.approx(link.seconds(nbytes), rel=1e-9)


def test_a_transport_without_a_core_of_its_own_lengthens_computing():
    ranks = (Rank(0, LinearTime(0, 1e-2), 3),) * 2
    exchange = Exchange("mpi", (1000,) * 10, Link(0, 2e-6), overlaps=True, busy_cores=1.0)  # 20 ms, of which 18 hide
    roomy = step(Scene(ranks, exchange, hosts=(Host(4.0),)))
    full = step(Scene(ranks, exchange, hosts=(Host(2.0),)))
    assert roomy.parts["exchange"] == pytest.approx(2e-3)
    assert full.parts["exchange"] == pytest.approx(2e-3 + 18e-3)
    half = step(Scene(ranks, exchange, hosts=(Host(3.0),)))
    assert half.parts["exchange"] == pytest.approx(2e-3 + 9e-3)
