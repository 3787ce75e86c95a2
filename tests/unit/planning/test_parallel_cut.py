"""Where a model is cut over devices: against every cut there is, and what is said where none fits."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.control import SoloControl
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.units import MIB, format_bytes
from hvdtrain.parallel.pipeline import devices as plan
from hvdtrain.planning.pipeline.blocks import Block, Needs
from hvdtrain.planning.pipeline.devices.cut import Cut, min_max_cut

BLOCK = st.builds(Block, st.just("b"), st.integers(0, 20).map(float), st.integers(0, 50), st.integers(0, 50))
ONE = Needs(gradients=0, slots=0, micros=1)


def blocks(*costs, params=MIB, activations=0):
    return [Block(f"b{i}", float(c), params, activations) for i, c in enumerate(costs)]


def every_cut(n, devices):
    return [Cut((0, *starts)) for starts in itertools.combinations(range(1, n), devices - 1)]


def slowest(cut, chain, room, needs, speeds):
    stages = [[chain[i] for i in stage] for stage in cut.stages(len(chain))]
    if any(needs.of(stage).total > limit for stage, limit in zip(stages, room)):
        return math.inf
    return max(sum(b.cost_s for b in stage) / speed for stage, speed in zip(stages, speeds))


@settings(max_examples=150, deadline=None)
@given(st.lists(BLOCK, min_size=1, max_size=7), st.integers(1, 4), st.data())
def test_no_cut_is_faster(chain, devices, data):
    devices = min(devices, len(chain))
    room = data.draw(st.lists(st.integers(20, 400), min_size=devices, max_size=devices))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=devices, max_size=devices))
    needs = Needs(gradients=1, slots=data.draw(st.integers(0, 2)), micros=data.draw(st.integers(1, 3)))
    best = min(slowest(c, chain, room, needs, speeds) for c in every_cut(len(chain), devices))
    if math.isinf(best):
        with pytest.raises(UserError, match="needs .* and device"):
            min_max_cut(chain, devices, room, needs, speeds)
        return
    cut = min_max_cut(chain, devices, room, needs, speeds)
    assert slowest(cut, chain, room, needs, speeds) == best
    stages = cut.stages(len(chain))
    assert len(stages) == devices and all(stages) and [i for stage in stages for i in stage] == list(range(len(chain)))
    assert all(i in stages[cut.stage_of(i)] for i in range(len(chain)))


def test_a_slower_device_gets_less():
    assert min_max_cut(blocks(1, 1, 1, 1), 2).starts == (0, 2)
    assert min_max_cut(blocks(1, 1, 1, 1), 2, speeds=[3.0, 1.0]).starts == (0, 3)


def test_memory_moves_a_cut_away_from_the_fastest():
    assert min_max_cut(blocks(4, 1, 1, 1, 1), 2, needs=ONE).starts == (0, 1)
    assert min_max_cut(blocks(4, 1, 1, 1, 1), 2, [9 * MIB, 3 * MIB], ONE).starts == (0, 2)


def test_more_devices_than_blocks():
    with pytest.raises(UserError, match=r"model_parallel is 3 and the model has 2 blocks \(b0, b1\).*parallel: 2"):
        min_max_cut(blocks(1, 1), 3)


def test_too_large_says_where_how_much_and_what_to_do():
    with pytest.raises(UserError, match=r"stage \d \(b\d\.\.b\d\) needs 8.00 MiB and device \d has 6.00 MiB .*"
                                        r"Set model_parallel: 4\.$"):
        min_max_cut(blocks(1, 1, 1, 1), 2, [6 * MIB] * 2, Needs(1, 2, 1))
    with pytest.raises(UserError, match="optimizer with less state"):
        min_max_cut(blocks(1, 1, 1, 1), 2, [3 * MIB] * 2, Needs(1, 2, 1))
    with pytest.raises(UserError, match="smaller micro_batch"):
        min_max_cut(blocks(1, 1, activations=8 * MIB), 2, [9 * MIB] * 2, Needs(1, 2, 1))


def test_what_a_device_holds():
    held = Needs(gradients=2, slots=2, micros=4).of(blocks(1, 1, activations=3 * MIB))
    assert (held.parameters, held.gradients, held.slots, held.activations) == (
        2 * MIB, 4 * MIB, 4 * MIB, 24 * MIB)
    assert held.total == 34 * MIB == Needs(2, 2, 4).total(2 * MIB, 6 * MIB)
    assert (format_bytes(1.5 * MIB), format_bytes(2048 * MIB)) == ("1.50 MiB", "2.00 GiB")


def measured(*costs, **more):
    return plan.Measured(tuple(blocks(*costs)), ("/CPU:0", "/CPU:1"), (0, 0), Needs(micros=4), **more)


class Ranks:
    """A control whose other ranks found ``rows``."""

    rank, size, node = 0, 2, "here"

    def __init__(self, *rows):
        self._rows = rows

    def gather(self, own):
        return [own, *(self._rows if isinstance(own, plan.Measured) else [own])]


def test_every_rank_cuts_by_the_slowest():
    config = Config(model_parallel=2)
    assert plan.agree(measured(3, 1, 1, 1), config, SoloControl()).cut.starts == (0, 1)
    both = plan.agree(measured(3, 1, 1, 1), config, Ranks(measured(1, 1, 1, 4)))
    other = plan.agree(measured(1, 1, 1, 4), config, Ranks(measured(3, 1, 1, 1)))
    assert both == other and [b.cost_s for b in both.blocks] == [3, 1, 1, 4]
    with pytest.raises(UserError, match="rank 1 has other blocks than rank 0"):
        plan.agree(measured(1, 1), config, Ranks(measured(1, 1, 1)))


def test_devices_that_share_a_memory():
    with pytest.raises(UserError, match=r"training needs 16.0 MiB and the devices share 15.0 MiB"):
        plan.agree(measured(1, 1, 1, 1, together_bytes=15 * MIB), Config(model_parallel=2), SoloControl())
    plan.agree(measured(1, 1, 1, 1, together_bytes=16 * MIB), Config(model_parallel=2), SoloControl())


def test_speeds_are_the_mean_of_the_ranks():
    joint = plan.joined([measured(1, 1, speeds=(1.0, 3.0)), measured(1, 1)])
    assert joint.speeds == (1.0, 2.0)
    assert plan.joined([measured(1, 1), measured(1, 1)]).speeds == ()


@pytest.mark.parametrize("samples, parts", [(0, 1), (1, 1), (3, 2), (7, 4), (8, 8), (9, 8), (100, 8)])
def test_parts_of_few_samples_are_a_power_of_two(samples, parts):
    assert plan.parts_of(samples, 8) == parts


def test_blocks_are_measured_with_the_samples_of_a_part():
    config = Config(model_parallel=2, global_batch=96, shares=[3, 1])
    assert (plan.part_samples(config, 0, 2), plan.part_samples(config, 1, 2)) == (9, 3)
    assert plan.part_samples(Config(model_parallel=2, global_batch=96, micro_batch=16), 0, 1) == 2
    assert plan.part_samples(Config(model_parallel=2, global_batch=1), 0, 2) == 1
    assert plan.part_samples(Config(model_parallel=2, split_micro_batches=1, accumulate=3, global_batch=96), 0, 1) == 32


def test_the_table_shows_each_device():
    made = plan.agree(measured(3, 1, 1, 1, together_bytes=64 * MIB), Config(model_parallel=2), SoloControl())
    row = plan.rows(made)[1]
    assert row._asdict() | {"capacity_mib": 0} == {
        "stage": 1, "device": "/CPU:1", "blocks": "b1..b3", "cost_share": 0.5, "parameters_mib": 3,
        "gradients_mib": 3, "slots_mib": 6, "activations_mib": 0, "total_mib": 12, "capacity_mib": 0}
    text = made.table()
    assert "b1..b3" in text and "12.00" in text and "bubble: 20.0% predicted" in text
    assert made.words() == "b0 | b1..b3 on /CPU:0, /CPU:1"
    assert len({len(line) for line in text.splitlines()[1:4]}) == 1


def test_a_part_of_a_rank_without_a_share_is_one_sample():
    assert plan.part_samples(SimpleNamespace(shares=[1, 0], global_batch=64, accumulate=1, micro_batch_limit=0,
                                             split_micro_batches=4, model_parallel=2), 1, 2) == 1
