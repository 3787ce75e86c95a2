"""Partition of a model over the devices of a rank: against every partition, and errors where none fits."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.control import SoloControl
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.units import MIB
from hvdtrain.parallel.pipeline.partition import agree_devices
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs, part_samples, parts_of, slowest
from hvdtrain.planning.pipeline.search import Partition, Task, search

BLOCK = st.builds(Block, st.just("b"), st.integers(0, 20).map(float), st.integers(0, 50), st.integers(0, 50))
TWO = Config(model_parallel=2, progress="off")


def blocks(*costs, params=MIB, activations=0):
    return tuple(Block(f"b{i}", float(c), params, activations) for i, c in enumerate(costs))


def profiles(chain, room=(0, 0), needs=Needs(), speeds=(), together=0):  # noqa: B008
    return [DeviceProfile(chain, 1, most, needs, f"/CPU:{i}", together_bytes=together).slowed(speed)
            for i, (most, speed) in enumerate(zip(room, speeds or [1.0] * len(room)))]


def starts(plan):
    return plan.choice.starts


@settings(max_examples=150, deadline=None)
@given(st.lists(BLOCK, min_size=1, max_size=7), st.integers(2, 4), st.data())
def test_no_partition_is_faster(chain, devices, data):
    devices = min(devices, len(chain))
    room = data.draw(st.lists(st.integers(20, 400), min_size=devices, max_size=devices))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=devices, max_size=devices))
    kinds = profiles(tuple(chain), room, Needs(1, data.draw(st.integers(0, 2))), speeds)
    task = Task(tuple(kinds), tuple(range(devices)), "gpipe", data.draw(st.integers(1, 3)), ordered=True)
    every = [Partition(task.kind_of, (0, *cuts)) for cuts in itertools.combinations(range(1, len(chain)), devices - 1)]
    best = min((p.played(task).step_s for p in every if p.fits(task)), default=math.inf)
    found = search(task)
    assert (math.inf if found is None else found[1].step_s) == pytest.approx(best)
    assert found is None or found[0].places == task.kind_of and found[0].fits(task)


def test_a_slower_device_gets_fewer_blocks():
    assert starts(agree_devices(profiles(blocks(1, 1, 1, 1)), TWO, SoloControl())) == (0, 2)
    assert starts(agree_devices(profiles(blocks(1, 1, 1, 1), speeds=(3.0, 1.0)), TWO, SoloControl())) == (0, 3)


def test_memory_overrides_speed():
    chain = blocks(4, 1, 1, 1, 1)
    assert starts(agree_devices(profiles(chain), TWO, SoloControl())) == (0, 1)
    some = profiles(chain, (9 * MIB, 3 * MIB), Needs(0, 0))
    assert starts(agree_devices(some, TWO, SoloControl())) == (0, 2)


@pytest.mark.parametrize("made, words", [
    (lambda: profiles(blocks(1, 1), (0,) * 3), r"model_parallel is 3 and the model has 2 blocks \(b0, b1\).*el: 2"),
    (lambda: profiles(blocks(1, 1, 1, 1), (6 * MIB,) * 2),
     r"stage \d of 2 \(b\d\.\.b\d\) needs 8.00 MiB and /CPU:\d has 6.00 MiB .*Set model_parallel: 4\.$"),
    (lambda: profiles(blocks(1, 1, 1, 1), (3 * MIB,) * 2), "optimizer with less state"),
    (lambda: profiles(blocks(1, 1, activations=8 * MIB), (9 * MIB,) * 2), "smaller micro_batch, or remat"),
    (lambda: profiles(blocks(1, 1, 1, 1), together=15 * MIB), "training needs 16.0 MiB and the devices share 15.0"),
])
def test_too_large_names_the_stage_and_a_remedy(made, words):
    with pytest.raises(UserError, match=words):
        agree_devices(made(), TWO, SoloControl())


def test_memory_of_a_device():
    plan = agree_devices(profiles(blocks(1, 1, activations=3 * MIB), needs=Needs(2, 2)), TWO, SoloControl())
    held = plan.choice.holds(plan.task, 0)
    assert (held.parameters, held.gradients, held.slots, held.activations) == (MIB, 2 * MIB, 2 * MIB, 8 * 3 * MIB)
    assert held.total == 29 * MIB


class Ranks:
    """A control whose other rank found ``row``."""

    rank, size, node = 0, 2, "here"

    def __init__(self, row):
        self._row = row

    def bcast(self, own):
        return own

    def gather(self, own):
        return [own, self._row if isinstance(own, tuple) and isinstance(own[0], DeviceProfile) else own]


def test_every_rank_cuts_by_the_slowest():
    one, two = profiles(blocks(3, 1, 1, 1)), profiles(blocks(1, 1, 1, 4))
    assert starts(agree_devices(one, TWO, SoloControl())) == (0, 1)
    both, other = agree_devices(one, TWO, Ranks(two)), agree_devices(two, TWO, Ranks(one))
    assert both == other and [b.cost_s for b in both.task.kinds[0].blocks] == [3, 1, 1, 4]
    assert slowest(profiles(blocks(1), (0, 5))).capacity_bytes == 5
    with pytest.raises(UserError, match="rank 1 has blocks that differ from rank 0's"):
        agree_devices(profiles(blocks(1, 1)), TWO, Ranks(profiles(blocks(1, 1, 1))))


@pytest.mark.parametrize("samples, parts", [(0, 1), (1, 1), (3, 2), (7, 4), (8, 8), (9, 8), (100, 8)])
def test_parts_of_few_samples_are_a_power_of_two(samples, parts):
    assert parts_of(samples, 8) == parts


def test_blocks_are_measured_with_the_samples_of_a_part():
    config = Config(model_parallel=2, global_batch=96, shares=[3, 1])
    assert (part_samples(config, 0, 2), part_samples(config, 1, 2)) == (9, 3)
    assert part_samples(Config(model_parallel=2, global_batch=96, micro_batch=16), 0, 1) == 2
    assert part_samples(Config(model_parallel=2, global_batch=1), 0, 2) == 1
    assert part_samples(Config(model_parallel=2, split_micro_batches=1, accumulate=3, global_batch=96), 0, 1) == 32
    # a rank without a share
    assert part_samples(SimpleNamespace(shares=[1, 0], global_batch=64, accumulate=1, micro_batch_limit=0,
                                        split_micro_batches=4, model_parallel=2), 1, 2) == 1


def test_the_table_shows_each_device():
    plan = agree_devices(profiles(blocks(3, 1, 1, 1)), Config(model_parallel=2, split_micro_batches=4, progress="off"),
                         SoloControl())
    assert plan.rows()[1] == {
        "stage": 1, "device": "/CPU:1", "blocks": "b1..b3", "busy_s": 12.0, "micro_batches": 4,
        "parameters_bytes": 3 * MIB, "gradients_bytes": 3 * MIB, "optimizer_bytes": 6 * MIB, "activations_bytes": 0,
        "capacity_bytes": 0}
    text = plan.table()
    assert "b1..b3" in text and "12.00" in text and "bubble: 20.0% predicted" in text
    assert plan.words() == "b0 | b1..b3 on /CPU:0, /CPU:1"
    assert len({len(line) for line in text.splitlines()[1:4]}) == 1
