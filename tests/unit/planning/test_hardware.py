"""Plans for hardware that is not here: catalogue, rates, estimates and alternatives."""

import math
from dataclasses import replace

import pytest

from hvdtrain.commands.plan.inventory import catalogue_here
from hvdtrain.config.inventory import InventoryDevice, InventoryLinks
from hvdtrain.core.errors import UserError
from hvdtrain.engine import machine
from hvdtrain.planning.compressor_choice import CodecCost
from hvdtrain.planning.hardware import alternatives
from hvdtrain.planning.hardware.alternatives import PlanLimits
from hvdtrain.planning.hardware.estimate import SiteHost, TrainingSettings, estimate
from hvdtrain.planning.hardware.rates import AssumedDevice, Assumptions, Calibration, Rates, ZeroUpdate
from hvdtrain.planning.hardware.workload import assumed
from hvdtrain.planning.linear import LinearTime, Link

CATALOGUE = catalogue_here()
A100, RTX3090 = CATALOGUE.devices["A100-40GB"], CATALOGUE.devices["RTX-3090"]
LINKS = InventoryLinks(25.0)
SMALL = assumed("small", {"parameters": 25e6, "flops_per_sample": 25e9, "activation_bytes_per_sample": 50e6,
                          "optimizer": "momentum", "layers": 50})
LARGE = assumed("large", {"parameters": 6.7e9, "flops_per_sample": 8e13, "activation_bytes_per_sample": 20e9,
                          "checkpointed_bytes_per_sample": 1e9})
GUESS = Assumptions("guess.yaml", 0.4)


def rates(workload=SMALL, guess=GUESS, calibrations=(), links=LINKS):
    return Rates(workload, calibrations, guess, links)


def host(name, device, n, price=None):
    return SiteHost(name, (device,) * n, price)


def explored(hosts, settings, known, samples=10**6, wishes=None):
    wishes = wishes or PlanLimits()
    base = estimate(hosts, settings, known, samples)
    found, left_out = alternatives.explored(base, hosts, settings, known, CATALOGUE, samples, wishes, "USD")
    return base, {one.name: one for one in found}, left_out, alternatives.chosen(base, found, wishes)


@pytest.mark.parametrize("device", [d for d in CATALOGUE.devices.values() if d.name != "CPU"], ids=lambda d: d.name)
def test_every_figure_of_the_catalogue_has_a_source(device):
    assert device.source.startswith("https://") and device.memory_bytes and device.bandwidth_Bps and device.power_w
    assert all(link.startswith("https://") for link in device.sources.values())
    assert device.sources.keys() <= device.flops.keys()
    assert device.flops["fp32"] <= device.flops.get("tf32", device.flops["fp16"]) <= device.flops["fp16"]
    for kind, peak in device.flops.items():  # one truth: the utilisation of a run has a table of its own
        tflops = machine.peak_tflops(device.name.replace("-", " ").removesuffix("GB"), kind)
        assert tflops is None or tflops * 1e12 == pytest.approx(peak, rel=0.03)


def test_a_device_is_found_by_its_driver_s_name_and_an_inventory_s_own_figures_count():
    for name, known in (("NVIDIA GeForce RTX 3090", "RTX-3090"), ("A100-SXM4-80GB", "A100-80GB"),
                        ("NVIDIA H100 80GB HBM3", "H100"), ("Tesla T4", "T4")):
        assert CATALOGUE.known(name, {}).name == known
    own = CATALOGUE.known("Mine", {"Mine": InventoryDevice("Mine", 12.0, {"bf16": 1e14}, 500.0, 200.0)})
    assert (own.memory_bytes, own.peak("bf16"), own.peak("fp16"), own.power_w) == (12e9, 1e14, 0.0, 200.0)
    assert CATALOGUE.devices["MI250X"].memory_bytes == 64e9  # a rank's: the module has two devices
    given = CATALOGUE.known("MI250X", {"MI250X": InventoryDevice("MI250X", 128.0, {"bf16": 400e12}, None, 500.0)})
    assert (given.memory_bytes, given.peak("bf16"), given.power_w) == (64e9, 200e12, 250.0)
    with pytest.raises(UserError, match="did you mean|one of"):
        CATALOGUE.known("A100", {})


