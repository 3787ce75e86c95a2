"""New partitions of a model over ranks when a supervisor launches its job on other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.launchers.spec import HostSlots
from hvdtrain.commands.launch.job import SupervisedJob, recut
from hvdtrain.commands.train import parse
from hvdtrain.config import Config, PipelineConfig

A, B, C = HostSlots("a", 2), HostSlots("b", 2), HostSlots("c", 2)


@pytest.mark.parametrize(("stages", "hosts", "depths", "why"), [
    (2, (A, B), (2, 2), ""),
    (2, (A,), (2,), ""),
    (3, (A,), (2,), "2 ranks are no multiple of pipeline.stages 3: the model is partitioned over 2"),
    (3, (A, B), (2, 2),
     "4 ranks are no multiple of pipeline.stages 3: the model is partitioned over 2 in each of 2 replicas"),
    (3, (A, B, HostSlots("c", 1)), (3, 2),
     "5 ranks are no multiple of pipeline.stages 3: the model is partitioned over 3 and 2 in "
     "2 replicas"),
    (2, (HostSlots("a", 1),), (1,), "1 rank is no multiple of pipeline.stages 2: the model is unpartitioned on each"),
])
def test_stages_are_kept_where_they_can_be(stages: int, hosts: tuple[HostSlots, ...], depths: tuple[int, ...],
                                           why: str) -> None:
    found = recut(Config(pipeline=PipelineConfig(stages)), (A, B, C), hosts)
    assert (found.depths, found.why) == (depths, why)


def test_given_depths_keep_the_ranks_that_are_left_of_each_copy() -> None:
    config, four = Config(pipeline=PipelineConfig(depths=[1, 1, 2, 2])), (HostSlots("a", 2), HostSlots("b", 4))
    assert recut(config, four, four).depths == (1, 1, 2, 2) and not recut(config, four, four).why
    assert recut(config, four, (HostSlots("b", 4),))[:2] == ((2, 2), (2, 3))
    assert recut(config, four, (HostSlots("a", 2),))[:2] == ((1, 1), (0, 1))
    assert recut(config, four, (HostSlots("a", 2), HostSlots("b", 3)))[:2] == ((1, 1, 2, 1), (0, 1, 2, 3))
    more = recut(config, four, (HostSlots("a", 2), HostSlots("b", 6)))
    assert more.depths == (1, 1, 2, 2, 2), "none is deeper than it was"
    assert "of pipeline.depths [1, 1, 2, 2] the remaining ranks form [2, 2]" == recut(
        config, four, (HostSlots("b", 4),)).why


def test_the_options_of_an_attempt_are_ones_that_train_takes(tmp_path: Path) -> None:
    config = Config(pipeline=PipelineConfig(3, cut=["b", "c"]), shares=[3, 1])
    words = ("train", "--pipeline", "3", "--pipeline.cut", "[b, c]", "--shares", "[3, 1]")
    job = SupervisedJob(words, tmp_path, config, (A, B, C))
    for hosts, want in (((A, B, C), PipelineConfig(3, cut=["b", "c"])), ((A,), PipelineConfig(2)),
                        ((A, B, HostSlots("c", 1)), PipelineConfig(1, depths=[3, 2])),
                        ((C, HostSlots("d", 1)), PipelineConfig(
                            3, cut=["b", "c"]))):
        got = parse([word for word in job.attempt(2, hosts, 0)[1:]], {})
        assert (got.pipeline.stages, got.pipeline.depths, got.pipeline.cut) == (
            want.stages, want.depths, want.cut), hosts
        assert len(got.shares) == len(got.pipeline.depths or range(sum(h.slots for h in hosts) // got.pipeline.stages))
    assert job.partition_change((A,))
    assert not job.partition_change((C, HostSlots("d", 1))) and not job.partition_change(())


@given(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_rank_that_is_left_has_one_place_and_no_copy_is_deeper_than_before(
        stages: int, slots: list[int], data: st.DataObject) -> None:
    before = tuple(HostSlots(str(i), n) for i, n in enumerate(slots))
    left = data.draw(st.lists(st.sampled_from(before), min_size=1, unique=True))
    ranks = sum(slots)
    cut = data.draw(st.sampled_from([[], [2] * (ranks // 2) + [1] * (ranks % 2)]))
    found = recut(Config(pipeline=PipelineConfig(1, depths=cut) if cut else PipelineConfig(stages)), before, left)
    assert sum(found.depths) == sum(host.slots for host in left)
    assert max(found.depths) <= max([stages] if not cut else cut)
    assert len(found.owners) == len(found.depths)