def test_one_device_is_arithmetic():
    found = estimate([host("a", A100, 1, 3.0)], TrainingSettings(64, "bf16"), rates(), 64_000)
    update = SMALL.update_bytes / A100.bandwidth_Bps
    assert found.mid_s == pytest.approx(64 * 25e9 / (0.4 * 312e12) + update)
    assert found.hours == pytest.approx(1000 * found.mid_s / 3600)
    assert found.cost == pytest.approx(3 * found.hours) and found.energy_kwh == pytest.approx(0.4 * found.hours)
    assert found.efficiency == pytest.approx(1.0) and found.fits is True
    assert found.assumed and found.low_s is found.high_s is None and "40 %" in found.assumptions[0]


def test_the_last_batch_of_an_epoch_is_smaller():
    """40 samples an epoch in batches of 16: two whole batches and one of 8; of 100 samples a last one of 4."""
    guess = replace(GUESS, overhead_s=1.0)
    found = {n: estimate([host("a", A100, 1)], TrainingSettings(n, "bf16"), rates(guess=guess), 0).mid_s
             for n in (16, 8, 4)}
    whole = TrainingSettings(16, "bf16", epoch_samples=40)
    hours = estimate([host("a", A100, 1)], whole, rates(guess=guess), 100).hours
    assert hours == pytest.approx((5 * found[16] + 2 * found[8] + found[4]) / 3600)


def test_hours_have_restarts_and_the_work_since_the_last_save():
    """Daly's formula, with the failures of three hosts, of which one is not known to fail."""
    hosts = [replace(host(f"n{i}", A100, 1, 1.0), mtbf_hours=hours) for i, hours in enumerate((2.0, 6.0, None))]
    settings = TrainingSettings(256, "bf16", save_every_s=600.0, restart_s=120.0)
    plain = estimate([replace(one, mtbf_hours=None) for one in hosts], settings, rates(), 10**8)
    found = estimate(hosts, settings, rates(), 10**8)
    mtbf_s = 3600 / (1 / 2 + 1 / 6)
    factor = mtbf_s * math.exp(120 / mtbf_s) * math.expm1(600 / mtbf_s) / 600
    assert found.hours == pytest.approx(factor * plain.hours) and plain.failures is None
    assert found.failures == pytest.approx(found.hours * 3600 / mtbf_s)
    assert found.cost == pytest.approx(3 * found.hours) and found.parts["restarts"] > 0 == plain.parts["restarts"]
    auto = replace(settings, save_every_s=0.0, save_auto=True)
    often = estimate(hosts, auto, rates(), 10**8)
    assert plain.hours < often.hours < found.hours  # each minute, where a save costs nothing
    with pytest.raises(UserError, match="fail so often"):
        estimate([replace(one, mtbf_hours=1e-4) for one in hosts], settings, rates(), 10**8)


def test_sync_batchnorm_adds_its_sums_on_assumed_devices():
    facts = SMALL.facts
    known = replace(SMALL, facts=replace(facts, model=replace(facts.model, norm_channels=(64, 128))))
    guess = replace(GUESS, latency_s=1e-3)
    plain, synced = (estimate([host("a", A100, 2)], TrainingSettings(64, "bf16", sync_batchnorm=sync),
                              rates(known, guess), 0).parts["exchange"] for sync in (False, True))
    assert synced - plain == pytest.approx(4e-3 + 8 * 5 * 192 / A100.host_link_Bps)  # two ranks send a vector each


def test_a_price_or_power_that_is_unknown_leaves_cost_and_energy_out():
    found = estimate([host("a", A100, 1, 1.0), host("b", replace(A100, power_w=0.0), 1)], TrainingSettings(64, "bf16"),
                     rates(), 6400)
    assert found.cost is None and found.energy_kwh is None and found.hours > 0


def test_without_assumptions_only_what_was_calibrated_is_estimated():
    made = Calibration(A100.name, "bf16", 4, 1, LinearTime(1e-3, 1e-4), (8, 64), 2e-3, 0.07, "horovod", True,
                       Link(0.0, 1e-11), None, {"fp16": CodecCost(1e-3, 0.5)}, (0.5, 2.0))
    known = rates(guess=None, calibrations=[made])
    saving = estimate([host("a", A100, 4)], TrainingSettings(128, "bf16", save_steps=100), known, 1000)
    found = estimate([host("a", A100, 4)], TrainingSettings(128, "bf16"), known, 1000)
    assert not found.assumed and found.low_s == pytest.approx(0.93 * found.mid_s)
    assert found.high_s == pytest.approx(1.07 * found.mid_s)
    assert saving.mid_s == pytest.approx(found.mid_s + 0.005) and saving.parts["saves"] == pytest.approx(0.005)
    for hosts, settings, words in (
            ([host("a", RTX3090, 4)], TrainingSettings(128, "bf16"), "was not calibrated"),
            ([host("a", A100, 4)], TrainingSettings(128, "fp32"), "not calibrated with this model in fp32"),
            ([host("a", A100, 4)], TrainingSettings(4096, "bf16"), "micro-batches of 1024"),
            ([host("a", A100, 4), host("b", A100, 4)], TrainingSettings(128, "bf16"), "links were not calibrated")):
        with pytest.raises(UserError, match=words):
            estimate(hosts, settings, known, 1000)
    timed = replace(TrainingSettings(128, "bf16"), recompute=1.0, recompute_timed=True)
    assert estimate([host("a", A100, 4)], timed, known, 0).mid_s == found.mid_s  # checkpointing was calibrated
    assert "activation checkpointing" not in explored([host("a", A100, 4)], timed, rates(LARGE, None, [made]))[1]
    _, found, left_out, _ = explored([host("a", A100, 4)], TrainingSettings(128, "bf16"), known)
    assert "compression fp16" in found and "one more host like a" in left_out


def test_zero_and_micro_batches_take_what_was_measured():
    made = Calibration(A100.name, "bf16", 4, 1, LinearTime(1e-3, 1e-4), (4, 64), 8e-3, 0.07, "horovod", False,
                       Link(0.0, 1e-11), None, accumulate_s=3e-3)
    measured = replace(made, zero=ZeroUpdate(4, 6e-3, 5e-3, True))

    def parts(calibration, size=4, **change):
        settings = replace(TrainingSettings(32 * size, "bf16"), **change)
        return estimate([host("a", A100, size)], settings, rates(guess=None, calibrations=[calibration]), 0).parts

    plain, sharded = parts(made, zero=1), parts(measured, zero=1)
    assert plain["update"] == pytest.approx(2e-3) and sharded["update"] == pytest.approx(6e-3)
    assert sharded["exchange"] == pytest.approx(plain["exchange"] + 5e-3)
    assert parts(measured, zero=2)["exchange"] < sharded["exchange"]  # whose transport works during backward
    assert parts(measured, 2, zero=1)["update"] == pytest.approx(12e-3)  # half of the parameters, not a quarter
    assert parts(measured)["update"] == pytest.approx(8e-3)
    assert parts(made, accumulate=4)["compute"] == pytest.approx(4 * 1e-3 + 32 * 1e-4 + 3 * 3e-3)
    free = replace(made, accumulate_s=0.0)
    added = parts(made, stages=2, micros=4)["compute"] - parts(free, stages=2, micros=4)["compute"]
    assert added == pytest.approx(3 * 3e-3 / 2)


def test_a_rank_without_samples_computes_nothing():
    guess = replace(GUESS, overhead_s=0.5)
    one, two = (estimate([host("a", A100, n)], TrainingSettings(64, "bf16", shares=(1.0, 0.0)[:n]), rates(guess=guess),
                         0) for n in (1, 2))
    assert two.parts["compute"] == pytest.approx(one.parts["compute"] / 2)


def test_a_limit_of_micro_batches_adds_their_overhead():
    guess = replace(GUESS, overhead_s=0.01)
    plain, limited = (estimate([host("a", A100, 1)], TrainingSettings(64, "bf16", micro_batch=n), rates(guess=guess), 0)
                      for n in (0, 16))
    assert limited.mid_s == pytest.approx(plain.mid_s + 0.03) and plain.hours is plain.cost is None
    assert limited.memory.need.total < plain.memory.need.total


def test_ranks_that_share_a_processor_need_a_calibration_with_as_many():
    cpu = replace(CATALOGUE.devices["CPU"], name="CPU of this host")
    made = Calibration(cpu.name, "fp32", 1, 1, LinearTime(0.0, 1e-3), (8, 64), 0.0, 0.05)
    with pytest.raises(UserError, match="with 1 ranks on a host, not with 2"):
        estimate([host("a", cpu, 2)], TrainingSettings(64), rates(guess=None, calibrations=[made]), 1000)


def test_alternatives_of_a_mixed_set_up_are_named_with_reason_and_options():
    hosts = [host("fast", A100, 2, 6.0), host("old", RTX3090, 2, 1.5)]
    base, found, _, _ = explored(hosts, TrainingSettings(256, "bf16"), rates())
    assert found["without host old"].outcome.samples_per_s > base.samples_per_s
    assert "faster" in found["without host old"].reason and "instead of" in found["without host old"].reason
    balanced = found["balance"]
    assert balanced.outcome.samples_per_s > base.samples_per_s and balanced.options == ("--balance", "static")
    assert balanced.outcome.shares[0] > balanced.outcome.shares[2] and sum(balanced.outcome.shares) == 256
    assert {one.device for one in found.values()} >= {"", "H100", "MI300X", "L4"} - {"CPU"}
    line = alternatives.line_of(hosts, ["--model", "m:build", *balanced.options])
    assert line[3:6] == ["launch", "-H", "fast:2,old:2"] and line[-2:] == ["--balance", "static"]


def test_what_does_not_fit_gets_alternatives_that_do():
    hosts = [host("a", CATALOGUE.devices["A100-80GB"], 4)]
    base, found, _, _ = explored(hosts, TrainingSettings(8, "bf16"), rates(LARGE))
    assert base.fits is False
    best, zero = found["ZeRO stage 2 and activation checkpointing"], found["ZeRO stage 2"]
    assert best.outcome.fits and not zero.outcome.fits and list(found).index(best.name) < list(found).index(zero.name)
    assert best.reason.startswith("fits, needs ") and "--remat" in best.options
    assert best.outcome.mid_s > zero.outcome.mid_s  # which computes nothing again


def test_budget_and_deadline_choose():
    hosts = [host("a", A100, 2, 6.0), host("b", A100, 2, 6.0)]
    settings, known = TrainingSettings(256, "bf16"), rates()
    base, found, _, chosen = explored(hosts, settings, known, wishes=PlanLimits(deadline=100.0))
    cheapest = min((one.outcome.cost for one in found.values() if one.outcome.cost is not None))
    assert chosen.outcome.cost == pytest.approx(cheapest) and chosen.outcome.cost < base.cost
    _, found, _, chosen = explored(hosts, settings, known, wishes=PlanLimits(budget=base.cost / 1.2))
    assert chosen.outcome.cost <= base.cost / 1.2
    assert chosen.outcome.samples_per_s == max(one.outcome.samples_per_s for one in found.values()
                                               if one.outcome.cost is not None and one.outcome.cost <= base.cost / 1.2)
    assert explored(hosts, settings, known, wishes=PlanLimits(budget=1e-6))[3] is None
    assert explored(hosts, settings, known)[3] is True


def test_a_faster_link_never_slows_a_step_and_1024_ranks_are_estimated():
    hosts = [host(f"n{i}", A100, 8) for i in range(128)]
    steps = [estimate(hosts, TrainingSettings(8192, "bf16"), rates(links=InventoryLinks(gbit)), 10**7).mid_s
             for gbit in (10.0, 100.0, 400.0)]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    assert alternatives.line_of(hosts, [])[4:6] == ["--hostfile", "hosts-128.txt"]


@pytest.mark.parametrize("change, words", [
    ({"efficiency": None}, "no efficiency of A100-40GB"),
    ({"devices": {"A100-40GB": AssumedDevice(0.5, {"fp16": 1e12})}}, None),
])
def test_assumptions_by_device(change, words):
    given = replace(GUESS, **change)
    if words:
        with pytest.raises(UserError, match=words):
            rates(guess=given).pace(A100, 1, "bf16")
        return
    assert rates(guess=given).pace(A100, 1, "fp16").line.c_s == pytest.approx(25e9 / 0.5e12)


def test_ranks_of_a_host_send_over_links_of_their_own():
    """Each of P ranks sends 2 (P - 1) / P of the gradients over a link that no other uses."""
    guess, links = replace(GUESS, overlaps=False), InventoryLinks(None, 10.0)
    for transport, size in ((transport, size) for transport in ("horovod", "mpi", "shared") for size in (2, 4, 8)):
        known = Rates(SMALL, (), guess, links, transport)
        found = estimate([host("a", A100, size)], TrainingSettings(64, "bf16"), known, 0)
        assert found.parts["exchange"] == pytest.approx(2 * (size - 1) / size * SMALL.gradient_bytes / 10e9)


def test_links_are_those_of_a_calibration_over_such_hosts_by_the_same_transport():
    one, two = (Calibration(A100.name, "bf16", 2, n, LinearTime(1e-3, 1e-4), (8, 64), 0.0, 0.05, "mpi", False,
                            Link(0.0, 1e-9) if n == 1 else Link(0.0, 0.0), None if n == 1 else Link(0.0, 8e-9))
                for n in (1, 2))

    def wired(count, *made, links=InventoryLinks(), collectives="auto"):
        return Rates(SMALL, made, None, links, collectives).wiring([[A100] * 2] * count)

    assert wired(1, one, two).within == one.within  # that of two hosts has all of the exchange between them
    assert wired(2, two, one).between == two.between and wired(2, two, one).within == two.within
    assert wired(2, two, links=InventoryLinks(1.5)).between == two.between
    for given in ({"links": InventoryLinks(10.0)}, {"collectives": "shared"}):
        with pytest.raises(UserError, match="links were not calibrated|bandwidth between hosts is not known"):
            wired(2, two, **given)
    with pytest.raises(UserError, match="links were not calibrated"):
        wired(1, two)


def test_a_command_is_for_the_set_up_that_was_estimated():
    hosts = [host("fast", A100, 2), host("old", RTX3090, 2)]
    _, found, _, _ = explored(hosts, TrainingSettings(256, "bf16", shares=(3.0, 3.0, 1.0, 1.0), zero=1), rates())
    for name in ("without host old", "balance", "pipeline of 2 stages", "H100 in place of A100-40GB, RTX-3090"):
        assert found[name].options[:2] == ("--shares", "[]")  # those of the command are of four ranks
    assert "--data_parallel.name replicate" in " ".join(found["pipeline of 2 stages"].options)


def test_a_pipeline_takes_the_settings_that_it_can_have():
    hosts = [host("a", A100, 4)]
    piped = TrainingSettings(256, "bf16", stages=2)
    plain = estimate(hosts, piped, rates(), 0)
    fewer, again = (estimate(hosts, replace(piped, **change), rates(), 0)
                    for change in ({"micros": 2}, {"recompute": 1.0}))
    assert fewer.mid_s > plain.mid_s and again.mid_s > plain.mid_s  # a longer pipeline bubble; forward again
    packed = estimate(hosts, replace(piped, compression="fp16"), rates(), 0)
    assert any(text.startswith("fp16 costs") for text in packed.assumptions)
    for change in ({"zero": 1}, {"balance": True}, {"shares": (1.0, 2.0)}):
        with pytest.raises(UserError, match="a plan of a pipeline with"):
            estimate(hosts, replace(piped, **change), rates(), 0)
    assert not {"balance", "ZeRO stage 1"} & set(explored(hosts, piped, rates())[1])
